"""Read Arrow IPC files and streams in bounded memory.

The sizes that their messages claim are checked before a batch is decoded. The claims are read from the messages' flatbuffers
(github.com/google/flatbuffers, internals) without decoding the whole buffer; damaged ones raise struct.error or IndexError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from reflogp.scoring.data.bounds import Meter, group_too_large
from reflogp.scoring.errors import DatasetError


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


#: Field numbers of Message, RecordBatch and DictionaryBatch (arrow, format/Message.fbs).
_HEADER, _BUFFERS, _COMPRESSION, _DATA_OF_DICTIONARY = 2, 2, 3, 1


def arrow_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Yield validated record batches of an Arrow IPC file or stream.

    Both are read as streams: a file is a stream after its first eight bytes, and its footer could point anywhere.

    Raises DatasetError when a batch, or all dictionaries together, are larger than `group_bytes` after decompression, and for
    a message that is damaged or of an unsupported type.
    """
    with pa.memory_map(str(file)) as source:
        start = 8 if source.read(6) == b"ARROW1" else 0
        source.seek(start)
        dictionaries = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            size, of_dictionary = _message_bytes(message)
            dictionaries += size * of_dictionary
            if max(size, dictionaries) > meter.bounds.group_bytes:
                raise group_too_large(file, max(size, dictionaries), meter.bounds)
        source.seek(start)
        for batch in pa.ipc.open_stream(source):
            batch.validate(full=True)  # otherwise wrong offsets could expose other memory of this process
            yield batch


def _message_bytes(message: pa.ipc.Message) -> tuple[int, bool]:
    """Return (bytes of a message's decompressed body, True if it is a dictionary)."""
    of_dictionary = message.type == "dictionary"
    if message.type == "schema":
        return 0, False
    if not of_dictionary and message.type != "record batch":
        raise DatasetError(f"an Arrow message of type {message.type} is not supported")
    data, body = message.metadata.to_pybytes(), message.body
    try:
        batch = table_at(data, place(data, 0), _HEADER)
        if of_dictionary:
            batch = table_at(data, batch, _DATA_OF_DICTIONARY)
        if field_at(data, batch, _COMPRESSION) is None:
            return len(body), of_dictionary
        buffers = table_at(data, batch, _BUFFERS)
        size = 0
        for number in range(struct.unpack_from("<I", data, buffers)[0]):
            offset, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
            if length:
                if not 0 <= offset <= len(body) - 8:
                    raise IndexError
                (unpacked,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
                size += length if unpacked == -1 else unpacked  # -1: this buffer is not compressed
                if unpacked < -1:
                    raise IndexError
    except (struct.error, IndexError, ValueError) as error:
        raise DatasetError("an Arrow message is damaged") from error
    return size, of_dictionary
