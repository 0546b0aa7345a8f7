"""Read request bodies (Arrow IPC or JSON), enforce limits on their size, and write responses in the same formats.

A body that is too long is refused while it is being read. An Arrow stream with too many rows or values is refused before its
values are converted. A stream with compressed record batches is also refused, because a few compressed bytes can expand to
gigabytes. How long a sender may take is up to the proxy in front of the service (docs/security.md).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pyarrow as pa
from anyio import to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from reflogp.service.problems import SEE_API, Problem
from reflogp.service.worker.protocol import MASKED_SEQUENCES, SEQUENCES
from reflogp.store.keys import KEY_BYTES, KEY_TYPE
from reflogp.store.schema import QUESTION, one_array
from reflogp.store.texts import counted

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

JSON = "application/json"

#: A request whose body has more bytes than this is large. At most _MOST_LARGE of them are read and decoded at the same time.
#: One that has waited for PATIENCE_SECONDS is rejected.
_LARGE_BYTES, _MOST_LARGE, PATIENCE_SECONDS = 256 << 10, 4, 30.0
#: Maximum size in bytes of a body that is no dataset, and of a JSON body. Programs send Arrow streams.
_MAX_BODY_BYTES, _MAX_JSON_BYTES = 64 << 20, 2 << 20
#: Bodies of up to this many bytes are decoded in the event loop, because starting a thread would take longer.
_DECODED_AT_ONCE = 64 << 10
_SEND_ARROW = "send less data per request; for lookups and scoring, you can also send an Arrow stream, as reflogp.client does"

#: The maximum number of objects, lists and fields in a JSON body. No route needs more: a scoring request with 1,000 sequences
#: (the maximum for JSON) has about 5,000.
_MAX_JSON_PARTS = 10_000
#: The maximum size in bytes of an Arrow stream's schema, and the maximum number of its batches. Ordinary streams have about a
#: kilobyte of schema, and one batch for every few thousand rows. Both take far more memory than their bytes in the stream.
_MAX_SCHEMA_BYTES, _MAX_BATCHES = 64 << 10, 20_000


class LargeRequests:
    """A semaphore for large requests. Small requests never wait."""

    def __init__(self) -> None:
        self._semaphore = asyncio.Semaphore(_MOST_LARGE)

    @asynccontextmanager
    async def turn_of(
        self, request: Request, answer_bytes: int = 0, patience: float | None = PATIENCE_SECONDS
    ) -> AsyncIterator[None]:
        """Wait for a turn if the request's body or its response is large, or the body is of unknown length.

        Raises Problem 503 after `patience` seconds, if it is not None.
        """
        declared = content_length(request)
        if declared is not None and max(declared, answer_bytes) <= _LARGE_BYTES:
            yield
            return
        try:
            async with asyncio.timeout(patience):
                await self._semaphore.acquire()
        except TimeoutError:
            step = "try again later, or send less data per request"
            raise Problem(503, "too many large requests are being processed", step, {"Retry-After": "5"}) from None
        try:
            yield
        finally:
            pa.default_memory_pool().release_unused()  # otherwise, Arrow would keep the freed memory
            self._semaphore.release()


def content_length(request: Request) -> int | None:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


async def read_body(
    request: Request, max_bytes: int | None = None, otherwise: str = "split the request into several requests"
) -> bytearray:
    """Read a body of at most `max_bytes`, by default _MAX_BODY_BYTES.

    Raise Problem 413 with the next step `otherwise` if the body is too long, and 400 if the sender disconnects.
    """
    max_bytes = max_bytes or _MAX_BODY_BYTES
    too_long = Problem(413, f"the body is longer than {max_bytes:,} bytes", otherwise)
    if (content_length(request) or 0) > max_bytes:
        raise too_long
    body = bytearray()
    async for chunk in stream_chunks(request):
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    return body


async def decoded(decode: Callable[[bytearray], Result], body: bytearray) -> Result:
    return decode(body) if len(body) <= _DECODED_AT_ONCE else await to_thread.run_sync(decode, body)


async def stream_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; the caller must limit its length. Raise Problem 400 if the sender disconnects early."""
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect as error:
        raise Problem(400, "the connection was closed before the whole body had arrived", "send the request again") from error


