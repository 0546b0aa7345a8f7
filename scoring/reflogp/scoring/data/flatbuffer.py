"""Read fields of flatbuffers (github.com/google/flatbuffers, internals) without decoding the whole buffer.

Functions raise struct.error or IndexError for damaged data.
"""

from __future__ import annotations

import struct


def place(data: bytes, at: int) -> int:
    """Return the target offset of a flatbuffer's forward reference."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def table_at(data: bytes, table: int, number: int) -> int:
    """Return the offset of the table or vector that a table's field refers to. Raises IndexError for an absent field."""
    at = field_at(data, table, number)
    if at is None:
        raise IndexError
    return place(data, at)


def field_at(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of a table's field; None for an absent field."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + entry)[0])
    return table + offset if offset else None
