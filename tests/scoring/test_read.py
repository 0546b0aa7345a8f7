import gzip
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.notes import dataset_notes
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import detect_format
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
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "b.ndjson").write_text('{"n": 2}\n')
    with gzip.open(tmp_path / "c.jsonl.GZ", "wt") as file:
        file.write('{"n": 3}\n')
    for name in ("a.jsonl.bak", "README.md", "_SUCCESS", ".d.jsonl", "e.parquet.gz"):
        (tmp_path / name).write_text("no row")
    assert [row.columns["n"] for row in RowSource(str(tmp_path))] == [1, 2, 3]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "b.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    array, lines = json.dumps(ROWS), "".join(json.dumps(row) + "\n" for row in ROWS)
    text = {"a.csv": "prompt,chosen,rejected\n2 + 2 =, 4, five\n", "a.json": array, "a.jsonl": lines, "b.json": lines}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    expected = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"}] if name == "a.csv" else ROWS
    assert columns_of(tmp_path / name) == expected


def test_the_files_of_a_split_are_those_of_datasets(tmp_path):
    import datasets

    by_name = tmp_path / "by_name"
    by_name.mkdir()
    for name, text in (("train-00000-of-00002", "one"), ("train-00001-of-00002", "two"), ("test-00000-of-00001", "three")):
        pq.write_table(pa.table({"prompt": [text]}), by_name / f"{name}.parquet")
    named = tmp_path / "named"
    (named / "parts").mkdir(parents=True)
    (named / "parts" / "a.jsonl").write_text('{"prompt": "four"}\n')
    (named / "parts" / "b.jsonl").write_text('{"prompt": "five"}\n')
    splits = "  - split: train\n    path: parts/a.jsonl\n  - split: validation\n    path: parts/b.jsonl\n"
    (named / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    for folder, split in ((by_name, "train"), (by_name, "test"), (named, "train"), (named, "validation")):
        expected = datasets.load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "cache")).to_list()
        assert [row.columns for row in RowSource(str(folder), split)] == expected
    with pytest.raises(DatasetError, match="no split 'nosuch'; choose from train, test"):
        RowSource(str(by_name), "nosuch")


def test_a_local_folder_with_one_other_split_is_not_taken_for_the_split(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DatasetError, match="no split 'train'; choose from test"):
        RowSource(str(tmp_path), "train", bounds=ReadBounds(1 << 20, 1 << 20, 1 << 20))
    fetched = RowSource(str(tmp_path), "train", bounds=ReadBounds(1 << 20, 1 << 20, 1 << 20), is_fetched=True)
    assert [row.columns for row in fetched] == [{"prompt": "a"}]


def test_files_of_a_folder_may_have_other_types_of_text(tmp_path):
    for number, kind in enumerate((pa.string(), pa.large_string())):
        pq.write_table(pa.table({"prompt": pa.array(["a"], kind)}), tmp_path / f"{number}.parquet")
    assert RowSource(str(tmp_path)).schema().names == ["prompt"]


@pytest.mark.parametrize(
    ("header", "says"),
    [("prompt;chosen;rejected", "delimited by ';'"), ("chosen,chosen", "several columns have the same name")],
)
def test_a_csv_header_that_cannot_be_meant_so(tmp_path, header, says):
    (tmp_path / "a.csv").write_text(f"{header}\na,b\n" if "," in header else f"{header}\na;b;c\n")
    with pytest.raises(DatasetError, match=says):
        for row in RowSource(str(tmp_path / "a.csv")):
            detect_format(row.columns)


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"prompt": json.dumps(CHAT), "chosen": "a", "rejected": "b"}, "", "messages as JSON text in prompt"),
        ({"instruction": "Hi", "chosen": "a", "rejected": "b"}, "", "but the file has instruction"),
        ({"instruction": "Hi", "prompt": "", "chosen": "a", "rejected": "b"}, "", "but the file has instruction"),
        ({"prompt": CHAT, "chosen": CHAT, "rejected": CHAT}, "{{ strftime_now('%d') }}", "prints the date"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "{{ strftime_now('%d') }}", None),
        ({"source": "web", "chosen": "same start, a", "rejected": "same start, b"}, "", None),
        ({"prompt": "[{not JSON", "chosen": "[1]", "rejected": '[{"a": 1}]'}, "", None),
    ],
)
def test_what_is_probably_not_meant_is_noted_once(row, template, says):
    notes = dataset_notes([row] * 30, SimpleNamespace(chat_template=template))
    assert (says is None and notes == ()) or (len(notes) == 1 and says in notes[0])


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
