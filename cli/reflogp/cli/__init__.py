"""The `reflogp` command.

Each subcommand has its own module. The service's and the trainers' packages are imported only when they are needed.
"""

from reflogp.cli.main import main

__all__ = ["main"]
