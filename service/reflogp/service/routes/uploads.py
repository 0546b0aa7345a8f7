"""Serve /v1/uploads: send, list, show and delete dataset files."""

from __future__ import annotations

import logging
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Request, Response

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS
from reflogp.service.auth import requires
from reflogp.service.bodies import JSON, content_length, json_response, require_type, stream_chunks
from reflogp.service.context import Context
from reflogp.service.models import NAME_PATTERN, UPLOAD_PATTERN, Upload, Uploads
from reflogp.service.problems import documented
from reflogp.service.routes.jobs import DATASET_TYPES

logger = logging.getLogger(__name__)

_UploadName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the upload.")]
_NewName = Annotated[str, Path(pattern=UPLOAD_PATTERN, description=f"Name of the upload. It must end in {SUFFIXES_IN_WORDS}.")]
#: Accepted content types of an uploaded file. A file's name, not its content type, determines its format. HTML forms on other
#: sites cannot send these content types.
_FILE_TYPES = (
    "application/octet-stream",
    *DATASET_TYPES,
    JSON,
    "application/jsonlines",
    "application/x-jsonlines",
    "application/parquet",
    "application/gzip",
    "application/x-gzip",
    "application/x-bzip2",
    "application/zstd",
    "application/x-lz4",
)
_BINARY = {"schema": {"type": "string", "format": "binary", "minLength": 1}}


def uploads_router(context: Context) -> APIRouter:
    router = APIRouter(tags=["uploads"])
    uploads = context.uploads
    reader = Depends(requires("read", context.settings.tokens))
    scorer = Depends(requires("jobs", context.settings.tokens))

    @router.put(
        "/v1/uploads/{name}",
        status_code=201,
        summary="Send a dataset",
        response_model=Upload,
        response_description="The new upload.",
        dependencies=[scorer],
        responses={
            **documented(400, 401, 403, 413, 415, 422, 503, 507),
            200: {"model": Upload, "description": "The new upload, which replaced an earlier upload with the same name."},
        },
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}},
    )
    async def put(name: _NewName, request: Request, response: Response) -> Upload:
        """Upload a dataset file.

        The request body is the file. The content type is application/octet-stream or the media type of the file. The suffix of
        the upload's name determines the file's format.

        If the new file replaces an earlier upload with the same name, existing jobs still read the earlier file.
        """
        require_type(request, *_FILE_TYPES)
        upload, created = await uploads.receive(name, stream_chunks(request), content_length(request))
        response.status_code = 201 if created else 200
        return upload

    @router.get(
        "/v1/uploads",
        dependencies=[reader],
        summary="List uploads",
        response_description="All uploads.",
        response_model=Uploads,
        responses=documented(401, 403, 503),
    )
    async def list_uploads() -> Response:
        """List all uploads, sorted by name."""
        return await to_thread.run_sync(lambda: json_response(Uploads(uploads=uploads.list())))

    @router.get(
        "/v1/uploads/{name}",
        dependencies=[reader],
        summary="Show an upload",
        response_description="The upload's name, size, digest and upload time.",
        responses=documented(401, 403, 404, 422, 503),
    )
    async def get(name: _UploadName) -> Upload:
        """Show an upload's size, digest and upload time."""
        return await to_thread.run_sync(uploads.get, name)

    @router.delete(
        "/v1/uploads/{name}",
        status_code=204,
        summary="Delete an upload",
        response_description="The upload has been deleted.",
        responses=documented(401, 403, 404, 422, 503),
    )
    async def delete(name: _UploadName, who: str = scorer) -> None:
        """Delete an upload. Existing jobs can still read its file."""
        await to_thread.run_sync(uploads.delete, name)
        logger.info("upload %s deleted: token %s", name, who)

    return router
