"""Test damage: full disks, changed bytes, missing files.

Undamaged rows can still be read, writes are refused until a repair.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.store import (
    DamagedStoreError,
    Store,
    StoreDamageWarning,
    UsageError,
    compact,
    export_table,
    repair,
    vacuum,
    verify,
)
from tests.store.rows import REFERENCE, pairs_of, some_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def three_shards(table):
    """A table of three shards with 1,000 rows each, and their keys, in the order of their commits."""
    return table, [commit(table, 1000 * i) for i in range(3)]


def commit(table, first):
    """Append 1,000 rows, and return (keys, shard)."""
    before = set(table.shards())
    keys, rows = some_rows(first, 1000, values=10)
    table.append(rows)
    [shard] = set(table.shards()) - before
    return keys, Path(table.uri) / shard


def flip(file: Path, at: float | int) -> None:
    data = bytearray(file.read_bytes())
    data[at if isinstance(at, int) else int(len(data) * at)] ^= 0x10
    file.write_bytes(data)


def reopened(table):
    return Store(Path(table.uri).parents[1]).table(REFERENCE.reference_id)


def lengths(table, keys) -> set[int]:
    return set(table.snapshot().stored_lengths(keys).tolist())


def break_shard(file: Path, how: str) -> None:
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        key_column = pq.ParquetFile(file).metadata.row_group(0).column(0)
        flip(file, {"keys": key_column.data_page_offset + key_column.total_compressed_size // 2, "footer": -5}[how])


@pytest.mark.parametrize("how", ["gone", "cut", "keys", "footer"])
def test_a_damaged_shard_is_named_the_rest_is_served_and_a_repair_drops_only_it(three_shards, how):
    table, commits = three_shards
    (keys_a, _), (keys_b, shard), (keys_c, _) = commits
    break_shard(shard, how)
    damaged = reopened(table)
    with pytest.warns(StoreDamageWarning, match=re.escape(shard.name) + r".*1,000 rows as missing.*verify .*--repair"):
        assert lengths(damaged, keys_b) == {-1}
    assert lengths(damaged, keys_a) == lengths(damaged, keys_c) == {10}
    version = damaged.snapshot_number()
    with pytest.raises(DamagedStoreError, match=r"verify .*--repair"):
        damaged.append(some_rows(9000, 5)[1])
    with pytest.raises(DamagedStoreError, match=r"verify .*--repair"):
        compact(damaged)
    with pytest.raises(DamagedStoreError, match=r"verify .*--repair"):
        export_table(damaged, str(Path(table.uri).parent / "export"))
    assert damaged.snapshot_number() == version
    found = verify(damaged)
    assert [(d.file, d.rows) for d in found] == [(shard.name, 1000)]
    repaired = repair(damaged, found)
    assert not verify(repaired)
    assert lengths(repaired, keys_a) == lengths(repaired, keys_c) == {10}
    assert lengths(repaired, keys_b) == {-1}
    assert repaired.append(some_rows(1000, 1000, values=10)[1]).written == 1000


def test_verify_notices_any_byte(table):
    """The test also changes bytes that no page checksum covers: page headers, and the writer's name in the footer."""
    table.append(some_rows(0, 20)[1])
    [path] = table.shards()
    file = Path(table.uri) / path
    whole = file.read_bytes()
    for at in range(0, len(whole), 23):
        flip(file, at)
        assert [d.file for d in verify(table)] == [path], at
        file.write_bytes(whole)
    assert not verify(table)


