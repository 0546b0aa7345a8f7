"""Declare the columns of shards, build and check tables with these columns, and encode tables as Arrow IPC streams.

The Arrow schema, the table in docs/store-format.md and the README of an export follow from COLUMNS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reflogp.store.errors import UsageError
from reflogp.store.texts import counted

#: Number of the store format (docs/store-format.md). A store with a higher number is refused.
FORMAT = 1


@dataclass(frozen=True)
class Column:
    """A column of a shard: what its values mean, with their unit."""

    name: str
    type: pa.DataType
    meaning: str


#: The columns of a shard. Delta Lake has neither fixed-size binary nor unsigned integers: keys are binary, and lengths int32.
COLUMNS = (
    Column("key", pa.binary(), "16 bytes that identify a sequence by its token ids"),
    Column("prompt_len", pa.int32(), "number of tokens in the prompt"),
    Column("completion_len", pa.int32(), "number of tokens in the whole completion"),
    Column("scored_len", pa.int32(), "number of values in `token_logps`, one for each of the completion's first tokens"),
    Column("token_logps", pa.list_(pa.float32()), "log p(token given all tokens before it), at temperature 1, in nats"),
    Column("logp_sum", pa.float64(), "float64 sum of `token_logps`, in nats"),
    Column("provenance", pa.string(), "JSON: engine, versions, device, kernels"),
)
#: More columns of a table with the k most probable tokens of each position. Their lists have k entries for each value in
#: `token_logps`, one position after the other, the most probable token first.
TOP_COLUMNS = (
    Column("top_ids", pa.list_(pa.int32()), "ids of the k most probable tokens at each position that has a value"),
    Column("top_logps", pa.list_(pa.float32()), "log-probs of these tokens, rounded to float16, at temperature 1, in nats"),
)


def _schema(columns: Iterable[Column]) -> pa.Schema:
    return pa.schema([pa.field(column.name, column.type, nullable=False) for column in columns])


SCHEMA = _schema(COLUMNS)
_TOP_SCHEMA = _schema((*COLUMNS, *TOP_COLUMNS))


#: Maximum number of most probable tokens of a position.
MOST_TOP = 256


def check_top_k(top_k: int) -> None:
    if not 0 <= top_k <= MOST_TOP:
        raise UsageError(f"top_k {top_k}: must be from 0 to {MOST_TOP}")


def schema_of(top_k: int) -> pa.Schema:
    return _TOP_SCHEMA if top_k else SCHEMA


def columns_table(top_k: int = 0) -> str:
    columns = (*COLUMNS, *TOP_COLUMNS) if top_k else COLUMNS
    rows = [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in columns]
    return "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])


def shard_table(
    keys: pa.Array,
    prompt_lens: npt.NDArray[np.int32],
    completion_lens: npt.NDArray[np.int32],
    token_logps: pa.Array,
    provenance: dict[str, Any],
    top: tuple[pa.Array, pa.Array] | None = None,
) -> pa.Table:
    """Build a table with the schema SCHEMA or, if `top` is given, with the TOP_COLUMNS too.

    `scored_len` and `logp_sum` are computed.

    Args:
        keys: array of n keys, of type binary or fixed_size_binary(16).
        prompt_lens: number of tokens in each prompt, shape (n,).
        completion_lens: number of tokens in each whole completion, shape (n,), of which fewer may have values.
        token_logps: log-probs of the scored tokens of each completion, in nats, as an array of n float32 lists.
        provenance: description of how the values were computed, which every row contains as JSON.
        top: the k most probable tokens: n lists of ids (int32), and n lists of log-probs (float32, rounded here to float16).
    """
    values = token_logps.cast(pa.list_(pa.float32()))
    more = {} if top is None else {"top_ids": top[0], "top_logps": _in_half(top[1])}
    return pa.table(
        {
            "key": keys.cast(pa.binary()),
            "prompt_len": pa.array(prompt_lens, pa.int32()),
            "completion_len": pa.array(completion_lens, pa.int32()),
            "scored_len": values.value_lengths(),
            "token_logps": values,
            "logp_sum": pa.array(list_sums(values)),
            "provenance": pa.array([json.dumps(provenance, sort_keys=True)] * len(keys), pa.string()),
            **more,
        },
        schema=schema_of(top is not None),
    )


def _in_half(lists: pa.ListArray) -> pa.ListArray:
    """Round to float16, whose numbers compress to half the size; log-probs below its range become its lowest number."""
    lowest = np.finfo(np.float16).min
    values = np.maximum(lists.flatten().to_numpy(zero_copy_only=False), lowest).astype(np.float16).astype(np.float32)
    return pa.ListArray.from_arrays(_offsets(lists), pa.array(values))


def _offsets(lists: pa.ListArray) -> pa.Array:
    """Return a list array's offsets into its own values, if the array is a slice of another one."""
    return pa.array(lists.offsets.to_numpy() - lists.offsets[0].as_py(), pa.int32())


