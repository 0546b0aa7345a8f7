"""`reflogp submit` and `reflogp jobs`: submit, list, show, cancel and retry a service's jobs, and save results and reports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_DONE, EXIT_FAILED, EXIT_MISSES, WatchInterruptedError, err, print_result, progress_bar
from reflogp.client import Client, Job, RequestRefusedError, ServiceError, ServicePath, ServiceUri, Uploaded, files
from reflogp.client.models import JobState, dataset_name, known
from reflogp.scoring.runs.summary import ScoreSummary
from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.texts import hide_secrets, visible

app = typer.Typer(
    no_args_is_help=True,
    help="""List, show, cancel and retry a service's jobs, and save their results and reports. `reflogp submit` submits a job.

Example: reflogp jobs show http://127.0.0.1:8311 4f1c9a02d77be310 --watch""",
)

JobId = Annotated[
    str, typer.Argument(help="Id of the job, as printed by `reflogp submit` and `reflogp jobs ls`.", metavar="ID")
]

#: Routes that a service advises, and the commands that do the same.
_COMMANDS = {
    "POST /v1/jobs/ID/retry": "reflogp jobs retry {url} {job}",
    "GET /v1/jobs/ID/result": "reflogp jobs result {url} {job} -o FILE.parquet",
    "GET /v1/jobs": "reflogp jobs ls {url}",
    "GET /v1/references": "reflogp doctor --url {url}",
    "PUT /v1/uploads/NAME": "reflogp submit {url} FILE",
}


@contextmanager
def connected(url: str, token: str | None, job: str = "ID") -> Iterator[Client]:
    """Yield a client. Its errors advise commands, which can be copied, where the service advises routes."""
    with Client(url, token) as client:
        try:
            yield client
        except ServiceError as error:
            text, shown = str(error), hide_secrets(url.rstrip("/"))
            for route, line in _COMMANDS.items():
                text = text.replace(route, f"`{line.format(url=shown, job=job)}`")
            error.args = (text,)
            raise


def submit(
    url: options.Url,
    data: Annotated[
        str,
        typer.Argument(
            help="Dataset: a local file to upload (.parquet, .arrow, .jsonl, .json or .csv; the last three can be compressed, "
            "such as .csv.gz). If the service's settings allow downloads, DATA can also be the name of a dataset on the Hub "
            "(ORGANISATION/NAME) or a URI (s3://, gs://, az://, hf://datasets/ORGANISATION/NAME, "
            "hf://datasets/ORGANISATION/NAME/FILE). With --on-service, DATA is a path on the service's machine.",
            metavar="DATA",
        ),
    ],
    reference: Annotated[str, typer.Option("--reference", help="Reference model: its name on the service, or its id.")],
    watch: options.Watch = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Wait for the job to end, and save its values to this Parquet file.", metavar="FILE"
        ),
    ] = None,
    on_service: Annotated[
        bool, typer.Option("--on-service", help="DATA is a file or folder on the service's machine.")
    ] = False,
    form: options.Form = None,
    max_length: options.MaxLength = None,
    truncation_mode: options.TruncationMode = "keep_start",
    ld_alpha: options.LdAlpha = None,
    split: options.Split = "train",
    dataset_config: Annotated[
        str | None,
        typer.Option(help="Config (subset) of a dataset on the Hub. Default: the dataset's own default.", metavar="NAME"),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=-100,
            max=100,
            help="Priority of the job. Jobs with a higher priority run first, and interrupt jobs with a lower priority.",
        ),
    ] = 0,
    title: Annotated[str, typer.Option(help="Title of the job, shown in lists of jobs.")] = "",
    token: options.Token = None,
    as_json: options.AsJson = False,
) -> None:
    """Submit a job to a service, which scores a dataset with a reference model. The job continues after this command ends.

    Submitting the same data, reference and settings again returns the same job, even with another title or priority. However, a
    new job is created if the earlier job is done and the data may have changed since then (because the dataset is on the Hub or
    at a URI, or its rows refer to image files). A file that was already uploaded is not sent again.

    Exit codes: 0 if the job is done or, without --watch or --output, if it is queued or running; 1 if the job failed or was
    cancelled, or if another error occurred; 2 for bad usage; 3 if the job is done, but some rows have no values.

    Example: reflogp submit http://127.0.0.1:8311 pairs.jsonl.gz --reference sft --max-length 1024 --output pairs-logps.parquet
    """
    if output is not None:
        files.check_output(output)
        if output.exists() and Path(data).exists() and output.samefile(data):
            raise UsageError(f"the output {output} is the dataset itself; give the output another name")
    with connected(url, token) as client:
        job = client.submit(
            _asked_dataset(client, data, on_service, dataset_config),
            reference,
            format=form,
            max_length=max_length,
            truncation_mode=truncation_mode,
            ld_alpha=ld_alpha,
            priority=priority,
            title=title,
            split=split,
        )
        err.print(f"job {job.id}; open it in a browser: {client.url}/jobs/{job.id}")
        if job.finished:
            err.print("this job has already finished, so no new job was started")
        if watch or output is not None:
            job = watched(client, job.id)
        elif not job.finished:
            err.print(f"watch it: {command('show', client.url, job.id)} --watch")
        if output is not None and job.state == "done":
            try:
                client.result(job.id, output)
                err.print(f"values saved to {output}")
            except RequestRefusedError as error:
                if error.status != 404:
                    raise
                err.print(f"no values were saved: {error}", style="yellow")  # status 404: no row of the dataset could be read
    print_result(job.as_dict(), as_json, *outcome(job))
    raise typer.Exit(exit_code(job))


