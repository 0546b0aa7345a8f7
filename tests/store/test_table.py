"""Test the table as its users write to it and read from it, and as several writers share it."""

import numpy as np
import pyarrow as pa
import pytest

from reflogp.store import LogprobTable, ReferenceNotFoundError, Store, UsageError, sequence_keys
from reflogp.store.schema import shard_table
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
    assert table.add([[1]], [[2, 3, 4]], [[-8.0, -8.0]], provenance={"engine": "third"}).written == 0
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
    with pytest.raises(UsageError, match=f"{says}.*nothing was stored"):
        table.add(PROMPTS, COMPLETIONS, values, provenance={})
    assert len(table.snapshot()) == 0


def test_one_bad_value_spoils_only_its_own_row(table):
    keys, rows = some_rows(0, 3)
    values = rows["token_logps"].to_pylist()
    values[1][4] = float("nan")
    lists = pa.array(values, pa.list_(pa.float32()))
    rows = shard_table(keys, np.full(3, 3, np.int32), np.full(3, 10, np.int32), lists, {})
    table.replace([], [table.write(rows)])  # as another writer could do
    assert np.isfinite(table.snapshot().prefix_sums(keys, np.full(3, 4))).all()
    assert np.isnan(table.snapshot().prefix_sums(keys, np.full(3, 5))).tolist() == [False, True, False]


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


def test_a_key_is_written_once_and_the_first_commit_wins(table, tmp_path):
    other_writer = Store(tmp_path / "store")[REFERENCE.reference_id]
    keys, mine = some_rows(0, 10, seed=1)
    assert table.append(pa.concat_tables([mine, mine])).written == 10
    done = other_writer.append(some_rows(0, 20, seed=2)[1])
    assert (done.written, done.already_there) == (10, 10)
    assert [values.tolist() for values in table.snapshot().token_logps(keys)] == mine["token_logps"].to_pylist()


def test_many_appends_stay_findable(table):
    """More commits than the index has layers."""
    batches = [some_rows(100 * i, 7, seed=i) for i in range(25)]
    for _, rows in batches:
        table.append(rows)
        table.snapshot()
    for keys, rows in batches:
        assert [v.tolist() for v in table.snapshot().token_logps(keys)] == rows["token_logps"].to_pylist()


def test_a_writer_that_loses_the_race_still_keeps_the_first_values(table, tmp_path, monkeypatch):
    """The other writer commits fewer values of the same keys after this writer's shard is written and before its commit."""
    keys, short = some_rows(0, 10, values=4, seed=1)
    _, long = some_rows(0, 10, values=9, seed=2)
    winner, commit = Store(tmp_path / "store")[REFERENCE.reference_id], table._commit

    def late(*arguments):
        monkeypatch.setattr(table, "_commit", commit)
        winner.append(short)
        return commit(*arguments)

    monkeypatch.setattr(table, "_commit", late)
    assert table.append(long).written == 10
    got = np.stack(table.snapshot().token_logps(keys))
    assert (got[:, :4] == np.array(short["token_logps"].to_pylist(), np.float32)).all()
    assert (got[:, 4:] == np.array(long["token_logps"].to_pylist(), np.float32)[:, 4:]).all()


def test_a_commit_whose_answer_is_lost_is_found_and_its_shard_kept(table, monkeypatch):
    keys, rows = some_rows(0, 10)
    original = table._commit

    def unanswered(*arguments):
        monkeypatch.setattr(table, "_commit", original)
        assert original(*arguments)
        return False

    monkeypatch.setattr(table, "_commit", unanswered)
    done = table.append(rows)
    assert (done.written, done.already_there) == (0, 10), "the next attempt finds the rows in the table"
    assert (table.snapshot().stored_lengths(keys) == 5).all()
    assert not table.verify()


def test_a_table_by_its_reference_its_id_or_its_name(table, tmp_path):
    store = Store(tmp_path / "store")
    for word in (REFERENCE, REFERENCE.reference_id, REFERENCE.name):
        assert isinstance(store[word], LogprobTable)
    with pytest.raises(ReferenceNotFoundError, match=f"no reference other.*{REFERENCE.reference_id}"):
        store["other"]
    with pytest.raises(ReferenceNotFoundError, match="cd" * 16):
        store["cd" * 16]
