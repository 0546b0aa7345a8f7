"""Test damaged shards, damaged logs, folders that are no stores, and disks that are full or read-only."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from reflogp.store import DamagedStoreError, Store, StoreUnavailableError, UsageError
from tests.store.rows import REFERENCE, some_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def three_shards(table):
    """A table of three shards with 1,000 rows each, and their keys, in the order of their commits."""
    return table, [commit(table, 1000 * i) for i in range(3)]


def commit(table, first):
    """Append 1,000 rows, and return (keys, shard)."""
    before = {shard.path for shard in table.shards()}
    keys, rows = some_rows(first, 1000, values=10)
    table.append(rows)
    [shard] = {shard.path for shard in table.shards()} - before
    return keys, Path(table.uri) / shard


def damage(file: Path, how: str) -> None:
    if how == "gone":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        data[{"keys": 300, "values": len(data) // 2}[how]] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "cut", "keys", "values"])
def test_a_damaged_shard_is_an_error_until_it_is_dropped(three_shards, how):
    """Never fewer rows without a word; the error's command drops this shard only."""
    table, [(keys, _), (lost, shard), (others, _)] = three_shards
    damage(shard, how)
    reader = Store(Path(table.uri).parents[1])[REFERENCE]
    with pytest.raises(DamagedStoreError, match=f"{shard.name}.*reflogp store verify .* --repair"):
        reader.snapshot().token_logps(pa.concat_arrays([keys, lost, others]))
    if how != "values":
        with pytest.raises(DamagedStoreError):
            reader.append(some_rows(5000, 10)[1])
    [found] = reader.verify()
    assert (found.file, found.rows) == (shard.name, 1000)
    done = reader.drop(shards=[found.file])
    assert done.rows == 1000
    assert not reader.verify()
    lengths = reader.snapshot().stored_lengths(pa.concat_arrays([keys, lost, others]))
    assert lengths.tolist() == [10] * 1000 + [-1] * 1000 + [10] * 1000
    assert reader.append(some_rows(1000, 1000, values=10)[1]).written == 1000


@pytest.mark.parametrize("how", ["empty", "cut", "gone", "the whole log is gone"])
def test_a_damaged_log_is_an_error_for_readers_and_writers(three_shards, how, tmp_path):
    table, _ = three_shards
    log, store = Path(table.uri) / "_delta_log", Store(tmp_path / "store")
    whole = shutil.copytree(log, tmp_path / "copy")
    file = log / f"{2:020}.json"
    if how == "gone":
        file.unlink()
    elif how == "the whole log is gone":
        shutil.rmtree(log)
    else:
        file.write_bytes({"empty": b"", "cut": file.read_bytes()[: file.stat().st_size // 2]}[how])
    before = sorted(path.name for path in Path(table.uri).rglob("*"))
    for opening in (lambda: store[REFERENCE], lambda: store.create_table(REFERENCE)):
        with pytest.raises(DamagedStoreError, match=r"_delta_log.* or move the folder away and score again") as caught:
            opening()
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in Path(table.uri).rglob("*")) == before
    shutil.copytree(whole, log, dirs_exist_ok=True)
    assert len(store[REFERENCE].snapshot()) == 3000, "restored from a copy"


def test_an_entry_that_arrives_empty_is_noticed_by_who_has_the_table_open(three_shards, tmp_path):
    table, _ = three_shards
    Store(tmp_path / "store")[REFERENCE].append(some_rows(7000, 10)[1])
    (Path(table.uri) / "_delta_log" / f"{4:020}.json").write_bytes(b"")
    for use in (table.snapshot, lambda: table.append(some_rows(8000, 10)[1])):
        with pytest.raises(DamagedStoreError, match="is empty"):
            use()
            use()


def test_a_reference_file_that_is_gone_is_written_again(three_shards, tmp_path):
    store = Store(tmp_path / "store")
    (tmp_path / "store" / REFERENCE.reference_id / "reference.json").unlink()
    with pytest.raises(UsageError, match=r"reference\.json"):
        store.references()
    assert len(store.create_table(REFERENCE).snapshot()) == 3000
    assert store.references() == [REFERENCE]


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
            store[REFERENCE.reference_id]
    for place, says in {
        tmp_path / "folder": "is not a reflogp store",
        tmp_path / "nowhere": "there is no store",
        "s4://team/logps": "the scheme is not supported; use a folder, or an s3://, gs:// or az:// URI",
    }.items():
        with pytest.raises(UsageError, match=says):
            Store(place).references()
    with pytest.raises(StoreUnavailableError, match="cannot be"):
        Store(tmp_path / "file" / "store").create_table(REFERENCE)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills(tmp_path):
    """On a real file system of 3 MB, the append that does not fit fails with one sentence.

    Committed rows stay, and with more space, writes succeed again.
    """
    program = f"""
        import json, shutil, subprocess
        from pathlib import Path
        from reflogp.store import Store, StoreUnavailableError
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
        table = Store(disk / "store")[REFERENCE.reference_id]
        keys = some_rows(0, 2000 * written, completion=100)[0]
        assert written >= 2 and (table.snapshot().stored_lengths(keys) == 100).all()
        assert not table.verify()
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