def _asked_dataset(client: Client, data: str, on_service: bool, config: str | None) -> ServicePath | ServiceUri | Uploaded:
    uri = files.service_uri(data)
    if config is not None and (on_service or uri is None):
        raise UsageError(f"--dataset-config applies only to datasets on the Hub, but {data} is a path: omit --dataset-config")
    if on_service:
        return ServicePath(data)
    if uri is not None:
        return replace(uri, config=config)
    with progress_bar("uploading (bytes)") as bar:
        return Uploaded(client.upload(data, progress=bar.hashed).name)


@app.command("ls")
def ls(
    url: options.Url,
    state: Annotated[JobState | None, typer.Option(help="List only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs to list.")] = 20,
    token: options.Token = None,
    as_json: options.AsJson = False,
) -> None:
    """List jobs, newest first.

    Example: reflogp jobs ls http://127.0.0.1:8311 --state running
    """
    with connected(url, token) as client:
        page = client.jobs(state, limit=limit)
    cells = list(map(_cells, page.jobs))
    rows = [list(cells[0]), *(list(row.values()) for row in cells)] if cells else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = ", ".join(f"{count:,} {name}" for name, count in page.counts.items() if count) or "no jobs yet"
    result = {"jobs": [job.as_dict() for job in page.jobs], "counts": page.counts, "next_before": page.next_before}
    print_result(result, as_json, *lines, counts)


def _cells(job: Job) -> dict[str, str]:
    """Return the cells of a job's row, by heading."""
    cells = {
        "job": job.id,
        "state": job.state,
        "sequences": f"{job.progress.done:,} of {job.progress.sequences:,}" if job.progress.sequences else "",
        "bad rows": f"{job.progress.bad_rows:,}" if job.progress.bad_rows else "",
        "submitted": _time(job.created_at),
        "by": job.submitted_by,
        "reference": job.settings.get("reference"),
        "dataset": dataset_name(job),
        "title": job.settings.get("title"),
    }
    return {heading: visible(str(cell or "")) for heading, cell in cells.items()}


