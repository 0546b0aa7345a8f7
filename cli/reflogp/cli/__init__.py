"""The `reflogp` command.

Each subcommand has its own module. Packages that only the `service` and `trainer` extras install, such as torch, are imported
only when a subcommand that needs them runs.
"""

from reflogp.cli.main import main

__all__ = ["main"]
