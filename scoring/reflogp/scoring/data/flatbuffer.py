"""Fields of flatbuffers (github.com/google/flatbuffers, internals), read before anything is decoded.

Knows bytes and offsets. Raises struct.error or IndexError for data that is damaged. Called by what bounds Arrow messages.
"""

from __future__ import annotations

import struct


def place(data: bytes, at: int) -> int:
    """Where a flatbuffer's forward reference leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def table_at(data: bytes, table: int, number: int) -> int:
    """Where the table or vector that a flatbuffer table's field refers to begins."""
    at = field_at(data, table, number)
    if at is None:
        raise IndexError
    return place(data, at)


def field_at(data: bytes, table: int, number: int) -> int | None:
    """Where a flatbuffer table's field lies; None when it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + entry)[0])
    return table + offset if offset else None
