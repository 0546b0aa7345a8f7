"""Tables as Arrow IPC streams: the form in which they cross between processes and over HTTP.

Knows Arrow only. Called by the service, its workers, the client and the trainers' shared files.
"""

from __future__ import annotations

import pyarrow as pa

#: Media type (www.iana.org/assignments/media-types).
ARROW_STREAM = "application/vnd.apache.arrow.stream"


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