def require_type(request: Request, *accepted: str) -> str:
    """Return the body's media type.

    Raise Problem 415 if the request has no Content-Type, or one that the route does not accept.

    This check protects against web pages on other sites, which can make a browser send requests to this service. If such a
    request has no content type, or one of the three content types of HTML forms, the browser sends it without a CORS preflight
    request. Before a request with any other content type, the browser sends a preflight request, which this service refuses.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in accepted:
        detail = f"this route does not accept the content type {kind[:100]!r}" if kind else "the request has no content type"
        raise Problem(415, detail, f"send the header content-type: {' or '.join(accepted)}", {"Accept": ", ".join(accepted)})
    return kind


async def read_json(request: Request, model: type[Model], max_bytes: int | None = None) -> Model:
    """Read a JSON body of at most `max_bytes`, by default _MAX_JSON_BYTES, and return it as a pydantic model.

    Raises:
        RequestValidationError: the body does not match the model.
        Problem: 415 if the media type is not JSON, 422 if the body has more than _MAX_JSON_PARTS parts; also any problem that
            `read_body` raises.
    """
    require_type(request, JSON)
    body = await read_body(request, max_bytes or _MAX_JSON_BYTES, _SEND_ARROW)
    return await decoded(lambda body: _json_model(body, model), body)


def _json_model(body: bytearray, model: type[Model]) -> Model:
    # The number of parts is limited, because pydantic creates an error object of about a kilobyte for each invalid part.
    if body.count(b"[") + body.count(b"{") + body.count(b":") > _MAX_JSON_PARTS:
        raise Problem(422, f"the JSON body has more than {_MAX_JSON_PARTS:,} lists, objects and fields", _SEND_ARROW)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_context=False, include_input=False)) from error


def body_schemas(path: str, model: type[BaseModel], *others: str) -> dict[str, Any]:
    """Return the OpenAPI description of the body of POST `path`: `model` as JSON, or one of the media types in `others`."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"  # where the schema itself is
    content = {JSON: {"schema": model.model_json_schema(ref_template=f"{place}/$defs/{{model}}")}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in others}
    return {"requestBody": {"required": True, "content": content}}


def keys_of(body: bytearray, max_keys: int) -> pa.FixedSizeBinaryArray:
    """Return the `key` column of an Arrow IPC stream.

    Raises:
        Problem: the body is not an Arrow IPC stream with this column, a key is null, a batch is compressed, or there are more
            than `max_keys` rows.
    """

    def check(schema: pa.Schema) -> None:
        if schema.names != QUESTION.names or schema.field("key").type not in (KEY_TYPE, pa.binary(), pa.large_binary()):
            raise Problem(
                422,
                f"the stream has the wrong columns: {_described(schema)}",
                "send one column: `key` of type fixed_size_binary(16)",
            )

    try:
        parts = [batch.column("key").cast(KEY_TYPE) for batch in _batches_of(body, max_keys, "keys", check)]
        keys = one_array(pa.chunked_array(parts, KEY_TYPE))
    except pa.ArrowException as error:
        raise _not_arrow("keys", error) from error
    if keys.null_count:
        raise Problem(
            422, f"the stream contains {counted(keys.null_count, 'null key')}", f"send {KEY_BYTES} bytes for each key"
        )
    return keys


