"""Test the reprs of the store's objects: one line or a few lines, which no name in the data can break."""

from reflogp.store import Reference, Store, sequence_keys
from reflogp.store.texts import counted, short_repr
from tests.store.rows import some_rows

REFERENCE = Reference("ab" * 16, "sft-model", "bfloat16", "float32", ("d1", "d2"), {"hidden_size": 64})


def test_a_store_and_its_tables_say_what_they_are(tmp_path):
    store = Store(tmp_path / "logps")
    table = store.create_table(REFERENCE)
    table.append(some_rows(0, 3)[1])
    snapshot = table.snapshot()
    assert repr(store) == f"Store({tmp_path}/logps)"
    assert repr(table) == f"LogprobTable(sft-model in bfloat16, reference {'ab' * 16}, {table.uri})"
    assert repr(snapshot) == f"Snapshot(1 of reference {'ab' * 16}: 3 rows in 1 shard)"
    assert repr(snapshot.find(sequence_keys([[1]], [[2]]))) == "Found(0 of 1 key)"


def test_a_repr_is_safe_to_print():
    assert short_repr("Job", "a\x1b[31m\nb", "", "https://user:secret@host/x") == (
        "Job(\n    a\\x1b[31m\\nb\n    https://host/x\n)"
    )
    assert len(short_repr("Job", "x" * 100_000)) < 600
    assert "hush" not in short_repr("Job", f"https://host/x?{'hush' * 1000} and more")
    assert (counted(1, "row"), counted(1_200, "row"), counted(0, "row")) == ("1 row", "1,200 rows", "0 rows")
