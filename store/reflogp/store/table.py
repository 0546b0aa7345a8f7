"""The table with the log-probs of one reference model: look up, append, and open numbered snapshots.

If another writer commits first, an append is retried without the rows that the other writer has already stored. The values that
are committed first for a key are therefore kept, and never change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store import maintenance, storage
from reflogp.store.commits import TableLog
from reflogp.store.errors import UsageError
from reflogp.store.index import each_key_once
from reflogp.store.keys import TokenLists, keys_as_words, list_lengths, sequence_keys, token_lists
from reflogp.store.schema import TOP_COLUMNS, list_sums, one_array, problem_of_rows, shard_table
from reflogp.store.snapshot import Snapshot
from reflogp.store.texts import counted


@dataclass(frozen=True)
class Appended:
    """The result of one append.

    Attributes:
        snapshot: number of a snapshot that contains all the rows.
        written: number of rows that were committed.
        already_there: number of rows that were skipped, because there are at least as many values for the same key.
    """

    snapshot: int
    written: int
    already_there: int


class LogprobTable(TableLog):
    """The table with the log-probs of one reference model.

    Args:
        uri: folder or object store prefix of the Delta table.
        reference: the reference model of the table.
        options: delta-rs storage options.

    Threads can share a table: calls to `snapshot`, `append` and `replace` wait for each other.

    Raises ReferenceNotFoundError if there is no table yet. This and all methods raise DamagedStoreError if the log or a shard
    that they need is damaged, and StoreUnavailableError if the storage cannot be reached, read or written to.

    Examples:
        >>> from reflogp.store import Store, describe_reference
        >>> logps = Store("./logps")[describe_reference("./sft-model", "bfloat16")]
        >>> logps.add([[1, 5, 9]], [[7, 2]], [[-1.5, -0.25]], provenance={"engine": "mine"}).written
        1
        >>> logps.get([[1, 5, 9], [1, 5, 9]], [[7, 2], [8]])
        [array([-1.5 , -0.25], dtype=float32), None]
        >>> logps.sums([[1, 5, 9]], [[7, 2]])
        array([-1.75])
        >>> logps.drop(provenance={"engine": "mine"}).rows
        1
    """

    def add(self, prompt_ids: TokenLists, completion_ids: TokenLists, token_logps: Any, provenance: dict[str, Any]) -> Appended:
        """Store the log-probs of n sequences, as `append` does.

        Args:
            token_logps: n lists of log-probs in nats, at temperature 1: those of the first tokens of each completion.
            provenance: how the values were computed, for example {"engine": "mine"}. `drop` can select rows by it.

        Raises UsageError if there are more values than tokens, or if a value is not finite.
        """
        prompts, completions = token_lists(prompt_ids, "prompt_ids"), token_lists(completion_ids, "completion_ids")
        values = token_logps if isinstance(token_logps, pa.Array) else pa.array(list(token_logps), pa.list_(pa.float32()))
        keys = sequence_keys(prompts, completions)
        if len(values) != len(keys):
            raise UsageError(
                f"{counted(len(keys), 'sequence')} but {counted(len(values), 'list')} of log-probs; nothing was stored"
            )
        return self.append(shard_table(keys, list_lengths(prompts), list_lengths(completions), values, provenance))

    def get(self, prompt_ids: TokenLists, completion_ids: TokenLists) -> list[npt.NDArray[np.float32] | None]:
        """Return the stored log-probs of each sequence, or None where there are none."""
        return self.snapshot().token_logps(sequence_keys(prompt_ids, completion_ids))

    def missing(self, prompt_ids: TokenLists, completion_ids: TokenLists) -> npt.NDArray[np.bool_]:
        """Return, for each sequence, whether values of some of its completion's tokens are missing; shape (n,)."""
        stored = self.snapshot().stored_lengths(sequence_keys(prompt_ids, completion_ids))
        missing: npt.NDArray[np.bool_] = stored < list_lengths(token_lists(completion_ids, "completion_ids"))
        return missing

    def sums(
        self, prompt_ids: TokenLists, completion_ids: TokenLists, lengths: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the sum of each completion's log-probs in nats, float64 of shape (n,); NaN where values are missing.

        Args:
            lengths: number of the completion's first tokens that each sum covers, shape (n,); None for all tokens.
        """
        whole = list_lengths(token_lists(completion_ids, "completion_ids"))
        first = np.asarray(whole if lengths is None else lengths, np.int64)
        return self.snapshot().prefix_sums(sequence_keys(prompt_ids, completion_ids), first)

    def append(self, rows: pa.Table) -> Appended:
        """Commit rows as one shard. Readers see either all of these rows or none.

        A row is skipped if the table already has at least as many values for its key. If the table has some values for the key,
        but fewer than the row, the table's values are kept, and only the row's remaining values are added. A value that has
        been read therefore never changes.

        Args:
            rows: a table from schema.shard_table, with keys in any order.

        Raises:
            UsageError: the columns are wrong, a row's lengths or sum contradict its values, or a value is not finite.
            StoreUnavailableError: the shard or the commit cannot be written, or other writers commit first for 15 minutes.
                Earlier commits are kept.
        """
        if problem := problem_of_rows(rows, self.top_k):
            raise UsageError(f"{problem}; nothing was stored")
        given, written = len(rows), None
        with self._turn, storage.translate_errors(f"the store {self.uri} cannot be written"):
            for _ in self._attempts():
                latest = self._latest_snapshot()
                fresh = without_stored(rows, latest)
                if not len(fresh):
                    return Appended(latest.number, 0, given)
                if written is None or fresh is not rows:
                    rows, written = fresh, self.write(fresh)
                if self._commit([written], []):
                    return Appended(latest.number + 1, len(rows), given - len(rows))
        raise AssertionError("unreachable: the last attempt to commit returns or raises an error")

    compact = maintenance.compact
    compact_if_many = maintenance.compact_if_many
    vacuum = maintenance.vacuum
    verify = maintenance.verify
    drop = maintenance.drop
    export = maintenance.export


def without_stored(rows: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Return the rows that have more values than the snapshot, or than another of the rows, has for their key.

    Values that the snapshot has replace the first values of a row, and the row's provenance contains theirs as "begins_with".
    If no row is changed or omitted, `rows` itself is returned: a shard that was written from these rows is still valid.
    """
    keys, lengths = one_array(rows["key"]), rows["scored_len"].to_numpy()
    found = snapshot.find(keys)
    wanted = np.zeros(len(rows), bool)
    wanted[each_key_once(*keys_as_words(keys), lengths)] = True
    wanted &= found.lengths < lengths
    begun = np.flatnonzero(wanted & (found.lengths > 0))
    lists = one_array(rows["token_logps"])
    stored = {
        int(row): values
        for row, values in zip(begun, found.token_logps(begun), strict=True)
        if values is not None
        and (snapshot.top_k or not np.array_equal(lists[int(row)].values.to_numpy()[: len(values)], values))
    }
    if wanted.all() and not stored:
        return rows
    wanted[list(stored)] = False
    parts = [rows.filter(pa.array(wanted))]
    if stored:
        changed = np.array(list(stored))
        names = ["token_logps", *(column.name for column in TOP_COLUMNS)] if snapshot.top_k else ["token_logps"]
        beginnings = {name: list(found.lists(name, changed).values()) for name in names}
        parts.append(_beginning_with(rows.take(pa.array(changed)), beginnings, found.provenance_of(changed)))
    return pa.concat_tables(parts)


def _beginning_with(rows: pa.Table, beginnings: dict[str, list[Any]], provenances: list[dict[str, Any]]) -> pa.Table:
    """Replace the first values of each row in some columns by those that are stored for its key."""
    columns = {name: rows[name] for name in rows.column_names}
    for name, stored in beginnings.items():
        lists = rows[name].to_pylist()
        for row, beginning in zip(lists, stored, strict=True):
            row[: len(beginning)] = beginning.tolist()
        columns[name] = pa.array(lists, rows.schema.field(name).type)
    columns["logp_sum"] = pa.array(list_sums(columns["token_logps"]))
    columns["provenance"] = pa.array(
        json.dumps({**json.loads(own), "begins_with": earlier}, sort_keys=True)
        for own, earlier in zip(rows["provenance"].to_pylist(), provenances, strict=True)
    )
    return pa.table(columns, schema=rows.schema)
