"""Keys of datasets of many shapes: read by `datasets` and prepared by TRL, and read by reflogp.

The chat template renders everything in a message, so that a key that is null or missing, another order of keys, or 1 instead of
1.0 changes the tokens.
"""

import copy
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
from tokenizers.processors import TemplateProcessing
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.read import RowSource, table_of_rows
from reflogp.scoring.data.tokenize import tokenize_dataset
from reflogp.scoring.errors import DatasetError
from reflogp.store import ReflogpError, UsageError, sequence_keys
from tests.conftest import wider_data, write_rows
from tests.versions import skip_before

TELLING = (
    "{{ tools | tojson }}{{ mode | default('no mode') | tojson }}{{ budget | default('no budget') | tojson }}\n"
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '{' }}{% endif %}"
)


#: Renders the prompt alone differently from the prompt before a completion, as Gemma's and Qwen's thinking templates do.
NOT_PREFIX_PRESERVING = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not mode %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def telling(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = TELLING
    return other


@pytest.fixture(scope="module")
def awkward(tokenizer):
    """Adds BOS to plain text, and has a template that is not prefix-preserving."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<|bos|>"})
    special = [("<|bos|>", other.bos_token_id)]
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=special)
    other.chat_template = NOT_PREFIX_PRESERVING
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


def keys_of_sft(rows, tokenizer, folder) -> list[bytes]:
    """The first token, or the prompt's tokens, which are in no loss, are the prompt of a key."""
    args = SFTConfig(output_dir=str(folder), max_length=None, bf16=False, report_to=[], packing=False)
    options = {"chat_template": None, "completion_only_loss": True, "_is_vlm": False, "padding_free": False}
    trainer_parts = SimpleNamespace(_tokenizer=tokenizer, args=args, **options)
    prepared = SFTTrainer._prepare_dataset(trainer_parts, rows, tokenizer, args, False, None, "train")
    starts = [max(1, next(at for at, label in enumerate(labels) if label != -100)) for labels in prepared["labels"]]
    split = [(ids[:start], ids[start:]) for ids, start in zip(prepared["input_ids"], starts, strict=True)]
    return sequence_keys(*map(list, zip(*split, strict=True))).to_pylist()


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


PLAIN = [{"prompt": f"{n} + 2 =", "chosen": f" is {n + 2}", "rejected": f" is {n + 3}, no"} for n in range(5)]
CHATS = [pair([user(f"What is {n} + 2?")], [assistant(f"{n + 2}")], [assistant(f"{n + 3}")]) for n in range(5)]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
SAY = {"type": "function", "function": {"name": "say", "description": "Speak", "parameters": {"text": {"type": "string"}}}}


def call(name: str, **arguments: Any) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


#: The rows of a JSON Lines file.
ROWS: dict[str, list[dict]] = {
    "plain": [*PLAIN, {"prompt": "", "chosen": "a b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": ""}],
    "plain, implicit prompt": [
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi\n\nAssistant: Yes. No."},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:  b"},
        {"chosen": "x ", "rejected": "y "},
    ],
    "plain, EOS is there": [{"prompt": "a", "chosen": "b<|eos|>", "rejected": "c"}],
    "plain, unicode": [
        {
            "prompt": "国会 \u2028 \u0085 \x0b \x1c é e\u0301",
            "chosen": "👩‍👩‍👧 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
            "rejected": "\ufeffא\u0000b",
        }
    ],
    "conversational": [
        *CHATS,
        pair([{"role": "system", "content": "Be brief."}, user("Hi")]),
        pair([user("a"), assistant("b"), user("c")]),
        pair(chosen=[assistant("a"), user("b"), assistant("c")]),
        pair([user("a"), assistant("b")]),
        pair([user("c"), assistant("")]),
    ],
    "conversational, implicit prompt beside other columns": [
        whole([user("Hi")], "a", "b", prompt_id="0", messages=[user("Hi"), assistant("a")], score_chosen=8.5, score_rejected=7),
        whole([user("Ho"), assistant("?"), user("!")], "c", "d", messages=[user("Ho")], score_chosen=8, score_rejected=7.0),
    ],
    "key in some messages": [pair([user("Hi", name="Ann"), assistant("Ho"), user("x")]), pair()],
    "key in the messages of some rows": [pair(), pair([user("Hi", name="Ann")])],
    "key that is null": [pair([user("Hi", name=None)]), pair([user("Hi", name="Ann")])],
    "keys in another order": [pair(), pair([{"content": "Hi", "role": "user"}])],
    "tool calls with other arguments": [
        pair([user("Hi"), call("add", a=2, b=3), {"role": "tool", "content": "5"}]),
        pair([user("Hi"), call("say", text="x"), {"role": "tool", "content": "x"}]),
    ],
    "content in parts in some rows": [pair([user([{"type": "text", "text": "Hi"}])]), pair()],
    "message keys that are numbers": [pair([user("Hi", weight=1)]), pair([user("Ho", weight=0.5)])],
    "contents that are dates": [pair([user("2024-01-02")], [assistant("2024-01-03")], [assistant("2024-01-04")])],
    "tools that differ": [pair(tools=[ADD]), pair(tools=[ADD, SAY]), pair(tools=[SAY])],
    "tools that differ in the order of keys": [pair(tools=[{"name": "a", "x": 1}]), pair(tools=[{"x": 1, "name": "a"}])],
    "tools with whole and other numbers": [pair(tools=[{"name": "a", "max": 1}]), pair(tools=[{"name": "b", "max": 0.5}])],
    "tools as text": [pair(tools=json.dumps([ADD])), pair(tools=json.dumps([ADD, SAY]))],
    "tools in later rows": [pair(), pair(tools=[ADD])],
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
    "sft, messages": [
        {"n": 1, "messages": [{"role": "system", "content": "Hm."}, user("a"), assistant("b"), user("c"), assistant("d")]},
        {"n": 2, "messages": [user("a"), assistant("b")]},
    ],
    "sft, conversations": [{"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}],
    "sft, tools and kwargs": [
        {"messages": [user("a"), assistant("b")], "tools": json.dumps([ADD]), "chat_template_kwargs": {"mode": "fast"}}
    ],
    "sft, text": [{"text": "Once upon a time."}, {"text": "An end.<|eos|>"}],
    "sft, prompt and completion": [{"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}],
    "sft, plain prompt and completion": [{"prompt": "Two and two? ", "completion": "Four."}],
    "kto, plain": [{"prompt": "a", "completion": " b", "label": True}, {"prompt": "c", "completion": " d", "label": False}],
    "kto, conversational": [
        {"prompt": [user("Hi")], "completion": [assistant("a")], "label": True},
        {"prompt": [user("Hi", name="Ann")], "completion": [assistant("b")], "label": False},
    ],
}


def loaded(kind: str, file: Any) -> datasets.Dataset:
    """What a user of TRL loads."""
    return datasets.load_dataset(kind, data_files=str(file), split="train")


#: What TRL did before 1.14.
CUT_BEFORE = "begins completions where the prompt's own tokens end, and ends plain text with EOS whether it has one or not"


@pytest.mark.parametrize("which", ["telling", "awkward"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_json_lines(name, which, request, tmp_path):
    if which == "awkward" or name in ("plain, EOS is there", "sft, plain prompt and completion"):
        skip_before("trl", "1.14", CUT_BEFORE)
    if name == "contents that are dates":
        skip_before("transformers", "5.23", "writes no dates in templates")
    tokenizer, file = request.getfixturevalue(which), write_rows(tmp_path / "rows.jsonl", ROWS[name])
    if name.startswith("sft"):
        expected = keys_of_sft(loaded("json", file), tokenizer, tmp_path)
    else:
        trainer = KTOTrainer if name.startswith("kto") else DPOTrainer
        expected = keys_of_trl(loaded("json", file), tokenizer, tmp_path, trainer)
    assert keys_of_reflogp(file, tokenizer) == (expected, {})


@pytest.mark.slow
@pytest.mark.parametrize("file", wider_data(), ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize("which", ["tokenizer", "awkward"])
def test_every_data_file(file, which, request, tmp_path):
    tokenizer, rows = request.getfixturevalue(which), loaded("json", file)
    trainer = DPOTrainer if "chosen" in rows.column_names else KTOTrainer
    assert keys_of_reflogp(file, tokenizer) == (keys_of_trl(rows, tokenizer, tmp_path, trainer), {})


def test_a_format_that_does_not_fit_says_what_it_found(telling, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS["sft, messages"])
    with pytest.raises(DatasetError, match="expected rows in the format 'kto', but the columns n, messages match 'sft'"):
        keys_of_reflogp(file, telling, form="kto")


def test_pairs_read_as_kto_rows_are_unpaired_as_trl_does(awkward, tmp_path):
    skip_before("trl", "1.14", CUT_BEFORE)
    rows = [pair([user("a"), assistant("b"), user("c")]), pair(), *CHATS]
    expected = keys_of_trl(datasets.Dataset.from_list(rows), awkward, tmp_path, KTOTrainer)
    found, problems = keys_of_reflogp(write_rows(tmp_path / "rows.jsonl", rows), awkward, form="kto")
    assert (sorted(found), problems) == (sorted(expected), {})


MIXED = [ROWS["key in some messages"][0], ROWS["tool calls with other arguments"][0], *CHATS]


def lines(rows: list[dict], end: str = "\n", **options: Any) -> str:
    return "".join(json.dumps(row, **options) + end for row in rows)


def csv_text(rows: list[dict], **options: Any) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def arrow(new: Callable[..., Any]) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(MIXED)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def parquet(table: pa.Table | list[dict], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table) if isinstance(table, list) else table, sink, **options)
    return sink.getvalue()


MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string()), ("name", pa.string())]))


def typed(kind: pa.DataType, rows: list[dict]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name in rows[0]})


def card(fields: str) -> str:
    return f"---\nconfigs:\n- config_name: default\n{fields}---\n"


BUDGETS = [{"budget": 0.5, "mode": "x"}, {"mode": "y", "budget": 1}]
#: Shape of a file, or of a folder where it has no kind -> its kind for `datasets`, and path -> content.
FILES: dict[str, tuple[str | None, dict[str, str | bytes]]] = {
    "JSON Lines, BOM": ("json", {"a.jsonl": lines(MIXED).encode("utf-8-sig")}),
    "JSON Lines, blank lines": ("json", {"a.jsonl": "\r\n" + lines(MIXED, "\r\n \r\n\r\n")}),
    "JSON Lines named JSON": ("json", {"a.json": lines(MIXED)}),
    "JSON Lines, gzip": ("json", {"a.jsonl.gz": gzip.compress(lines(MIXED).encode())}),
    "JSON array": ("json", {"a.json": json.dumps(MIXED)}),
    "JSON array, half a surrogate pair": ("json", {"a.json": json.dumps([pair([user("\ud800a")]), pair()])}),
    "JSON array named JSON Lines": ("json", {"a.jsonl": json.dumps(PLAIN)}),
    "CSV, BOM": ("csv", {"a.csv": csv_text(PLAIN).encode("utf-8-sig")}),
    "CSV, quoted line ends": ("csv", {"a.csv": csv_text([pair('a\n"b"', "c\r\nd", " e ")])}),
    "CSV, numbers beside text": ("csv", {"a.csv": csv_text([pair("007", "1.50", "x"), pair("a", "b", "1e3")])}),
    "CSV, gzip": ("csv", {"a.csv.gz": gzip.compress(csv_text(PLAIN).encode())}),
    "TSV in a folder": (None, {"a.tsv": csv_text(PLAIN, delimiter="\t")}),
    "Parquet": ("parquet", {"a.parquet": parquet(MIXED, row_group_size=2)}),
    "Parquet, dictionaries": ("parquet", {"a.parquet": parquet(typed(pa.dictionary(pa.int32(), pa.string()), PLAIN))}),
    "Parquet, order of fields and nulls": ("parquet", {"a.parquet": parquet(typed(MESSAGES, CHATS))}),
    "Arrow file": ("arrow", {"a.arrow": arrow(pa.ipc.new_file)}),
    "Arrow stream": ("arrow", {"a.arrow": arrow(pa.ipc.new_stream)}),
    "folder of JSON Lines whose types differ": (
        None,
        {f"{n}.jsonl": lines([pair(chat_template_kwargs=kwargs)]) for n, kwargs in enumerate(BUDGETS)},
    ),
    "folder of Parquet shards": (
        None,
        {
            f"{split}-0000{at}-of-0000{of}.parquet": parquet([pair(f"{split} {at}", "a", "b")])
            for split, of in (("train", 2), ("test", 1))
            for at in range(of)
        },
    ),
    "folder whose other split decides types": (
        None,
        {
            "README.md": card("  data_files:\n  - split: test\n    path: t.jsonl\n  - split: train\n    path: a.jsonl\n"),
            "t.jsonl": lines([pair(chat_template_kwargs={"budget": 0.5})]),
            "a.jsonl": lines([pair(chat_template_kwargs={"budget": 1})]),
        },
    ),
    "folder with a config": (
        None,
        {"README.md": card("  sep: ';'\n  data_files: data/*.csv\n"), "data/a.csv": csv_text(PLAIN, delimiter=";")},
    ),
    "folder with other files": (
        None,
        {
            "a.jsonl": lines(CHATS),
            "b.jsonl.gz": gzip.compress(lines(CHATS).encode()),
            "c.ndjson": lines(CHATS),
            "README.md": "# Pairs\n",
            **dict.fromkeys(("notes.txt", ".hidden.jsonl", "_SUCCESS"), "no row"),
            "one.csv": "a,b\n1,2\n",
        },
    ),
}


def write_files(folder: Path, kind: str | None, files: dict[str, str | bytes]) -> Path:
    """Write the files, and return the path of the only one or of the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder if kind is None else folder / next(iter(files))


@pytest.mark.parametrize("name", FILES)
def test_files(name, telling, tmp_path):
    kind, files = FILES[name]
    path = write_files(tmp_path / "data", kind, files)
    splits = {"train": loaded(kind, path)} if kind else datasets.load_dataset(str(path))
    for split, rows in splits.items():
        assert keys_of_reflogp(path, telling, split) == (keys_of_trl(rows, telling, tmp_path), {})
        assert RowSource(str(path), split).count() == len(rows)


def mixed_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_list(MIXED, on_mixed_types="use_json")


def test_a_saved_dictionary_of_splits(telling, tmp_path):
    selected = mixed_dataset().shuffle(seed=1).select([3, 0, 2])
    datasets.DatasetDict(test=mixed_dataset(), train=selected).save_to_disk(tmp_path / "saved", num_shards={"test": 2})
    for split, rows in datasets.load_from_disk(tmp_path / "saved").items():
        assert keys_of_reflogp(tmp_path / "saved", telling, split) == (keys_of_trl(rows, telling, tmp_path), {})


#: Datasets in memory, with the Dataset that a user of TRL makes of each.
OBJECTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Dataset": lambda: (mixed_dataset().with_format("numpy"), mixed_dataset()),
    "IterableDataset": lambda: (mixed_dataset().to_iterable_dataset(), mixed_dataset().to_iterable_dataset()),
    "list": lambda: ([*MIXED, pair(tools=[ADD])], datasets.Dataset.from_list([*MIXED, pair(tools=[ADD])])),
    "list, whole and other numbers": lambda: (
        ROWS["kwargs with whole and other numbers"],
        datasets.Dataset.from_list(ROWS["kwargs with whole and other numbers"]),
    ),
    "pandas": lambda: (pandas.DataFrame(MIXED), datasets.Dataset.from_pandas(pandas.DataFrame(MIXED))),
    "polars": lambda: (polars.DataFrame(CHATS), datasets.Dataset.from_polars(polars.DataFrame(CHATS))),
    "Arrow table": lambda: (pa.Table.from_pylist(MIXED), datasets.Dataset(pa.Table.from_pylist(MIXED))),
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
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "no prompt, messages": ("a.jsonl", lines([whole([], "a", "b")]), "row 0: the conversation has no prompt"),
    "ultrafeedback with its prompt as text": (
        "a.jsonl",
        lines([{**whole([user("Hi")], "a", "b"), "prompt": "Hi"}]),
        "row 0: prompt is not a list of messages",
    ),
    "dates": ("a.jsonl", lines([pair("When?", "2024-01-02", "2024-01-03")]), "row 0: chosen has type datetime"),
    "messages in a row of text": ("a.jsonl", lines([pair("a", "b", [assistant("c")])]), "prompt is not a list of messages"),
    "null": ("a.jsonl", lines([{**pair("a", "b"), "rejected": None}]), "row 0: rejected is null or missing"),
    "sft, null": ("a.jsonl", lines([{"messages": None}]), "row 0: messages is null or missing"),
    "sft, text for messages": ("a.jsonl", lines([{"messages": "Hi"}]), "row 0: messages is not a list of messages"),
    "sft, no role": ("a.jsonl", lines([{"messages": [{"content": "Hi"}]}]), "messages that each have a role"),
    "sft, number": ("a.jsonl", lines([{"text": 7}]), "row 0: text has type int"),
    "sft, image": ("a.jsonl", lines([{"messages": [user([{"type": "image"}])]}]), "row 0: the row contains more than text"),
    "tools that are not JSON": ("a.jsonl", lines([pair(tools="add(a, b)")]), "row 0: tools is not JSON"),
    "empty": ("a.jsonl", "", "a.jsonl has no readable row; the dataset is empty"),
    "empty CSV": ("a.csv", "", "a.csv cannot be read as csv: No columns to parse from file"),
    "CSV with semicolons": ("a.csv", csv_text(PLAIN, delimiter=";").replace(",", " "), "delimited by ';'"),
    "CSV with NA": (
        "a.csv",
        csv_text([pair("a", "NA", "b")]),
        "row 0: chosen is null or missing (in CSV, empty cells and words such as NA",
    ),
    "CSV with a cell too many": ("a.csv", csv_text(PLAIN) + "a,b,c,d\n", "Expected 3 fields in line 7, saw 4"),
    "CSV in UTF-16": ("a.csv", csv_text(PLAIN).encode("utf-16"), "a.csv cannot be read as csv: 'utf-8' codec can't decode"),
    "broken JSON array": ("a.json", json.dumps(PLAIN)[:-9], "a.json is not JSON"),
    "truncated Parquet": ("a.parquet", b"PAR1 and so on", "a.parquet cannot be read as parquet"),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(lines(PLAIN).encode())[:-20], "a.jsonl.gz cannot be read as json"),
    "type that changes after the first 10 MB": (
        "a.jsonl",
        lines([pair("a", "b" * 9_000_000, "c"), pair("a", "b" * 2_000_000, "c"), pair(["d"], "e", "f")]),
        "a.jsonl cannot be read as json from row 2 on: Couldn't cast",
    ),
    "two columns of token ids": ("a.jsonl", lines([{"prompt_ids": [1], "chosen_ids": [2]}]), "match no known format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_trl_refuses(name, telling, tmp_path):
    file, data, says = REFUSED[name]
    kind = file.split(".")[1].removesuffix("l")
    path = write_files(tmp_path / "data", kind, {file: data})
    with pytest.raises(Exception):  # noqa: B017
        keys_of_trl(loaded(kind, path), telling, tmp_path)
    said = refusal(path, telling)
    assert says in said and "\n" not in said, said


#: Bad lines between good ones, and a part of what reflogp says of each of them.
BAD_LINES = {
    "JSON": (["{broken", "[1]"], ("not JSON", "the row has type list")),
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
    rows = PLAIN if name == "a surrogate, and no number" else [*MIXED[:2], *CHATS]
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
