"""Define the `reflogp` command: register the subcommands, and convert errors into messages and exit codes.

Unexpected exceptions are raised with a traceback.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer import rich_utils

from reflogp.cli import demo, doctor, export, jobs, score, serve, store, stored, verify
from reflogp.cli.console import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    WatchInterruptedError,
    err,
    out,
    print_json,
)
from reflogp.client.errors import RequestRefusedError
from reflogp.scoring.machine import growing_segments
from reflogp.store import ReflogpError, UsageError
from reflogp.store.texts import LineFormatter, visible

#: HTTP statuses that mean bad usage: the request is malformed or too large, or names something that does not exist.
_BAD_REQUEST = (400, 404, 413, 415, 422)
_INTERRUPTED = "interrupted; committed values are kept; run the same command again to continue"

app = typer.Typer(
    name="reflogp",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Score preference data once with a frozen reference model, store the log-probs, and use them in any trainer.

A first run:

    reflogp score ./sft-model pairs.jsonl --store ./logps

Then pass the store to CachedDPOTrainer (reflogp.trainer). For other trainers, write the values to a copy of the dataset:

    reflogp join ./sft-model pairs.jsonl --store ./logps -o pairs-with-ref.parquet

[bold]reflogp demo[/bold] shows the whole process on example data;
[bold]reflogp doctor[/bold] checks the installation and says what is missing.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 some rows have no values, 130 interrupted.""",
)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"reflogp {version('reflogp')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("score", cls=score.ScoreCommand)(score.score)
app.command("join")(stored.join)
app.command("verify")(verify.verify)
app.command("report")(stored.report)
app.command("export")(export.export)
app.command("reference")(score.reference)
app.command("serve")(serve.serve)
app.command("token")(serve.token)
app.command("submit")(jobs.submit)
app.add_typer(jobs.app, name="jobs")
app.add_typer(store.app, name="store")
for commands in (app, jobs.app, store.app):
    for command in commands.registered_commands:  # typer would print a docstring's line breaks, however wide the terminal is
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(lines.split("\n")) for lines in paragraphs)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning on one line, without its location in the code."""
    err.print(f"reflogp: warning: {message}", style="yellow")


def _run() -> tuple[int, str | None]:
    """Run the command given in sys.argv and print its error. Return the exit code, and the error's message or None."""
    try:
        code = app(standalone_mode=False)
    except WatchInterruptedError as error:
        err.print(f"reflogp: {error}", style="yellow")
        return EXIT_INTERRUPTED, str(error)
    except ReflogpError as error:
        err.print(f"reflogp: {error}", style="red")
        refused = isinstance(error, RequestRefusedError) and error.status in _BAD_REQUEST
        return EXIT_USAGE if refused or isinstance(error, UsageError) else EXIT_FAILED, str(error)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception as error:
        # Click's errors have this method. Their class is not checked, because typer may have its own copy of click.
        if not hasattr(error, "format_message"):
            raise
        error.message = visible(error.message)  # type: ignore[attr-defined]
        rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        return EXIT_USAGE, error.format_message()
    if code == EXIT_INTERRUPTED:  # typer returns this code after Ctrl-C
        err.print(f"reflogp: {_INTERRUPTED}", style="yellow")
        return EXIT_INTERRUPTED, _INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE, None


def main() -> None:
    """Run the `reflogp` command. With --json, an error is also printed as JSON: {"error": message}."""
    os.environ.update(growing_segments(os.environ))  # configures torch's allocator; must run before torch is imported
    warnings.showwarning = _show_warning
    if isinstance(logging.lastResort, logging.Handler):
        logging.lastResort.setFormatter(LineFormatter())  # libraries' log messages may also contain untrusted data
    problem = None
    try:
        code, problem = _run()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if problem is not None and "--json" in sys.argv:
            print_json({"error": visible(problem)})
    sys.exit(code)
