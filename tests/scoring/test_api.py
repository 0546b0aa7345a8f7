"""The Python API: every kind of dataset goes in and comes back, with the values of an independent computation."""

import pickle
from contextlib import nullcontext

import datasets
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
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


#: Kind of dataset -> of rows and a folder, the dataset; how its rows are read as dicts; what a join returns.
KINDS = {
    "path": (lambda rows, folder: write_rows(folder / "rows.jsonl", rows), list, datasets.Dataset),
    "list": (lambda rows, _: rows, list, list),
    "dataset": (lambda rows, _: datasets.Dataset.from_list(rows), list, datasets.Dataset),
    "shuffled dataset": (
        lambda rows, _: datasets.Dataset.from_list(rows[::-1]).select(range(len(rows) - 1, -1, -1)),
        list,
        datasets.Dataset,
    ),
    "stream": (lambda rows, _: datasets.Dataset.from_list(rows).to_iterable_dataset(), list, datasets.IterableDataset),
    "pandas": (
        lambda rows, _: pandas.DataFrame(rows, index=range(100, 100 + len(rows))),
        lambda frame: frame.to_dict("records"),
        pandas.DataFrame,
    ),
    "polars": (lambda rows, _: polars.DataFrame(rows), lambda frame: frame.to_dicts(), polars.DataFrame),
    "arrow": (lambda rows, _: pa.Table.from_pylist(rows), lambda table: table.to_pylist(), pa.Table),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_scored_and_joined(kind, rows, model, expected, tmp_path):
    make, read, returned = KINDS[kind]
    dataset = make(rows, tmp_path)
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
    train, test = datasets.Dataset.from_list(rows[:9]), datasets.Dataset.from_list(rows)
    make, loads = EngineChoice.make, []
    monkeypatch.setattr(EngineChoice, "make", lambda *arguments: loads.append(1) or make(*arguments))
    summaries = score(model, datasets.DatasetDict(train=train, test=test), tmp_path / "store", dtype="float32")
    assert {name: summary.rows for name, summary in summaries.items()} == {"train": 9, "test": 12}
    assert all(summary.scored for summary in summaries.values()) and len(loads) == 1
    joined = join(model, datasets.DatasetDict(train=test, test=train), tmp_path / "store", dtype="float32")
    assert isinstance(joined, datasets.DatasetDict)
    assert {name: len(split) for name, split in joined.items()} == {"train": 12, "test": 9}


def test_a_processor_stands_for_its_tokenizer(rows, model, scored, tmp_path):
    """As TRL takes it as processing_class, for rows of text too; a store may be open."""
    processor = ProcessorMixin()
    processor.tokenizer = AutoTokenizer.from_pretrained(model)
    for given in (processor, processor.tokenizer):
        assert score(model, rows, Store(scored), dtype="float32", tokenizer=given).scored == 0
        assert len(join(model, rows, Store(scored), dtype="float32", tokenizer=given)) == 12
    found = report(model, datasets.Dataset.from_list(rows), scored, tmp_path / "report", dtype="float32", tokenizer=processor)
    assert (found.rows, found.with_values, found.coverage) == (12, 12, 1)
    assert (tmp_path / "report" / "index.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_values_are_an_error_or_left_out(kind, rows, model, tmp_path):
    make, read, _ = KINDS[kind]
    score(model, rows[:9], tmp_path / "store", dtype="float32")
    dataset = make([*rows[:3], {"prompt": "Q:", "chosen": None, "rejected": "x"}, *rows[3:]], tmp_path)
    with pytest.raises(NotScoredError, match=r"cannot be used \(row 3: ") as caught:
        read(join(model, dataset, tmp_path / "store", dtype="float32"))
    assert caught.value.summary.bad_row_numbers == [3]
    seen = read(join(model, dataset, tmp_path / "store", dtype="float32", on_miss="drop"))
    assert [row["ref_row"] for row in seen] == [0, 1, 2, *range(4, 10)]
    missing = r"snapshot \d+ has no values for 3 rows \(0-based row numbers: 9, 10, 11\).*reflogp score .* --store"
    with pytest.raises(NotScoredError, match=missing):
        read(join(model, make(rows, tmp_path), tmp_path / "store", dtype="float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_of_no_row_has_the_columns(kind, rows, model, scored, tmp_path):
    make, read, returned = KINDS[kind]
    joined = join(model, make([{**row, "prompt": "more"} for row in rows], tmp_path), scored, dtype="float32", on_miss="drop")
    assert isinstance(joined, returned) and read(joined) == []
    if kind not in ("list", "stream"):
        assert set(getattr(joined, "column_names", getattr(joined, "columns", None))) == {*rows[0], *COLUMNS}
    bad = make([{"prompt": "Q:", "chosen": None, "rejected": "x"}], tmp_path)
    with pytest.raises(DatasetError, match="no row of the dataset can be used") if kind != "stream" else nullcontext():
        assert read(join(model, bad, scored, dtype="float32", on_miss="drop")) == []


def test_rows_that_trl_drops_are_left_out(rows, model, tmp_path):
    long = [{**rows[0], "prompt": "many words " * 60}, *rows[1:4]]
    options = {"dtype": "float32", "max_length": 64}
    summary = score(model, long, tmp_path / "store", **options)
    assert (summary.rows, summary.dropped_rows, summary.sequences, summary.bad_rows) == (4, 1, 6, 0)
    assert [row["ref_row"] for row in join(model, long, tmp_path / "store", **options)] == [1, 2, 3]


def test_a_dataset_keeps_split_features_format_and_types(rows, model, scored):
    """A column that the first rows lack, too."""
    labelled = datasets.Dataset.from_list(
        [{**row, "kind": n % 2, "source": "web" if n == 3 else None} for n, row in enumerate(rows)], split="validation"
    )
    labelled = labelled.cast_column("kind", datasets.ClassLabel(names=["a", "b"])).with_format("numpy")
    joined = join(model, labelled, scored, dtype="float32")
    assert (joined.split, joined.format["type"]) == ("validation", "numpy")
    assert joined.features["kind"].names == ["a", "b"] and joined["source"][3] == "web"
    assert isinstance(joined["ref_chosen_logps"][:], np.ndarray)
    for schema in (joined.features.arrow_schema, join(model, pa.Table.from_pylist(rows), scored, dtype="float32").schema):
        assert schema.field("ref_chosen_logps").type == schema.field("ref_rejected_logps").type == pa.float32()
        assert schema.field("ref_row").type == schema.field("ref_chosen_tokens").type == pa.int64()


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


def test_other_columns_of_a_file_keep_their_values(model, tmp_path):
    """Those that Python's own types, or a guess of the type, would round or refuse."""
    table = pa.table(
        {
            "prompt": ["Q:", "Q: "],
            "chosen": [" 4", " 5"],
            "rejected": [" 6", " 7"],
            "when": pa.array([1704067200123456789, None], pa.timestamp("ns")),
            "took": pa.array([1, 2], pa.duration("ns")),
            "hash": pa.array([2**64 - 1, 7], pa.uint64()),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    score(model, tmp_path / "rows.parquet", tmp_path / "store", dtype="float32")
    joined = join(model, tmp_path / "rows.parquet", tmp_path / "store", dtype="float32").data.table
    assert joined.select(table.column_names).cast(table.schema).equals(table)
    rows = [{**row, "meta": meta} for row, meta in zip(table.select([0, 1, 2]).to_pylist(), (1, {"a": ["x"]}), strict=True)]
    mixed = write_rows(tmp_path / "rows.jsonl", rows)
    assert join(model, mixed, tmp_path / "store", dtype="float32")["meta"] == [row["meta"] for row in rows]


def test_many_windows_of_tokens(model, tmp_path):
    tokens = [{"prompt_ids": [5, n % 700 + 10], "chosen_ids": [7, 8], "rejected_ids": [9]} for n in range(1500)]
    frame = polars.DataFrame(tokens)
    assert score(model, frame, tmp_path / "store", dtype="float32").rows == 1500
    assert join(model, frame, tmp_path / "store", dtype="float32")["ref_row"].to_list() == list(range(1500))
    streamed = datasets.Dataset.from_list(tokens[:50]).to_iterable_dataset().with_format("numpy")
    assert len(list(join(model, streamed, tmp_path / "store", dtype="float32"))) == 50


def test_what_cannot_be_meant_is_refused(rows, model, scored, tmp_path):
    changed, stream = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).to_iterable_dataset()
    changed.set_transform(lambda batch: batch)
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_dict({"prompt": []}))
    twice = pandas.DataFrame([[1, 2]], columns=["prompt", "prompt"])
    for call, error, says in (
        (lambda: join(model, rows, scored, dtype="float32", on_miss="raise"), UsageError, "use 'error' or 'drop'"),
        (lambda: join(model, stream, scored, dtype="float32", tokenizer=str(tmp_path / "nowhere")), UsageError, "nowhere"),
        (lambda: score(model, changed, scored, dtype="float32"), UsageError, "has a transform"),
        (lambda: score(model, splits, scored, dtype="float32"), DatasetError, "split test: "),
        (
            lambda: report(model, splits, scored, tmp_path / "report"),
            UsageError,
            "one of the DatasetDict's splits: train, test",
        ),
        (lambda: score(model, twice, scored, dtype="float32"), UsageError, "column names are not unique"),
        (lambda: join(model, rows, tmp_path / "nowhere", dtype="float32"), StoreNotFoundError, "reflogp score"),
        (lambda: join(model, rows, scored, dtype="bfloat16"), ReferenceNotFoundError, "--dtype bfloat16"),
        *(
            (lambda none=none: score(model, none, scored, dtype="float32"), UsageError, "cannot be read: pass a path")
            for none in (7, ["a row"], None, {"train": []})
        ),
    ):
        with pytest.raises(error, match=says):
            call()
