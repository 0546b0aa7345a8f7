"""`reflogp jobs`: list, show, cancel and retry a service's jobs, and download their results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from reflogp.cli import options
from reflogp.cli.console import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISSES,
    WatchInterruptedError,
    err,
    lines_of,
    out,
    print_json,
)
from reflogp.client.client import Client
from reflogp.client.errors import ServiceError
from reflogp.client.models import Job, JobProgress, JobState
from reflogp.store import UsageError
from reflogp.store.texts import counted, hide_secrets, visible

#: Width, in characters. Job lists on narrower terminals have fewer columns.
_WIDE = 120
#: Width, in characters, for tables that are not printed to a terminal. Rich's default is 80.
_ANY_WIDTH = 10_000

app = typer.Typer(
    no_args_is_help=True,
    help="""List, show, cancel and retry a service's jobs, and save their results. To submit a job, use `reflogp submit`.

Example: reflogp jobs show http://127.0.0.1:8311 4f1c9a02d77be310 --watch""",
)

Url = Annotated[str, typer.Argument(help="URL of the service, as printed by `reflogp serve`.", metavar="URL")]
JobId = Annotated[
    str, typer.Argument(help="Id of the job, as printed by `reflogp submit` and `reflogp jobs ls`.", metavar="ID")
]
Token = Annotated[
    str | None, typer.Option("--token", envvar="REFLOGP_TOKEN", help="Bearer token, if the service requires one.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job until it has completed, failed or been cancelled.")]


#: What a service advises as a route, and the command that does the same. Other routes are shown as curl commands.
_COMMANDS = {
    "POST /v1/jobs/ID/retry": "reflogp jobs retry {url} {job}",
    "GET /v1/jobs/ID/result": "reflogp jobs result {url} {job}",
    "GET /v1/jobs": "reflogp jobs ls {url}",
    "GET /v1/references": "reflogp doctor --url {url}",
    "PUT /v1/uploads/NAME": "reflogp submit {url} FILE",
}
_ROUTE = re.compile(r"(GET|POST|PUT|DELETE) (/v1/[\w/]+)")


@contextmanager
def connected(url: str, token: str | None, job: str = "ID") -> Iterator[Client]:
    """Yield a client. Errors of the service advise commands, which can be copied, where the service advises routes."""

    def command_of(route: re.Match[str]) -> str:
        known = _COMMANDS.get(route[0])
        shown = hide_secrets(url.rstrip("/"))
        return f"`{known.format(url=shown, job=job)}`" if known else f"`curl -X {route[1]} {shown}{route[2]}`"

    with Client(url, token) as client:
        try:
            yield client
        except ServiceError as error:
            error.args = (_ROUTE.sub(command_of, str(error)),)
            raise


