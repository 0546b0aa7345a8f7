"""Request and response bodies: bounded reading, Arrow IPC in and out.

Knows bytes and Arrow, not routes. A body is refused before it costs more than its bound: while it arrives when it is too long
or too slow, and before it is decoded when it claims too many rows or is compressed (a few bytes can stand for gigabytes).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pyarrow as pa
from fastapi import Request, Response

from reflogp_service.server.problems import Problem
from reflogp_store.keys import KEY_BYTES, KEY_TYPE
from reflogp_store.lookup import ARROW_STREAM, QUESTION
from reflogp_store.schema import one_array

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
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_long(max_bytes)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds", "send less at a time") from None
    return bytes(body)


def keys_of(body: bytes, max_keys: int) -> pa.FixedSizeBinaryArray:
    """The `key` column of an Arrow IPC stream.

    Raises a Problem for anything else, for compressed batches, and for more than `max_keys` rows.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
        schema = pa.ipc.read_schema(messages.read_next_message())
        if schema.names != QUESTION.names or schema.field("key").type not in (KEY_TYPE, pa.binary(), pa.large_binary()):
            raise Problem(422, f"the stream's columns are {schema.names}", "send one column: key, fixed_size_binary(16)")
        parts, rows = [], 0
        for message in messages:
            batch_rows, compressed = _record_batch_header(message.metadata.to_pybytes())
            rows += batch_rows
            if compressed:
                raise Problem(422, "the stream's record batches are compressed", "send them uncompressed")
            if rows > max_keys:
                raise Problem(413, f"more than {max_keys:,} keys", "send them in several requests")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            parts.append(batch.column("key").cast(KEY_TYPE))
        keys = one_array(pa.chunked_array(parts, KEY_TYPE))
    except (pa.ArrowException, StopIteration, EOFError, struct.error, IndexError, OSError) as error:
        said = str(error).split("\n")[0] or type(error).__name__
        raise Problem(400, f"the body is not an Arrow IPC stream of keys: {said}", "see the README's example") from error
    if keys.null_count:
        raise Problem(422, f"{keys.null_count} keys are null", f"send {KEY_BYTES} bytes for each")
    return keys


def arrow_response(table: pa.Table) -> Response:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(sink.getvalue().to_pybytes(), media_type=ARROW_STREAM)


def _too_long(max_bytes: int) -> Problem:
    return Problem(413, f"the body is longer than {max_bytes:,} bytes", "send it in several requests")


def _record_batch_header(metadata: bytes) -> tuple[int, bool]:
    """(rows, whether it is compressed) of a record batch message, before anything is decoded."""
    message = struct.unpack_from("<I", metadata)[0]
    kind = _field(metadata, message, _HEADER_TYPE)
    if kind is None or metadata[kind] != _RECORD_BATCH:
        raise pa.ArrowInvalid("a message that is not a record batch")
    at = _field(metadata, message, _HEADER)
    assert at is not None
    batch = at + struct.unpack_from("<I", metadata, at)[0]
    length = _field(metadata, batch, _LENGTH)
    rows = struct.unpack_from("<q", metadata, length)[0] if length is not None else 0
    if rows < 0:
        raise pa.ArrowInvalid("a negative number of rows")
    return rows, _field(metadata, batch, _COMPRESSION) is not None


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a flatbuffer table's field lies; None when it is left out (github.com/google/flatbuffers, internals)."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset: Any = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + int(offset) if offset else None
