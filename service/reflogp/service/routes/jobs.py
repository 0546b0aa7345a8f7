"""Serve /v1/jobs: submit, list, show, cancel and retry jobs; return their results and reports."""

from __future__ import annotations

import secrets
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse

from reflogp.service.auth import requires
from reflogp.service.bodies import JSON, body_schemas, content_length, json_response, read_json, require_type, stream_chunks
from reflogp.service.context import Context
from reflogp.service.models import UNFINISHED, DatasetSpec, Job, JobRequest, Jobs, JobState, QuerySettings
from reflogp.service.problems import Problem, documented

#: A job can be submitted with the dataset as the request body. This dict maps each allowed media type to its file suffix.
DATASET_TYPES = {
    "application/x-ndjson": ".jsonl",
    "application/jsonl": ".jsonl",
    "text/csv": ".csv",
    "application/vnd.apache.parquet": ".parquet",
    "application/vnd.apache.arrow.file": ".arrow",
}
_PARQUET = "application/vnd.apache.parquet"
#: A report shows texts of strangers' rows. It has an inline stylesheet and images, and nothing that a sandbox forbids.
_REPORT_HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
}
_JobId = Annotated[str, Path(description="Id of the job, as returned when the job was submitted.")]


def jobs_router(context: Context) -> APIRouter:
    router = APIRouter(tags=["jobs"])
    precompute, ledger, tokens = context.precompute, context.ledger, context.settings.tokens
    reader = Depends(requires("read", tokens))
    scorer = Depends(requires("jobs", tokens))

    @router.post(
        "/v1/jobs",
        status_code=201,
        summary="Submit a job",
        response_model=Job,
        response_description="The queued job. The `Location` header contains the path of the job.",
        responses={
            **documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 507),
            200: {"model": Job, "description": "The existing job, which was submitted earlier."},
        },
        openapi_extra=body_schemas("/v1/jobs", JobRequest, *DATASET_TYPES),
    )
    async def submit(
        request: Request,
        response: Response,
        query: Annotated[QuerySettings, Query()],
        who: str = scorer,
        idempotency_key: Annotated[
            str | None,
            Header(
                max_length=200,
                description="Key that identifies the job. Without a key, the job is identified by its reference, tokenizer, "
                "dataset and settings.",
            ),
        ] = None,
    ) -> Job:
        """Submit a job, or return the existing job if the same job was submitted before.

        Two submissions with the same bearer token and the same Idempotency-Key count as the same job; if their content differs,
        the second is refused (409). Without a key, two submissions count as the same job if they have the same reference,
        tokenizer, dataset and settings. Datasets named by a URI are compared by the URI, all others by their bytes and, if the
        job names a path, also by the path. Priority and title are not compared.

        If the existing job has failed or was cancelled, it is queued again. Otherwise, it is returned as it is, with one
        exception: without a key, a new job is created if the existing job is done and the data may have changed since then.
        This is the case if the dataset is named by a URI, or if its rows refer to image files.

        The body is either JSON that names a dataset, or the dataset itself, with the settings in the query string.
        """
        kind = require_type(request, JSON, *DATASET_TYPES)
        if kind in DATASET_TYPES:
            if query.reference is None:
                raise Problem(404, "the query string does not name a reference", "add ?reference=NAME")
            context.registry.served(query.reference)
            chunks, length = stream_chunks(request), content_length(request)
            file, digest, _ = await context.uploads.receive_nameless(DATASET_TYPES[kind], chunks, length)
            name = f"job-{secrets.token_hex(8)}{DATASET_TYPES[kind]}"  # for display only; there is no upload with this name
            asked = JobRequest(dataset=DatasetSpec(upload=name), **query.model_dump())
            job, new = await precompute.submit(asked, who, idempotency_key, (file, digest))
        else:
            async with context.large.turn_of(request):
                asked = await read_json(request, JobRequest)
            job, new = await precompute.submit(asked, who, idempotency_key)
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return job

    @router.get(
        "/v1/jobs",
        dependencies=[reader],
        summary="List jobs",
        response_model=Jobs,
        response_description="A page of jobs.",
        responses=documented(401, 403, 422, 503),
    )
    async def jobs(
        state: Annotated[JobState | None, Query(description="List only jobs in this state.")] = None,
        before: Annotated[
            str | None, Query(max_length=64, description="Id of a job. List only jobs that were submitted before this job.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of jobs on a page.")] = 50,
    ) -> Response:
        """List jobs, newest first. To get the next page, pass this page's `next_before` as `before`."""
        return await to_thread.run_sync(lambda: json_response(ledger.page(state, before, limit)))

    @router.get(
        "/v1/jobs/{job_id}",
        dependencies=[reader],
        summary="Show a job",
        response_description="The job in its current state.",
        responses=documented(401, 403, 404, 422, 503),
    )
    async def job(
        job_id: _JobId,
        wait: Annotated[
            float, Query(ge=0, le=60, description="Seconds to wait for the next change of a job that is queued or running.")
        ] = 0,
    ) -> Job:
        """Show a job and its progress.

        With `wait`, the response is sent when the job changes, or after that many seconds. The response is sent at once if the
        job has ended.
        """
        return await precompute.get(job_id, wait)

    @router.delete(
        "/v1/jobs/{job_id}",
        dependencies=[scorer],
        status_code=202,
        summary="Cancel a job",
        response_description="The job. If it was running, it may continue for a short time.",
        responses=documented(401, 403, 404, 409, 422, 503),
    )
    async def cancel(job_id: _JobId) -> Job:
        """Cancel a job.

        A queued job ends at once; a running job may continue until its current forward pass ends. Values that were already
        computed stay in the store.
        """
        return await precompute.cancel(job_id)

    @router.post(
        "/v1/jobs/{job_id}/retry",
        dependencies=[scorer],
        status_code=202,
        summary="Retry a job",
        response_description="The job, which has been queued again.",
        responses=documented(401, 403, 404, 409, 422, 503),
    )
    async def retry(job_id: _JobId) -> Job:
        """Queue a failed or cancelled job again."""
        return await precompute.retry(job_id)

    @router.get(
        "/v1/jobs/{job_id}/result",
        dependencies=[reader],
        summary="Fetch a job's values",
        response_class=FileResponse,
        response_description="The result as a Parquet file.",
        responses={
            **documented(401, 403, 404, 409, 422, 503),
            200: {"content": {_PARQUET: {}}},
            206: {"content": {_PARQUET: {}}, "description": "The part of the file that the `Range` header requests."},
        },
    )
    async def result(job_id: _JobId) -> Response:
        """Return a completed job's values in dataset order, as a Parquet file.

        The columns are `row`, `error` and, for each completion, its key, log-prob sum and token count.
        """
        await _require_done(job_id)
        return FileResponse(await precompute.result(job_id), media_type=_PARQUET, filename=f"{job_id}.parquet")

    @router.get(
        "/v1/jobs/{job_id}/report",
        dependencies=[reader],
        summary="Fetch a job's report",
        response_class=HTMLResponse,
        response_description="The report as a page that stands alone.",
        responses=documented(401, 403, 404, 409, 422, 503),
    )
    async def report(job_id: _JobId) -> Response:
        """Return the report on a completed job's values, as `reflogp report` writes it.

        The report shows log-probs, margins, truncation, outliers and duplicates. It is written when it is first asked for,
        which takes some seconds for each 100,000 rows. A job has no report if its dataset has more than 300,000 rows or no row
        that can be used, or if the dataset was deleted or changed before the first request.
        """
        file = await precompute.report(await _require_done(job_id))
        return FileResponse(file, media_type="text/html", headers=_REPORT_HEADERS)

    async def _require_done(job_id: str) -> Job:
        job = await precompute.get(job_id)
        if job.state != "done":
            step = "wait until the job is done" if job.state in UNFINISHED else "queue the job again: POST /v1/jobs/ID/retry"
            raise Problem(409, f"the job is {job.state}", step)
        return job

    return router
