"""Keys of datasets of many shapes: read by `datasets` and prepared by TRL, and read by reflogp.

The chat template renders everything in a message, so that a key that is null or missing, another order of keys, or 1 instead of
1.0 changes the tokens.
"""

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.read import RowSource, table_of_rows
from reflogp.scoring.data.tokenize import tokenize_dataset
from reflogp.store import ReflogpError, UsageError, sequence_keys
from tests.conftest import write_rows

TELLING = (
    "{{ tools | tojson }}{{ mode | default('no mode') | tojson }}{{ budget | default('no budget') | tojson }}\n"
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '{' }}{% endif %}"
)


@pytest.fixture(scope="module")
def telling(tokenizer):
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = TELLING
    return other


def keys(rows) -> list[bytes]:
    """The keys of the completions, row by row: chosen, then rejected."""
    names = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in rows.column_names]
    columns = [sequence_keys(rows["prompt_ids"][:], rows[name][:]).to_pylist() for name in names]
    return [key for row in zip(*columns, strict=True) for key in row]


def keys_of_trl(rows, tokenizer, folder, trainer=DPOTrainer) -> list[bytes]:
    config = DPOConfig if trainer is DPOTrainer else KTOConfig
    args = config(output_dir=str(folder), max_length=None, bf16=False, report_to=[])
    trainer_parts = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    prepared = trainer._prepare_dataset(trainer_parts, rows, tokenizer, args, "eval")
    if isinstance(prepared, datasets.IterableDataset):
        prepared = datasets.Dataset.from_list(list(prepared))
    return keys(prepared)


def keys_of_reflogp(data, tokenizer, split="train", form=None) -> tuple[list[bytes], dict[int, str]]:
    source = RowSource(str(data), split) if not isinstance(data, DATASETS) else open_dataset(data)
    windows = list(tokenize_dataset(source, tokenizer, form))
    problems = {row: text for window in windows for row, text in window.problems.items()}
    return [key for window in windows for key in keys(window.table)], problems


DATASETS = (datasets.Dataset, datasets.IterableDataset, pandas.DataFrame, polars.DataFrame, pa.Table, list)


def user(text: Any, **more: Any) -> dict:
    return {"role": "user", "content": text, **more}


def assistant(text: Any, **more: Any) -> dict:
    return {"role": "assistant", "content": text, **more}


def pair(prompt: Any = None, chosen: Any = None, rejected: Any = None, **more: Any) -> dict:
    return {
        "prompt": [user("Hi")] if prompt is None else prompt,
        "chosen": [assistant("a")] if chosen is None else chosen,
        "rejected": [assistant("b")] if rejected is None else rejected,
        **more,
    }


def whole(prompt: list, chosen: str, rejected: str, **more: Any) -> dict:
    return {"chosen": [*prompt, assistant(chosen)], "rejected": [*prompt, assistant(rejected)], **more}


PLAIN = [{"prompt": f"{n} + 2 =", "chosen": f" {n + 2}", "rejected": f" {n + 3}, no"} for n in range(5)]
CHATS = [pair([user(f"What is {n} + 2?")], [assistant(f"{n + 2}")], [assistant(f"{n + 3}")]) for n in range(5)]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
SAY = {"type": "function", "function": {"name": "say", "description": "Speak", "parameters": {"text": {"type": "string"}}}}


def call(name: str, **arguments: Any) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


