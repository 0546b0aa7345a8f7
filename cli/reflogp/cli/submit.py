"""`reflogp submit`: submit a dataset to a service, which scores it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from reflogp.cli import jobs, options
from reflogp.cli.console import err, print_result, progress_bar
from reflogp.client import Client, RequestRefusedError, ServicePath, ServiceUri, Uploaded, files
from reflogp.store import UsageError


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
    with jobs.connected(url, token) as client:
        job = client.submit(
            _dataset(client, data, on_service, dataset_config),
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
            job = jobs.watched(client, job.id)
        elif not job.finished:
            err.print(f"watch it: {jobs.command('show', client.url, job.id)} --watch")
        if output is not None and job.state == "done":
            try:
                client.result(job.id, output)
                err.print(f"values saved to {output}")
            except RequestRefusedError as error:
                if error.status != 404:
                    raise
                err.print(f"no values were saved: {error}", style="yellow")  # status 404: no row of the dataset could be read
    print_result(job.as_dict(), as_json, *jobs.outcome(job))
    raise typer.Exit(jobs.exit_code(job))


def _dataset(client: Client, data: str, on_service: bool, config: str | None) -> ServicePath | ServiceUri | Uploaded:
    found = ServiceUri(data) if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", data) else files.on_hub(data)
    if config is not None and (on_service or found is None):
        raise UsageError(f"--dataset-config applies only to datasets on the Hub, but {data} is a path: omit --dataset-config")
    if on_service:
        return ServicePath(data)
    if found is not None:
        return replace(found, config=config)
    with progress_bar("uploading (bytes)") as bar:
        return Uploaded(client.upload(data, progress=bar.hashed).name)
