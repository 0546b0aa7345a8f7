"""Run the DPO or KTO training of `swift rlhf`, with the settings of that command but without a reference model.

    swift rlhf --rlhf_type dpo …                                           becomes
    python -m reflogp.trainer.swift --reflogp.store ./logps --rlhf_type dpo …

ms-swift's own command starts the training processes, with torchrun whenever `swift rlhf` would use it. The only difference from
`swift rlhf` is that each process runs `reflogp.trainer.swift_process`.
"""

from __future__ import annotations

import sys

from swift.cli.main import cli_main

from reflogp.trainer.options import give_to_processes, read_options, warn_if_untested


def main() -> None:
    """Read reflogp's options from the command line, and run ms-swift's command with the other arguments."""
    command = "python -m reflogp.trainer.swift"
    options, others = read_options(command, sys.argv[1:], "All other arguments are passed to `swift rlhf`.")
    warn_if_untested("ms-swift", "4.6")
    give_to_processes(options)
    sys.argv[1:] = ["rlhf", *others]
    cli_main({"rlhf": "reflogp.trainer.swift_process"})


if __name__ == "__main__":
    main()
