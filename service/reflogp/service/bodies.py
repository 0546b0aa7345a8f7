"""Read request bodies (Arrow IPC or JSON), enforce limits on their size, and write responses in the same formats.

A body that is too long or arrives too slowly is refused while it is being read. An Arrow stream with too many rows or values is
refused before its values are converted. A stream with compressed record batches is also refused, because a few compressed bytes
can expand to gigabytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from anyio import to_thread
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from reflogp.service.large_requests import content_length
from reflogp.service.problems import Problem
from reflogp.service.worker.protocol import MASKED_SEQUENCES, SEQUENCES, token_count
from reflogp.store.keys import KEY_BYTES, KEY_TYPE
from reflogp.store.schema import ARROW_STREAM, QUESTION, one_array, stream_buffer
from reflogp.store.texts import counted

Model = TypeVar("Model", bound=BaseModel)

JSON = "application/json"

#: Maximum size of a JSON body in bytes. Programs send Arrow streams.
_MAX_JSON_BYTES = 2 << 20
#: JSON bodies of up to this many bytes are decoded in the event loop, because starting a thread would take longer.
_DECODED_AT_ONCE = 64 << 10
_SEE = "see docs/api.md or /openapi.json for what the route accepts"
_SEND_ARROW = "send less data per request; for lookups and scoring, you can also send an Arrow stream, as reflogp.client does"

#: A body is refused if it is still incomplete after _BODY_SECONDS, or if it arrives at less than _LEAST_RATE bytes per second
#: after the first _SLOW_START_SECONDS. A slower sender would let other large requests wait for too long.
_BODY_SECONDS, _LEAST_RATE, _SLOW_START_SECONDS = 120.0, 128 << 10, 15.0
#: The maximum number of objects, lists and fields in a JSON body. No route needs more: a scoring request with 1,000 sequences
#: (the maximum for JSON) has about 5,000.
_MAX_JSON_PARTS = 10_000
#: The maximum size in bytes of an Arrow message's metadata (schema, buffer offsets), and the maximum number of messages in a
#: stream. Ordinary streams have about a kilobyte of metadata, and one batch for every few thousand rows. Parsing metadata and
#: messages takes far more memory than their bytes in the stream.
_MAX_METADATA_BYTES, _MAX_MESSAGES = 64 << 10, 20_000
#: Number of bytes allowed for a stream's headers, padding and metadata, in addition to its data.
_FRAME_BYTES = 1 << 20
#: Size in bytes of the pieces in which a response is sent. Each piece is created only after the previous piece was sent, so
#: the connection to a client that reads slowly buffers only one piece.
_PIECE_BYTES = 256 << 10
#: Indices of fields in Arrow's flatbuffers (format/Message.fbs). `_HEADER_TYPE` and `_HEADER` are fields of Message. `_LENGTH`
#: and `_COMPRESSION` are fields of RecordBatch. `_RECORD_BATCH` is not an index, but the value of the field header_type if the
#: message is a record batch.
_HEADER_TYPE, _HEADER, _LENGTH, _COMPRESSION, _RECORD_BATCH = 1, 2, 0, 3, 3


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """Read a body of at most `max_bytes`.

    Raises:
        Problem: 408 if the body arrives too slowly, 413 if it is too long, 400 if the sender disconnects.
    """
    loop = asyncio.get_running_loop()
    if (content_length(request) or 0) > max_bytes:
        raise _too_long(max_bytes)
    body, start = bytearray(), loop.time()
    chunks = stream_chunks(request)
    while True:
        patience = min(_BODY_SECONDS, _SLOW_START_SECONDS + len(body) / _LEAST_RATE)
        try:
            async with asyncio.timeout_at(start + patience):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise Problem(
                408,
                f"only {len(body):,} bytes of the body arrived within {patience:.0f} seconds",
                "send less data per request, or use a faster connection",
            ) from None
        if chunk is None:
            return body
        body += chunk
        if len(body) > max_bytes:
            raise _too_long(max_bytes)


async def stream_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; the caller must limit its length. Raise Problem 400 if the sender disconnects early."""
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect as error:
        raise Problem(400, "the connection was closed before the whole body had arrived", "send the request again") from error


