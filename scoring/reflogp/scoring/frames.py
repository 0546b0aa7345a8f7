"""Encode and read the messages that processes exchange over pipes.

Messages are not pickled. Each message consists of the lengths of its two parts, followed by the parts: a JSON object and a body
of bytes.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">IQ")

#: A message: a JSON object whose `op` field names the message type, and a body of bytes, usually an Arrow IPC stream.
Frame = tuple[dict[str, Any], bytes]


def encode(message: dict[str, Any], body: bytes = b"") -> bytes:
    head = json.dumps(message).encode()
    return _LENGTHS.pack(len(head), len(body)) + head + body


def read_frame(file: BinaryIO) -> Frame | None:
    """Return the next frame, or None if the other process closed the pipe before it had sent a complete frame."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack(lengths)
    head, body = file.read(head_size), file.read(body_size)
    return (json.loads(head), body) if len(head) == head_size and len(body) == body_size else None


async def receive_frame(reader: asyncio.StreamReader) -> Frame | None:
    try:
        head_size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        head = await reader.readexactly(head_size)
        return json.loads(head), await reader.readexactly(body_size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
