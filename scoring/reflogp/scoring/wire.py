"""Encode sequences and their images for another process, as two Arrow IPC streams, one after the other.

The first stream has a row for each sequence. It is compressed, so that a prompt that many sequences share takes little space.
The second stream has each distinct image once, as the bytes of an image file. The process that decodes the streams may have
another environment; therefore, this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store.schema import one_array

#: `images` has the row numbers of a sequence's images in the second stream. `counts` and `image_token` are the fields `counts`
#: and `token` of SentImages. All three are null for a sequence without images.
_SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int64())),
        ("prompt_len", pa.int32()),
        ("images", pa.list_(pa.int32())),
        ("counts", pa.list_(pa.int32())),
        ("image_token", pa.int64()),
    ]
)
_IMAGES = pa.schema([("digest", pa.binary()), ("file", pa.large_binary())])


class SentImages(NamedTuple):
    """The images of a sequence, in the order in which they appear in the prompt.

    Attributes:
        counts: number of image tokens of each image.
        token: id of the model's image token. The model gets this id wherever the sequence contains an image id.
    """

    digests: tuple[bytes, ...]
    counts: tuple[int, ...]
    files: tuple[bytes, ...]
    token: int


class SentSequence(NamedTuple):
    """A sequence: the token ids of prompt and completion, int64 (tokens,), the prompt's length, and the images or None."""

    ids: npt.NDArray[np.int64]
    prompt_len: int
    images: SentImages | None = None


def sent_images(sequence: Sequence, files: Mapping[bytes, bytes]) -> SentImages | None:
    """Return a sequence's images as they are sent; `files` is a dict from each image's digest to the bytes of its file."""
    images = sequence.images
    if images is None:
        return None
    return SentImages(
        images.digests, images.counts, tuple(files[digest] for digest in images.digests), images.vision.image_token_id
    )


def encode_sequences(sequences: list[SentSequence], columns: dict[str, pa.Array], note: Any = None) -> bytes:
    """Encode sequences, with further columns that have an entry for each sequence, and a note (a JSON value) about all."""
    rows_of_images: dict[bytes, int] = {}
    files: list[bytes] = []
    for images in (sequence.images for sequence in sequences if sequence.images is not None):
        for digest, file in zip(images.digests, images.files, strict=True):
            if digest not in rows_of_images:
                rows_of_images[digest] = len(files)
                files.append(file)
    own = [
        [sequence.ids for sequence in sequences],
        [sequence.prompt_len for sequence in sequences],
        [None if each.images is None else [rows_of_images[digest] for digest in each.images.digests] for each in sequences],
        [None if each.images is None else each.images.counts for each in sequences],
        [None if each.images is None else each.images.token for each in sequences],
    ]
    table = pa.table({field.name: pa.array(column, field.type) for field, column in zip(_SCHEMA, own, strict=True)} | columns)
    table = table.replace_schema_metadata({"note": json.dumps(note)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(sink, _IMAGES) as writer:
        writer.write_table(pa.table([list(rows_of_images), files], schema=_IMAGES))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_sequences(content: bytes) -> tuple[list[SentSequence], pa.Table, Any]:
    """Return the sequences, a table that has the further columns, and the note that `encode_sequences` encoded."""
    reader = pa.BufferReader(content)
    table = pa.ipc.open_stream(reader).read_all()
    distinct = pa.ipc.open_stream(reader).read_all().to_pydict()
    lists = one_array(table["ids"])
    ids = np.split(lists.values.to_numpy(), lists.offsets.to_numpy()[1:-1])
    rows = zip(*(table[name].to_pylist() for name in _SCHEMA.names[1:]), strict=True)
    sequences = []
    for of_sequence, (prompt_len, images, counts, token) in zip(ids, rows, strict=True):
        sent = None
        if images is not None:
            digests, files = (tuple(distinct[name][row] for row in images) for name in _IMAGES.names)
            sent = SentImages(digests, tuple(counts), files, token)
        sequences.append(SentSequence(of_sequence, prompt_len, sent))
    return sequences, table, json.loads(table.schema.metadata[b"note"])