#: The rows of a JSON Lines file.
ROWS: dict[str, list[dict]] = {
    "plain": PLAIN,
    "plain, implicit prompt": [{"chosen": "Q: 1? A: one", "rejected": "Q: 1? A: two"}, {"chosen": "x ", "rejected": "y "}],
    "plain, HH": [
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi\n\nAssistant: Yes. No."},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:  b"},
    ],
    "plain, empty prompt": [{"prompt": "", "chosen": "a b", "rejected": "c"}, *PLAIN],
    "plain, empty completion": [{"prompt": "a", "chosen": "b", "rejected": ""}, *PLAIN],
    "plain, EOS is there": [{"prompt": "a", "chosen": "b<|eos|>", "rejected": "c"}],
    "plain, unicode": [
        {
            "prompt": "国会 \u2028 \u0085 \x0b \x1c é e\u0301",
            "chosen": "👩‍👩‍👧 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
            "rejected": "\ufeffא\u0000b",
        }
    ],
    "plain, dates and other text": [{"prompt": "When?", "chosen": "2024-01-02", "rejected": "no"}, *PLAIN],
    "plain, orca": [
        {"system": "Be brief.", "prompt": "Hi", "chosen": "a", "rejected": "b", "source": ["x", "y"], "score": 4.5},
        {"system": "", "prompt": "Ho", "chosen": "c", "rejected": "d", "source": [], "score": None},
    ],
    "plain, numbers in other columns": [{**row, "id": n, "score": n / 2, "ok": n > 1} for n, row in enumerate(PLAIN)],
    "conversational": CHATS,
    "conversational, implicit prompt": [
        whole([user("Hi"), assistant("Ho"), user("?")], "a", "b"),
        whole([user("x")], "c", "d"),
    ],
    "conversational, ultrafeedback": [
        whole([user("Hi")], "a", "b", prompt_id="0", messages=[user("Hi"), assistant("a")], score_chosen=8.5, score_rejected=7),
        whole([user("Ho")], "c", "d", prompt_id="1", messages=[user("Ho"), assistant("c")], score_chosen=8, score_rejected=7.0),
    ],
    "conversational, system message": [pair([{"role": "system", "content": "Be brief."}, user("Hi")]), pair()],
    "conversational, several turns": [
        pair([user("a"), assistant("b"), user("c")]),
        pair(chosen=[assistant("a"), user("b"), assistant("c")]),
    ],
    "conversational, prompt ends in an assistant's turn": [pair([user("a"), assistant("b")]), pair([user("c"), assistant("")])],
    "conversational, nectar": [
        pair(
            prompt_id=1,
            answers=[{"answer": "a", "model": "m", "rank": 1.0}, {"answer": "b", "model": "n", "rank": 2.0}],
            turns=1,
        )
    ],
    "key in all messages": [pair([user("Hi", name="Ann")], [assistant("a", name="Bob")], [assistant("b", name="Bob")])],
    "key in some messages": [pair([user("Hi", name="Ann"), assistant("Ho"), user("x")]), pair()],
    "key in the messages of some rows": [pair(), pair([user("Hi", name="Ann")])],
    "key in some messages, implicit prompt": [
        whole([user("Hi", name="Ann"), assistant("Ho"), user("x")], "a", "b"),
        whole([user("y")], "c", "d"),
    ],
    "key that is null": [pair([user("Hi", name=None)]), pair([user("Hi", name="Ann")])],
    "key that is always null": [pair([user("Hi", name=None)]), pair([user("Ho", name=None)])],
    "keys in another order": [pair(), pair([{"content": "Hi", "role": "user"}])],
    "null content": [pair([user("2 + 3?"), call("add", a=2, b=3), {"role": "tool", "content": "5"}]), pair()],
    "tool calls with other arguments": [
        pair([user("Hi"), call("add", a=2, b=3), {"role": "tool", "content": "5"}]),
        pair([user("Hi"), call("say", text="x"), {"role": "tool", "content": "x"}]),
    ],
    "content in parts": [pair([user([{"type": "text", "text": "Hi"}])])],
    "content in parts in some rows": [pair([user([{"type": "text", "text": "Hi"}])]), pair()],
    "message keys that are numbers": [pair([user("Hi", weight=1)]), pair([user("Ho", weight=0.5)])],
    "message keys that are dates": [pair([user("Hi", at="2024-01-02")]), pair([user("Ho", at="2024-01-03")])],
    "contents that are dates": [pair([user("2024-01-02")], [assistant("2024-01-03")], [assistant("2024-01-04")])],
    "contents that are numbers as text": [pair([user("007")], [assistant("1e5")], [assistant("true")])],
    "tools": [pair(tools=[ADD]), pair(tools=[ADD, ADD])],
    "tools that differ": [pair(tools=[ADD]), pair(tools=[ADD, SAY]), pair(tools=[SAY])],
    "tools that differ in the order of keys": [pair(tools=[{"name": "a", "x": 1}]), pair(tools=[{"x": 1, "name": "a"}])],
    "tools with whole and other numbers": [pair(tools=[{"name": "a", "max": 1}]), pair(tools=[{"name": "b", "max": 0.5}])],
    "tools with mixed types": [pair(tools=[{"name": "a", "enum": [1, "b"]}]), pair(tools=[{"name": "b", "enum": ["c"]}])],
    "tools as text": [pair(tools=json.dumps([ADD])), pair(tools=json.dumps([ADD, SAY]))],
    "tools in some rows": [pair(tools=[ADD]), pair()],
    "tools in later rows": [pair(), pair(tools=[ADD])],
    "tools null in some rows": [pair(tools=[ADD]), pair(tools=None)],
    "tools empty in some rows": [pair(tools=[]), pair(tools=[ADD])],
    "kwargs": [pair(chat_template_kwargs={"mode": "fast", "budget": n}) for n in range(2)],
    "kwargs that differ": [pair(chat_template_kwargs={"mode": "fast"}), pair(chat_template_kwargs={"budget": 2})],
    "kwargs with whole and other numbers": [
        pair(chat_template_kwargs={"budget": 1}),
        pair(chat_template_kwargs={"budget": 0.5}),
    ],
    "kwargs that are null": [
        pair(chat_template_kwargs={"mode": None, "budget": 1}),
        pair(chat_template_kwargs={"mode": "x", "budget": 2}),
    ],
    "other columns of many types": [pair(meta={"a": 1}), pair(meta={"b": [1, {"c": None}]}), pair(meta=None)],
    "kto, plain": [{"prompt": "a", "completion": " b", "label": True}, {"prompt": "c", "completion": " d", "label": False}],
    "kto, conversational": [
        {"prompt": [user("Hi")], "completion": [assistant("a")], "label": True},
        {"prompt": [user("Hi", name="Ann")], "completion": [assistant("b")], "label": False},
    ],
    "kto, labels as numbers": [
        {"prompt": "a", "completion": " b", "label": 1},
        {"prompt": "c", "completion": " d", "label": 0},
    ],
}