def media_type(request: Request) -> str:
    """Return the body's media type without parameters, or an empty string if the request has no Content-Type."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def require_type(request: Request, *accepted: str) -> str:
    """Return the body's media type.

    Raise Problem 415 if the request has no Content-Type, or one that the route does not accept.

    This check protects against web pages on other sites, which can make a browser send requests to this service. If such a
    request has no content type, or one of the three content types of HTML forms, the browser sends it without a CORS preflight
    request. Before a request with any other content type, the browser sends a preflight request, which this service refuses.
    """
    kind = media_type(request)
    if kind not in accepted:
        detail = f"this route does not accept the content type {kind[:100]!r}" if kind else "the request has no content type"
        raise Problem(415, detail, f"send the header content-type: {' or '.join(accepted)}", {"Accept": ", ".join(accepted)})
    return kind


async def read_json(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read a JSON body of at most _MAX_JSON_BYTES and at most `max_bytes`, and return it as a pydantic model.

    Raises:
        Problem: 415 if the media type is not JSON, 422 if the body does not match the model or has more than _MAX_JSON_PARTS
            parts; also any problem that `read_body` raises.
    """
    require_type(request, JSON)
    max_bytes = min(max_bytes, _MAX_JSON_BYTES)
    try:
        body = await read_body(request, max_bytes)
    except Problem as problem:
        if problem.status == 413:
            raise Problem(413, f"the JSON body is longer than {max_bytes:,} bytes", _SEND_ARROW) from None
        raise
    if len(body) <= _DECODED_AT_ONCE:
        return _json_model(body, model)
    return await to_thread.run_sync(_json_model, body, model)


def _json_model(body: bytearray, model: type[Model]) -> Model:
    # The number of parts is limited, because pydantic creates an error object of about a kilobyte for each invalid part.
    if body.count(b"[") + body.count(b"{") + body.count(b":") > _MAX_JSON_PARTS:
        raise Problem(422, f"the JSON body has more than {_MAX_JSON_PARTS:,} lists, objects and fields", _SEND_ARROW)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise Problem(422, f"{where}: {first['msg']}", _SEE) from error


def body_schemas(model: type[BaseModel], *others: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request body.

    The body is either `model` as JSON, or binary data with one of the media types in `others`.
    """
    content = {"application/json": {"schema": _inlined(model.model_json_schema())}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in others}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with every reference to `$defs` replaced by the definition itself.

    References to `$defs` are resolved from the root of the document, so they would be invalid in an OpenAPI document, where
    the schema is not the root.
    """
    definitions = schema.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return resolved(definitions[part["$ref"].rsplit("/", 1)[1]])
            return {name: resolved(value) for name, value in part.items()}
        return [resolved(value) for value in part] if isinstance(part, list) else part

    found: dict[str, Any] = resolved(schema)
    return found


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


def keys_body_bytes(max_keys: int) -> int:
    """Return the maximum size in bytes of a body with `max_keys` keys, including 64-bit offsets and a validity bitmap."""
    return 25 * max_keys + _FRAME_BYTES


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
        if any(column.null_count for column in columns.values()):
            raise Problem(422, "a sequence or its attention_mask is null", "send a list for each sequence")
        flat = {name: column.flatten() for name, column in columns.items()}
        tokens += sum(len(flat[name]) for name in SEQUENCES.names)
        masked += len(flat.get("attention_mask", ()))
        if max(tokens, masked) > max_tokens:
            raise _too_many_tokens(max_tokens)
        if any(values.null_count for values in flat.values()):
            raise Problem(422, "a token id or attention_mask value is null", "send an integer for each token")
        try:
            lists = [pa.ListArray.from_arrays(_offsets(columns[name]), flat[name].cast(pa.int32())) for name in kind.names]
        except pa.ArrowInvalid as error:
            raise Problem(
                422,
                "a token id or attention_mask value does not fit into 32 bits",
                "send ids from the model's vocabulary, and 0 or 1 in attention_mask",
            ) from error
        parts.append(pa.record_batch(lists, schema=kind))
    return pa.Table.from_batches(parts, kind)


def sequences_body_bytes(max_sequences: int, max_tokens: int) -> int:
    """Return the maximum size in bytes of a body with `max_sequences` sequences and `max_tokens` tokens.

    The size allows for 64-bit token ids, an attention mask with 64 bits per token, and 64-bit offsets in three columns.
    """
    return 16 * max_tokens + 32 * max_sequences + _FRAME_BYTES


def bounded_tokens(sequences: pa.Table, max_tokens: int) -> pa.Table:
    """Return the table unchanged, or raise Problem 413 if it has more than `max_tokens` tokens."""
    if token_count(sequences) > max_tokens:
        raise _too_many_tokens(max_tokens)
    return sequences


def _too_many_tokens(max_tokens: int) -> Problem:
    return Problem(413, f"the request has more than {max_tokens:,} tokens", "split the request into several requests")


def _offsets(lists: pa.Array) -> pa.Array:
    """Return a list array's offsets into its flattened values, as int32.

    The offsets are the start of each list, followed by the end of the last list.
    """
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False), out=offsets[1:])
    return pa.array(offsets)


