"""Arrow tables of keys, of sequences and of their values, as they cross the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.client.errors import RequestRefusedError, ServiceFailedError
from reflogp.client.models import Lookup, Scores
from reflogp.store import UsageError
from reflogp.store.keys import KEY_TYPE, token_lists
from reflogp.store.schema import QUESTION, one_array

T = TypeVar("T")

#: Lists of token ids, with one list for each sequence. They can be Python lists, one-dimensional numpy arrays, the rows of a
#: two-dimensional numpy array, or an Arrow list array.
TokenIds: TypeAlias = "Sequence[Sequence[int]] | Sequence[npt.NDArray[Any]] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray"

#: Maximum number of keys in a lookup request without token values (16 MB of keys) and with token values (500 MB of values at
#: 2,000 tokens per key).
KEYS_AT_ONCE, VALUE_KEYS_AT_ONCE = 1_000_000, 65_536
#: Maximum number of sequences and of tokens in a score request: half of a service's default limits.
SEQUENCES_AT_ONCE, TOKENS_AT_ONCE = 2_048, 2 << 20


def key_table(keys: pa.Array | Sequence[bytes]) -> pa.Table:
    """Return the table that asks for the values of keys. Raises UsageError if a key is not 16 bytes long."""
    try:
        column = keys.cast(KEY_TYPE) if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(list(keys), KEY_TYPE)
    except pa.ArrowException as error:
        raise UsageError(f"keys must be 16 bytes long, like those from sequence_keys: {str(error).splitlines()[0]}") from error
    return pa.table([column], schema=QUESTION)


def sequence_table(prompts: TokenIds, completions: TokenIds, attention_masks: TokenIds | None) -> pa.Table:
    """Return the table of sequences to score. Raises UsageError if the arguments are not as many lists of token ids each."""
    given = {"prompts": prompts, "completions": completions, "attention masks": attention_masks}
    lists = {name: _lists(ids, name) for name, ids in given.items() if ids is not None}
    for name, column in lists.items():
        if len(column) != len(lists["prompts"]):
            raise UsageError(f"the number of {name} ({len(column)}) must equal the number of prompts ({len(lists['prompts'])})")
    return pa.table(dict(zip(("prompt_ids", "completion_ids", "attention_mask"), lists.values(), strict=False)))


def _lists(ids: TokenIds, name: str) -> pa.ListArray:
    try:
        return token_lists(list(ids) if isinstance(ids, np.ndarray) else ids, name).cast(pa.list_(pa.uint32()))
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"{name}: expected lists of token ids ({str(error).splitlines()[0]})") from error


def in_parts(table: pa.Table, most: int, ask: Callable[[pa.Table], T]) -> list[T]:
    """Call `ask` with at most `most` rows and TOKENS_AT_ONCE tokens of the table at a time, and return its results.

    A part that the service refuses as too large (status 413) is halved. An empty table is one part.
    """
    tokens = np.zeros(len(table) + 1, np.int64)  # the number of tokens before each row
    for name in {"prompt_ids", "completion_ids"} & set(table.column_names):
        tokens[1:] += one_array(table[name]).value_lengths().to_numpy(zero_copy_only=False).cumsum()
    results: list[T] = []
    at = 0
    while at < len(table) or not results:
        stop = int(np.searchsorted(tokens, tokens[at] + TOKENS_AT_ONCE, "right")) - 1
        rows = min(most, max(stop - at, 1))
        part = table.slice(at, rows)
        try:
            results.append(ask(part))
        except RequestRefusedError as error:
            if error.status != 413 or len(part) < 2:
                raise
            most = len(part) // 2
            continue
        at += len(part)
    return results


def lookup_of(response: httpx.Response) -> Lookup:
    def read(table: pa.Table, metadata: dict[str, str]) -> Lookup:
        values = _arrays(table["token_logps"]) if "token_logps" in table.column_names else None
        lengths, sums = table["scored_len"].fill_null(-1).to_numpy(), table["logp_sum"].to_numpy()
        return Lookup(lengths, sums, values, metadata["reference_id"], int(metadata["snapshot"]))

    return _read(response, read)


def scores_of(response: httpx.Response) -> tuple[Scores, list[str | None]]:
    """Return the scores, and each sequence's error, or None."""

    def read(table: pa.Table, metadata: dict[str, str]) -> tuple[Scores, list[str | None]]:
        seconds = float(metadata["engine_seconds"]), float(metadata["queue_seconds"])
        values: Any = _arrays(table["token_logps"])
        return Scores(values, metadata["reference_id"], int(metadata["hits"]), *seconds), table["error"].to_pylist()

    return _read(response, read)


def _read(response: httpx.Response, read: Callable[[pa.Table, dict[str, str]], T]) -> T:
    """Call `read` with the Arrow table in a response and its metadata."""
    try:
        table = pa.ipc.open_stream(response.content).read_all().combine_chunks()
        return read(table, {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()})
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ServiceFailedError(f"the service's response cannot be read: {error}") from error


def _arrays(column: pa.ChunkedArray) -> list[npt.NDArray[np.float32] | None]:
    return [entry.values.to_numpy() if entry.is_valid else None for entry in column]


def joined_lookup(parts: list[Lookup]) -> Lookup:
    first = parts[0]
    values = None if first.token_logps is None else [entry for part in parts for entry in part.token_logps or []]
    lengths, sums = np.concatenate([part.lengths for part in parts]), np.concatenate([part.sums for part in parts])
    return Lookup(lengths, sums, values, first.reference_id, first.snapshot)


def joined_scores(parts: list[Scores]) -> Scores:
    return Scores(
        [values for part in parts for values in part.token_logps],
        parts[0].reference_id,
        sum(part.hits for part in parts),
        sum(part.engine_seconds for part in parts),
        sum(part.queue_seconds for part in parts),
    )
