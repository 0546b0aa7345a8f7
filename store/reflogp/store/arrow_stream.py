"""Encode tables as Arrow IPC streams, the form in which they are sent between processes and over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

#: Media type (www.iana.org/assignments/media-types).
ARROW_STREAM = "application/vnd.apache.arrow.stream"

#: End of a stream: a continuation marker and a length of zero (Arrow's columnar format, "IPC Streaming Format").
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def stream_buffer(table: pa.Table) -> pa.Buffer:
    """Return a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def stream_bytes(table: pa.Table) -> bytes:
    """Return a table as an Arrow IPC stream, for callers that need bytes."""
    content: bytes = stream_buffer(table).to_pybytes()
    return content


def stream_messages(schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[pa.Buffer]:
    """Yield an Arrow IPC stream message by message: joined, the messages are what `stream_buffer` returns."""
    yield schema.serialize()
    for table in tables:
        for batch in table.to_batches():
            yield batch.serialize()
    yield pa.py_buffer(_END)
