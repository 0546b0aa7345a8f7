"""Files, folders, splits and tokenizers of which little can be said by a matrix (see test_dataset_shapes.py)."""

import copy
import json
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import dataset_notes
from reflogp.scoring.data.tokenize import tokenize_dataset
from reflogp.scoring.errors import DatasetError, TokenizerError
from tests.conftest import write_rows
from tests.scoring.hostile_rows import pair

ROWS = [{"prompt": f"p{i}", "chosen": "yes, 100%", "rejected": 'no "never"\nat all'} for i in range(5)]
CHAT = [{"role": "user", "content": "Hi"}]


def columns_of(source, *arguments, **options) -> list:
    return [row.columns for row in RowSource(str(source), *arguments, **options)]


def test_one_other_split_is_not_taken_for_the_one_that_is_wanted_unless_it_was_fetched(tmp_path):
    write_rows(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(DatasetError, match="no split 'train'; choose from test"):
        RowSource(str(tmp_path), "train", confined=True)
    assert columns_of(tmp_path, "train", confined=True, is_fetched=True) == ROWS


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"prompt": json.dumps(CHAT), "chosen": "a", "rejected": "b"}, "", "messages as text in prompt"),
        ({"prompt": str(CHAT), "chosen": "a", "rejected": "b"}, "", "ast.literal_eval"),
        ({"prompt": "Hi", "chosen": "a", "rejected": ""}, "", "rejected is empty in some rows"),
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


def test_prompts_in_a_column_of_another_name_are_noted_though_some_completions_share_a_start():
    rows = [{"question": "Hi?", "chosen": f"{start}a", "rejected": f"{start}b"} for start in ("It is ", "", "It is ")]
    [note] = dataset_notes(rows, None)
    assert "no column named prompt" in note and "if question has the prompts, rename it" in note


def test_numbers_in_a_csv_file_are_text_if_a_user_of_datasets_says_so(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,chosen,rejected,id\n007, 4,1e3,08\nNA,1.50,true,09\n")
    features = datasets.Features({name: datasets.Value("string") for name in ("prompt", "chosen", "rejected")})
    features["id"] = datasets.Value("int64")
    found = columns_of(file)
    assert found == datasets.load_dataset("csv", data_files=str(file), split="train", features=features).to_list()
    assert found[0] == {"prompt": "007", "chosen": " 4", "rejected": "1e3", "id": 8}


@pytest.mark.parametrize("suffix", ["zst", "lz4"])
def test_compressions_that_datasets_reads_only_with_another_package(tmp_path, suffix):
    file = tmp_path / f"a.jsonl.{suffix}"
    with pa.output_stream(str(file), compression="detect") as sink:
        sink.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert columns_of(file) == ROWS


def test_tabs_and_a_file_whose_name_would_be_a_pattern(tmp_path):
    write_rows(tmp_path / "a[1]*.jsonl", ROWS[:1])
    write_rows(tmp_path / "a1.jsonl", ROWS[1:2])
    assert columns_of(tmp_path / "a[1]*.jsonl") == ROWS[:1]
    (tmp_path / "a.tsv").write_text("prompt\tchosen\trejected\nx, y\ta\tb\n")
    assert columns_of(tmp_path / "a.tsv") == [{"prompt": "x, y", "chosen": "a", "rejected": "b"}]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.txt", "unknown file type"),
        ("someone/some-dataset", "is not a local file or folder, and cannot be loaded from the hub"),
    ],
)
def test_what_is_not_there_or_is_no_dataset_says_so(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(DatasetError, match=says):
        list(RowSource(name))


def test_no_cache_folder_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nowhere")
    write_rows(tmp_path / "a.jsonl", ROWS)
    assert columns_of(tmp_path / "a.jsonl") == columns_of(tmp_path) == ROWS


# Tokenizers


def tokenized(folder, rows, tokenizer):
    [window] = tokenize_dataset(RowSource(str(write_rows(folder / "rows.jsonl", rows))), tokenizer)
    return window.table.to_pylist(), window.problems


def test_a_tokenizer_needs_no_pad_and_for_conversations_no_eos_but_a_template(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    assert tokenized(tmp_path, ROWS, bare) == tokenized(tmp_path, ROWS, tokenizer)
    bare.eos_token = None
    bare.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    assert tokenized(tmp_path, [pair()], bare)[0]
    with pytest.raises(TokenizerError, match="EOS"):
        tokenized(tmp_path, ROWS, bare)
    bare.chat_template = None
    with pytest.raises(TokenizerError, match="chat template"):
        tokenized(tmp_path, [pair()], bare)


def test_a_template_that_refuses_a_row_is_that_rows_problem(tokenizer, tmp_path):
    strict = copy.deepcopy(tokenizer)
    refusal = "{% if m.content == 'x' %}{{ raise_exception('no such role') }}{% endif %}"
    strict.chat_template = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    rows, problems = tokenized(tmp_path, [pair(), pair("x"), pair()], strict)
    assert [row["row"] for row in rows] == [0, 2] and "no such role" in problems[1]
