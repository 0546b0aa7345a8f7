"""The Python API: every kind of dataset goes in and comes back, with the values of an independent computation."""

import pickle

import datasets
import numpy as np
import pandas
import polars
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ProcessorMixin

from reflogp.scoring import join, report, score
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import DatasetError, NotScoredError
from reflogp.store import ReferenceNotFoundError, Store, StoreNotFoundError, UsageError
from tests.conftest import plain_token_logps, write_rows

COLUMNS = {"chosen_key", "rejected_key", "ref_chosen_logps", "ref_rejected_logps", "ref_row"}
COLUMNS |= {"ref_chosen_tokens", "ref_rejected_tokens"}


@pytest.fixture(scope="module")
def rows(pair_rows):
    """Pairs as text."""
    sides = ("chosen", "rejected")
    return [{"prompt": "Q:"} | {name: " " + row[name][-1]["content"] for name in sides} for row in pair_rows[:12]]


@pytest.fixture(scope="module")
def model(reference_folder):
    return str(reference_folder)


@pytest.fixture(scope="module")
def scored(rows, model, tmp_path_factory):
    """A store with the values of all rows."""
    store = tmp_path_factory.mktemp("scored") / "store"
    score(model, rows, store, dtype="float32")
    return store


@pytest.fixture(scope="module")
def expected(rows, model):
    """(sum of chosen, sum of rejected) of each row, by a plain forward of each sequence."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def total(prompt, completion):
        ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
        start = len(tokenizer(prompt)["input_ids"])
        return sum(plain_token_logps(plain, ids[:start], ids[start:]))

    return [(total(row["prompt"], row["chosen"]), total(row["prompt"], row["rejected"])) for row in rows]


def kinds(rows, folder):
    """Each kind of dataset of the rows, and how its rows are read as dicts."""
    table = pa.Table.from_pylist(rows)

    def each(dataset):
        return list(dataset)

    def as_path(dataset):
        return [dict(row) for row in dataset]

    return {
        "path": (write_rows(folder / "rows.jsonl", rows), as_path, datasets.Dataset),
        "list": (rows, each, list),
        "dataset": (datasets.Dataset.from_list(rows), each, datasets.Dataset),
        "shuffled dataset": (
            datasets.Dataset.from_list(rows[::-1]).select(range(len(rows) - 1, -1, -1)),
            each,
            datasets.Dataset,
        ),
        "stream": (datasets.Dataset.from_list(rows).to_iterable_dataset(), each, datasets.IterableDataset),
        "pandas": (pandas.DataFrame(rows, index=range(100, 100 + len(rows))), lambda f: f.to_dict("records"), pandas.DataFrame),
        "polars": (polars.DataFrame(rows), lambda f: f.to_dicts(), polars.DataFrame),
        "arrow": (table, lambda t: t.to_pylist(), pa.Table),
    }


KINDS = ("path", "list", "dataset", "shuffled dataset", "stream", "pandas", "polars", "arrow")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_scored_and_joined(kind, rows, model, expected, tmp_path):
    dataset, read, returned = kinds(rows, tmp_path)[kind]
    summary = score(model, dataset, tmp_path / "store", dtype="float32")
    assert (summary.rows, summary.bad_rows) == (12, 0)
    assert summary.scored + summary.duplicates == 24
    assert score(model, dataset, tmp_path / "store", dtype="float32").scored == 0
    joined = join(model, dataset, tmp_path / "store", dtype="float32")
    assert isinstance(joined, returned)
    seen = read(joined)
    assert [{name: row[name] for name in rows[0]} for row in seen] == rows
    assert set(seen[0]) == set(rows[0]) | COLUMNS
    values = np.array([(row["ref_chosen_logps"], row["ref_rejected_logps"]) for row in seen])
    assert np.abs(values - np.array(expected)).max() < 1e-3
    assert [row["ref_row"] for row in seen] == list(range(12))
    again = read(join(model, joined, tmp_path / "store", dtype="float32"))  # columns of an earlier join are replaced
    assert [set(row) for row in again] == [set(row) for row in seen]


def test_a_dictionary_of_splits(rows, model, tmp_path, monkeypatch):
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows[:9]), test=datasets.Dataset.from_list(rows))
    make, loads = EngineChoice.make, []
    monkeypatch.setattr(EngineChoice, "make", lambda *arguments: loads.append(1) or make(*arguments))
    summaries = score(model, splits, tmp_path / "store", dtype="float32")
    assert {name: summary.rows for name, summary in summaries.items()} == {"train": 9, "test": 12}
    assert all(summary.scored for summary in summaries.values()) and len(loads) == 1
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:5]))
    joined = join(model, splits, tmp_path / "store", dtype="float32")
    assert isinstance(joined, datasets.DatasetDict) and {name: len(split) for name, split in joined.items()} == {
        "train": 12,
        "test": 5,
    }


def test_a_processor_stands_for_its_tokenizer(rows, model, tmp_path):
    """As TRL takes it as processing_class, for rows of text too."""
    processor = ProcessorMixin()
    processor.tokenizer = AutoTokenizer.from_pretrained(model)
    score(model, rows, tmp_path / "store", dtype="float32", tokenizer=processor)
    assert score(model, rows, tmp_path / "store", dtype="float32").hits == 24
    assert report(model, rows, tmp_path / "store", tmp_path / "report", dtype="float32", tokenizer=processor).coverage == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_values_are_an_error_or_left_out(kind, rows, model, tmp_path):
    score(model, rows[:9], tmp_path / "store", dtype="float32")
    bad = [*rows[:3], {"prompt": "Q:", "chosen": None, "rejected": "x"}, *rows[3:]]
    dataset, read, _ = kinds(bad, tmp_path)[kind]
    with pytest.raises(NotScoredError, match=r"cannot be used \(row 3: ") as caught:
        read(join(model, dataset, tmp_path / "store", dtype="float32"))
    assert caught.value.summary.bad_row_numbers == [3]
    seen = read(join(model, dataset, tmp_path / "store", dtype="float32", on_miss="drop"))
    assert [row["ref_row"] for row in seen] == [0, 1, 2, *range(4, 10)]
    with pytest.raises(
        NotScoredError,
        match=r"snapshot \d+ has no values for 3 rows \(0-based row numbers: 9, 10, 11\).*reflogp score .* --store",
    ):
        read(join(model, kinds(rows, tmp_path)[kind][0], tmp_path / "store", dtype="float32"))


def test_rows_that_trl_drops_are_left_out(rows, model, tmp_path):
    long = [{**rows[0], "prompt": "many words " * 60}, *rows[1:4]]
    options = {"dtype": "float32", "max_length": 64}
    score(model, long, tmp_path / "store", **options)
    assert [row["ref_row"] for row in join(model, long, tmp_path / "store", **options)] == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_of_no_row_has_the_columns(kind, rows, model, scored, tmp_path):
    dataset, read, returned = kinds([{**row, "prompt": row["prompt"] + " more"} for row in rows], tmp_path)[kind]
    joined = join(model, dataset, scored, dtype="float32", on_miss="drop")
    assert isinstance(joined, returned) and read(joined) == []
    if kind in ("path", "dataset", "shuffled dataset", "arrow"):
        assert set(joined.column_names) == {*rows[0], *COLUMNS}
    if kind in ("pandas", "polars"):
        assert set(joined.columns) == {*rows[0], *COLUMNS}
    bad = kinds([{"prompt": "Q:", "chosen": None, "rejected": "x"}], tmp_path)[kind][0]
    if kind == "stream":
        assert read(join(model, bad, scored, dtype="float32", on_miss="drop")) == []
    else:
        with pytest.raises(DatasetError, match="no row of the dataset can be used"):
            join(model, bad, scored, dtype="float32", on_miss="drop")


@pytest.mark.parametrize("kind", ["path", "dataset", "shuffled dataset", "arrow"])
def test_types_of_the_columns(kind, rows, model, scored, tmp_path):
    varied = [{"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in rows]
    varied[3]["source"] = "a column that the first rows lack"
    table = pa.Table.from_pylist(varied, schema=pa.schema([(name, pa.string()) for name in [*rows[0], "source"]]))
    dataset = {
        "path": write_rows(tmp_path / "varied.jsonl", varied),
        "dataset": datasets.Dataset(table),
        "shuffled dataset": datasets.Dataset(table).select(range(12)),
        "arrow": table,
    }[kind]
    joined = join(model, dataset, scored, dtype="float32")
    schema = joined.schema if kind == "arrow" else joined.features.arrow_schema
    assert schema.field("ref_chosen_logps").type == schema.field("ref_rejected_logps").type == pa.float32()
    assert schema.field("ref_row").type == schema.field("ref_chosen_tokens").type == pa.int64()
    assert (joined.column("source") if kind == "arrow" else pa.array(joined["source"]))[3].as_py() == varied[3]["source"]


def test_a_dataset_keeps_split_features_and_format(rows, model, scored):
    labelled = datasets.Dataset.from_list([{**row, "kind": n % 2} for n, row in enumerate(rows)], split="validation")
    labelled = labelled.cast_column("kind", datasets.ClassLabel(names=["a", "b"])).with_format("numpy")
    joined = join(model, labelled, scored, dtype="float32")
    assert (joined.split, joined.format["type"]) == ("validation", "numpy")
    assert joined.features["kind"].names == ["a", "b"]
    assert isinstance(joined["ref_chosen_logps"][:], np.ndarray)


@pytest.mark.slow
def test_a_stream_is_read_by_one_worker(rows, model, scored):
    stream = join(model, datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4), scored, dtype="float32")
    assert [row["ref_row"] for row in torch.utils.data.DataLoader(stream, batch_size=None, num_workers=1)] == list(range(12))
    with pytest.raises(UsageError, match="num_workers is 2"):
        list(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2))
    assert len(list(datasets.concatenate_datasets([stream, stream]))) == 24
    assert len(list(datasets.interleave_datasets([stream, stream]))) >= 23
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        pickle.loads(pickle.dumps(stream))  # noqa: S301


def test_a_bad_tokenizer_is_refused_before_a_stream_is_read(rows, model, scored, tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        join(
            model,
            datasets.Dataset.from_list(rows).to_iterable_dataset(),
            scored,
            dtype="float32",
            tokenizer=str(tmp_path / "nowhere"),
        )


def test_what_pandas_makes_of_gaps(model, tmp_path):
    odd = pandas.DataFrame(
        [
            {"prompt": "Q:", "completion": " 4", "label": 1, "x": 1},
            {"prompt": "Q:", "completion": " 5", "label": 0, "x": "s"},
            {"prompt": "Q:", "completion": " 6", "label": None, "x": None},
            {"prompt": "Q:", "completion": None, "label": 1, "x": object()},
        ]
    )
    summary = score(model, odd, tmp_path / "store", dtype="float32")
    assert (summary.scored, summary.bad_row_numbers) == (3, [3])
    joined = join(model, odd, tmp_path / "store", dtype="float32", on_miss="drop")
    assert joined["ref_row"].tolist() == [0, 1, 2] and (joined["ref_logps"] < 0).all()
    assert report(model, odd, tmp_path / "store", tmp_path / "report", dtype="float32").with_values == 3
    with pytest.raises(UsageError, match="column names are not unique"):
        score(model, pandas.DataFrame([[1, 2]], columns=["prompt", "prompt"]), tmp_path / "store", dtype="float32")


def test_many_rows_messages_and_tokens(model, pair_rows, tmp_path):
    messages = [{name: row[name] for name in ("prompt", "chosen", "rejected") if name in row} for row in pair_rows[:6]]
    assert score(model, pandas.DataFrame(messages), tmp_path / "store", dtype="float32").bad_rows == 0
    assert len(join(model, datasets.Dataset.from_list(messages), tmp_path / "store", dtype="float32")) == 6
    tokens = [{"prompt_ids": [5, n % 700 + 10], "chosen_ids": [7, 8], "rejected_ids": [9]} for n in range(1500)]
    frame = polars.DataFrame(tokens)
    assert score(model, frame, tmp_path / "store", dtype="float32").rows == 1500
    assert join(model, frame, tmp_path / "store", dtype="float32")["ref_row"].to_list() == list(range(1500))
    streamed = datasets.Dataset.from_list(tokens[:50]).to_iterable_dataset().with_format("numpy")
    assert len(list(join(model, streamed, tmp_path / "store", dtype="float32"))) == 50


def test_arguments_that_would_be_taken_for_others(rows, model, scored, tmp_path):
    with pytest.raises(UsageError, match="unknown on_miss 'raise': use 'error' or 'drop'"):
        join(model, rows, scored, dtype="float32", on_miss="raise")
    changed = datasets.Dataset.from_list(rows)
    changed.set_transform(lambda batch: batch)
    with pytest.raises(UsageError, match="has a transform"):
        score(model, changed, scored, dtype="float32")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_dict({"prompt": []}))
    with pytest.raises(DatasetError, match="split test: "):
        score(model, splits, scored, dtype="float32")
    with pytest.raises(UsageError, match="one of the DatasetDict's splits: train, test"):
        report(model, splits, scored, tmp_path / "report", dtype="float32")


def test_nothing_was_scored(rows, model, scored, tmp_path):
    with pytest.raises(StoreNotFoundError, match="reflogp score"):
        join(model, rows, tmp_path / "nowhere", dtype="float32")
    with pytest.raises(ReferenceNotFoundError, match="--dtype bfloat16"):
        join(model, rows, scored, dtype="bfloat16")


def test_an_own_tokenizer_and_an_open_store(rows, model, scored):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert score(model, rows, Store(scored), dtype="float32", tokenizer=tokenizer).scored == 0
    assert len(join(model, rows, Store(scored), dtype="float32", tokenizer=tokenizer)) == 12


@pytest.mark.parametrize("dataset", [7, ["a row"], None, {"train": []}])
def test_what_is_no_dataset(dataset, model, scored):
    with pytest.raises(UsageError, match="cannot be read: pass a path"):
        score(model, dataset, scored, dtype="float32")


def test_summaries_are_shown_in_a_few_readable_lines(rows, model, scored, tmp_path):
    again = score(model, rows, scored, dtype="float32")
    where = f"reference {again.reference_id}, snapshot {again.snapshot} of {scored}"
    assert repr(again) == f"ScoreSummary(\n    12 rows, 24 sequences: 24 hits, 0 scored\n    {where} ({again.seconds:.1f} s)\n)"
    first = score(model, rows[:1], tmp_path / "store", dtype="float32")
    assert repr(first).splitlines()[1:3] == [
        "    1 row, 2 sequences: 0 hits, 2 scored",
        f"    {first.lines()[1]}",
    ]
    assert f"{first.tokens} tokens in " in first.lines()[1] and " tokens/s" in first.lines()[1]
    found = report(model, rows, scored, tmp_path / "report", dtype="float32")
    assert repr(found).splitlines()[1].startswith("    12 of 12 examples with values, accuracy ")
    with pytest.raises(NotScoredError) as caught:
        join(model, rows, tmp_path / "store", dtype="float32")
    assert repr(caught.value.summary).splitlines()[1] == "    1 of 12 rows with values, 11 missing"


def test_a_report_of_rows(rows, model, scored, tmp_path):
    found = report(model, datasets.Dataset.from_list(rows), scored, tmp_path / "report", dtype="float32")
    assert (found.rows, found.with_values) == (12, 12)
    assert (tmp_path / "report" / "index.html").is_file()