def sequences_of(body: bytearray, max_sequences: int, max_tokens: int) -> pa.Table:
    """Decode an Arrow IPC stream of sequences into a table with the columns prompt_ids and completion_ids.

    If the stream has an attention_mask column, the table has one too. The type of all columns is list<int32>. The limit on
    tokens is checked before token ids are cast to int32, because the cast makes a column of int8 ids four times as large.

    Raises:
        Problem: the body is not an Arrow IPC stream with these columns, a sequence or one of its values is null, a value needs
            more than 32 bits, a batch is compressed, or there are more sequences or tokens than allowed.
    """

    def check(schema: pa.Schema) -> None:
        known = any(sorted(schema.names) == sorted(kind.names) for kind in (SEQUENCES, MASKED_SEQUENCES))
        if not known or not all(_is_token_lists(field.type) for field in schema):
            raise Problem(
                422,
                f"the stream has the wrong columns: {_described(schema)}",
                "send the columns prompt_ids and completion_ids as lists of integers; for padded batches, add attention_mask",
            )

    parts, kind, tokens, masked = [], SEQUENCES, 0, 0
    for batch in _batches_of(body, max_sequences, "sequences", check):
        kind = MASKED_SEQUENCES if "attention_mask" in batch.schema.names else SEQUENCES
        columns = {name: batch.column(name) for name in kind.names}
        tokens += sum(len(columns[name].values) for name in SEQUENCES.names)
        masked += len(columns["attention_mask"].values) if kind is MASKED_SEQUENCES else 0
        if max(tokens, masked) > max_tokens:
            raise too_many_tokens(max_tokens)
        if any(column.null_count or column.values.null_count for column in columns.values()):
            raise Problem(422, "a sequence or one of its values is null", "send a list of integers for each sequence")
        try:
            parts.append(pa.record_batch([column.cast(pa.list_(pa.int32())) for column in columns.values()], schema=kind))
        except pa.ArrowInvalid as error:
            raise Problem(
                422,
                "a token id or attention_mask value does not fit into 32 bits",
                "send ids from the model's vocabulary, and 0 or 1 in attention_mask",
            ) from error
    return pa.Table.from_batches(parts, kind)


def too_many_tokens(max_tokens: int) -> Problem:
    return Problem(413, f"the request has more than {max_tokens:,} tokens", "split the request into several requests")


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name[:50]}: {str(field.type)[:50]}" for field in list(schema)[:5]) or "none"


def _is_token_lists(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def _batches_of(body: bytearray, max_rows: int, what: str, check: Callable[[pa.Schema], None]) -> Iterator[pa.RecordBatch]:
    """Validate and yield the record batches of an Arrow IPC stream, after calling `check` with the stream's schema.

    Batches without rows are skipped.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
        first = messages.read_next_message()
        if first.metadata.size > _MAX_SCHEMA_BYTES:
            step = "send only the required columns, without custom metadata"
            raise Problem(413, f"the stream's schema has more than {_MAX_SCHEMA_BYTES:,} bytes", step)
        _require_kind(first, "schema")
        schema = pa.ipc.read_schema(first)
        check(schema)
        schema = schema.remove_metadata()
        rows = 0
        for number, message in enumerate(messages):
            if number >= _MAX_BATCHES:
                raise Problem(413, f"the stream has more than {_MAX_BATCHES:,} record batches", "send fewer, larger batches")
            _require_kind(message, "record batch")
            if _is_compressed(message.metadata.to_pybytes()):
                raise Problem(422, "the stream's record batches are compressed", "send uncompressed record batches")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            rows += batch.num_rows
            if rows > max_rows:
                raise Problem(413, f"the request has more than {max_rows:,} {what}", "split the request into several requests")
            if batch.num_rows:
                yield batch
    except (pa.ArrowException, StopIteration, EOFError, struct.error, OSError, UnicodeDecodeError) as error:
        raise _not_arrow(what, error) from error


def _require_kind(message: pa.ipc.Message, kind: str) -> None:
    if message.type != kind:  # pyarrow would end the process by a segmentation fault for a schema of an unknown kind
        raise pa.ArrowInvalid(f"a message is no {kind}")


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a record batch is compressed. pyarrow has no call that answers this without decompressing the batch.

    Args:
        metadata: metadata of the batch's message: a flatbuffer (format/Message.fbs in github.com/apache/arrow), which pyarrow
            has verified.
    """

    def field(table: int, number: int) -> int:
        """Return the offset of a table's field, or 0 if the table does not have it."""
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        size, entry = struct.unpack_from("<H", metadata, vtable)[0], 4 + 2 * number
        offset: int = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < size else 0
        return table + offset if offset else 0

    def target(at: int) -> int:
        return at + int(struct.unpack_from("<I", metadata, at)[0])

    batch = target(field(target(0), 2))  # Message.header
    return field(batch, 3) != 0  # RecordBatch.compression


def _not_arrow(what: str, error: Exception) -> Problem:
    said = str(error).split("\n")[0] or type(error).__name__
    return Problem(400, f"the body is not an Arrow IPC stream of {what}: {said}", SEE_API)


def json_response(answer: BaseModel) -> Response:
    """Return a pydantic model as JSON. Call this in a thread if the response may be long."""
    return Response(answer.model_dump_json(), media_type=JSON)
