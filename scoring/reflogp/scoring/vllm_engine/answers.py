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
from reflogp.scoring.wire import SentImages, SentSequence, decode_sequences, encode_sequences
from reflogp.store.images import FIRST_IMAGE_ID

#: Upper limit for log-probs, which rounding can make slightly positive. A greater value comes from uninitialized memory: vLLM's
#: older model runner returns the contents of such memory in place of log-probs that it did not compute.
_ROUNDING = 1e-3


class Request(NamedTuple):
    """A request to score a sequence.

    Attributes:
        ids: token ids of the prompt and the completion, int64 (tokens,). Each image token is represented by an image id
            (see reflogp.store.images).
    """

    ids: npt.NDArray[np.int64]
    prompt_len: int
    reads_cache: bool
    images: SentImages | None = None

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
        values: log-probs of the completion, float32, or None if vLLM returned no log-probs. With most probable tokens, 1 + 2k
            numbers for each token, one after the other; see `top_logps_of`.
    """

    at: int
    values: Any
    cached: int
    problem: str | None = None


class VllmEndedError(Exception):
    """The vLLM process exited before it had responded to all requests. It can be restarted."""


def believable(values: Any, cached: int, sequence: Sequence, top_k: int = 0) -> bool:
    """Return True if a response contains plausible log-probs for the whole completion.

    The log-probs must be finite and, except for rounding errors, not positive. vLLM must have computed the positions that
    predict the completion, instead of reading them from its cache.
    """
    width = 1 + 2 * top_k
    if values is None or len(values) != width * len(sequence.completion_ids) or cached > len(sequence.prompt_ids) - 1:
        return False
    logps = values.reshape(-1, width)[:, : 1 + top_k]
    return bool(np.isfinite(logps).all() and (logps <= _ROUNDING).all())


def problem_of_answer(values: Any) -> str:
    if values is not None and not np.isfinite(values).all():
        return NOT_FINITE
    return "vLLM returned no valid log-probs for the sequence, even without the prefix cache; use --engine torch"


#: Schema of responses. `number` is the request's number. `token_logps` contains the completion's log-probs, or null if vLLM
#: returned no log-probs. `cached` is the number of tokens that were read from the prefix cache. `problem` says why vLLM cannot
#: score the sequence, or is null.
ANSWERS = pa.schema(
    [("number", pa.int64()), ("token_logps", pa.list_(pa.float32())), ("cached", pa.int32()), ("problem", pa.string())]
)


def requests_body(requests: Iterable[tuple[int, Request]]) -> bytes:
    numbered = list(requests)
    columns = {
        "number": pa.array([number for number, _ in numbered], pa.int64()),
        "reads_cache": pa.array([request.reads_cache for _, request in numbered], pa.bool_()),
    }
    return encode_sequences([SentSequence(each.ids, each.prompt_len, each.images) for _, each in numbered], columns)


def requests_of(body: bytes) -> list[tuple[int, Request]]:
    sequences, table, _ = decode_sequences(body)
    numbers, reads = (table[name].to_pylist() for name in ("number", "reads_cache"))
    return [
        (number, Request(sent.ids, sent.prompt_len, reads_cache, sent.images))
        for number, reads_cache, sent in zip(numbers, reads, sequences, strict=True)
    ]


def answers_table(answers: Iterable[Answer]) -> pa.Table:
    columns = list(zip(*answers, strict=True)) or [() for _ in ANSWERS]
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, ANSWERS, strict=True)]
    return pa.table(arrays, schema=ANSWERS)


def answers_of(body: bytes) -> Iterator[Answer]:
    """Decode the responses in an `answers_table` that was sent as an Arrow IPC stream. Values are float32 arrays or None."""
    table = pa.ipc.open_stream(body).read_all().combine_chunks()
    values = (np.asarray(entry.values) if entry.is_valid else None for entry in table["token_logps"])
    rest = (table[name].to_pylist() for name in ("cached", "problem"))
    return (Answer(*row) for row in zip(table["number"].to_pylist(), values, *rest, strict=True))