@app.command("ls")
def ls(
    url: Url,
    state: Annotated[str | None, typer.Option(help=f"List only jobs in this state: {', '.join(get_args(JobState))}.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs to list.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="List only jobs that were submitted before the job with this id.", metavar="ID")
    ] = None,
    token: Token = None,
    as_json: options.AsJson = False,
) -> None:
    """List jobs, newest first.

    Example: reflogp jobs ls http://127.0.0.1:8311 --state running
    """
    if state is not None and state not in get_args(JobState):
        raise UsageError(f"--state {state}: unknown state; choose from {', '.join(get_args(JobState))}")
    with connected(url, token) as client:
        page = client.jobs(state, before, limit)  # type: ignore[arg-type]
    if as_json:
        print_json({"jobs": [job.as_dict() for job in page.jobs], "counts": page.counts, "next_before": page.next_before})
        return
    if page.jobs:
        _print(_listed(page.jobs, narrow=out.is_terminal and out.width < _WIDE))
    out.print(", ".join(f"{count:,} {name}" for name, count in page.counts.items() if count) or "no jobs yet")
    if page.next_before:
        out.print(f"list older jobs with --before {page.next_before}")


@app.command("show")
def show(url: Url, job: JobId, watch: Watch = False, token: Token = None, as_json: options.AsJson = False) -> None:
    """Show one job. With --watch, follow the job until it ends.

    With --watch, the exit code is 1 if the job failed or was cancelled, and 3 if some rows have no values.

    Example: reflogp jobs show http://127.0.0.1:8311 4f1c9a02d77be310 --watch
    """
    with connected(url, token, job) as client:
        found = watched(client, job) if watch else client.job(job)
    if as_json:
        print_json(found.as_dict())
    else:
        _describe(found)
    if watch:
        raise typer.Exit(exit_code(found))


@app.command("cancel")
def cancel(url: Url, job: JobId, token: Token = None, as_json: options.AsJson = False) -> None:
    """Cancel a job. Values that the job has already computed stay in the store, so a retry scores only the remaining sequences.

    Example: reflogp jobs cancel http://127.0.0.1:8311 4f1c9a02d77be310
    """
    with connected(url, token, job) as client:
        found = client.cancel(job)
    ending = "" if found.finished else "; it will be cancelled after its current forward pass"
    _say(found, f"job {found.id} is {'cancelled' if found.finished else found.state}{ending}", as_json)


@app.command("retry")
def retry(url: Url, job: JobId, token: Token = None, as_json: options.AsJson = False) -> None:
    """Queue a failed or cancelled job again. The job scores only the sequences that are not in the store yet.

    Example: reflogp jobs retry http://127.0.0.1:8311 4f1c9a02d77be310
    """
    with connected(url, token, job) as client:
        found = client.retry(job)
    _say(found, f"job {found.id} is {found.state}; watch it: {command('show', url, job)} --watch", as_json)


@app.command("result")
def result(
    url: Url,
    job: JobId,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Parquet file to write. Its name must end in .parquet.", metavar="FILE")
    ],
    token: Token = None,
) -> None:
    """Save a completed job's result: each row's reference log-probs and sequence keys, or the reason why the row has no values.

    Example: reflogp jobs result http://127.0.0.1:8311 4f1c9a02d77be310 -o pairs-logps.parquet
    """
    with connected(url, token, job) as client:
        save_result(client, job, output)


def save_result(client: Client, job: str, output: Path) -> None:
    client.result(job, output)
    err.print(f"values saved to {output}")


