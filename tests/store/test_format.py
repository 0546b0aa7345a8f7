"""Test docs/store-format.md: old stores are read, newer stores are refused, and other tools can read the table."""

import json
import shutil
from pathlib import Path

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from reflogp.store import Store, StoreFormatError
from reflogp.store.schema import FORMAT, SCHEMA, columns_table
from tests.store.rows import REFERENCE, some_rows

FIXTURE = Path(__file__).parent / "format-1"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "store-format.md"


def test_a_store_of_the_first_version_is_read_and_written(tmp_path):
    """reflogp 0.1.0 wrote it: appends, a longer row, a compaction, another append. It must never be made anew."""
    shutil.copytree(FIXTURE / "store", tmp_path / "store")
    store = Store(tmp_path / "store")
    expected = {bytes.fromhex(key): values for key, values in json.loads((FIXTURE / "expected.json").read_text()).items()}
    [reference] = store.references()
    table = store.create_table(reference)
    assert not table.verify()
    keys = pa.array(list(expected), pa.binary(16))
    assert [values.tolist() for values in table.snapshot().token_logps(keys)] == list(expected.values())
    assert (table.snapshot(1).stored_lengths(keys) > 0).sum() == 20
    assert table.append(some_rows(5_000, 7)[1]).written == 7
    table.compact()
    assert [values.tolist() for values in table.snapshot().token_logps(keys)] == list(expected.values())


def test_a_newer_format_is_refused_and_left_alone(table, tmp_path):
    """In the table's settings, and in the reference's file."""
    assert DeltaTable(table.uri).metadata().configuration["reflogp.format"] == str(FORMAT)
    store = Store(tmp_path / "store")
    opened = (lambda: store[REFERENCE.reference_id], lambda: store.create_table(REFERENCE), store.references)
    for file, before, after, opening in (
        (Path(table.uri) / "_delta_log" / f"{0:020}.json", '"reflogp.format":"1"', '"reflogp.format":"2"', opened[:2]),
        (Path(table.uri).with_name("reference.json"), '"format": 1', '"format": 2', opened),
    ):
        original = file.read_text()
        assert before in original
        file.write_text(original.replace(before, after))
        for attempt in opening:
            with pytest.raises(StoreFormatError, match=r"format 2.*upgrade reflogp"):
                attempt()
        assert file.read_text() == original.replace(before, after)
        file.write_text(original)


def test_row_groups_of_long_rows_have_about_1_mb(table):
    """A lookup reads whole row groups."""
    table.append(some_rows(0, 8, values=75_000, completion=75_000)[1])
    [shard] = table.shards()
    groups = pq.read_metadata(Path(table.uri) / shard.path)
    assert [groups.row_group(index).num_rows for index in range(groups.num_row_groups)] == [3, 3, 2]


def test_the_document_names_every_column_with_its_type():
    assert columns_table() in DOCUMENT.read_text()


def test_duckdb_polars_and_datasets_read_the_table(table, tmp_path):
    keys, rows = some_rows(0, 100)
    table.append(rows.slice(0, 60))
    table.append(rows.slice(60))
    sums = dict(zip(keys.to_pylist(), rows["logp_sum"].to_pylist(), strict=True))
    delta = DeltaTable(table.uri)
    logps = delta.to_pyarrow_dataset()  # which DuckDB finds by this name
    assert logps.schema.names == SCHEMA.names
    found = duckdb.sql("select key, logp_sum, len(token_logps) from logps where scored_len >= 5").fetchall()
    assert {key: (total, count) for key, total, count in found} == {key: (total, 5) for key, total in sums.items()}
    frame = polars.read_delta(table.uri)
    assert dict(zip(frame["key"], frame["logp_sum"], strict=True)) == sums
    assert frame["token_logps"].list.len().to_list() == [5] * 100
    loaded = datasets.load_dataset("parquet", data_files=delta.file_uris(), split="train", cache_dir=str(tmp_path))
    assert dict(zip(loaded["key"], loaded["logp_sum"], strict=True)) == sums
