"""Exports, and the recipes of docs/exports.md, as their readers meet them.

Each reader is written from the other stack's description, with no code of reflogp.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import TokenizedDataset
from reflogp.service.runner.result import write_result
from reflogp.store import Store, describe_reference
from reflogp.store.windows import TrainerSettings
from tests.conftest import REPOSITORY, plain_token_logps, write_rows

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3
ROWS = 12
HASH = "3f0c9d2b81a4e567"
OPEN_INSTRUCT = ("--as", "open-instruct", "--hash", HASH, "--loss-type")


class TensorCache:
    """open-instruct's model_utils.TensorCache over a dataset of n rows, as dpo_utils reads it."""

    def __init__(self, file: Path, n: int) -> None:
        self.tensors = torch.load(file, weights_only=True, map_location="cpu")
        assert set(self.tensors) == {"chosen_logps", "rejected_logps"}
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.float32 or tensor.shape != (n,) or torch.isinf(tensor).any():
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {n} float32")

    def __getitem__(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor[index.long()] for name, tensor in self.tensors.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def rows():
    """Token rows as another stack made them, with the text fields that fairseq2 reads."""
    draw = np.random.default_rng(5)
    made = []
    for number in range(ROWS):
        ids = {
            f"{side}_ids": draw.integers(10, 900, draw.integers(3, 14)).tolist() for side in ("prompt", "chosen", "rejected")
        }
        texts = {"src": f"question {number}", "tgt_chosen": f"„gut“ {number}", "tgt_rejected": f"bad {number}"}
        made.append({"id": number, **ids, **texts})
    return made


@pytest.fixture(scope="module")
def plain(rows, reference_folder):
    """side -> float64 sums of plain float32 forwards of transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    return {
        side: np.array([sum(plain_token_logps(model, row["prompt_ids"], row[f"{side}_ids"])) for row in rows])
        for side in ("chosen", "rejected")
    }


@pytest.fixture(scope="module")
def command():
    """The command line, for the fixtures that are made once."""
    from reflogp.cli import main

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
            patch.setattr(sys, "argv", ["reflogp", *map(str, arguments)])
            main()
        return int(caught.value.code or 0)

    return run


@pytest.fixture(scope="module")
def join(command, place, reference_folder):
    """join(data, name, *options) -> a joined file, scored first."""

    def run(data, name, *options, scored=True, code=DONE):
        store = ("--store", place / "store", "--dtype", "float32")
        if scored:
            command("score", reference_folder, data, *store)
        assert command("join", reference_folder, data, *store, "-o", place / name, *options) == code
        return place / name

    return run


@pytest.fixture(scope="module")
def joined(join, place, rows):
    return join(write_rows(place / "tokens.jsonl", rows), "joined.parquet")


@pytest.fixture(scope="module")
def short(join, place, joined):
    """Joined under a max_length that cuts completions; rows whose prompt fills it are dropped, so it is above every prompt."""
    return join(place / "tokens.jsonl", "short.parquet", "--max-length", "15", scored=False)


def altered(file: Path, target: Path, change) -> Path:
    """The joined file with its table, note and coverage changed by `change(table, note)`."""
    table = pq.read_table(file)
    kept = pq.ParquetFile(file).metadata.metadata
    note = json.loads(kept[b"reflogp"])
    table = change(table, note)
    metadata = {b"reflogp": json.dumps(note).encode(), b"reflogp.coverage": kept.get(b"reflogp.coverage", b"{}")}
    pq.write_table(table.replace_schema_metadata(metadata), target)
    return target


def with_values(table: pa.Table, name: str, values) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


def test_open_instruct_gathers_plain_sums_by_index_under_a_shuffle(reflogp, joined, plain, tmp_path):
    code, out, _ = reflogp("export", joined, *OPEN_INSTRUCT, "dpo", "-o", tmp_path / "caches", "--json")
    summary = json.loads(out.splitlines()[-1])
    file = tmp_path / "caches" / f"{HASH}.pt"
    assert (code, summary["written"], summary["missing"], summary["files"]) == (DONE, ROWS, 0, [str(file)])
    assert summary["reference_dtype"] == "float32" and summary["reference_id"] and summary["snapshot"]
    cache = TensorCache(file, ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    for index in order.split(5):
        found = cache[index]
        for side in ("chosen", "rejected"):
            assert found[f"{side}_logps"].numpy() == pytest.approx(plain[side][index.numpy()], abs=1e-4)


def test_open_instruct_means_are_over_the_tokens_that_are_summed(
    reflogp, joined, short, rows, plain, reference_folder, tmp_path
):
    assert reflogp("export", joined, *OPEN_INSTRUCT, "dpo_norm", "-o", tmp_path)[0] == DONE
    cache = TensorCache(tmp_path / f"{HASH}.pt", ROWS)
    for side in ("chosen", "rejected"):
        means = plain[side] / [len(row[f"{side}_ids"]) for row in rows]
        assert cache.tensors[f"{side}_logps"].numpy() == pytest.approx(means, abs=1e-5)
    assert reflogp("export", short, *OPEN_INSTRUCT, "dpo_norm", "-o", tmp_path)[0] == DONE
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    values = TensorCache(tmp_path / f"{HASH}.pt", ROWS).tensors["chosen_logps"].tolist()
    kept = [row["chosen_ids"][: 15 - len(row["prompt_ids"])] for row in rows]
    assert any(len(ids) < len(row["chosen_ids"]) for ids, row in zip(kept, rows, strict=True))
    for row, ids, value in zip(rows, kept, values, strict=True):
        assert value == pytest.approx(np.mean(plain_token_logps(model, row["prompt_ids"], ids)), abs=1e-5)


def recipes() -> dict:
    """What the Python blocks of docs/exports.md define."""
    found: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "exports.md").read_text("utf-8"), re.DOTALL):
        exec(compile(block, "docs/exports.md", "exec"), found)
    return found


def test_the_documents_recipes_write_the_records_of_their_frameworks(joined, rows, plain, tmp_path):
    recipe = recipes()
    recipe["write_megatron_bridge"](joined, tmp_path, {"tokenizer": "org/model"}, ROWS)
    recipe["write_fairseq2"](joined, tmp_path / "train.jsonl")
    assert json.loads((tmp_path / "scoring_metadata.json").read_text()) == {"tokenizer": "org/model", "num_pairs": ROWS}
    lines = [map(json.loads, (tmp_path / name).read_text().splitlines()) for name in ("ref_logprobs.jsonl", "train.jsonl")]
    for number, (row, record, line) in enumerate(zip(rows, *lines, strict=True)):
        assert record.pop("pair_id") == number
        texts = {name: line.pop(name) for name in ("src", "tgt_chosen", "tgt_rejected")}
        assert texts.items() <= row.items()
        for side in ("chosen", "rejected"):
            assert record.pop(f"ref_{side}_logprob_sum") == pytest.approx(plain[side][number], abs=1e-4)
            assert record.pop(f"ref_{side}_num_tokens") == len(row[f"{side}_ids"])
            assert line.pop(f"reference_score_{side}") == pytest.approx(plain[side][number], abs=1e-4)
        assert record == line == {}
    with pytest.raises(ValueError, match="does not have values for every pair"):
        recipe["write_megatron_bridge"](joined, tmp_path / "more", {}, ROWS + 1)


def test_a_jobs_result_is_exported_too_and_its_bad_rows_are_named(
    reflogp, joined, place, reference_folder, tokenizer, plain, rows, tmp_path
):
    reference = describe_reference(str(reference_folder), "float32")
    snapshot = Store(str(place / "store"))[reference].snapshot()

    def result(data, name, problems):
        dataset = TokenizedDataset(RowSource(str(data)), lambda: tokenizer, None)
        file = tmp_path / name
        write_result(dataset, snapshot, TrainerSettings(), problems, file, lambda: None)
        return file

    whole = result(place / "tokens.jsonl", "whole.parquet", {})
    assert reflogp("export", whole, *OPEN_INSTRUCT, "dpo", "-o", tmp_path)[0] == DONE
    sums = TensorCache(tmp_path / f"{HASH}.pt", ROWS).tensors["rejected_logps"]
    assert sums.numpy() == pytest.approx(plain["rejected"], abs=1e-4)
    cut = altered(whole, tmp_path / "cut.parquet", lambda table, note: table.slice(0, 11))
    code, _, err = reflogp("export", cut, *OPEN_INSTRUCT, "dpo", "-o", tmp_path)
    assert code == MISSES
    assert "row 11." in err
    data = write_rows(tmp_path / "bad.jsonl", [*rows[:2], {**rows[2], "chosen_ids": "none"}, *rows[3:]])
    code, _, err = reflogp(
        "export", result(data, "bad.parquet", {5: "it killed a worker"}), *OPEN_INSTRUCT, "dpo", "-o", tmp_path
    )
    assert code == MISSES
    assert "2 of 12 rows" in err
    assert "rows 2, 5." in err


def test_rows_without_values_stop_the_export_and_are_named(reflogp, join, joined, rows, tmp_path):
    """Missing, bad and dropped rows, and rows cut off behind the last that has values."""
    unscored = {**rows[4], "chosen_ids": [11, 12, 13]}
    data = write_rows(tmp_path / "gaps.jsonl", [*rows[:4], unscored, {**rows[5], "prompt_ids": None}, *rows[6:], unscored])
    gaps = join(data, "gaps.parquet", scored=False, code=MISSES)
    code, out, err = reflogp("export", gaps, *OPEN_INSTRUCT, "dpo", "-o", tmp_path / "out", "--json")
    assert code == MISSES
    assert "3 of 13 rows have no values" in err and "rows 4, 5, 12." in err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["rows"], summary["written"], summary["missing_row_numbers"]) == (13, 0, [4, 5, 12])
    dropped = join(tmp_path / "gaps.jsonl", "dropped.parquet", "--max-length", "8", scored=False, code=MISSES)
    code, _, err = reflogp("export", dropped, *OPEN_INSTRUCT, "dpo", "-o", tmp_path / "out")
    left_out = [at for at, row in enumerate(rows) if len(row["prompt_ids"]) >= 8 or at in (4, 5)]
    assert code == MISSES
    assert f"rows {', '.join(map(str, [*left_out, 12][:10]))}" in err
    assert not (tmp_path / "out").exists()


def nan_in_row_3(table, note):
    return with_values(table, "ref_chosen_logps", [float("nan") if at == 3 else -1.0 for at in range(ROWS)])


def no_tokens_in_row_2(table, note):
    return with_values(table, "ref_chosen_tokens", [0 if at == 2 else 5 for at in range(ROWS)])


def without(*names):
    return lambda table, note: table.drop_columns(list(names))


def noted(**settings):
    def change(table, note):
        note.update(settings)
        return table

    return change


DPO = (*OPEN_INSTRUCT, "dpo", "-o", "caches")


@pytest.mark.parametrize(
    "change, form, says",
    [
        (nan_in_row_3, DPO, "not finite: row 3"),
        (no_tokens_in_row_2, (*OPEN_INSTRUCT, "dpo_norm", "-o", "caches"), "at least one token): row 2"),
        (without("ref_chosen_tokens", "ref_rejected_tokens", "ref_row"), DPO, "has no sums of preference pairs"),
        (noted(ld_alpha=0.5), DPO, "was joined with ld_alpha 0.5"),
        (noted(max_length=64, truncation_mode="keep_end"), DPO, "keeps the start of each sequence"),
        (lambda table, note: table.take(list(range(ROWS))[::-1]), DPO, "not in dataset order"),
        (noted(), ("--as", "open-instruct", "-o", "caches", "--loss-type", "dpo", "--hash", "../secret"), "16 digits"),
        (noted(), (*OPEN_INSTRUCT, "dpo", "-o", "altered.parquet"), "cannot be written"),
    ],
)
def test_values_that_would_be_wrong_there_are_refused(reflogp, joined, tmp_path, monkeypatch, change, form, says):
    monkeypatch.chdir(tmp_path)
    file = altered(joined, tmp_path / "altered.parquet", change)
    before = sorted(tmp_path.iterdir())
    code, _, err = reflogp("export", file, *form)
    assert code == USAGE
    assert says in err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_a_joined_file_of_pairs_is_refused(reflogp, join, rows, place, joined, tmp_path):
    pq.write_table(pa.table({"ref_chosen_logps": [1.0]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes(joined.read_bytes()[:-9])
    for file in (place / "tokens.jsonl", *(tmp_path / f"{name}.parquet" for name in ("other", "cut", "nowhere"))):
        code, _, err = reflogp("export", file, *OPEN_INSTRUCT, "dpo", "-o", tmp_path)
        assert code == USAGE
        assert "cannot be read as output of `reflogp join` or `reflogp jobs result`" in err
    kto = [{"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"], "label": True} for row in rows]
    file = join(write_rows(tmp_path / "kto.jsonl", kto), "kto.parquet")
    code, _, err = reflogp("export", file, *OPEN_INSTRUCT, "dpo", "-o", tmp_path)
    assert code == USAGE
    assert "has no sums of preference pairs" in err


def test_the_documents_token_row_splits_what_a_stack_scores():
    """The function that docs/exports.md gives, on rows as open-instruct and Megatron-Bridge hold them."""
    token_row = recipes()["token_row"]
    chosen, labels = [1, 2, 3, 4, 5], [-100, -100, 3, 4, 5]
    rejected, mask = [1, 2, 9], [False, False, True]
    expected = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [9]}
    assert token_row(chosen, [label != -100 for label in labels], rejected, mask) == expected
    with pytest.raises(ValueError, match="one prompt"):
        token_row(chosen, [False, False, True, True, True], [1, 7, 9], mask)
    with pytest.raises(ValueError, match="scattered tokens"):
        token_row(chosen, [False, False, True, False, True], rejected, mask)