def list_sums(lists: pa.ListArray, lengths: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
    """Return the float64 sum of the first `lengths[i]` values of each list i (None: of all its values).

    Each list is summed separately, so a non-finite value affects only the sum of its own list.
    """
    offsets = lists.offsets.to_numpy().astype(np.int64)
    starts, stops = offsets[:-1], offsets[1:]
    if lengths is not None:
        stops = np.minimum(starts + lengths, stops)
    values = np.append(lists.values.to_numpy(zero_copy_only=False).astype(np.float64), 0.0)
    sums = np.add.reduceat(values, np.stack([starts, stops], 1).ravel())[::2] if len(starts) else np.zeros(0)
    return np.where(stops > starts, sums, 0.0)


def problem_of_rows(rows: pa.Table, top_k: int = 0) -> str | None:
    """Return the reason why rows cannot be stored in a table with this `top_k`, or None."""
    schema = schema_of(top_k)
    if rows.schema.names != schema.names or rows.schema.types != schema.types:
        return f"columns have wrong names or types: got {rows.schema.names}, expected {schema.names}"
    lists_of = [name for name in schema.names if pa.types.is_list(schema.field(name).type)]
    if any(column.null_count for column in rows.columns) or any(
        one_array(rows[name]).flatten().null_count for name in lists_of
    ):
        return "a value is null"
    if not pc.all(pc.equal(pc.binary_length(rows["key"]), 16), min_count=0).as_py():
        return "a key is not 16 bytes long"
    lists = one_array(rows["token_logps"])
    values: npt.NDArray[Any] = lists.flatten().to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        return f"the rows contain {counted(int(np.count_nonzero(~np.isfinite(values))), 'non-finite value')}"
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != rows["scored_len"].to_numpy()).any():
        return "a row's scored_len is not the number of its token_logps"
    if (lengths > rows["completion_len"].to_numpy()).any():
        return "a row has more token_logps than its completion has tokens"
    if not np.allclose(list_sums(lists), rows["logp_sum"].to_numpy(), rtol=1e-9, atol=1e-6):
        return "a row's logp_sum is not the sum of its token_logps"
    if not all(map(_is_object, rows["provenance"].unique().to_pylist())):
        return "a row's provenance is not a JSON object"
    return _problem_of_top(rows, top_k, lengths) if top_k else None


def _problem_of_top(rows: pa.Table, top_k: int, lengths: npt.NDArray[np.int32]) -> str | None:
    for column in TOP_COLUMNS:
        lists = one_array(rows[column.name])
        if (lists.value_lengths().to_numpy(zero_copy_only=False) != lengths * top_k).any():
            return f"a row's {column.name} does not have {top_k} entries for each of its token_logps"
    if not np.isfinite(one_array(rows["top_logps"]).flatten().to_numpy(zero_copy_only=False)).all():
        return "top_logps contains a non-finite value"
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def one_array(array: Any) -> Any:
    """Return a chunked array as one Arrow array, and any other array unchanged."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)


#: Arrow schema of the keys in a lookup over HTTP.
QUESTION = pa.schema([pa.field("key", pa.binary(16), nullable=False)])

#: Media type of an Arrow IPC stream (www.iana.org/assignments/media-types).
ARROW_STREAM = "application/vnd.apache.arrow.stream"

#: The bytes that end a stream: a continuation marker and a length of zero (Arrow's columnar format, "IPC Streaming Format").
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def stream_bytes(table: pa.Table) -> bytes:
    """Encode a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def stream_messages(schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[pa.Buffer]:
    """Yield the messages of the Arrow IPC stream of all tables together."""
    yield schema.serialize()
    for table in tables:
        for batch in table.to_batches():
            yield batch.serialize()
    yield pa.py_buffer(_END)
