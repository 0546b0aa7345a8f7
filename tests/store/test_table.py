import json

import numpy as np
import pyarrow as pa
import pytest

from reflogp.store import (
    ReferenceNotFoundError,
    Store,
    StoreFormatError,
    StoreUnavailableError,
    UsageError,
)
from reflogp.store.schema import shard_table
from tests.store.rows import REFERENCE, some_rows


def test_one_bad_value_spoils_only_its_own_row(table):
    keys, rows = some_rows(0, 3)
    values = rows["token_logps"].to_pylist()
    values[1][4] = float("nan")
    lists = pa.array(values, pa.list_(pa.float32()))
    rows = shard_table(keys, np.full(3, 3, np.int32), np.full(3, 10, np.int32), lists, {})
    with pytest.raises(UsageError, match="non-finite value; nothing was stored"):
        table.append(rows)
    table.replace([], [table.write(rows)])  # as another writer could do

    assert np.isfinite(table.snapshot().prefix_sums(keys, np.full(3, 4))).all()
    assert np.isnan(table.snapshot().prefix_sums(keys, np.full(3, 5))).tolist() == [False, True, False]


def test_the_first_commit_wins_for_a_key(table, tmp_path):
    other_writer = Store(tmp_path / "store")[REFERENCE.reference_id]
    keys, mine = some_rows(0, 10, seed=1)
    _, theirs = some_rows(0, 20, seed=2)
    table.append(mine)
    done = other_writer.append(theirs)
    assert (done.written, done.already_there) == (10, 10)
    got = table.snapshot().token_logps(keys)
    assert [values.tolist() for values in got] == mine["token_logps"].to_pylist()


def test_a_longer_row_begins_with_the_values_that_were_read_before(table):
    keys, short = some_rows(0, 10, values=4, seed=1)
    _, long = some_rows(0, 10, values=9, seed=2)
    table.append(short)
    assert table.append(long).written == 10
    got = np.stack(table.snapshot().token_logps(keys))
    assert (got[:, :4] == np.array(short["token_logps"].to_pylist(), np.float32)).all()
    assert (got[:, 4:] == np.array(long["token_logps"].to_pylist(), np.float32)[:, 4:]).all()
    assert not table.verify()
    _, shorter = some_rows(0, 10, values=2, seed=3)
    assert table.append(shorter).written == 0


def test_a_key_twice_in_one_append_is_written_once(table):
    _, rows = some_rows(0, 10)
    assert table.append(pa.concat_tables([rows, rows])).written == 10
    assert len(table.snapshot()) == 10


def test_many_appends_stay_findable(table):
    """The test makes more commits than the index has layers."""
    batches = [some_rows(100 * i, 7, seed=i) for i in range(25)]
    for _, rows in batches:
        table.append(rows)
        table.snapshot()
    for keys, rows in batches:
        assert [v.tolist() for v in table.snapshot().token_logps(keys)] == rows["token_logps"].to_pylist()


def commit_in_between(table, monkeypatch, other):
    """Call `other()` right before the table's next commit."""
    original = table._commit

    def late(*arguments):
        monkeypatch.setattr(table, "_commit", original)
        other()
        return original(*arguments)

    monkeypatch.setattr(table, "_commit", late)


def test_a_writer_that_loses_the_race_still_keeps_the_first_values(table, tmp_path, monkeypatch):
    """The other writer commits fewer values of the same keys after this writer's shard is written and before its commit."""
    keys, short = some_rows(0, 10, values=4, seed=1)
    _, long = some_rows(0, 10, values=9, seed=2)
    winner = Store(tmp_path / "store")[REFERENCE.reference_id]
    commit_in_between(table, monkeypatch, lambda: winner.append(short))
    assert table.append(long).written == 10
    got = np.stack(table.snapshot().token_logps(keys))
    assert (got[:, :4] == np.array(short["token_logps"].to_pylist(), np.float32)).all()
    assert got.shape == (10, 9)


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


def test_a_store_of_a_newer_format_is_refused_and_left_alone(table, tmp_path):
    file = tmp_path / "store" / REFERENCE.reference_id / "reference.json"
    newer = json.loads(file.read_text()) | {"format": 2}
    file.write_text(json.dumps(newer))
    for opening in ("__getitem__", "references", "create_table"):
        argument = {"__getitem__": [REFERENCE.reference_id], "references": [], "create_table": [REFERENCE]}[opening]
        with pytest.raises(StoreFormatError, match="format 2"):
            getattr(Store(tmp_path / "store"), opening)(*argument)
    assert json.loads(file.read_text()) == newer


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="cannot be"):
        Store(tmp_path / "file" / "store").create_table(REFERENCE)


def test_a_reference_that_was_never_scored(table, tmp_path):
    with pytest.raises(ReferenceNotFoundError, match=REFERENCE.reference_id):
        Store(tmp_path / "store")["cd" * 16]
    with pytest.raises(UsageError, match="no store"):
        Store(tmp_path / "nowhere").references()
    assert [r.reference_id for r in Store(tmp_path / "store").references()] == [REFERENCE.reference_id]


def test_a_uri_of_no_storage_is_refused_with_what_there_is():
    with pytest.raises(UsageError, match="the scheme is not supported; use a folder, or an s3://, gs:// or az:// URI"):
        Store("s4://team/logps").references()
