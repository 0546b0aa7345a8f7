"""Define requests to vLLM and its responses, and check that a response holds the log-probs of the completion.

The responses of both transports are checked here before their values reach a store. The process around vLLM exchanges them with
the engine as Arrow IPC streams. Both environments import this module, so it imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Sequence

#: A value above this is not a log-prob but uninitialized memory: vLLM's older runner leaves it where it computed nothing.
_ROUNDING = 1e-3


class Request(NamedTuple):
    """A sequence to score.

    Attributes:
        ids: token ids of prompt and completion, int64 (tokens,).
        prompt_len: number of prompt tokens.
        reads_cache: True if vLLM may read the prefix cache for this sequence.
    """

    ids: npt.NDArray[np.int64]
    prompt_len: int
    reads_cache: bool


class Answer(NamedTuple):
    """A response of vLLM.

    Attributes:
        at: index of the request.
        values: float32 values of the completion, or None.
        cached: number of tokens read from the cache.
    """

    at: int
    values: Any
    cached: int


class VllmEndedError(Exception):
    """vLLM ended before it had answered all requests; it can be started again."""


def believable(values: Any, cached: int, sequence: Sequence) -> bool:
    """Return True if the values can be the completion's log-probs: complete, finite, not positive, not read from the cache.

    Args:
        values: float32 array, or None.
        cached: number of tokens that vLLM read from its cache and did not compute.
        sequence: the sequence that was scored.
    """
    if values is None or len(values) != len(sequence.completion_ids) or cached > len(sequence.prompt_ids) - 1:
        return False
    return bool(np.isfinite(values).all() and (values <= _ROUNDING).all())


def problem_of_answer(values: Any) -> str:
    """Return what is wrong with a response that is not believable even without the cache."""
    if values is not None and not np.isfinite(values).all():
        return NOT_FINITE
    return "vLLM gave no log-probs for it, with and without its prefix cache"


#: `ids` are the prompt and the completion; the first `prompt_len` ids are the prompt.
REQUESTS = pa.schema(
    [("number", pa.int64()), ("ids", pa.list_(pa.int64())), ("prompt_len", pa.int32()), ("reads_cache", pa.bool_())]
)
#: `token_logps` has the completion's log-probs, or null if there are none; `cached` tokens were read from the prefix cache.
ANSWERS = pa.schema([("number", pa.int64()), ("token_logps", pa.list_(pa.float32())), ("cached", pa.int32())])


def requests_table(requests: Iterable[tuple[int, Any, int, bool]]) -> pa.Table:
    """Return a table with the schema REQUESTS from (number, ids, prompt_len, reads_cache)."""
    return _table(requests, REQUESTS)


def requests_of(body: bytes) -> Iterator[tuple[int, list[int], int, bool]]:
    """Return the requests of an encoded `requests_table`, with ids as lists, as vLLM takes them."""
    columns = pa.ipc.open_stream(body).read_all().to_pydict()
    return zip(*(columns[name] for name in REQUESTS.names), strict=True)


def answers_table(answers: Iterable[tuple[int, Any, int]]) -> pa.Table:
    """Return a table with the schema ANSWERS from (number, float32 values or None, cached)."""
    return _table(answers, ANSWERS)


def answers_of(body: bytes) -> Iterator[tuple[int, Any, int]]:
    """Return the responses of an encoded `answers_table`, with values as float32 arrays."""
    table = pa.ipc.open_stream(body).read_all().combine_chunks()
    values = (np.asarray(entry.values) if entry.is_valid else None for entry in table["token_logps"])
    return zip(table["number"].to_pylist(), values, table["cached"].to_pylist(), strict=True)


def _table(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [() for _ in schema]
    return pa.table([pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)
