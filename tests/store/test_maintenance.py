"""Test compaction, vacuum, export and import."""

import os
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.store import SnapshotNotFoundError, Store, UsageError, import_folder, join_logps
from tests.store.rows import REFERENCE, some_rows


def values_of(snapshot, keys):
    return [values.tolist() for values in snapshot.token_logps(keys)]


def age(files, hours: float) -> None:
    then = time.time() - hours * 3600
    for file in files:
        os.utime(file, (then, then))


def test_a_reader_from_before_a_compaction_goes_on(table, tmp_path):
    keys, rows = some_rows(0, 50)
    for start in range(0, 50, 10):
        table.append(rows.slice(start, 10))
    reader = Store(tmp_path / "store")[REFERENCE.reference_id]
    opened, unread = reader.snapshot(), reader.snapshot(3)
    table.compact()
    assert values_of(opened, keys) == rows["token_logps"].to_pylist()
    assert (unread.stored_lengths(keys) == [5] * 30 + [-1] * 20).all()
    assert reader.append(some_rows(40, 20)[1]).written == 10, "and so does a writer"


def test_a_join_at_a_snapshot_is_the_same_bits_after_later_writes_and_compaction(table):
    rows = range(200)
    ids = {"prompt_ids": [[i, 1, 2] for i in rows], "chosen_ids": [[i + t for t in range(10)] for i in rows]}
    dataset = pa.table({**ids, "rejected_ids": [[i + t for t in range(8)] for i in rows]})
    for completion in (10, 8):
        table.append(some_rows(0, 200, values=completion, seed=completion, completion=completion)[1])
    at = table.snapshot()
    settings = [{}, {"max_length": 8}, {"ld_alpha": 0.3, "max_length": 9}]
    before = [join_logps(dataset, at, **s).logps for s in settings]
    table.append(some_rows(50_000, 100)[1])
    table.compact()
    table.append(some_rows(60_000, 100)[1])
    for number in (at.number, None):
        again = [join_logps(dataset, table.snapshot(number), **s).logps for s in settings]
        for old, new in zip(before, again, strict=True):
            for name in old:
                assert old[name].tobytes() == new[name].tobytes()


def test_another_compaction_that_came_first_wins(table, tmp_path, monkeypatch):
    for i in range(4):
        table.append(some_rows(10 * i, 10)[1])
    other = Store(tmp_path / "store")[REFERENCE.reference_id]
    original = table.replace

    def late(*arguments):
        other.compact()
        return original(*arguments)

    monkeypatch.setattr(table, "replace", late)
    done = table.compact()
    assert not done.won
    assert len(list(Path(table.uri).glob("shard-*"))) == 6, "the four replaced shards stay"
    assert table.totals()[:2] == (1, 40)


def test_vacuum_deletes_what_is_old_and_readers_of_it_are_told(table, tmp_path):
    keys, rows = some_rows(0, 40)
    for start in range(0, 40, 10):
        table.append(rows.slice(start, 10))
    old = table.snapshot_number()
    held, unread = (Store(tmp_path / "store")[REFERENCE].snapshot() for _ in range(2))
    held.stored_lengths(keys)
    table.compact()
    assert table.vacuum(1) == []
    with pytest.raises(UsageError, match="use at least 1 hour, or 0 hours with --alone"):
        table.vacuum(0)
    would = table.vacuum(0, alone=True, dry_run=True)
    assert len(would) == 4
    assert (table.snapshot(old).stored_lengths(keys) == 5).all()
    assert sorted(table.vacuum(0, alone=True)) == sorted(would)
    with pytest.raises(SnapshotNotFoundError, match=f"snapshot {old} .* was vacuumed: vacuum deleted 4 of its 4 shards"):
        Store(tmp_path / "store")[REFERENCE].snapshot(old)
    for snapshot in (held, unread):
        with pytest.raises(SnapshotNotFoundError, match=r"was vacuumed after it was opened.*open the latest snapshot"):
            snapshot.token_logps(keys)
    assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()
    assert not table.verify()


def test_vacuum_removes_what_a_killed_writer_left_and_spares_what_is_young(table):
    table.append(some_rows(0, 10)[1])
    left_behind = table.write(some_rows(50, 10)[1])
    half_written = Path(table.uri) / "shard-half.parquet"
    half_written.write_bytes(b"PAR1")
    assert table.vacuum(1) == []
    age(Path(table.uri).glob("*.parquet"), hours=2)
    assert sorted(table.vacuum(1)) == sorted([left_behind.path, half_written.name])
    assert not (Path(table.uri) / left_behind.path).exists()
    assert not half_written.exists()
    assert not table.verify()


