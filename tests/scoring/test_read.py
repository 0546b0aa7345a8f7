import gzip
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import dataset_notes
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
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"n": 3}\n')
    for name in ("a.jsonl.bak", "README.md", "_SUCCESS", ".d.jsonl", "e.parquet.gz"):
        (tmp_path / name).write_text("no row")
    assert [row.columns["n"] for row in RowSource(str(tmp_path))] == [1, 2, 3]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "b.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    array, lines = json.dumps(ROWS), "".join(json.dumps(row) + "\n" for row in ROWS)
    text = {"a.csv": "prompt,chosen,rejected\n2 + 2 =, 4, 007\n", "a.json": array, "a.jsonl": lines, "b.json": lines}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    expected = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 007"}] if name == "a.csv" else ROWS
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


def test_files_of_a_folder_may_have_other_types_of_text(tmp_path):
    for number, kind in enumerate((pa.string(), pa.large_string())):
        pq.write_table(pa.table({"prompt": pa.array(["a"], kind)}), tmp_path / f"{number}.parquet")
    assert RowSource(str(tmp_path)).schema().names == ["prompt"]


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


@pytest.mark.parametrize("cells", ["a,,c", "a,b", "a,NA,c", "a,null,nan"])
def test_csv_cells_that_are_null_to_datasets(tmp_path, cells):
    import datasets

    file = tmp_path / "a.csv"
    file.write_text(f"prompt,chosen,rejected\n{cells}\nd,e,f\n")
    found = columns_of(file)
    assert found == datasets.load_dataset("csv", data_files=str(file), split="train").to_list()
    assert None in found[0].values()


def test_numbers_in_a_csv_file_are_text_if_a_user_of_datasets_says_so(tmp_path):
    import datasets

    file = tmp_path / "a.csv"
    file.write_text("prompt,chosen,rejected,id\n007, 4,1e3,08\nNA,1.50,true,09\n")
    features = datasets.Features({name: datasets.Value("string") for name in ("prompt", "chosen", "rejected")})
    features["id"] = datasets.Value("int64")
    found = columns_of(file)
    assert found == datasets.load_dataset("csv", data_files=str(file), split="train", features=features).to_list()
    assert found[0] == {"prompt": "007", "chosen": " 4", "rejected": "1e3", "id": 8}


def test_a_local_folder_with_one_other_split_is_not_taken_for_the_split(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DatasetError, match="no split 'train'; choose from test"):
        RowSource(str(tmp_path), "train", confined=True)
    fetched = RowSource(str(tmp_path), "train", confined=True, is_fetched=True)
    assert [row.columns for row in fetched] == [{"prompt": "a"}]


@pytest.mark.parametrize("suffix", ["zst", "lz4"])
def test_compressions_that_datasets_reads_only_with_another_package(tmp_path, suffix):
    file = tmp_path / f"a.jsonl.{suffix}"
    with pa.output_stream(str(file), compression="detect") as sink:
        sink.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert columns_of(file) == ROWS


def test_a_file_whose_name_would_be_a_pattern(tmp_path):
    (tmp_path / "a[1]*.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "a1.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    assert columns_of(tmp_path / "a[1]*.jsonl") == ROWS[:1]


def test_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("prompt\tchosen\tx, y\tb\n".replace("x, y", "rejected") + "x, y\ta\tb\tc\n")
    assert columns_of(tmp_path / "a.tsv") == [{"prompt": "x, y", "chosen": "a", "rejected": "b", "b": "c"}]


def test_the_rows_of_a_json_array_are_not_counted_while_they_are_read(tmp_path):
    for name, text in (("a.json", " " + json.dumps(ROWS)), ("b.json", json.dumps(ROWS[0])), ("c.jsonl", json.dumps(ROWS))):
        (tmp_path / name).write_text(text)
        assert RowSource(str(tmp_path / name)).is_json_array() == (name != "b.json")
        assert RowSource(str(tmp_path / name)).count() == (1 if name == "b.json" else 5)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("none.jsonl", None, "no such file"),
        ("x.txt", b"hello", "unknown file type"),
        ("x.parquet", b"not parquet", "cannot be read as parquet"),
        ("x.arrow", b"not arrow at all", "cannot be read as arrow"),
        ("x.jsonl.gz", b"not gzip", "cannot be read as json"),
        ("x.json", b"[1, 2", "not JSON"),
        ("x.csv", b"", "No columns to parse"),
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


def test_no_cache_folder_is_needed(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nowhere")
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert columns_of(tmp_path / "a.jsonl") == columns_of(tmp_path) == [ROWS[0]]
