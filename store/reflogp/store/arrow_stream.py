"""Tables as Arrow IPC streams: the form in which they cross between processes and over HTTP.

Knows Arrow only. Called by the service, its workers, the client and the trainers' shared files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

#: Media type (www.iana.org/assignments/media-types).
ARROW_STREAM = "application/vnd.apache.arrow.stream"

#: What ends a stream: a continuation marker and a length of zero (Arrow's columnar format, "IPC Streaming Format").
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def stream_buffer(table: pa.Table) -> pa.Buffer:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def stream_bytes(table: pa.Table) -> bytes:
    """As `stream_buffer`, for what takes bytes only."""
    content: bytes = stream_buffer(table).to_pybytes()
    return content


def stream_messages(schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[pa.Buffer]:
    """An Arrow IPC stream, message by message: one behind the other they are what `stream_buffer` gives."""
    yield schema.serialize()
    for table in tables:
        for batch in table.to_batches():
            yield batch.serialize()
    yield pa.py_buffer(_END)
