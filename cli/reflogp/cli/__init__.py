"""The `reflogp` command. Each subcommand is one module; the service and the trainers are imported when one needs them."""

from reflogp.cli.main import main

__all__ = ["main"]
