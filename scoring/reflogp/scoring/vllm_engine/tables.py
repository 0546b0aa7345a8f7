"""Encode requests and responses between the vLLM engine and the process around vLLM as Arrow IPC streams.

Both environments import this module, so it imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

#: `ids` are the prompt and the completion; the first `prompt_len` ids are the prompt.
REQUESTS = pa.schema(
    [("number", pa.int64()), ("ids", pa.list_(pa.int64())), ("prompt_len", pa.int32()), ("reads_cache", pa.bool_())]
)
#: `token_logps` are the completion's, or null if there are none; `cached` tokens were read from the prefix cache.
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