def _described(schema: pa.Schema) -> str:
    """List a schema's first columns and their types, shortened for an error message."""
    return ", ".join(f"{field.name[:50]}: {str(field.type)[:50]}" for field in list(schema)[:5]) or "none"


def _is_token_lists(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def _batches_of(body: bytearray, max_rows: int, what: str, check: Callable[[pa.Schema], None]) -> Iterator[pa.RecordBatch]:
    """Validate and yield the record batches of an Arrow IPC stream, after calling `check` with the stream's schema.

    Nothing is decompressed. Batches without rows are skipped.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
        first = messages.read_next_message()
        _check_metadata(first)
        schema = pa.ipc.read_schema(first)
        check(schema)
        schema = schema.remove_metadata()
        rows = 0
        for number, message in enumerate(messages):
            _check_metadata(message)
            if number >= _MAX_MESSAGES:
                raise Problem(413, f"the stream has more than {_MAX_MESSAGES:,} record batches", "send fewer, larger batches")
            batch_rows, compressed = _record_batch_header(message.metadata.to_pybytes())
            rows += batch_rows
            if compressed:
                raise Problem(422, "the stream's record batches are compressed", "send uncompressed record batches")
            if rows > max_rows:
                raise Problem(413, f"the request has more than {max_rows:,} {what}", "split the request into several requests")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            if batch_rows:
                yield batch
    except (pa.ArrowException, StopIteration, EOFError, struct.error, IndexError, OSError) as error:
        raise _not_arrow(what, error) from error


def _check_metadata(message: pa.ipc.Message) -> None:
    """Raise Problem 413 if the metadata of an Arrow message is too large, for example because it names thousands of columns."""
    if message.metadata.size > _MAX_METADATA_BYTES:
        raise Problem(
            413,
            f"a message in the stream has more than {_MAX_METADATA_BYTES:,} bytes of metadata",
            "send only the required columns, without custom metadata",
        )


def _not_arrow(what: str, error: Exception) -> Problem:
    said = str(error).split("\n")[0] or type(error).__name__
    return Problem(400, f"the body is not an Arrow IPC stream of {what}: {said}", _SEE)


class PiecewiseResponse(Response):
    """A response that is sent in pieces.

    While a client reads slowly, the connection buffers only one piece, not the whole response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in in_pieces(self.body):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def in_pieces(content: pa.Buffer | bytes | memoryview) -> Iterator[bytes]:
    """Yield the content in pieces of _PIECE_BYTES."""
    view = memoryview(content)
    for start in range(0, len(view), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


def arrow_response(table: pa.Table) -> Response:
    """Return a response that contains a table as an Arrow IPC stream."""
    return PiecewiseResponse(memoryview(stream_buffer(table)), media_type=ARROW_STREAM)


def json_response(answer: BaseModel) -> Response:
    """Return a response that contains a pydantic model as JSON. Call this in a thread if the response may be long."""
    return PiecewiseResponse(answer.model_dump_json().encode(), media_type="application/json")


def _too_long(max_bytes: int) -> Problem:
    return Problem(413, f"the body is longer than {max_bytes:,} bytes", "split the request into several requests")


def _record_batch_header(metadata: bytes) -> tuple[int, bool]:
    """Return the number of rows in a record batch and whether the batch is compressed, from the metadata of its message."""
    message = place(metadata, 0)
    kind = field_at(metadata, message, _HEADER_TYPE)
    if kind is None or metadata[kind] != _RECORD_BATCH:
        raise pa.ArrowInvalid("a message in the stream is not a record batch")
    at = field_at(metadata, message, _HEADER)
    assert at is not None
    batch = place(metadata, at)
    length = field_at(metadata, batch, _LENGTH)
    rows = struct.unpack_from("<q", metadata, length)[0] if length is not None else 0
    if rows < 0:
        raise pa.ArrowInvalid("a record batch has a negative number of rows")
    return rows, field_at(metadata, batch, _COMPRESSION) is not None


def place(data: bytes, at: int) -> int:
    """Follow a forward reference in a flatbuffer: return the offset that the reference at offset `at` points to.

    A message's metadata is a flatbuffer (see the page "Internals" in the documentation of github.com/google/flatbuffers).
    """
    return at + int(struct.unpack_from("<I", data, at)[0])


def field_at(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of field `number` of the flatbuffer table at offset `table`, or None if the field is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + entry)[0])
    return table + offset if offset else None