def test_damage_in_token_values_alone_spares_the_sums(table):
    """A join without truncation reads sums only. The damage is detected when values are needed, and by verify."""
    from reflogp.store import join_logps

    dataset, rows = pairs_of(3000)
    table.append(rows)
    [path] = table.shards()
    column = pq.ParquetFile(Path(table.uri) / path).metadata.row_group(0).column(4)
    flip(Path(table.uri) / path, column.data_page_offset + column.total_compressed_size // 2)
    damaged = reopened(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = join_logps(dataset, damaged.snapshot())
    assert not whole.missing.any() | whole.unusable.any()
    with pytest.warns(StoreDamageWarning):
        cut = join_logps(dataset, damaged.snapshot(), max_length=8)
    assert cut.unusable.all()
    assert [d.file for d in verify(damaged)] == [path]


def entry(table, version: int) -> Path:
    return Path(table.uri) / "_delta_log" / f"{version:020}.json"


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("where", ["first byte", "in an action", "cut", "gone"])
def test_a_damaged_log_entry_is_named_its_neighbours_served_and_mended(three_shards, version, where):
    table, commits = three_shards
    file = entry(table, version)
    text = file.read_text()
    if where == "gone":
        if version == 3:
            return  # without its newest entry, the log is shorter but complete
        file.unlink()
    elif where == "cut":
        file.write_text(text[: len(text) // 3])
    else:
        at = 0 if where == "first byte" else text.index('"add"' if version else '"metaData"') + 8
        flip(file, at)
    with pytest.warns(StoreDamageWarning, match=f"{version:020}"):
        damaged = reopened(table)
        served = [lengths(damaged, keys) for keys, _ in commits]
    assert [s == {10} for i, s in enumerate(served, 1) if i != version] == [True] * (3 - (version in (2, 3)))
    before = sorted(path.name for path in Path(table.uri).rglob("*"))
    with pytest.raises(DamagedStoreError, match=f"{version:020}.*verify .*--repair"):
        damaged.append(some_rows(9000, 5)[1])
    with pytest.raises(DamagedStoreError):
        Store(Path(table.uri).parents[1]).create_table(REFERENCE)
    assert sorted(path.name for path in Path(table.uri).rglob("*")) == before
    with pytest.warns(StoreDamageWarning):
        found = verify(reopened(table))
    assert [d.file for d in found] == [f"_delta_log/{version:020}.json"]
    repaired = repair(damaged, found)
    assert not verify(repaired)
    expected = [{-1} if i == version and where == "cut" else {10} for i in (1, 2, 3)]
    assert [lengths(repaired, keys) for keys, _ in commits] == expected
    assert repaired.append(some_rows(0, 3000, values=10)[1]).written == 1000 * expected.count({-1})


def places(value, path=()):
    """Yield the path and the type of every value inside a JSON document."""
    yield path, type(value)
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, name))


def changed(value, path, other):
    """A copy of a JSON document with another value at a path."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], other)
    return copy


@pytest.mark.parametrize("version", [0, 2])
def test_a_value_of_another_type_anywhere_in_a_log_entry_is_mended(three_shards, version):
    table, commits = three_shards
    file = entry(table, version)
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    changes = [
        (number, path, other)
        for number, line in enumerate(lines)
        for path, kind in places(line)
        if path[-1:] != ("reflogp.format",) and path[1:] != ("reflogp", "added", 0, 3)  # a newer store, an altered shard
        for other in (None, 5, "x", [], [[1]], {}, {"x": 1})
        if type(other) is not kind
    ]
    for number, path, other in random.Random(version).sample(changes, 20):
        altered = [changed(line, path, other) if at == number else line for at, line in enumerate(lines)]
        file.write_text("".join(json.dumps(line) + "\n" for line in altered))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreDamageWarning)
            damaged = reopened(table)
            served = [lengths(damaged, keys) for keys, _ in commits]
            assert [found == {10} for at, found in enumerate(served, 1) if at != version] == [True] * (3 - bool(version))
            repaired = repair(damaged, verify(damaged))
        assert not verify(repaired), (path, other)
        assert [lengths(repaired, keys) for keys, _ in commits] == [{10}] * 3, (path, other)
        file.write_text(text)


def test_a_path_that_changed_in_the_log_is_noticed_and_put_right(three_shards):
    """The changed JSON can still be parsed: delta-rs accepts it, and looks for a shard that never existed."""
    table, commits = three_shards
    file = entry(table, 2)
    add = next(line for line in file.read_text().splitlines() if line.startswith('{"add"'))
    changed = add.replace("shard-", "shard+", 1)
    file.write_text(file.read_text().replace(add, changed))
    damaged = reopened(table)
    with pytest.warns(StoreDamageWarning, match=r"shard\+"):
        assert lengths(damaged, commits[1][0]) == {-1}
    found = verify(damaged)
    assert f"_delta_log/{2:020}.json" in [d.file for d in found]
    repaired = repair(damaged, found)
    assert not verify(repaired)
    assert [lengths(repaired, keys) for keys, _ in commits] == [{10}] * 3


def test_a_damaged_compaction_entry_keeps_every_row(three_shards):
    table, commits = three_shards
    compact(table)
    flip(entry(table, 4), 0)
    with pytest.warns(StoreDamageWarning, match=f"{4:020}"):
        damaged = reopened(table)
    assert [lengths(damaged, keys) for keys, _ in commits] == [{10}] * 3
    repaired = repair(damaged, verify(damaged))
    assert not verify(repaired)
    assert [lengths(repaired, keys) for keys, _ in commits] == [{10}] * 3


@pytest.fixture
def with_checkpoint(table):
    """A table of 101 commits of one row, and its checkpoint file."""
    for i in range(101):
        table.append(some_rows(i, 1)[1])
    [checkpoint] = (Path(table.uri) / "_delta_log").glob("*.checkpoint*.parquet")
    return table, checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("how", ["footer", "gone", "pointer"])
def test_a_damaged_checkpoint_is_served_from_the_entries_and_deleted_by_a_repair(with_checkpoint, how):
    table, checkpoint = with_checkpoint
    if how == "footer":
        flip(checkpoint, -6)
    elif how == "gone":
        checkpoint.unlink()
    else:
        flip(checkpoint.parent / "_last_checkpoint", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreDamageWarning)
        damaged = reopened(table)
        assert len(damaged.snapshot()) == 101
        found = verify(damaged)
    assert found
    repaired = repair(damaged, found)
    assert not verify(repaired)
    assert len(repaired.snapshot()) == 101
    assert repaired.append(some_rows(500, 1)[1]).written == 1


def test_a_checkpoint_that_lacks_a_shard_is_noticed_before_anything_is_deleted(with_checkpoint):
    """The checkpoint can be read, but differs from the entries of the log; delta-rs uses the checkpoint."""
    table, checkpoint = with_checkpoint
    actions = pq.read_table(checkpoint)
    added = [i for i, action in enumerate(actions["add"].to_pylist()) if action]
    pq.write_table(actions.take(pa.array([i for i in range(len(actions)) if i != added[0]])), checkpoint)
    damaged = reopened(table)
    assert len(damaged.snapshot()) == 100
    with pytest.raises(DamagedStoreError, match="does not match the log's entries"):
        vacuum(damaged, 0, alone=True)
    found = verify(damaged)
    assert any(damage.file.endswith(checkpoint.name) for damage in found)
    repaired = repair(damaged, found)
    assert len(repaired.snapshot()) == 101
    assert not verify(repaired)


def test_vacuum_spares_what_a_repair_can_bring_back(three_shards):
    """If a path in the log is changed, an undamaged shard looks unused."""
    table, commits = three_shards
    file = entry(table, 2)
    add = next(line for line in file.read_text().splitlines() if line.startswith('{"add"'))
    file.write_text(file.read_text().replace(add, add.replace("shard-", "shard+", 1)))
    damaged = reopened(table)
    with pytest.raises(DamagedStoreError, match=r"verify .*--repair"):
        vacuum(damaged, 0, alone=True)
    repaired = repair(damaged, verify(damaged))
    assert [lengths(repaired, keys) for keys, _ in commits] == [{10}] * 3


def test_maintenance_on_a_damaged_log_is_refused_before_anything_is_written(three_shards):
    table, _ = three_shards
    flip(entry(table, 2), 0)
    with pytest.warns(StoreDamageWarning):
        damaged = reopened(table)
    before = sorted(Path(table.uri).rglob("*"))
    for act in (compact, vacuum):
        with pytest.raises(DamagedStoreError, match=r"verify .*--repair"):
            act(damaged)
    assert sorted(Path(table.uri).rglob("*")) == before


def test_a_repair_does_not_bless_a_shard_that_was_altered(three_shards):
    """The test changes both the log entry and one byte of its shard that no page checksum covers."""
    table, commits = three_shards
    _, shard = commits[1]
    footer = shard.read_bytes().rindex(b"parquet-cpp")
    flip(shard, footer)
    text = entry(table, 2).read_text()
    flip(entry(table, 2), text.index('"add"') + 8)
    with pytest.warns(StoreDamageWarning):
        damaged = reopened(table)
    repaired = repair(damaged, verify(damaged))
    assert [lengths(repaired, keys) for keys, _ in commits] == [{10}, {-1}, {10}]


def test_a_setting_that_was_altered_is_damage_and_mended(three_shards):
    table, commits = three_shards
    first = entry(table, 0)
    first.write_text(first.read_text().replace('"reflogp.format":"1"', '"reflogp.format":"q"'))
    with pytest.warns(StoreDamageWarning, match=f"{0:020}"):
        damaged = reopened(table)
    repaired = repair(damaged, verify(damaged))
    assert [lengths(repaired, keys) for keys, _ in commits] == [{10}] * 3
    assert not verify(reopened(table))


def test_a_log_that_is_gone_is_not_a_new_store(three_shards, tmp_path):
    table, _ = three_shards
    shutil.rmtree(Path(table.uri) / "_delta_log")
    before = sorted(path.name for path in Path(table.uri).rglob("*"))
    store = Store(tmp_path / "store")
    for opening in (lambda: store.table(REFERENCE.reference_id), lambda: store.create_table(REFERENCE)):
        with pytest.raises(DamagedStoreError, match="part of the folder was deleted"):
            opening()
    assert sorted(path.name for path in Path(table.uri).rglob("*")) == before


def test_a_reference_file_that_is_gone(three_shards, tmp_path):
    store = Store(tmp_path / "store")
    (tmp_path / "store" / REFERENCE.reference_id / "reference.json").unlink()
    with pytest.raises(UsageError, match=r"reference\.json"):
        store.references()
    assert lengths(store.create_table(REFERENCE), some_rows(0, 3000)[0]) == {10}, "scoring writes it again"


def test_what_is_no_store(tmp_path):
    from deltalake import write_deltalake

    other = tmp_path / "other"
    write_deltalake(other, pa.table({"x": [1]}))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("")
    shutil.copytree(other, tmp_path / "inside" / REFERENCE.reference_id / "logprobs")
    (tmp_path / "inside" / REFERENCE.reference_id / "reference.json").write_text(REFERENCE.to_json())
    before = sorted(tmp_path.rglob("*"))
    for name, says in {"other": "is a Delta table", "file": "is a file", "inside": "reflogp did not create"}.items():
        store = Store(tmp_path / name)
        with pytest.raises(UsageError, match=says):
            store.create_table(REFERENCE)
        with pytest.raises(UsageError, match=says):
            store.table(REFERENCE.reference_id)
    with pytest.raises(UsageError, match="is not a reflogp store"):
        Store(tmp_path / "folder").references()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
def test_no_permission(three_shards, tmp_path):
    """A user who may read but not write can join; the error of a write is one sentence."""
    program = f"""
        from reflogp.store import Store, StoreError
        from tests.store.rows import REFERENCE, some_rows
        store = Store({str(tmp_path / "store")!r})
        assert len(store.table(REFERENCE.reference_id).snapshot()) == 3000
        table = store.table(REFERENCE.reference_id)
        for act in (lambda: store.create_table(REFERENCE), lambda: table.append(some_rows(9000, 5)[1])):
            try:
                act()
            except StoreError as error:
                assert "cannot be written" in str(error) and "\\n" not in str(error), error
            else:
                raise AssertionError("written")
    """
    folders = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    for path in folders:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in [tmp_path, *tmp_path.parents][:4]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    command = [sys.executable, "-c", textwrap.dedent(program)]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for path in folders:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == 0, done.stderr
    assert len(Store(tmp_path / "store").table(REFERENCE.reference_id).snapshot()) == 3000


def test_a_disk_that_fills(tmp_path):
    """On a real file system of 3 MB, the append that does not fit fails with one sentence.

    Committed rows stay, and with more space, writes succeed again.
    """
    program = f"""
        import json, shutil, subprocess
        from pathlib import Path
        from reflogp.store import Store, StoreUnavailableError, vacuum, verify
        from tests.store.rows import REFERENCE, some_rows
        disk = Path({str(tmp_path / "disk")!r})
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
        table = Store(disk / "store").create_table(REFERENCE)
        written = 0
        try:
            while True:
                table.append(some_rows(2000 * written, 2000, values=100, completion=100, seed=written)[1])
                written += 1
        except StoreUnavailableError as error:
            message = str(error)
        assert "\\n" not in message, message
        table = Store(disk / "store").table(REFERENCE.reference_id)
        keys = some_rows(0, 2000 * written, completion=100)[0]
        assert written >= 2 and (table.snapshot().stored_lengths(keys) == 100).all()
        assert not verify(table)
        subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
        assert table.append(some_rows(2000 * written, 2000, values=100, completion=100)[1]).written == 2000
        assert len(list(Path(table.uri).glob("shard-*"))) == written + 1, "the shard that did not fit is not left behind"
        print(json.dumps(message))
    """
    enter = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a file system")
    command = [*enter, sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left" in json.loads(done.stdout)
