"""The `reflogp` command. Each subcommand is one module; the service and the trainers are imported only when needed."""

from reflogp.cli.main import main

__all__ = ["main"]
