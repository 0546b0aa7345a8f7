"""Request and response bodies: bounded reading, Arrow IPC in and out.

Knows bytes and Arrow, not routes. A body is refused before it costs more than its bound: while it arrives when it is too long
or too slow, and before it is decoded when it claims too many rows or is compressed (a few bytes can stand for gigabytes).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pyarrow as pa
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from reflogp_service.data.flatbuffer import field_at, place
from reflogp_service.server.problems import Problem
from reflogp_service.worker.wire import MASKED_SEQUENCES, SEQUENCES, token_count
from reflogp_store.arrow_stream import ARROW_STREAM, stream_bytes
from reflogp_store.keys import KEY_BYTES, KEY_TYPE
from reflogp_store.lookup import QUESTION
from reflogp_store.schema import one_array

Model = TypeVar("Model", bound=BaseModel)

#: A body that has not arrived after this is given up.
_BODY_SECONDS = 120.0
#: Places of fields in Arrow's flatbuffers (format/Message.fbs): Message.header_type, Message.header; RecordBatch.length,
#: RecordBatch.compression. Type 3 of the header union is RecordBatch.
_HEADER_TYPE, _HEADER, _LENGTH, _COMPRESSION, _RECORD_BATCH = 1, 2, 0, 3, 3


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises a Problem when it is longer than `max_bytes` or takes too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in stream_chunks(request):
                body += chunk
                if len(body) > max_bytes:
                    raise _too_long(max_bytes)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds", "send less at a time") from None
    return bytes(body)


async def stream_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives; whoever takes it bounds it. Raises a Problem when the sender goes away before its end."""
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect as error:
        raise Problem(400, "the connection ended before the body did", "send it again") from error


def media_type(request: Request) -> str:
    """The body's media type, without parameters; JSON when none is named."""
    return request.headers.get("content-type", "application/json").split(";")[0].strip().lower()


def json_model(request: Request, body: bytes, model: type[Model]) -> Model:
    """A JSON body as a model. Raises a Problem for another media type and for what does not fit."""
    kind = media_type(request)
    if kind != "application/json":
        raise Problem(415, f"content type {kind!r}", "see /docs for what the route takes")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Problem(422, f"{where}: {first['msg']}", "see /docs for what the route takes") from error


