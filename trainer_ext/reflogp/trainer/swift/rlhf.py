"""Run the DPO or KTO training of `swift rlhf`, with the settings of that command but without a reference model.

    swift rlhf --rlhf_type dpo …                                           becomes
    python -m reflogp.trainer.swift.rlhf --reflogp.store ./logps --rlhf_type dpo …

ms-swift's own command starts the training processes, with torchrun whenever `swift rlhf` would use it. The only difference from
`swift rlhf` is that each process runs `reflogp.trainer.swift.process`.
"""

from __future__ import annotations

import sys

from swift.cli.main import cli_main

from reflogp.trainer.batches.options import give_to_processes, read_options, warn_if_untested

_MODULE = "reflogp.trainer.swift.rlhf"


def main() -> None:
    """Read reflogp's options from the command line, and run ms-swift's command with the other arguments."""
    options, others, parser = read_options(_MODULE, sys.argv[1:], model="--ref_model, or else --model")
    if {"-h", "--help"} & set(others):
        parser.print_help()
        print("\nAll other arguments are passed to `swift rlhf`.")
        return
    warn_if_untested("ms-swift", "4.6.0")
    give_to_processes(options)
    sys.argv[1:] = ["rlhf", *others]
    cli_main({"rlhf": "reflogp.trainer.swift.process"})


if __name__ == "__main__":
    main()