@app.command("show")
def show(
    url: options.Url,
    job: JobId,
    watch: options.Watch = False,
    token: options.Token = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one job. With --watch, follow the job until it ends.

    With --watch, the exit code is 1 if the job failed or was cancelled, and 3 if some rows have no values.

    Example: reflogp jobs show http://127.0.0.1:8311 4f1c9a02d77be310 --watch
    """
    with connected(url, token, job) as client:
        found = watched(client, job) if watch else client.job(job)
    print_result(found.as_dict(), as_json, *_described(found))
    if watch:
        raise typer.Exit(exit_code(found))


@app.command("cancel")
def cancel(url: options.Url, job: JobId, token: options.Token = None, as_json: options.AsJson = False) -> None:
    """Cancel a job. Values that the job has already computed stay in the store, so a retry scores only the remaining sequences.

    Example: reflogp jobs cancel http://127.0.0.1:8311 4f1c9a02d77be310
    """
    with connected(url, token, job) as client:
        found = client.cancel(job)
    more = "" if found.finished else "; it stops after its current forward pass"
    print_result(found.as_dict(), as_json, f"job {found.id} is {found.state}{more}")


@app.command("retry")
def retry(url: options.Url, job: JobId, token: options.Token = None, as_json: options.AsJson = False) -> None:
    """Queue a failed or cancelled job again. The job scores only the sequences that are not in the store yet.

    Example: reflogp jobs retry http://127.0.0.1:8311 4f1c9a02d77be310
    """
    with connected(url, token, job) as client:
        found = client.retry(job)
    print_result(found.as_dict(), as_json, f"job {found.id} is {found.state}; watch it: {command('show', url, job)} --watch")


@app.command("result")
def result(
    url: options.Url,
    job: JobId,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Parquet file to write. Its name must end in .parquet.", metavar="FILE")
    ],
    token: options.Token = None,
) -> None:
    """Save a completed job's result: each row's reference log-probs and sequence keys, or the reason why the row has no values.

    Example: reflogp jobs result http://127.0.0.1:8311 4f1c9a02d77be310 -o pairs-logps.parquet
    """
    with connected(url, token, job) as client:
        client.result(job, output)
    err.print(f"values saved to {output}")


@app.command("report")
def report(
    url: options.Url,
    job: JobId,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.", metavar="FILE")],
    token: options.Token = None,
) -> None:
    """Save a completed job's report, an HTML page like that of `reflogp report`.

    Example: reflogp jobs report http://127.0.0.1:8311 4f1c9a02d77be310 -o pairs-report.html
    """
    with connected(url, token, job) as client:
        page = client.report(job)
    with write_atomically(output) as partial:
        partial.write_text(page, encoding="utf-8")
    err.print(f"report saved to {output}")


def watched(client: Client, job: str) -> Job:
    """Follow a job until it ends, with progress on stderr, and return the ended job.

    Raises WatchInterruptedError on Ctrl-C. The job then continues on the service.
    """
    state = ""
    try:
        with progress_bar("connecting") as bar:
            for found in client.events(job):
                if found.state != state:
                    again = f" again ({found.note})" if found.state == "queued" and found.attempts and found.note else ""
                    state = found.state
                    err.print(f"job {found.id}: {state}{again}")
                now = found.progress
                rate = now.tokens_per_second if state == "running" else 0.0
                bar.follow(f"job {job}: {state}", now.done, now.sequences, rate)
    except KeyboardInterrupt:
        raise WatchInterruptedError(
            f"job {job} continues on the service; watch it again: {command('show', client.url, job)} --watch; "
            f"cancel it: {command('cancel', client.url, job)}"
        ) from None
    return found


def command(name: str, url: str, job: str) -> str:
    return shlex.join(["reflogp", "jobs", name, url, job])


def outcome(job: Job) -> list[str]:
    """Return how a job ended, in a few lines. For a job that has not ended, return its state."""
    if job.state == "failed" and job.error:
        return [f"job {job.id} failed: {job.error}"]
    if job.state != "done" or job.summary is None:
        return [f"job {job.id} {'was cancelled' if job.state == 'cancelled' else f'is {job.state}'}"]
    summary = ScoreSummary(**known(ScoreSummary, job.summary))
    counts, *more_lines = summary.lines()
    lines = [*(f"note: {note}" for note in summary.notes), counts]
    for entry in job.summary.get("bad_row_reasons", []):
        more = f" and {entry['rows'] - 1:,} more" if entry["rows"] > 1 else ""
        lines.append(f"  row {entry['examples'][0]}{more}: {entry['reason']}")
    return [*lines, *more_lines]


def exit_code(job: Job) -> int:
    """Return 1 for a failed or cancelled job, 3 for a completed job in which some rows have no values, otherwise 0."""
    if job.state in ("failed", "cancelled"):
        return EXIT_FAILED
    bad_rows = job.progress.bad_rows if job.summary is None else job.summary.get("bad_rows")
    return EXIT_MISSES if bad_rows and job.state == "done" else EXIT_DONE


def _described(job: Job) -> list[str]:
    now = job.progress
    settings = {name: value for name, value in job.settings.items() if value not in (None, "") and name != "reference"}
    facts = {
        "job": job.id,
        "state": job.state,
        "reference": f"{job.settings.get('reference')} ({job.reference_id})",
        "dataset": dataset_name(job),
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "submitted": f"{_time(job.created_at)} by {job.submitted_by}",
        "started": f"{_time(job.started_at)}, attempt {job.attempts}" if job.started_at else "",
        "finished": _time(job.finished_at),
        "progress": now.line(job.state == "running") if now.sequences else "",
    }
    lines = [f"{name:<10} {value}" for name, value in facts.items() if value]
    return [*lines, *outcome(job)] if job.finished else lines


def _time(moment: datetime | None) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M}" if moment else ""