def loaded(kind: str, file: Any) -> datasets.Dataset:
    return datasets.load_dataset(kind, data_files=str(file), split="train")


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_json_lines(name, telling, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS[name])
    trainer = KTOTrainer if "completion" in ROWS[name][0] else DPOTrainer
    expected = keys_of_trl(loaded("json", file), telling, tmp_path, trainer)
    assert keys_of_reflogp(file, telling) == (expected, {})


#: For each shape of a file or folder, the function that writes it, and how a user of TRL loads it.
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], datasets.Dataset]]] = {}
WORDS = [{"prompt": f"{n} + 2 =", "chosen": f" is {n + 2}", "rejected": f" is {n + 3}, no"} for n in range(5)]
MIXED = [ROWS["key in some messages"][0], ROWS["tool calls with other arguments"][0], *CHATS]


def lines(rows: list[dict], end: str = "\n", **options: Any) -> str:
    return "".join(json.dumps(row, **options) + end for row in rows)


def shape(name: str, kind: str | None = None) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Register a function that writes a file (of this kind) or a folder, and returns its path."""

    def register(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def load(path: Path) -> datasets.Dataset:
            if kind == "saved":
                found = datasets.load_from_disk(str(path))
                return found["train"] if isinstance(found, datasets.DatasetDict) else found
            if kind is None:
                return datasets.load_dataset(str(path), split="train")
            return datasets.load_dataset(kind, data_files=str(path), split="train")

        FILES[name] = (write, load)
        return write

    return register


def text_file(name: str, kind: str | None, file: str, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text

    @shape(name, kind)
    def write(folder: Path) -> Path:
        (folder / file).write_bytes(data)
        return folder / file


def csv_text(rows: list[dict], **options: Any) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


text_file("JSON Lines, BOM", "json", "a.jsonl", lines(MIXED).encode("utf-8-sig"))
text_file("JSON Lines, CRLF", "json", "a.jsonl", lines(MIXED, "\r\n"))
text_file("JSON Lines, blank lines", "json", "a.jsonl", "\n" + lines(MIXED, "\n \n\n"))
text_file("JSON Lines, no last line end", "json", "a.jsonl", lines(MIXED).rstrip())
text_file("JSON Lines, escapes", "json", "a.jsonl", lines([pair("é 👩 \u2028", "ü", "日本")]))
text_file("JSON Lines, no escapes", "json", "a.jsonl", lines([pair("é 👩 \u2028\u0085", "ü", "日本")], ensure_ascii=False))
text_file("JSON Lines named JSON", "json", "a.json", lines(MIXED))
text_file("JSON Lines named ndjson", "json", "a.ndjson", lines(MIXED))
text_file("JSON Lines, gzip", "json", "a.jsonl.gz", gzip.compress(lines(MIXED).encode()))
text_file("JSON Lines, bzip2", "json", "a.jsonl.bz2", bz2.compress(lines(MIXED).encode()))
text_file("JSON array", "json", "a.json", json.dumps(MIXED))
text_file("JSON array, indented", "json", "a.json", json.dumps(MIXED, indent=2))
text_file("JSON array, BOM", "json", "a.json", json.dumps(MIXED).encode("utf-8-sig"))
text_file("JSON array named JSON Lines", "json", "a.jsonl", json.dumps(PLAIN))
text_file("JSON array, gzip", "json", "a.json.gz", gzip.compress(json.dumps(MIXED).encode()))
text_file("JSON array, tools with numbers", "json", "a.json", json.dumps(ROWS["tools with whole and other numbers"]))
text_file("CSV", "csv", "a.csv", csv_text(WORDS))
text_file("CSV, BOM", "csv", "a.csv", csv_text(WORDS).encode("utf-8-sig"))
text_file("CSV, CRLF", "csv", "a.csv", csv_text(WORDS, lineterminator="\r\n"))
text_file("CSV, quoted line ends", "csv", "a.csv", csv_text([pair('a\n"b"', "c\r\nd", " e ")]))
text_file("CSV, blank lines", "csv", "a.csv", csv_text(WORDS, lineterminator="\n\n"))
text_file("CSV, numbers beside text", "csv", "a.csv", csv_text([pair("007", "1.50", "x"), pair("a", "b", "1e3")]))
text_file("CSV, index column of pandas", "csv", "a.csv", pandas.DataFrame(WORDS).to_csv())
text_file(
    "CSV, other columns", "csv", "a.csv", csv_text([{**row, "id": f"00{n}", "score": n or ""} for n, row in enumerate(WORDS)])
)
text_file(
    "CSV, two columns of one name", "csv", "a.csv", csv_text(WORDS).replace("rejected", "rejected,chosen").replace("no", "no,x")
)
text_file("CSV, gzip", "csv", "a.csv.gz", gzip.compress(csv_text(WORDS).encode()))
text_file("CSV, KTO", "csv", "a.csv", csv_text([{**row, "label": row["label"]} for row in ROWS["kto, plain"]]))


@shape("TSV in a folder")
def _(folder: Path) -> Path:
    (folder / "a.tsv").write_text(csv_text(WORDS, delimiter="\t"))
    return folder


def table_file(name: str, table: pa.Table, form: str = "parquet", **options: Any) -> None:
    @shape(name, form)
    def write(folder: Path) -> Path:
        if form == "parquet":
            pq.write_table(table, folder / "a.parquet", **options)
            return folder / "a.parquet"
        with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, options["new"](sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        return folder / "a.arrow"


MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string()), ("name", pa.string())]))
LARGE = pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))


def typed(kind: pa.DataType, rows: list[dict]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name in rows[0]})


table_file("Parquet", pa.Table.from_pylist(MIXED))
table_file("Parquet, row groups", pa.Table.from_pylist(CHATS), row_group_size=2)
table_file("Parquet, large strings", typed(pa.large_string(), PLAIN))
table_file("Parquet, string views", typed(pa.string_view(), PLAIN))
table_file("Parquet, dictionaries", typed(pa.dictionary(pa.int32(), pa.string()), PLAIN))
table_file("Parquet, order of fields and nulls", typed(MESSAGES, CHATS))
table_file("Parquet, large lists", typed(LARGE, CHATS))
table_file("Parquet, pandas index", pa.Table.from_pandas(pandas.DataFrame(PLAIN, index=["a", "b", "c", "d", "e"])))
table_file("Parquet of polars", polars.DataFrame(CHATS).to_arrow())
table_file("Parquet, empty lists", pa.Table.from_pylist([{**CHATS[0], "tools": []}]))
table_file("Arrow file", pa.Table.from_pylist(MIXED), "arrow", new=pa.ipc.new_file)
table_file("Arrow stream", pa.Table.from_pylist(MIXED), "arrow", new=pa.ipc.new_stream)


def mixed_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_list(MIXED, on_mixed_types="use_json")


@shape("Parquet of datasets with a JSON feature", "parquet")
def _(folder: Path) -> Path:
    mixed_dataset().to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


@shape("JSON Lines of datasets", "json")
def _(folder: Path) -> Path:
    mixed_dataset().to_json(folder / "a.jsonl")
    return folder / "a.jsonl"


@shape("saved Dataset", "saved")
def _(folder: Path) -> Path:
    mixed_dataset().save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


@shape("saved DatasetDict", "saved")
def _(folder: Path) -> Path:
    datasets.DatasetDict(test=mixed_dataset().select([0]), train=mixed_dataset()).save_to_disk(folder / "saved")
    return folder / "saved"


@shape("saved Dataset, selected and in another order", "saved")
def _(folder: Path) -> Path:
    mixed_dataset().shuffle(seed=1).select([3, 0, 2]).save_to_disk(folder / "saved")
    return folder / "saved"


@shape("folder of JSON Lines whose types differ")
def _(folder: Path) -> Path:
    write_rows(folder / "a.jsonl", [pair(chat_template_kwargs={"budget": 0.5, "mode": "x"})])
    write_rows(folder / "b.jsonl", [pair(chat_template_kwargs={"mode": "y", "budget": 1})])
    return folder


@shape("folder of JSON Lines, second file lacks a column")
def _(folder: Path) -> Path:
    write_rows(folder / "a.jsonl", [pair(tools=[ADD])])
    write_rows(folder / "b.jsonl", [pair()])
    return folder


@shape("folder of JSON arrays")
def _(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(MIXED))
    (folder / "b.json").write_text(json.dumps(CHATS))
    return folder


@shape("folder of Parquet shards")
def _(folder: Path) -> Path:
    for number, split in enumerate(("train", "train", "test")):
        rows = pa.Table.from_pylist([pair(f"{split} {number}", "a", "b")])
        pq.write_table(rows, folder / f"{split}-{number % 2:05}-of-{2 if split == 'train' else 1:05}.parquet")
    return folder


@shape("folder of Parquet with kinds of text")
def _(folder: Path) -> Path:
    for number, kind in enumerate((pa.string(), pa.large_string(), pa.string_view())):
        pq.write_table(typed(kind, PLAIN), folder / f"{number}.parquet")
    return folder


@shape("folder with folders of splits")
def _(folder: Path) -> Path:
    for split in ("train", "test"):
        (folder / split).mkdir()
        write_rows(folder / split / "b.jsonl", [pair(split, "a", "b")])
        write_rows(folder / split / "a.jsonl", [pair(split, "c", "d")])
    return folder


@shape("folder whose other split decides types")
def _(folder: Path) -> Path:
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: test\n    path: t.jsonl\n  - split: train\n    path: a.jsonl\n---\n"
    )
    write_rows(folder / "t.jsonl", [pair(chat_template_kwargs={"budget": 0.5})])
    write_rows(folder / "a.jsonl", [pair(chat_template_kwargs={"budget": 1})])
    return folder


@shape("folder with a config")
def _(folder: Path) -> Path:
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  sep: ';'\n  data_files: data/*.csv\n---\n")
    (folder / "data").mkdir()
    (folder / "data" / "a.csv").write_text(csv_text(WORDS, delimiter=";"))
    return folder


@shape("folder with other files")
def _(folder: Path) -> Path:
    write_rows(folder / "a.jsonl", CHATS)
    (folder / "README.md").write_text("# Pairs\n")
    (folder / "notes.txt").write_text("no row")
    (folder / ".hidden.jsonl").write_text("no row")
    (folder / "one.csv").write_text("a,b\n1,2\n")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_files(name, telling, tmp_path):
    write, load = FILES[name]
    path = write(tmp_path)
    rows = load(path)
    trainer = KTOTrainer if "completion" in rows.column_names else DPOTrainer
    expected = keys_of_trl(rows, telling, tmp_path, trainer)
    assert keys_of_reflogp(str(path), telling) == (expected, {})


#: Datasets in memory, with the Dataset that a user of TRL makes of each.
OBJECTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Dataset": lambda: (mixed_dataset(), mixed_dataset()),
    "Dataset without JSON": lambda: (datasets.Dataset.from_list(MIXED), datasets.Dataset.from_list(MIXED)),
    "Dataset in another format": lambda: (mixed_dataset().with_format("numpy"), mixed_dataset()),
    "IterableDataset": lambda: (mixed_dataset().to_iterable_dataset(), mixed_dataset().to_iterable_dataset()),
    "list": lambda: (MIXED, datasets.Dataset.from_list(MIXED)),
    "list, column that the first row lacks": lambda: (
        [pair(), pair(tools=[ADD])],
        datasets.Dataset.from_list([pair(), pair(tools=[ADD])]),
    ),
    "list, whole and other numbers": lambda: (
        ROWS["kwargs with whole and other numbers"],
        datasets.Dataset.from_list(ROWS["kwargs with whole and other numbers"]),
    ),
    "pandas": lambda: (pandas.DataFrame(MIXED), datasets.Dataset.from_pandas(pandas.DataFrame(MIXED))),
    "pandas, filtered": lambda: (
        pandas.DataFrame(PLAIN).iloc[[3, 1]],
        datasets.Dataset.from_pandas(pandas.DataFrame(PLAIN).iloc[[3, 1]]),
    ),
    "polars": lambda: (polars.DataFrame(CHATS), datasets.Dataset.from_polars(polars.DataFrame(CHATS))),
    "Arrow table": lambda: (pa.Table.from_pylist(MIXED), datasets.Dataset(pa.Table.from_pylist(MIXED))),
    "Arrow table, views": lambda: (typed(pa.string_view(), PLAIN), datasets.Dataset(typed(pa.string_view(), PLAIN))),
    "Arrow table of datasets": lambda: (mixed_dataset().with_format("arrow")[:], mixed_dataset()),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(name, telling, tmp_path):
    data, rows = OBJECTS[name]()
    assert keys_of_reflogp(data, telling) == (keys_of_trl(rows, telling, tmp_path), {})


def refusal(data: Any, tokenizer: Any) -> str:
    """What reflogp says of a dataset of which it can use no row."""
    try:
        found, problems = keys_of_reflogp(data, tokenizer)
    except ReflogpError as error:
        return str(error)
    assert not found
    return "; ".join(f"row {row}: {text}" for row, text in problems.items())


#: Files of which a TRL trainer cannot use the rows, and a part of what reflogp says.
REFUSED: dict[str, tuple[str, str, str | bytes, str]] = {
    "no prompt, messages": ("json", "a.jsonl", lines([whole([], "a", "b")]), "row 0: the conversation has no prompt"),
    "ultrafeedback with its prompt as text": (
        "json",
        "a.jsonl",
        lines([{**whole([user("Hi")], "a", "b"), "prompt": "Hi"}]),
        "row 0: prompt is not a list of messages",
    ),
    "dates": ("json", "a.jsonl", lines([pair("When?", "2024-01-02", "2024-01-03")]), "row 0: chosen has type datetime"),
    "numbers": ("json", "a.jsonl", lines([pair("How many?", 2, 3)]), "row 0: chosen has type int"),
    "messages in a row of text": (
        "json",
        "a.jsonl",
        lines([pair("a", "b", [assistant("c")])]),
        "row 0: prompt is not a list of messages",
    ),
    "null": ("json", "a.jsonl", lines([{**pair("a", "b"), "rejected": None}]), "row 0: rejected is null or missing"),
    "kwargs that TRL sets": (
        "json",
        "a.jsonl",
        lines([pair(chat_template_kwargs={"tokenize": False})]),
        "row 0: chat_template_kwargs sets tokenize",
    ),
    "tools that are not JSON": ("json", "a.jsonl", lines([pair(tools="add(a, b)")]), "row 0: tools is not JSON"),
    "object of columns": (
        "json",
        "a.json",
        json.dumps({name: [row[name] for row in WORDS] for name in WORDS[0]}, indent=1),
        "row 0: prompt has type list",
    ),
    "empty": ("json", "a.jsonl", "", "a.jsonl has no readable row; the dataset is empty"),
    "empty CSV": ("csv", "a.csv", "", "a.csv cannot be read as csv: No columns to parse from file"),
    "CSV with semicolons": ("csv", "a.csv", csv_text(WORDS, delimiter=";").replace(",", " "), "delimited by ';'"),
    "CSV with NA": ("csv", "a.csv", csv_text([pair("a", "NA", "b")]), "row 0: chosen is null or missing"),
    "CSV with a cell too many": ("csv", "a.csv", csv_text(WORDS) + "a,b,c,d\n", "Expected 3 fields in line 7, saw 4"),
    "CSV in UTF-16": (
        "csv",
        "a.csv",
        csv_text(WORDS).encode("utf-16"),
        "a.csv cannot be read as csv: 'utf-8' codec can't decode",
    ),
    "broken JSON array": ("json", "a.json", json.dumps(WORDS)[:-9], "a.json is not JSON"),
    "truncated Parquet": ("parquet", "a.parquet", b"PAR1 and so on", "a.parquet cannot be read as parquet"),
    "truncated Arrow": ("arrow", "a.arrow", b"ARROW1\0\0", "a.arrow cannot be read as arrow"),
    "truncated gzip": ("json", "a.jsonl.gz", gzip.compress(lines(WORDS).encode())[:-20], "a.jsonl.gz cannot be read as json"),
    "key that is there twice": (
        "json",
        "a.jsonl",
        '{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}\n',
        "a.jsonl cannot be read as json",
    ),
    "type that changes after the first 10 MB": (
        "json",
        "a.jsonl",
        lines([pair("a", "b" * 9_000_000, "c"), pair("a", "b" * 2_000_000, "c"), pair(["d"], "e", "f")]),
        "a.jsonl cannot be read as json from row 2 on: Couldn't cast",
    ),
    "two columns of token ids": ("json", "a.jsonl", lines([{"prompt_ids": [1], "chosen_ids": [2]}]), "match no known format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_trl_refuses(name, telling, tmp_path):
    kind, file, data, says = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(Exception):  # noqa: B017
        keys_of_trl(loaded(kind, path), telling, tmp_path)
    said = refusal(path, telling)
    assert says in said and "\n" not in said, said


#: Bad lines between good ones, and a part of what reflogp says of each of them.
BAD_LINES = {
    "JSON": (["{broken", "[1]"], ("not JSON", "the row has type list")),
    "a row that was cut": ([lines(CHATS[:1])[:40], "]"], ("not JSON", "not JSON")),
    "a surrogate, and no number": (
        [
            '{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}',
            '{"prompt": "a", "chosen": "b", "rejected": "c", "score": NaN}',
        ],
        ("unpaired surrogate", "not JSON"),
    ),
}


@pytest.mark.parametrize(("name", "megabytes"), [*((name, 0) for name in BAD_LINES), ("JSON", 11)])
def test_bad_lines_are_named_and_the_others_are_as_without_them(name, megabytes, telling, tmp_path):
    bad, says = BAD_LINES[name]
    rows = WORDS if name == "a surrogate, and no number" else [*MIXED[:2], *CHATS]
    good = [lines([row]).rstrip() for row in [{**rows[0], "other": "x" * megabytes * 1_000_000}, *rows[1:]]]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([good[0], bad[0], good[1], bad[1], *good[2:]]))
    (tmp_path / "without.jsonl").write_text("\n".join(good))
    with pytest.raises(Exception):  # noqa: B017
        loaded("json", file)
    found, problems = keys_of_reflogp(file, telling)
    assert found == keys_of_trl(loaded("json", tmp_path / "without.jsonl"), telling, tmp_path)
    assert list(problems) == [1, 3]
    assert all(part in problems[row] for part, row in zip(says, (1, 3), strict=True)), problems
    assert RowSource(str(file)).count() == len(good) + 2


@pytest.mark.parametrize("name", ["key in some messages", "tools that differ", "kwargs with whole and other numbers", "plain"])
def test_the_rows_of_a_joined_file_have_the_same_keys(name, telling, tmp_path):
    """`reflogp join` writes the rows that it read to a Parquet file, which a trainer then reads."""
    source = RowSource(str(write_rows(tmp_path / "rows.jsonl", ROWS[name])))
    table = table_of_rows([row.columns for row in source], source.schema())
    pq.write_table(table.replace_schema_metadata({"reflogp": "{}"}), tmp_path / "joined.parquet")
    joined = keys_of_trl(loaded("parquet", tmp_path / "joined.parquet"), telling, tmp_path)
    assert joined == keys_of_trl(loaded("json", tmp_path / "rows.jsonl"), telling, tmp_path)


def test_a_table_with_types_that_datasets_lacks():
    with pytest.raises(UsageError, match="cannot be read by `datasets`"):
        open_dataset(pa.table({"prompt": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))}))