def watched(client: Client, job: str) -> Job:
    """Follow a job until it ends, with a progress bar on stderr, and return the ended job.

    Each change of state is printed too. If stderr is not a terminal, a line with the progress is printed every 30 seconds
    instead of the bar.

    The service calculates the tokens per second and the remaining time, because the job may have started before this process.

    Raises WatchInterruptedError on Ctrl-C. The job then continues on the service.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", style="cyan", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    )
    state = ""
    now = JobProgress()

    def line() -> str:
        left = "" if now.seconds_left is None else f", {_duration(now.seconds_left)} left"
        return f"job {job}: {now.done:,} of {now.sequences:,} sequences, {now.tokens_per_second:,.0f} tokens/s{left}"

    try:
        with Progress(*columns, console=err, disable=not err.is_terminal) as progress, lines_of(line):
            bar = progress.add_task("connecting", total=None, rate="", left="")
            for found in client.events(job):
                now = found.progress
                if found.state != state:
                    again = f" again ({found.note})" if found.state == "queued" and found.attempts and found.note else ""
                    state = found.state
                    err.print(f"job {found.id}: {state}{again}")
                progress.update(
                    bar,
                    description="scoring" if state == "running" else visible(state),
                    total=now.sequences or None,
                    completed=now.done,
                    rate=f"{now.tokens_per_second:,.0f} tokens/s" if state == "running" and now.tokens else "",
                    left="" if now.seconds_left is None or found.finished else f"{_duration(now.seconds_left)} left",
                )
    except KeyboardInterrupt:
        error = WatchInterruptedError(f"job {job} continues on the service")
        error.hints = (
            f"watch it again: {command('show', client.url, job)} --watch",
            f"cancel it:      {command('cancel', client.url, job)}",
        )
        raise error from None
    return found


def command(name: str, url: str, job: str) -> str:
    """Return the complete shell command that runs a `reflogp jobs` subcommand on a job."""
    return shlex.join(["reflogp", "jobs", name, url, job])


def print_outcome(job: Job) -> None:
    """Print how a job ended, in up to three lines. For a job that has not ended, print its state."""
    for line in _outcome(job):
        out.print(line)


def _outcome(job: Job) -> list[str]:
    if job.state == "failed" and job.error:
        return [f"job {job.id} failed: {job.error}"]
    if job.state != "done" or job.summary is None:
        return [f"job {job.id} {'was cancelled' if job.state == 'cancelled' else f'is {job.state}'}"]
    notes = [f"note: {note}" for note in job.summary.get("notes", [])]
    counts = {
        name: job.summary.get(name) or 0 for name in ("hits", "scored", "duplicates", "failed", "bad_rows", "dropped_rows")
    }
    told = f"{job.summary.get('rows', 0):,} rows, {job.summary.get('sequences', 0):,} sequences: "
    told += ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n or name in ("hits", "scored"))
    lines = [*notes, told]
    if counts["scored"]:
        tokens, rate = job.summary.get("tokens", 0), job.summary.get("tokens_per_second", 0)
        lines.append(f"{tokens:,} tokens in {job.summary.get('scoring_seconds', 0):.1f} s: {rate:,.0f} tokens/s")
    return [*lines, f"reference {job.reference_id}, snapshot {job.summary.get('snapshot')}"]


def exit_code(job: Job) -> int:
    """Return 1 for a failed or cancelled job, 3 for a completed job in which some rows have no values, otherwise 0."""
    if job.state in ("failed", "cancelled"):
        return EXIT_FAILED
    bad_rows = job.progress.bad_rows if job.summary is None else job.summary.get("bad_rows")
    return EXIT_MISSES if bad_rows and job.state == "done" else EXIT_DONE


def _describe(job: Job) -> None:
    now = job.progress
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    settings = {name: value for name, value in job.settings.items() if value not in (None, "") and name != "reference"}
    done = f"{now.done:,} of {now.sequences:,} sequences: {counted(now.hits, 'hit')}, {now.scored:,} scored"
    rows = {
        "job": job.id,
        "reference": f"{job.settings.get('reference')} ({job.reference_id})",
        "dataset": _dataset(job.dataset),
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "submitted": f"{_time(job.created_at)} by {job.submitted_by}",
        "started": f"{_time(job.started_at)}, attempt {job.attempts}" if job.started_at else "",
        "finished": _time(job.finished_at),
        "progress": done if now.sequences else "",
        "speed": f"{now.tokens_per_second:,.0f} tokens/s" if now.tokens else "",
        "bad rows": f"{now.bad_rows:,}" if now.bad_rows else "",
    }
    table.add_row("state", _state(job))
    for name, value in rows.items():
        if value:
            table.add_row(name, _plain(value))
    _print(table)
    if job.finished:
        print_outcome(job)


def _listed(jobs: list[Job], narrow: bool) -> Table:
    """Return a table with one row per job.

    If the terminal is narrow, omit the submitter and the title, and wrap long text. No text is cut off.
    """
    table = Table(box=None, pad_edge=False)
    # Minimum widths. When long cells wrap, a width of 10 fits the first line of a cell: "123,456 of" or "2026-01-01".
    least = {"job": 16, "state": 9, "sequences": 10, "created": 10}
    for name in (*least, "reference", "dataset", *(() if narrow else ("by", "title"))):
        table.add_column(
            name,
            justify="right" if name == "sequences" else "left",
            no_wrap=name in (("job", "state") if narrow else least),
            overflow="fold",
            min_width=least.get(name) if narrow else None,
        )
    for job in jobs:
        done = f"{job.progress.done:,} of {job.progress.sequences:,}" if job.progress.sequences else ""
        told = [done, _time(job.created_at), job.settings.get("reference"), _dataset(job.dataset)]
        told += [] if narrow else [job.submitted_by, job.settings.get("title")]
        table.add_row(_plain(job.id), _state(job), *(_plain(text) for text in told))
    return table


def _print(table: Table) -> None:
    """Print a table so that it fits the terminal. If stdout is not a terminal, print each row on a single line."""
    if out.is_terminal:
        out.print(table)
        return
    for line in out.render_lines(table, out.options.update(width=_ANY_WIDTH), pad=False):
        out.print("".join(segment.text for segment in line).rstrip())


def _say(job: Job, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(job.as_dict())
    else:
        out.print(sentence)


def _state(job: Job) -> Text:
    return Text(
        visible(job.state), {"done": "green", "running": "cyan", "failed": "red", "cancelled": "yellow"}.get(job.state, "")
    )


def _dataset(dataset: Mapping[str, Any]) -> str:
    return str(next((dataset[kind] for kind in ("upload", "path", "uri") if dataset.get(kind)), ""))


def _time(moment: datetime | None) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M}" if moment else ""


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _plain(text: object) -> Text:
    """Return a table cell for untrusted text, with control and invisible characters escaped."""
    return Text(visible(str(text or "")))
