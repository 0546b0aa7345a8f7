import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError

ROWS = [{"prompt": f"p{i}", "chosen": "yes, 100%", "rejected": 'no "never"\nat all'} for i in range(5)]


def columns_of(source) -> list:
    return [row.columns for row in RowSource(str(source))]


def test_every_format_gives_the_same_rows(tmp_path):
    import datasets

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "c.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "c2.json").write_text(lines)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    with pa.OSFile(str(tmp_path / "e.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(ROWS).schema) as writer:
        writer.write(pa.Table.from_pylist(ROWS))
    with (
        pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.Table.from_pylist(ROWS).schema) as writer,
    ):
        writer.write(pa.Table.from_pylist(ROWS))
    datasets.Dataset.from_list(ROWS).to_csv(tmp_path / "g.csv")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "h")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "i")
    (tmp_path / "j").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "j" / "0.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), tmp_path / "j" / "1.parquet")
    names = ["a.jsonl", "b.jsonl.gz", "c.json", "c2.json", "d.parquet", "e.arrow", "f.arrow", "g.csv", "h", "i", "j"]
    for name in names:
        assert columns_of(tmp_path / name) == ROWS, name
        assert RowSource(str(tmp_path / name)).count() == 5, name
        assert set(RowSource(str(tmp_path / name)).schema().names) == set(ROWS[0]), name


def test_a_folder_is_read_by_its_files_suffixes(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"n": 1}\n')
    (tmp_path / "b.ndjson").write_text('{"n": 2}\n')
    with gzip.open(tmp_path / "c.jsonl.GZ", "wt") as file:
        file.write('{"n": 3}\n')
    for name in ("a.jsonl.bak", "README.md", "_SUCCESS", ".d.jsonl", "e.parquet.gz"):
        (tmp_path / name).write_text("no row")
    assert [row.columns["n"] for row in RowSource(str(tmp_path))] == [1, 2, 3]


def test_a_broken_line_is_named_and_the_others_are_kept(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n{broken\n\n[1]\n" + json.dumps(ROWS[1]) + "\n")
    rows = list(RowSource(str(file)))
    assert [row.columns for row in rows] == [ROWS[0], None, None, ROWS[1]]
    assert "not JSON" in rows[1].problem
    assert "list" in rows[2].problem
    assert [row.number for row in rows] == [0, 1, 2, 3]


def test_a_csv_line_with_too_few_cells_is_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,chosen,rejected\na,b,c\nd,e\nf,g,h\n")
    rows = list(RowSource(str(file)))
    assert [row.columns is None for row in rows] == [False, True, False]
    assert "2 columns" in rows[1].problem


def test_an_empty_csv_cell_is_null_as_it_is_to_datasets(tmp_path):
    import datasets

    file = tmp_path / "a.csv"
    file.write_text("prompt,chosen,rejected\na,,c\nd,e,f\n")
    assert columns_of(file) == datasets.load_dataset("csv", data_files=str(file), split="train").to_list()


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("none.jsonl", None, "no such file"),
        ("x.txt", b"hello", "unknown file type"),
        ("x.parquet", b"not parquet", "cannot be read as parquet"),
        ("x.arrow", b"not arrow at all", "cannot be read as arrow"),
        ("x.jsonl.gz", b"not gzip", "cannot be read as jsonl"),
        ("x.json", b"[1, 2", "not JSON"),
        ("x.csv", b"", "no header"),
        ("y.csv", b"a,b\n\xff\xfe,\x90", "cannot be read as csv"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=says):
        list(RowSource(str(tmp_path / name)))


def test_a_hub_name_without_a_network_says_so():
    with pytest.raises(DatasetError, match="is not a local file or folder, and cannot be loaded from the hub"):
        RowSource("someone/some-dataset")
