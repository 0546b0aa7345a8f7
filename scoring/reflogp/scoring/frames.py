"""Messages between the service and its workers: a JSON object and bytes, length-prefixed, over pipes. Nothing is pickled.

Knows the framing only. Called by both sides.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">IQ")

#: A JSON object that says what it is in `op`, and what goes with it: an Arrow IPC stream, mostly.
Frame = tuple[dict[str, Any], bytes]


def encode(message: dict[str, Any], body: bytes = b"") -> bytes:
    """A frame as bytes."""
    head = json.dumps(message).encode()
    return _LENGTHS.pack(len(head), len(body)) + head + body


def read_frame(file: BinaryIO) -> Frame | None:
    """The next frame; None where the other side is gone, also in the middle of a frame."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack(lengths)
    head, body = file.read(head_size), file.read(body_size)
    return (json.loads(head), body) if len(head) == head_size and len(body) == body_size else None


async def receive_frame(reader: asyncio.StreamReader) -> Frame | None:
    """As `read_frame`, for asyncio."""
    try:
        head_size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        head = await reader.readexactly(head_size)
        return json.loads(head), await reader.readexactly(body_size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
