"""Other tools rewrite the table's files: rows in any order, in any number of files and row groups, are valid, and no operation
loses any of them."""

import random
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake

from reflogp.store import Store, UsageError, import_folder, maintenance
from tests.store.rows import REFERENCE, some_rows

TABLES, SMALL_GROUPS = 12, WriterProperties(max_row_group_size=64, write_batch_size=64)


def optimized(uri: str, source: random.Random) -> None:
    DeltaTable(uri).optimize.compact(writer_properties=source.choice([SMALL_GROUPS, None]))


def z_ordered(uri: str, source: random.Random) -> None:
    columns = source.choice([["key"], ["logp_sum"], ["scored_len", "key"]])
    DeltaTable(uri).optimize.z_order(columns, writer_properties=source.choice([SMALL_GROUPS, None]))


def rewritten(uri: str, source: random.Random) -> None:
    """Rows in another order, split into several files, with Polars' types (large lists, views)."""
    frame = polars.read_delta(uri).sample(fraction=1.0, shuffle=True, seed=source.randrange(1000))
    rows = frame.to_arrow()
    write_deltalake(uri, rows, mode="overwrite", target_file_size=20_000, writer_properties=SMALL_GROUPS)


def left_alone(uri: str, source: random.Random) -> None:
    pass


def values_of(table) -> dict[bytes, list[float]]:
    """Return the longest row of each key, read by delta-rs and nothing of reflogp's."""
    found: dict[bytes, list[float]] = {}
    for row in DeltaTable(table.uri).to_pyarrow_table(columns=["key", "token_logps"]).to_pylist():
        if len(row["token_logps"]) > len(found.get(row["key"], [])):
            found[row["key"]] = row["token_logps"]
    return found


def looked_up(table, keys: list[bytes]) -> list[list[float]]:
    return [values.tolist() for values in table.snapshot().token_logps(pa.array(keys, pa.binary(16)))]


@pytest.mark.parametrize("seed", range(TABLES))
def test_no_operation_loses_a_row(tmp_path, monkeypatch, seed):
    source = random.Random(seed)
    table = Store(tmp_path / "store").create_table(REFERENCE)
    for batch in range(source.randrange(2, 12)):
        first, count = source.randrange(1500), source.randrange(1, 400)
        table.append(some_rows(first, count, values=source.randrange(1, 10), seed=batch)[1])
    opened_before = table.snapshot()
    opened_before.stored_lengths(some_rows(0, 1)[0])
    expected = values_of(table)
    for _ in range(4):
        source.choice([optimized, z_ordered, rewritten, left_alone])(table.uri, source)
        operation = source.choice(["compact", "only_small", "verify", "export", "append", "reopen", "vacuum"])
        if operation == "compact":
            monkeypatch.setattr(maintenance, "SHARD_BYTES", source.choice([5_000, 50_000, 1 << 27]))
            table.compact()
        elif operation == "only_small":
            table.compact(only_small=True)
        elif operation == "append":
            table.append(some_rows(source.randrange(1500), 200, values=10, seed=seed)[1])
            grown = values_of(table)
            assert all(grown[key][: len(values)] == values for key, values in expected.items())
            expected = grown
        elif operation == "export":
            table.export(str(tmp_path / "shared"))
            other = Store(tmp_path / "other")
            import_folder(other, str(tmp_path / "shared"))
            assert values_of(other[REFERENCE]) == expected
            (tmp_path / "shared").rename(tmp_path / f"shared-{source.random()}")
            (tmp_path / "other").rename(tmp_path / f"other-{source.random()}")
        elif operation == "reopen":
            table = Store(tmp_path / "store")[REFERENCE]
        elif operation == "vacuum":
            table.vacuum(0, alone=True)
        assert table.verify() == []
        assert values_of(table) == expected
        assert looked_up(table, list(expected)) == list(expected.values())
        assert len(set(table.snapshot().stored_lengths(some_rows(5_000, 10)[0]))) == 1


def test_a_key_has_one_row_after_a_compaction(table):
    for seed, values in enumerate([2, 5, 9]):
        table.append(some_rows(0, 300, values=values, seed=seed)[1])
    z_ordered(table.uri, random.Random(0))
    assert table.totals()[1] == 900
    done = table.compact()
    assert (done.shards_after, done.rows, done.duplicates, table.totals()[:2]) == (1, 300, 600, (1, 300))
    assert table.compact().rows == 0, "a shard that is as it should be is not rewritten"


def test_rows_keep_their_order_so_that_a_join_reads_them_together(table):
    """Keys are digests: in key order, the rows of one part of a dataset would lie in every row group."""
    keys = []
    for batch in range(20):
        found, rows = some_rows(1000 * batch, 1000, values=10, seed=batch)
        keys.append(found)
        table.append(rows)
    table.compact()
    [shard] = table.shards()
    assert table.shard(shard.path).read(["key"])["key"].to_pylist() == pa.concat_arrays(keys).to_pylist()


def test_columns_that_the_table_does_not_have_are_refused(table):
    _, rows = some_rows(0, 10)
    wrong = {
        "scored_len is not the number": rows.set_column(3, rows.schema.field(3), pa.array(np.full(10, 9, np.int32))),
        "logp_sum is not the sum": rows.set_column(5, rows.schema.field(5), pa.array(np.full(10, 1e9))),
        "wrong names or types": rows.drop_columns(["provenance"]),
        "more token_logps than its completion": rows.set_column(2, rows.schema.field(2), pa.array(np.full(10, 4, np.int32))),
        "not 16 bytes": rows.set_column(0, rows.schema.field(0), pa.array([b"12345678"] * 10, pa.binary())),
    }
    for says, table_of_rows in wrong.items():
        with pytest.raises(UsageError, match=f"{says}.*nothing was stored"):
            table.append(table_of_rows)
    assert len(table.snapshot()) == 0
    assert not list(Path(table.uri).glob("*.parquet"))
