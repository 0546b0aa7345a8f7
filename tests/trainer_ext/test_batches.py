"""Sums found by the tokens and labels of a padded batch, against a plain forward pass; and the options of the launchers."""

from __future__ import annotations

import random
import re
from functools import partial

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from reflogp.store import UsageError
from reflogp.trainer import MissingLogpsError, Reference
from reflogp.trainer.batch import BatchReference, labelled_rows, refuse_media
from reflogp.trainer.options import read_options, warn_if_untested
from tests.conftest import REPOSITORY, plain_token_logps
from tests.trainer_ext.conftest import score_missing

COLUMNS = [("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels")]
TRAIN, EVAL = slice(0, 40), slice(30, 44)  # ten rows are in both


def drawn_row(draw: random.Random) -> dict[str, list[int]]:
    """A pair as a framework tokenizes it: a common prompt, labels with holes, sometimes no completion or no prompt."""
    prompt = [draw.randrange(5, 900) for _ in range(draw.choice([0, 1, 3, 12]))]
    row = {}
    for ids, labels in COLUMNS:
        completion = [draw.randrange(5, 900) for _ in range(draw.choice([0, 1, 2, 9, 20]) or not prompt)]
        row[ids] = prompt + completion
        row[labels] = [-100] * len(prompt) + [-100 if draw.random() < 0.2 else token for token in completion]
    return row


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    draw = random.Random(11)
    return [drawn_row(draw) for _ in range(44)]


@pytest.fixture(scope="module")
def look_up(reference_folder, tmp_path_factory):
    """look_up(datasets, folder, store): a BatchReference for rows by dataset."""
    own = tmp_path_factory.mktemp("batches") / "store"

    def run(datasets, folder, store=own, policy_dtype="float32", **options) -> BatchReference:
        tokenized = {name: Dataset.from_list(rows) for name, rows in datasets.items()}
        source = Reference(str(store), **{"dtype": "float32", **options})
        rows_of = partial(labelled_rows, columns=COLUMNS)
        return BatchReference(source, tokenized, rows_of, folder, str(reference_folder), policy_dtype)

    return run


@pytest.fixture(scope="module")
def reference(rows, look_up, tmp_path_factory) -> BatchReference:
    """Made after the command of one error, about the rows of both datasets, was run."""
    datasets, folder = {"train": rows[TRAIN], "eval": rows[EVAL]}, tmp_path_factory.mktemp("out")
    told = r"\d+ of 40 rows of train \(rows 0, .*\) and \d+ of 14 rows of eval \(rows .*there is no store at .*Score them: "
    with pytest.raises(MissingLogpsError, match=told) as caught:
        look_up(datasets, folder)
    written = pq.read_table(folder / "reflogp-missing.parquet").to_pylist()
    assert len(written) < 2 * len(rows), "a sequence of both datasets is there once"
    score_missing(caught.value)
    found = look_up(datasets, folder)
    assert {name: (join.rows, join.scored) for name, join in found.joins.items()} == {"train": (40, 0), "eval": (14, 0)}
    return found


def padded(lists: list[list[int]], left: bool, fill: int) -> torch.Tensor:
    pads = [[fill] * (max(map(len, lists)) - len(entries)) for entries in lists]
    return torch.tensor([pad * left + entries + pad * (not left) for pad, entries in zip(pads, lists, strict=True)])


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_sums_are_those_of_a_plain_forward(left, rows, reference, reference_folder):
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    for start in range(0, len(rows), 4):
        ids = [row[name] for name, _ in COLUMNS for row in rows[start : start + 4]]
        labels = [row[name] for _, name in COLUMNS for row in rows[start : start + 4]]
        mask = padded([[1] * len(entries) for entries in ids], left, 0)
        sums, tokens = reference.sums(padded(ids, left, 0), mask, padded(labels, left, -100))
        assert (sums.dtype, tokens.dtype) == (torch.float32, torch.int64)
        for row, (whole, label) in enumerate(zip(ids, labels, strict=True)):
            logps = plain_token_logps(model, whole[:1], whole[1:]) if len(whole) > 1 else []  # the first token has none
            used = [logp for logp, number in zip(logps, label[1:], strict=True) if number != -100]
            assert int(tokens[row]) == len(used)
            assert abs(float(sums[row]) - sum(used)) <= 1e-4 * max(1, len(used))


def test_only_what_is_missing_is_named(rows, reference, look_up, tmp_path):
    new = {**rows[0], "rejected_input_ids": [7, 8, 9], "rejected_labels": [-100, -100, 9]}
    with pytest.raises(MissingLogpsError, match=r"^1 of 3 rows of eval \(rows 2\)"):
        look_up({"train": rows[TRAIN], "eval": [*rows[:2], new]}, tmp_path)
    assert pq.read_table(tmp_path / "reflogp-missing.parquet").to_pylist() == [{"prompt_ids": [7, 8], "completion_ids": [9]}]


def test_rows_that_were_not_looked_up_and_labels_at_padding_are_refused(reference):
    ids, ones = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(MissingLogpsError, match=r"row 0 of a batch \(4 tokens, beginning with \[5, 6, 7, 8\]\).*train, eval"):
        reference.sums(ids, ones, ids)
    with pytest.raises(UsageError, match="padding has labels"):
        reference.sums(ids, torch.tensor([[1, 1, 0, 0]]), ids)


def test_values_in_another_dtype_are_a_warning(rows, reference, look_up, tmp_path):
    with pytest.warns(UserWarning, match="computed in float32, but the policy computes in bfloat16.*--dtype bfloat16"):
        look_up({"train": rows[TRAIN]}, tmp_path, policy_dtype="bfloat16")


@pytest.mark.parametrize(("store", "options"), [("pairs.parquet", {}), ("logps", {"on_miss": "compute"})])
def test_sources_that_cannot_serve_batches(store, options, look_up, tmp_path):
    with pytest.raises(UsageError, match="need a store or a service"):
        look_up({}, tmp_path, store=store, **options)


def test_rows_with_images_are_refused():
    refuse_media(Dataset.from_list([{"images": None}, {"images": []}]), ["images"])
    with pytest.raises(UsageError, match="has images"):
        refuse_media(Dataset.from_list([{"images": None}, {"images": ["a.png"]}]), ["images", "videos"])


def test_every_option_is_in_the_help_and_in_the_docs(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_options("command", ["--help"], "others")
    documented = re.findall(r"(?m)^\| `(\w+)` \|", (REPOSITORY / "docs" / "frameworks.md").read_text(encoding="utf-8"))
    assert sorted(set(re.findall(r"--reflogp\.(\w+)", capsys.readouterr().out))) == sorted(documented)


def test_an_untested_version_of_a_framework_is_a_warning(monkeypatch, recwarn):
    for found, warned in (("0.11.2", 0), ("0.110", 1)):
        monkeypatch.setattr("importlib.metadata.version", lambda package, found=found: found)
        warn_if_untested("framework", "0.11")
        assert len(recwarn) == warned
    assert "is tested with framework 0.11, not 0.110" in str(recwarn.pop().message)
