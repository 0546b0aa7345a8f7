"""Test the table as its users write to it and read from it: by token ids, never by keys."""

import numpy as np
import pytest

from reflogp.store import LogprobTable, ReferenceNotFoundError, SnapshotNotFoundError, Store, UsageError, sequence_keys
from tests.store.rows import REFERENCE, some_rows

PROMPTS, COMPLETIONS = [[1, 5, 9], [1, 5, 9], []], [[7, 2], [8], [3, 4, 5]]
LOGPS = [[-1.5, -0.25], [-2.0], [-0.5, -0.5, -1.0]]


@pytest.fixture
def logps(table):
    table.add(PROMPTS, COMPLETIONS, LOGPS, provenance={"engine": "mine", "version": 1})
    return table


def test_what_was_added_is_got_and_summed(logps):
    assert [values.tolist() for values in logps.get(PROMPTS, COMPLETIONS)] == LOGPS
    assert logps.sums(PROMPTS, COMPLETIONS).tolist() == [-1.75, -2.0, -2.0]
    assert logps.sums(PROMPTS, COMPLETIONS, [1, 0, 2]).tolist() == [-1.5, 0.0, -1.0]
    assert logps.get([[9]], [[9]]) == [None]
    assert logps.snapshot().stored_lengths(sequence_keys([*PROMPTS, [9]], [*COMPLETIONS, [9]])).tolist() == [2, 1, 3, -1]
    assert np.isnan(logps.sums([[9]], [[9]])).all()
    assert logps.missing([*PROMPTS, [9]], [*COMPLETIONS, [9]]).tolist() == [False, False, False, True]


def test_a_completion_that_was_scored_in_part_is_missing_until_the_rest_is_added(table):
    table.add([[1]], [[2, 3, 4]], [[-1.0]], provenance={"engine": "first"})
    assert table.missing([[1]], [[2, 3, 4]]).tolist() == [True]
    assert np.isnan(table.sums([[1]], [[2, 3, 4]])).all()
    table.add([[1]], [[2, 3, 4]], [[-9.0, -2.0, -3.0]], provenance={"engine": "second"})
    assert table.get([[1]], [[2, 3, 4]])[0].tolist() == [-1.0, -2.0, -3.0]
    assert table.missing([[1]], [[2, 3, 4]]).tolist() == [False]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[float("nan"), -1.0], [-2.0], [-1.0]], "non-finite"),
        ([[-1.0, -1.0, -1.0], [-2.0], [-1.0]], "more token_logps than its completion"),
        ([[-1.0], [-2.0]], "3 sequences but 2 lists of log-probs"),
    ],
)
def test_values_that_do_not_fit_are_refused(table, values, says):
    with pytest.raises(UsageError, match=says):
        table.add(PROMPTS, COMPLETIONS, values, provenance={})
    assert len(table.snapshot()) == 0


def test_wrong_rows_are_dropped_by_their_provenance(logps):
    before = logps.snapshot().number
    logps.add([[4]], [[4]], [[-4.0]], provenance={"engine": "other", "version": 1})
    assert logps.drop(provenance={"engine": "mine", "version": 2}).rows == 0
    done = logps.drop(provenance={"engine": "mine"})
    assert (done.rows, logps.totals()[1]) == (3, 1)
    assert logps.missing(PROMPTS, COMPLETIONS).all()
    assert logps.get([[4]], [[4]])[0].tolist() == [-4.0]
    assert len(logps.snapshot(before)) == 3, "an earlier snapshot keeps them"
    logps.add(PROMPTS, COMPLETIONS, [[-9.0, -9.0], [-9.0], [-9.0]], provenance={"engine": "mended"})
    assert logps.get(PROMPTS, COMPLETIONS)[0].tolist() == [-9.0, -9.0]


def test_a_row_that_begins_with_dropped_values_goes_too(table):
    table.add([[1]], [[2, 3]], [[-1.0]], provenance={"engine": "broken"})
    table.add([[1]], [[2, 3]], [[-5.0, -2.0]], provenance={"engine": "good"})
    table.add([[6]], [[7]], [[-3.0]], provenance={"engine": "good"})
    table.compact()
    assert table.drop(provenance={"engine": "broken"}).rows == 1
    assert table.get([[1], [6]], [[2, 3], [7]])[0] is None
    assert table.drop(provenance={"engine": "good"}).rows == 1


def test_a_table_by_its_reference_its_id_or_its_name(table, tmp_path):
    store = Store(tmp_path / "store")
    for word in (REFERENCE, REFERENCE.reference_id, REFERENCE.name):
        assert isinstance(store[word], LogprobTable)
    with pytest.raises(ReferenceNotFoundError, match=f"no reference other.*{REFERENCE.reference_id}"):
        store["other"]


def test_a_pinned_snapshot_is_opened_once(table):
    keys, rows = some_rows(0, 100)
    table.append(rows.slice(0, 50))
    pinned = table.snapshot().number
    table.append(rows.slice(50))
    assert table.snapshot(pinned) is table.snapshot(pinned)
    assert (table.snapshot(pinned).stored_lengths(keys) > 0).sum() == 50


def test_a_reader_whose_snapshot_was_vacuumed_is_told_so(table, tmp_path):
    keys, rows = some_rows(0, 40)
    table.append(rows.slice(0, 20))
    table.append(rows.slice(20))
    held = Store(tmp_path / "store")[REFERENCE].snapshot()
    unread = Store(tmp_path / "store")[REFERENCE].snapshot()
    held.stored_lengths(keys)
    table.compact()
    table.vacuum(0, alone=True)
    for snapshot in (held, unread):
        with pytest.raises(SnapshotNotFoundError, match=r"was vacuumed after it was opened.*open the latest snapshot"):
            snapshot.token_logps(keys)


def test_a_merge_does_not_make_readers_read_all_keys_again(table, monkeypatch):
    from reflogp.store.shard import Shard

    table.append(some_rows(0, 5_000, values=10)[1])
    monkeypatch.setattr("reflogp.store.maintenance.SMALL_BYTES", 50_000)
    for batch in range(4):
        table.append(some_rows(10_000 + 10 * batch, 10)[1])
    table.snapshot().stored_lengths(some_rows(0, 1)[0])
    assert table.compact(only_small=True).rows == 40
    read = []
    original = Shard.read
    monkeypatch.setattr(Shard, "read", lambda self, columns: read.append(self.path) or original(self, columns))
    assert (table.snapshot().stored_lengths(some_rows(0, 5_000)[0]) == 10).all()
    assert len(read) == 1