def body_schemas(model: type[BaseModel], *others: str) -> dict[str, Any]:
    """OpenAPI's entry for a route that takes JSON, or bytes of these other media types."""
    content = {"application/json": {"schema": _inlined(model.model_json_schema())}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in others}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without `$defs`: they would not be found inside an OpenAPI document."""
    definitions = schema.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return resolved(definitions[part["$ref"].rsplit("/", 1)[1]])
            return {name: resolved(value) for name, value in part.items()}
        return [resolved(value) for value in part] if isinstance(part, list) else part

    found: dict[str, Any] = resolved(schema)
    return found


def keys_of(body: bytes, max_keys: int) -> pa.FixedSizeBinaryArray:
    """The `key` column of an Arrow IPC stream.

    Raises a Problem for anything else, for compressed batches, and for more than `max_keys` rows.
    """

    def check(schema: pa.Schema) -> None:
        if schema.names != QUESTION.names or schema.field("key").type not in (KEY_TYPE, pa.binary(), pa.large_binary()):
            raise Problem(422, f"the stream's columns are {schema.names}", "send one column: key, fixed_size_binary(16)")

    batches = _batches_of(body, max_keys, "keys", check)
    try:
        keys = one_array(pa.chunked_array([batch.column("key").cast(KEY_TYPE) for batch in batches], KEY_TYPE))
    except pa.ArrowException as error:
        raise _not_arrow("keys", error) from error
    if keys.null_count:
        raise Problem(422, f"{keys.null_count} keys are null", f"send {KEY_BYTES} bytes for each")
    return keys


def sequences_of(body: bytes, max_sequences: int, max_tokens: int) -> pa.Table:
    """prompt_ids, completion_ids and maybe attention_mask of an Arrow IPC stream, all list<int64>.

    Raises a Problem for anything else, for compressed batches, and for more sequences or tokens than allowed.
    """

    def check(schema: pa.Schema) -> None:
        known = any(sorted(schema.names) == sorted(kind.names) for kind in (SEQUENCES, MASKED_SEQUENCES))
        if not known or not all(_is_token_lists(field.type) for field in schema):
            described = ", ".join(f"{field.name}: {field.type}" for field in schema)
            raise Problem(
                422,
                f"the stream's columns are {described}",
                "send prompt_ids and completion_ids, lists of integers; for rows of padded batches attention_mask too",
            )

    parts, kind = [], SEQUENCES
    for batch in _batches_of(body, max_sequences, "sequences", check):
        kind = MASKED_SEQUENCES if "attention_mask" in batch.schema.names else SEQUENCES
        columns = [batch.column(name) for name in kind.names]
        if any(column.null_count or column.flatten().null_count for column in columns):
            raise Problem(422, "a sequence or a token id is null", "send token ids for each")
        try:
            parts.append(pa.record_batch([c.cast(pa.list_(pa.int64())) for c in columns], schema=kind))
        except pa.ArrowException as error:
            raise _not_arrow("sequences", error) from error
    return bounded_tokens(pa.Table.from_batches(parts, kind), max_tokens)


def bounded_tokens(sequences: pa.Table, max_tokens: int) -> pa.Table:
    """The same table; raises a Problem when it has more tokens than allowed."""
    if token_count(sequences) > max_tokens:
        raise Problem(413, f"more than {max_tokens:,} tokens", "send them in several requests")
    return sequences


def _is_token_lists(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def _batches_of(body: bytes, max_rows: int, what: str, check: Callable[[pa.Schema], None]) -> list[pa.RecordBatch]:
    """Record batches of an Arrow IPC stream whose schema passes `check`, each validated, none of them decompressed."""
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
        schema = pa.ipc.read_schema(messages.read_next_message())
        check(schema)
        batches, rows = [], 0
        for message in messages:
            batch_rows, compressed = _record_batch_header(message.metadata.to_pybytes())
            rows += batch_rows
            if compressed:
                raise Problem(422, "the stream's record batches are compressed", "send them uncompressed")
            if rows > max_rows:
                raise Problem(413, f"more than {max_rows:,} {what}", "send them in several requests")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            batches.append(batch)
        return batches
    except (pa.ArrowException, StopIteration, EOFError, struct.error, IndexError, OSError) as error:
        raise _not_arrow(what, error) from error


def _not_arrow(what: str, error: Exception) -> Problem:
    said = str(error).split("\n")[0] or type(error).__name__
    return Problem(400, f"the body is not an Arrow IPC stream of {what}: {said}", "see the README's example")


def arrow_response(table: pa.Table) -> Response:
    """A table as an Arrow IPC stream."""
    return Response(stream_bytes(table), media_type=ARROW_STREAM)


def _too_long(max_bytes: int) -> Problem:
    return Problem(413, f"the body is longer than {max_bytes:,} bytes", "send it in several requests")


def _record_batch_header(metadata: bytes) -> tuple[int, bool]:
    """(rows, whether it is compressed) of a record batch message, before anything is decoded."""
    message = place(metadata, 0)
    kind = field_at(metadata, message, _HEADER_TYPE)
    if kind is None or metadata[kind] != _RECORD_BATCH:
        raise pa.ArrowInvalid("a message that is not a record batch")
    at = field_at(metadata, message, _HEADER)
    assert at is not None
    batch = place(metadata, at)
    length = field_at(metadata, batch, _LENGTH)
    rows = struct.unpack_from("<q", metadata, length)[0] if length is not None else 0
    if rows < 0:
        raise pa.ArrowInvalid("a negative number of rows")
    return rows, field_at(metadata, batch, _COMPRESSION) is not None
