"""Define the requests to vLLM and the responses from vLLM, and check that a response contains the completion's log-probs.

Responses from a vLLM process and from a vLLM server are checked here before their values are stored. The vLLM process and the
engine's process exchange requests and responses as Arrow IPC streams. The two processes may have different environments,
and both import this module. Therefore, it imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Sequence
from reflogp.store.images import FIRST_IMAGE_ID
from reflogp.store.schema import stream_bytes

#: Upper limit for log-probs, which rounding can make slightly positive. A greater value comes from uninitialized memory: vLLM's
#: older model runner returns the contents of such memory in place of log-probs that it did not compute.
_ROUNDING = 1e-3


class RequestImages(NamedTuple):
    """The images of a request, in the order in which they appear in the prompt.

    Attributes:
        digests: each image's `pixel_digest` (see reflogp.store.images).
        counts: number of image tokens of each image.
        files: each image as the bytes of an image file.
        token: id of the model's image token. The model gets this id wherever `Request.ids` contains an image id.
    """

    digests: tuple[bytes, ...]
    counts: tuple[int, ...]
    files: tuple[bytes, ...]
    token: int


class Request(NamedTuple):
    """A request to score a sequence.

    Attributes:
        ids: token ids of the prompt and the completion, int64 (tokens,). Each image token is represented by an image id
            (see reflogp.store.images).
        prompt_len: number of prompt tokens.
        reads_cache: whether vLLM may read its prefix cache for this sequence.
        images: the images of the prompt, or None.
    """

    ids: npt.NDArray[np.int64]
    prompt_len: int
    reads_cache: bool
    images: RequestImages | None = None

    def model_ids(self) -> list[int]:
        """Return the token ids that the model gets: `ids` with each image id replaced by the model's image token."""
        ids = self.ids if self.images is None else np.where(self.ids >= FIRST_IMAGE_ID, self.images.token, self.ids)
        found: list[int] = ids.tolist()
        return found


class Answer(NamedTuple):
    """A response from vLLM.

    Attributes:
        at: index of the request in the list passed to `Transport.ask`. In the vLLM process and in an `answers_table`, it is
            the request's number instead (see `requests_body`).
        values: log-probs of the completion, float32, or None if vLLM returned no log-probs.
        cached: number of tokens that vLLM read from its prefix cache.
        problem: why vLLM cannot score the sequence, or None.
    """

    at: int
    values: Any
    cached: int
    problem: str | None = None


class VllmEndedError(Exception):
    """The vLLM process exited before it had responded to all requests. It can be restarted."""


def believable(values: Any, cached: int, sequence: Sequence) -> bool:
    """Return True if a response contains plausible log-probs for the whole completion.

    The log-probs must be finite and, except for rounding errors, not positive. vLLM must have computed the positions that
    predict the completion, instead of reading them from its cache.

    Args:
        values: the log-probs in the response, float32, or None if it contains no log-probs.
        cached: number of tokens that vLLM read from its cache instead of computing them.
        sequence: the sequence that was scored.
    """
    if values is None or len(values) != len(sequence.completion_ids) or cached > len(sequence.prompt_ids) - 1:
        return False
    return bool(np.isfinite(values).all() and (values <= _ROUNDING).all())


def problem_of_answer(values: Any) -> str:
    """Return the error message for a response that is still invalid after a retry without the cache."""
    if values is not None and not np.isfinite(values).all():
        return NOT_FINITE
    return "vLLM returned no valid log-probs for the sequence, even without the prefix cache; use --engine torch"


#: Schema of requests. `number` identifies a request. `ids`, `prompt_len` and `reads_cache` are the fields of Request. `images`
#: contains the row numbers of the request's images in the table of images (schema PICTURES). `counts` and `image_token` are the
#: fields `counts` and `token` of RequestImages. The last three columns are null for a request without images.
REQUESTS = pa.schema(
    [
        ("number", pa.int64()),
        ("ids", pa.list_(pa.int64())),
        ("prompt_len", pa.int32()),
        ("reads_cache", pa.bool_()),
        ("images", pa.list_(pa.int32())),
        ("counts", pa.list_(pa.int32())),
        ("image_token", pa.int64()),
    ]
)
#: Schema of the distinct images of a list of requests. `digest` is the image's `pixel_digest`, and `file` contains the bytes of
#: an image file.
PICTURES = pa.schema([("digest", pa.binary()), ("file", pa.large_binary())])
#: Schema of responses. `number` is the request's number. `token_logps` contains the completion's log-probs, or null if vLLM
#: returned no log-probs. `cached` is the number of tokens that were read from the prefix cache. `problem` says why vLLM cannot
#: score the sequence, or is null.
ANSWERS = pa.schema(
    [("number", pa.int64()), ("token_logps", pa.list_(pa.float32())), ("cached", pa.int32()), ("problem", pa.string())]
)


def requests_body(requests: Iterable[tuple[int, Request]]) -> bytes:
    """Encode (number, request) pairs as two Arrow IPC streams, one after the other.

    The first stream contains the requests (schema REQUESTS), and the second their distinct images (schema PICTURES).
    """
    places: dict[bytes, int] = {}
    files: list[bytes] = []
    rows = []
    for number, request in requests:
        images = request.images
        for digest, file in [] if images is None else zip(images.digests, images.files, strict=True):
            if digest not in places:
                places[digest] = len(files)
                files.append(file)
        shown: tuple[Any, ...] = (None, None, None)
        if images is not None:
            shown = ([places[digest] for digest in images.digests], images.counts, images.token)
        rows.append((number, request.ids, request.prompt_len, request.reads_cache, *shown))
    return stream_bytes(_table(rows, REQUESTS)) + stream_bytes(_table(zip(places, files, strict=True), PICTURES))


def requests_of(body: bytes) -> list[tuple[int, Request]]:
    """Decode the (number, request) pairs that `requests_body` encoded."""
    reader = pa.BufferReader(body)
    columns = pa.ipc.open_stream(reader).read_all()
    sent = pa.ipc.open_stream(reader).read_all().to_pydict()
    found = []
    for row in columns.to_pylist():
        images = None
        if row["images"] is not None:
            digests, files = (tuple(sent[name][at] for at in row["images"]) for name in PICTURES.names)
            images = RequestImages(digests, tuple(row["counts"]), files, row["image_token"])
        ids = np.array(row["ids"], np.int64)
        found.append((row["number"], Request(ids, row["prompt_len"], row["reads_cache"], images)))
    return found


def answers_table(answers: Iterable[Answer]) -> pa.Table:
    """Return responses as a table with the schema ANSWERS.

    The `at` of each response must be the number that `requests_body` encoded with the request, not the request's index.
    """
    return _table(answers, ANSWERS)


def answers_of(body: bytes) -> Iterator[Answer]:
    """Decode the responses in an `answers_table` that was sent as an Arrow IPC stream. Values are float32 arrays or None."""
    table = pa.ipc.open_stream(body).read_all().combine_chunks()
    values = (np.asarray(entry.values) if entry.is_valid else None for entry in table["token_logps"])
    rest = (table[name].to_pylist() for name in ("cached", "problem"))
    return (Answer(*row) for row in zip(table["number"].to_pylist(), values, *rest, strict=True))


def _table(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [() for _ in schema]
    return pa.table([pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)
