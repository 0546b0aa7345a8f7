"""Read structs in Thrift's compact protocol, as far as Parquet's footers and page headers need it.

No memory is allocated for claimed sizes. Functions raise IndexError where the data ends and ValueError for invalid data.
"""

from __future__ import annotations

from typing import Any

#: Types of Thrift's compact protocol.
_TRUE, _FALSE, _I8, _I16, I32, I64, _DOUBLE, BYTES, LIST, _SET, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12

#: Field number -> (type, value); the value is None for types whose content is skipped, such as byte strings.
Struct = dict[int, tuple[int, Any]]


def get(fields: Struct, number: int, kind: int) -> Any:
    """Return a field. Raises ValueError when it is missing or of another type, because other readers skip such a field."""
    found = fields.get(number)
    if found is None or found[0] != kind:
        raise ValueError
    return found[1]


def as_struct(value: Any) -> Struct:
    if not isinstance(value, dict):
        raise ValueError
    return value


def read_struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    """Return (fields, end offset) of the struct at `at`. Raises IndexError where the data ends, ValueError for invalid data."""
    if depth > 16:
        raise ValueError
    fields: Struct = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        if number in fields:
            raise ValueError
        kind = head & 15
        value, at = (kind == _TRUE, at) if kind in (_TRUE, _FALSE) else _value(data, at, kind, depth)
        fields[number] = kind, value


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    value: Any = None
    if kind in (_I16, I32, I64):
        value, at = _integer(data, at)
    elif kind == STRUCT:
        value, at = read_struct(data, at, depth + 1)
    elif kind in (LIST, _SET):
        of, count = data[at] & 15, data[at] >> 4
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        value = []
        for _ in range(count):
            item, at = _value(data, at, of, depth + 1)
            value.append(item)
    elif kind == BYTES:
        length, at = _varint(data, at)
        at += length
    elif kind in (_TRUE, _FALSE, _I8, _DOUBLE):  # only in lists do true and false take a byte
        at += 8 if kind == _DOUBLE else 1
    else:
        raise ValueError
    if at > len(data):
        raise IndexError
    return value, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError
