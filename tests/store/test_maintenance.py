"""Test compaction, vacuum, export and import, and lookups without an index."""

import os
import time
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from reflogp.store import (
    LogprobTable,
    SnapshotNotFoundError,
    Store,
    StoreUnavailableError,
    UsageError,
    compact,
    export_table,
    import_folder,
    join_logps,
    sequence_keys,
    vacuum,
    verify,
)
from reflogp.store import compaction as compaction_module
from reflogp.store.compaction import compact_if_many
from tests.store.rows import REFERENCE, pairs_of, some_rows


def values_of(snapshot, keys):
    return [values.tolist() for values in snapshot.token_logps(keys)]


def age(table, hours: float) -> None:
    """Set the age of every file in the table's folder, for vacuum. The time stamps in the log stay unchanged."""
    then = time.time() - hours * 3600
    for file in Path(table.uri).glob("*.parquet*"):
        os.utime(file, (then, then))


def test_compaction_keeps_every_value_and_each_key_once(table):
    keys, short = some_rows(0, 300, values=4, seed=1)
    _, long = some_rows(100, 300, values=9, seed=2)
    table.append(short)
    table.append(long)
    many = pa.concat_arrays([keys, some_rows(300, 100)[0]])
    before = values_of(table.snapshot(), many)
    done = compact(table)
    assert (done.shards_before, done.shards_after, done.rows, done.duplicates) == (2, 1, 400, 200)
    assert values_of(table.snapshot(), many) == before
    assert len(table.snapshot()) == 400
    assert not verify(table)
    assert compact(table).rows == 0, "shards that are in order are not rewritten"


def test_compacted_shards_lie_one_behind_the_other(table):
    for i in range(6):
        table.append(some_rows(1000 * i, 1000, values=10, seed=i)[1])
    assert compact(table, shard_bytes=60_000).shards_after > 2
    ranges = sorted((s.groups[0].least, s.groups[-1].greatest) for s in map(table.shard, table.shards()))
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    for i in range(6):
        keys, rows = some_rows(1000 * i, 1000, values=10, seed=i)
        assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()


def test_a_reader_from_before_a_compaction_goes_on(table, tmp_path):
    keys, rows = some_rows(0, 50)
    for start in range(0, 50, 10):
        table.append(rows.slice(start, 10))
    reader = Store(tmp_path / "store").table(REFERENCE.reference_id)
    opened, unread = reader.snapshot(), reader.snapshot(3)
    compact(table)
    assert values_of(opened, keys) == rows["token_logps"].to_pylist()
    assert (unread.stored_lengths(keys) == [5] * 30 + [-1] * 20).all()
    assert reader.append(some_rows(40, 20)[1]).written == 10, "and so does a writer"


def test_a_join_at_a_snapshot_is_the_same_bits_after_later_writes_and_compaction(table):
    dataset, rows = pairs_of(200)
    first = rows.slice(0, 400).take(pa.array(range(400)))
    half = pa.table({**{n: first[n] for n in first.column_names}}, schema=first.schema)
    table.append(half.slice(0, 150))
    table.append(half.slice(150))
    at = table.snapshot()
    settings = [{}, {"max_length": 8}, {"ld_alpha": 0.3, "max_length": 9}]
    before = [join_logps(dataset, at, **s).logps for s in settings]
    table.append(some_rows(50_000, 100)[1])
    compact(table)
    table.append(some_rows(60_000, 100)[1])
    for number in (at.number, None):
        again = [join_logps(dataset, table.snapshot(number), **s).logps for s in settings]
        for old, new in zip(before, again, strict=True):
            for name in old:
                assert old[name].tobytes() == new[name].tobytes()


def test_small_shards_are_merged_by_the_writer_that_has_too_many(table):
    for i in range(6):
        table.append(some_rows(10 * i, 10)[1])
        merged = compact_if_many(table, allowed=5)
        assert (merged is not None) == (i == 5)
    assert table.totals()[:2] == (1, 60)


def test_small_shards_stay_few_and_large_ones_are_left_alone(table, monkeypatch):
    monkeypatch.setattr(compaction_module, "SMALL_BYTES", 20_000)
    for i in range(30):
        table.append(some_rows(1000 * i, 300, values=10, seed=i)[1])
        compact_if_many(table, allowed=4)
    assert table.totals()[0] < 15
    assert table.totals()[1] == 9000


def test_another_compaction_that_came_first_wins(table, tmp_path, monkeypatch):
    for i in range(4):
        table.append(some_rows(10 * i, 10)[1])
    other = Store(tmp_path / "store").table(REFERENCE.reference_id)
    original = table.replace

    def late(*arguments):
        compact(other)
        return original(*arguments)

    monkeypatch.setattr(table, "replace", late)
    done = compact(table)
    assert not done.won
    assert len(list(Path(table.uri).glob("shard-*"))) == 5, "the loser's shard is deleted, the four replaced shards stay"
    assert table.totals()[:2] == (1, 40)


def test_vacuum_deletes_what_is_old_and_says_so_afterwards(table):
    keys, rows = some_rows(0, 40)
    for start in range(0, 40, 10):
        table.append(rows.slice(start, 10))
    old = table.snapshot_number()
    compact(table)
    assert vacuum(table, 1) == []
    assert (table.snapshot(old).stored_lengths(keys) == 5).all()
    would = vacuum(table, 0, alone=True, dry_run=True)
    assert len(would) == 4
    assert (table.snapshot(old).stored_lengths(keys) == 5).all()
    assert sorted(vacuum(table, 0, alone=True)) == sorted(would)
    with pytest.raises(SnapshotNotFoundError, match=f"snapshot {old} .* was vacuumed: vacuum deleted 4 of its 4 shards"):
        table.snapshot(old)
    assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()
    assert not verify(table)


def test_vacuum_removes_what_a_killed_writer_left_and_spares_what_is_young(table):
    table.append(some_rows(0, 10)[1])
    left_behind = table.write(some_rows(50, 10)[1])
    half_written = Path(table.uri) / "shard-half.parquet#1"
    half_written.write_bytes(b"PAR1")
    assert vacuum(table, 1) == []
    age(table, hours=2)
    assert sorted(vacuum(table, 1)) == sorted([left_behind.path, half_written.name])
    assert not (Path(table.uri) / left_behind.path).exists()
    assert not half_written.exists()
    assert not verify(table)


def test_vacuum_refuses_what_could_hurt_others_and_a_clock_that_went_back(table, monkeypatch):
    table.append(some_rows(0, 10)[1])
    with pytest.raises(UsageError, match="use at least 1 hour, or 0 hours with --alone"):
        vacuum(table, 0)
    monkeypatch.setattr(compaction_module.time, "time", lambda: 1.7e9)
    with pytest.raises(StoreUnavailableError, match="ahead of this machine's clock"):
        vacuum(table, 24)


def test_writing_does_not_depend_on_the_clock(table, monkeypatch):
    import reflogp.store.table as table_module

    keys, rows = some_rows(0, 30)
    table.append(rows.slice(0, 10))
    real = time.time
    monkeypatch.setattr(table_module.time, "time", lambda: real() - 1e6)
    table.append(rows.slice(10, 10))
    monkeypatch.undo()
    table.append(rows.slice(20))
    assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()


def test_lookups_without_an_index_give_the_same(table):
    """With more than INDEX_ROWS rows, no index is kept in memory; in this test, with any rows at all."""
    for i in range(5):
        table.append(some_rows(3000 * i, 5000, values=6 + i, seed=i)[1])
    scanning = LogprobTable(table.uri, REFERENCE, index_rows=0)
    keys = pa.concat_arrays([some_rows(0, 17_000)[0], sequence_keys([[8]], [[8]])]).take(
        pa.array(np.random.default_rng(0).permutation(17_001))
    )
    lengths = np.random.default_rng(1).integers(0, 11, 17_001)
    for compacted in (False, True):
        if compacted:
            compact(table, shard_bytes=200_000)
        indexed, scanned = table.snapshot(), scanning.snapshot()
        assert scanned._index == ([], 0)
        assert (indexed.stored_lengths(keys) == scanned.stored_lengths(keys)).all()
        assert np.array_equal(indexed.prefix_sums(keys, lengths), scanned.prefix_sums(keys, lengths), equal_nan=True)
        few = keys.slice(40, 3)
        assert (indexed.stored_lengths(few) == scanned.stored_lengths(few)).all()
        assert scanned._index == ([], 0)
    assert scanning.append(some_rows(16_000, 2000, values=10, seed=9)[1]).written == 1000


def test_a_few_keys_touch_a_few_row_groups_of_a_compacted_table(table, monkeypatch):
    from reflogp.store.shard import Shard

    for i in range(4):
        table.append(some_rows(10_000 * i, 10_000, values=2, seed=i)[1])
    compact(table)
    read = []
    original = Shard.index_columns
    monkeypatch.setattr(Shard, "index_columns", lambda self, groups=None: read.extend(groups) or original(self, groups))
    LogprobTable(table.uri, REFERENCE, index_rows=0).snapshot().stored_lengths(some_rows(0, 2)[0])
    assert 1 <= len(read) <= 2


def test_an_export_loads_with_datasets_and_comes_back(table, tmp_path):
    keys, rows = some_rows(0, 100)
    table.append(rows.slice(0, 60))
    table.append(rows.slice(40))
    assert export_table(table, str(tmp_path / "shared")) == (100, 1)
    loaded = datasets.load_dataset(str(tmp_path / "shared"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 100
    assert sorted(loaded["key"]) == sorted(keys.to_pylist())
    text = (tmp_path / "shared" / "README.md").read_text()
    assert "100 sequences" in text
    assert REFERENCE.reference_id in text
    other = Store(tmp_path / "other")
    done = import_folder(other, str(tmp_path / "shared"))
    assert (done.rows, done.written, done.reference_id) == (100, 100, REFERENCE.reference_id)
    there = other.table(REFERENCE.reference_id)
    assert values_of(there.snapshot(), keys) == rows["token_logps"].to_pylist()
    assert import_folder(other, str(tmp_path / "shared")).written == 0
    assert other.references() == [REFERENCE]


def test_bad_exports_and_imports_change_nothing(table, tmp_path):
    table.append(some_rows(0, 10)[1])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        export_table(table, str(tmp_path / "full"))
    with pytest.raises(UsageError, match="not an export"):
        import_folder(Store(tmp_path / "new"), str(tmp_path / "full"))
    export_table(table, str(tmp_path / "shared"))
    part = tmp_path / "shared" / "data" / "part-00000.parquet"
    rows = pq.read_table(part)
    pq.write_table(rows.set_column(5, "logp_sum", pa.array(np.zeros(10))), part)
    with pytest.raises(UsageError, match=r"data/part-00000\.parquet is damaged: its sha256 is not the one in contents\.json"):
        import_folder(Store(tmp_path / "new"), str(tmp_path / "shared"))
    (tmp_path / "shared" / "contents.json").unlink()  # exports of older versions had no such file
    with pytest.raises(UsageError, match="logp_sum is not the sum"):
        import_folder(Store(tmp_path / "new"), str(tmp_path / "shared"))
    part.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UsageError, match="cannot be read"):
        import_folder(Store(tmp_path / "new"), str(tmp_path / "shared"))
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.slow
def test_the_log_keeps_every_entry_through_checkpoints(table):
    for i in range(105):
        table.append(some_rows(i, 1)[1])
    log = Path(table.uri) / "_delta_log"
    assert len(list(log.glob("*.json"))) == 106
    assert list(log.glob("*.checkpoint*.parquet"))
    assert DeltaTable(table.uri).version() == 105
    assert (table.snapshot(50).stored_lengths(some_rows(0, 105)[0]) > 0).sum() == 50
    assert not verify(table)


def test_compaction_reads_each_row_group_once(table, monkeypatch):
    from reflogp.store.shard import Shard

    for i in range(8):
        table.append(some_rows(10_000 * i, 6000, values=10, seed=i)[1])
    read = []
    original = Shard.rows
    monkeypatch.setattr(
        Shard, "rows", lambda self, groups: read.extend((self.path, g) for g in groups) or original(self, groups)
    )
    assert compact(table, shard_bytes=100_000).shards_after > 10
    assert len(read) == len(set(read)) == 16


def test_many_shards_are_merged_in_stages(table, monkeypatch):
    monkeypatch.setattr(compaction_module, "_MERGED_AT_ONCE", 3)
    expected = []
    for i in range(20):
        keys, rows = some_rows(50 * i, 70, values=5, seed=0)  # consecutive batches overlap by 20 rows
        table.append(rows)
        expected.append(keys)
    before = [values_of(table.snapshot(), keys) for keys in expected]
    assert compact(table).shards_after == 1
    assert [values_of(table.snapshot(), keys) for keys in expected] == before
    assert len(table.snapshot()) == 50 * 19 + 70
    assert not verify(table)


def test_a_compaction_that_arrived_and_was_compacted_again_keeps_every_shard(table, tmp_path, monkeypatch):
    """The response to a commit is lost, and another process merges the committed shards before the writer looks."""
    keys, rows = some_rows(0, 60)
    for start in range(0, 60, 20):
        table.append(rows.slice(start, 20))
    other = Store(tmp_path / "store").table(REFERENCE.reference_id)
    original = table._commit

    def unanswered(*arguments):
        monkeypatch.setattr(table, "_commit", original)
        assert original(*arguments)
        other.append(some_rows(900, 5)[1])
        compact(other)
        return False

    monkeypatch.setattr(table, "_commit", unanswered)
    assert compact(table).won
    number = table.snapshot_number()
    for at in range(1, number + 1):
        snapshot = table.snapshot(at)
        assert all((Path(table.uri) / path).exists() for path in snapshot.rows_of)
    assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()


def test_a_shard_that_vanished_before_its_commit_is_not_committed(table, tmp_path, monkeypatch):
    """A vacuum with too short a retention deletes a shard while its writer retries, or while a compaction is being written."""
    winner = Store(tmp_path / "store").table(REFERENCE.reference_id)
    original = table._commit

    def late(added, removed):
        winner.append(some_rows(500, 10)[1])
        (Path(table.uri) / added[0].path).unlink()
        return original(added, removed)

    monkeypatch.setattr(table, "_commit", late)
    with pytest.raises(StoreUnavailableError, match="was deleted before it was committed"):
        table.append(some_rows(0, 10)[1])
    monkeypatch.undo()
    vanished = table.write(some_rows(700, 10)[1])
    (Path(table.uri) / vanished.path).unlink()
    with pytest.raises(StoreUnavailableError, match="was deleted before it was committed"):
        table.replace(list(table.shards()), [vanished])
    assert not verify(table)
    assert len(table.snapshot()) == 10


def test_an_old_snapshot_is_exported_as_it_was(table, tmp_path):
    rows = some_rows(0, 40)[1]
    table.append(rows.slice(0, 20))
    old = table.snapshot()
    table.append(rows.slice(20))
    compact(table)
    assert export_table(table, str(tmp_path / "old"), table.snapshot(old.number))[0] == 20


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("outside", "reference_id"),
        ("list", "format"),
        ("binary", "cannot be read"),
        ("short key", "16 bytes"),
        ("null", "null"),
        ("no object", "the provenance of a row is too long or not a JSON object"),
        ("name", "wrong type"),
    ],
)
def test_an_export_from_a_stranger_harms_nothing(table, tmp_path, what, says):
    table.append(some_rows(0, 10)[1])
    shared = tmp_path / "shared"
    export_table(table, str(shared))
    reference, part = shared / "reference.json", shared / "data" / "part-00000.parquet"
    (shared / "contents.json").unlink()  # contents.json would reveal the change by its digests
    rows = pq.read_table(part)
    if what == "outside":
        reference.write_text(reference.read_text().replace(REFERENCE.reference_id, "../outside"))
    elif what == "list":
        reference.write_text("[]")
    elif what == "binary":
        reference.write_bytes(b"\xff\xfe")
    elif what == "name":
        reference.write_text(reference.read_text().replace('"model"', '{"a": 1}'))
    elif what == "no object":
        pq.write_table(rows.set_column(rows.schema.get_field_index("provenance"), "provenance", pa.array(["[]"] * 10)), part)
    else:
        keys = rows["key"].to_pylist()
        keys[3] = keys[3][:15] if what == "short key" else None
        pq.write_table(rows.set_column(0, "key", pa.array(keys, pa.binary())), shared / "data" / "part-00001.parquet")
    with pytest.raises(UsageError, match=says):
        import_folder(Store(tmp_path / "new"), str(shared))
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "outside").exists()
