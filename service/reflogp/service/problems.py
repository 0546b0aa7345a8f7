"""Return every error as a problem+json response (RFC 9457) that states the cause and suggests a next step."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from reflogp.service.ledger_file import LedgerError
from reflogp.store import (
    DamagedStoreError,
    ReferenceNotFoundError,
    ReflogpError,
    SnapshotNotFoundError,
    StoreUnavailableError,
    UsageError,
)
from reflogp.store.texts import hide_secrets, visible

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

#: (Error class, HTTP status, next step). The first entry whose class matches the error is used.
_STATUS: list[tuple[type[ReflogpError], int, str]] = [
    (ReferenceNotFoundError, 404, "GET /v1/references lists all references, and how many sequences are stored for each"),
    (SnapshotNotFoundError, 404, "omit the snapshot number to read the latest snapshot"),
    (LedgerError, 503, "try again, or ask an administrator to check the service's state folder"),
    (UsageError, 422, "correct the request"),
    (DamagedStoreError, 500, "ask an administrator to repair the store as described in this error"),
    (StoreUnavailableError, 503, "try again, or ask an administrator to check the store"),
]
#: Value of the Retry-After header, in seconds, in responses that report a failing job ledger.
_LEDGER_SECONDS = "5"

SEE_API = "see docs/api.md or /openapi.json for the routes and what they accept"


class ProblemBody(BaseModel):
    """The body of an error response: a problem in RFC 9457 format."""

    type: str = Field(default="about:blank", description="Always `about:blank`: problems are classified only by `status`.")
    title: str = Field(description="Name of the HTTP status.")
    status: int
    detail: str = Field(description="Cause of the problem.")
    next_step: str = Field(description="What the caller can do next.")


class Problem(Exception):
    """An exception that ends a request with a problem response.

    Args:
        status: HTTP status.
        detail: what went wrong.
        next_step: what the caller can do.
        headers: additional response headers.
    """

    def __init__(self, status: int, detail: str, next_step: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.next_step, self.headers = status, detail, next_step, headers

    def response(self) -> JSONResponse:
        body = ProblemBody(
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=visible(hide_secrets(self.detail)),
            next_step=visible(hide_secrets(self.next_step)),
        )
        return JSONResponse(body.model_dump(), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: ReflogpError) -> Problem:
    """Return the Problem for a reflogp error. If the error matches no class in _STATUS, the status is 500."""
    for kind, status, next_step in _STATUS:
        if isinstance(error, kind):
            headers = {"Retry-After": _LEDGER_SECONDS} if isinstance(error, LedgerError) else None
            return Problem(status, str(error), next_step, headers)
    return Problem(500, str(error), "try again; if the error persists, report it together with the service's log")


def install(app: FastAPI) -> None:

    @app.exception_handler(Problem)
    async def _(request: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(ReflogpError)
    async def _(request: Request, error: ReflogpError) -> JSONResponse:
        return problem_of(error).response()

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        return Problem(422, f"{where}: {first['msg']}", SEE_API).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette's Allow header lists only the methods of the first route with this path
            described = request.app.openapi()["paths"].get(getattr(request.scope.get("route"), "path", None))
            headers |= {"Allow": ", ".join(sorted(map(str.upper, described)))} if described else {}
        return Problem(error.status_code, str(error.detail), SEE_API, headers).response()

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> JSONResponse:
        logger.exception("%s %s failed", request.method, request.url.path)
        return Problem(
            500, f"the service failed ({type(error).__name__})", "report this error and attach the service's log"
        ).response()


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries for problem responses, as a dict from each given status to its entry."""
    content = {MEDIA_TYPE: {"schema": ProblemBody.model_json_schema()}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}