def test_vacuum_deletes_log_entries_that_are_older_than_a_checkpoint_and_a_month(table, tmp_path):
    log = Path(table.uri) / "_delta_log"
    first = log / f"{0:020}.json"
    # earlier versions switched the clean-up of the log off
    setting = '"configuration":{"delta.enableExpiredLogCleanup":"false",'
    first.write_text(first.read_text().replace('"configuration":{', setting))
    assert setting in first.read_text()
    table = Store(tmp_path / "store")[REFERENCE.reference_id]
    keys, rows = some_rows(0, 120)
    for number in range(120):
        table.append(rows.slice(number, 1))
    age(log.iterdir(), hours=40 * 24)
    before = len(list(log.glob("*.json")))
    assert table.vacuum() == []
    assert len(list(log.glob("*.json"))) < before / 2
    assert values_of(Store(tmp_path / "store")[REFERENCE.reference_id].snapshot(), keys) == rows["token_logps"].to_pylist()


def test_writing_does_not_depend_on_the_clock(table, monkeypatch):
    import reflogp.store.commits as commits

    keys, rows = some_rows(0, 30)
    table.append(rows.slice(0, 10))
    real = time.time
    monkeypatch.setattr(commits.time, "time", lambda: real() - 1e6)
    table.append(rows.slice(10, 10))
    monkeypatch.undo()
    table.append(rows.slice(20))
    assert values_of(table.snapshot(), keys) == rows["token_logps"].to_pylist()


def test_an_export_loads_with_datasets_and_comes_back(table, tmp_path):
    keys, rows = some_rows(0, 100)
    table.append(rows.slice(0, 60))
    table.append(rows.slice(40))
    assert table.export(str(tmp_path / "shared")) == (100, 1)
    loaded = datasets.load_dataset(str(tmp_path / "shared"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 100
    assert sorted(loaded["key"]) == sorted(keys.to_pylist())
    text = (tmp_path / "shared" / "README.md").read_text()
    assert REFERENCE.reference_id in text
    other = Store(tmp_path / "other")
    done = import_folder(other, str(tmp_path / "shared"))
    assert (done.rows, done.written, done.reference_id) == (100, 100, REFERENCE.reference_id)
    there = other[REFERENCE]
    assert values_of(there.snapshot(), keys) == rows["token_logps"].to_pylist()
    assert import_folder(other, str(tmp_path / "shared")).written == 0
    assert other.references() == [REFERENCE]
    table.compact()
    assert table.export(str(tmp_path / "old"), 1)[0] == 60, "an earlier snapshot"


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("reference.json", REFERENCE.reference_id, "../outside", "reference_id"),
        ("reference.json", '"model"', '{"a": 1}', "wrong type"),
        ("reference.json", None, "[]", "format"),
        ("data/part-00001.parquet", None, "PAR1 nothing PAR1", "part-00001.parquet cannot be read"),
        ("key", 3, b"only 15 bytes.", "16 bytes"),
        ("key", 3, None, "null"),
        ("logp_sum", 0, 0.0, "logp_sum is not the sum"),
        ("provenance", 0, "[]", "provenance is not a JSON object"),
    ],
)
def test_an_export_from_a_stranger_harms_nothing(table, tmp_path, file, before, after, says):
    table.append(some_rows(0, 10)[1])
    shared = tmp_path / "shared"
    table.export(str(shared))
    with pytest.raises(UsageError, match="not an empty folder"):
        table.export(str(shared))
    if "." in file:
        text = (shared / file).read_text() if before else ""
        (shared / file).write_text(text.replace(before, after) if before else after)
    else:
        rows = pq.read_table(shared / "data" / "part-00000.parquet")
        values = rows[file].to_pylist()
        values[before] = after
        column = pa.array(values, rows.schema.field(file).type)
        rows = rows.set_column(rows.column_names.index(file), file, column)
        pq.write_table(rows, shared / "data" / "part-00001.parquet")
    with pytest.raises(UsageError, match=says):
        import_folder(Store(tmp_path / "new"), str(shared))
    with pytest.raises(UsageError, match="not an export"):
        import_folder(Store(tmp_path / "new"), str(tmp_path / "store"))
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "outside").exists()
