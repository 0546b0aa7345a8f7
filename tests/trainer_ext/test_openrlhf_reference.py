"""CachedReference by itself: what OpenRLHF's DPOTrainer asks of a reference model, answered exactly, or not at all."""

from __future__ import annotations

import shlex

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.store import UsageError
from reflogp.trainer import MissingLogpsError, ReferenceSource, UnusableLogpsError
from reflogp.trainer.openrlhf import CachedReference
from tests.conftest import plain_token_logps
from tests.trainer_ext.conftest import damaged_copy


class Rows(torch.utils.data.Dataset):
    """Rows as openrlhf.datasets.RewardDataset gives them, from token ids: (prompt length, chosen, rejected)."""

    def __init__(self, rows, is_dpo=True):
        self.rows, self.is_dpo = rows, is_dpo

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        prompt_length, *sides = self.rows[row]
        tokens = [torch.tensor([side]) for side in sides]
        return tokens[0], torch.ones_like(tokens[0]), tokens[1], torch.ones_like(tokens[1]), prompt_length

    def batch(self, rows, pad=0, left=False):
        """(input_ids, attention_mask) of some rows: chosen ones, then rejected ones, padded to the longest."""
        sides = [self.rows[row][side] for side in (1, 2) for row in rows]
        longest = max(map(len, sides))
        gaps = [longest - len(side) for side in sides]
        ids = [[pad] * gap * left + side + [pad] * gap * (not left) for gap, side in zip(gaps, sides, strict=True)]
        mask = [[0] * gap * left + [1] * len(side) + [0] * gap * (not left) for gap, side in zip(gaps, sides, strict=True)]
        return torch.tensor(ids), torch.tensor(mask)


def tokens(seed, length):
    return np.random.default_rng(seed).integers(5, 900, length).tolist()


PROMPT, OTHER = tokens(1, 12), tokens(2, 3)
#: Completions of different lengths, a prompt that merges differently on one side, no prompt at all, no completion at all.
TRAIN = Rows(
    [
        (12, PROMPT + tokens(3, 20), PROMPT + tokens(4, 5)),
        (11, PROMPT[:11] + tokens(5, 9), PROMPT[:10] + tokens(6, 2)),
        (0, tokens(7, 6), tokens(8, 1)),
        (3, [*OTHER, 2], OTHER),
    ]
)
EVAL = Rows([(12, PROMPT + tokens(9, 4), PROMPT + tokens(4, 5)), (7, PROMPT + tokens(3, 20), OTHER + tokens(1, 8))])
DATASETS = {"train": TRAIN, "eval": EVAL}


@pytest.fixture(scope="module")
def filled(reference_folder, tmp_path_factory):
    """A store that has what the datasets need: scored by the command that the first attempt names."""
    from typer.testing import CliRunner

    from reflogp.cli.main import app

    folder = tmp_path_factory.mktemp("filled")
    source = ReferenceSource(folder / "store", model=str(reference_folder), dtype="float32")
    with pytest.raises(MissingLogpsError, match=r"4 of 4 rows of train \(rows 0, 1, 2, 3\) and 2 of 2 rows of eval") as caught:
        CachedReference(source, DATASETS, folder)
    assert caught.value.rows == [0, 1, 2, 3]
    done = CliRunner().invoke(app, shlex.split(caught.value.command)[1:])
    assert done.exit_code == 0, done.output
    return folder / "store"


@pytest.fixture
def source(filled, reference_folder):
    return ReferenceSource(filled, model=str(reference_folder), dtype="float32")


@pytest.fixture
def reference(source, tmp_path):
    return CachedReference(source, DATASETS, tmp_path)


@pytest.mark.parametrize("left", [False, True])
def test_every_value_is_the_models(left, reference, reference_folder):
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    for dataset in DATASETS.values():
        rows = list(range(len(dataset)))
        ids, mask = dataset.batch(rows, left=left)
        log_probs, output = reference(ids, attention_mask=mask, return_output=True, return_logprobs=True, ring_attn_group=None)
        assert log_probs.dtype == torch.float32
        assert log_probs.shape == (len(ids), ids.shape[1] - 1)
        assert "aux_loss" not in output
        begins = [dataset.rows[row][0] for row in rows] * 2
        for row, begin in enumerate(begins):
            whole = ids[row][mask[row].bool()].tolist()
            begin = max(begin, 1)
            expected = plain_token_logps(model, whole[:begin], whole[begin:]) if begin < len(whole) else []
            last = np.flatnonzero(mask[row].numpy())[-1]
            given = log_probs[row, last - len(expected) : last]
            assert np.abs(given.numpy() - np.array(expected)).max(initial=0) <= 1e-4, (row, whole)


def test_rows_that_disagree_about_the_prompt_share_the_longer_completion(reference):
    """eval's second row is train's first with a shorter prompt: a value does not depend on what is called the prompt."""
    ids, mask = EVAL.batch([1])
    log_probs, _ = reference(ids, mask)
    assert (log_probs[0, 6:] != 0).all()
    assert (log_probs[0, :6] == 0).all()


def test_it_is_no_model(reference):
    assert not reference, "strategy.prepare hands back what is false"
    assert reference.model is None
    assert reference.eval() is reference
    assert not isinstance(reference, torch.nn.Module)
    for name in ("parameters", "forward", "module", "config"):
        assert not hasattr(reference, name)


def test_a_row_that_was_never_looked_up_is_named(reference):
    strangers = Rows([(2, [5, 6, 7, 8], [5, 6, 9])])
    with pytest.raises(MissingLogpsError, match=r"row 0 of a batch \(4 tokens, beginning with \[5, 6, 7, 8\]\).*train, eval"):
        reference(*strangers.batch([0]))


def test_only_what_is_missing_is_asked_for(source, tmp_path):
    more = Rows([*TRAIN.rows, (12, PROMPT + tokens(3, 20), PROMPT + tokens(40, 6))])
    with pytest.raises(MissingLogpsError, match=r"1 of 5 rows of train \(rows 4\) have no reference log-probs") as caught:
        CachedReference(source, {"train": more, "eval": EVAL}, tmp_path)
    assert caught.value.rows == [4]
    [written] = pq.read_table(tmp_path / "reflogp-missing.parquet").to_pylist()
    assert written == {"prompt_ids": PROMPT, "completion_ids": tokens(40, 6)}


def test_damaged_values_are_refused(filled, reference_folder, tmp_path):
    bad = damaged_copy(filled, tmp_path / "bad", lambda values: values * np.nan)
    source = ReferenceSource(bad, model=str(reference_folder), dtype="float32")
    with pytest.raises(UnusableLogpsError, match=r"4 of 4 rows of train .* damaged or not finite"):
        CachedReference(source, DATASETS, tmp_path)


def test_one_value_that_is_not_a_number_is_found(filled, reference_folder, tmp_path):
    def spoil(values):
        return np.where(np.arange(len(values)) == 19, np.inf, values)  # the one sequence of 20 completion tokens

    source = ReferenceSource(damaged_copy(filled, tmp_path / "bad", spoil), model=str(reference_folder), dtype="float32")
    with pytest.raises(UnusableLogpsError, match=r"1 of 4 rows of train \(rows 0\) and 1 of 2 rows of eval \(rows 1\)"):
        CachedReference(source, DATASETS, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"location": "pairs.parquet"}, "a value per token"),
        ({"on_miss": "compute"}, "only with TRL's trainers"),
    ],
    ids=str,
)
def test_sources_that_cannot_serve_openrlhf(arguments, words, filled, reference_folder, tmp_path):
    source = ReferenceSource(**{"location": filled, "model": str(reference_folder), "dtype": "float32", **arguments})
    with pytest.raises(UsageError, match=words):
        CachedReference(source, DATASETS, tmp_path)


def test_running_the_command_needs_a_store_and_the_latest_snapshot(filled, reference_folder, tmp_path):
    source = ReferenceSource(filled, model=str(reference_folder), dtype="float32", snapshot=1)
    with pytest.raises(UsageError, match="snapshot 1 cannot contain"):
        CachedReference(source, DATASETS, tmp_path, run_command=True)


def test_a_dataset_that_is_not_for_dpo_is_refused(source, tmp_path):
    with pytest.raises(UsageError, match="is_dpo=True"):
        CachedReference(source, {"train": Rows(TRAIN.rows, is_dpo=False)}, tmp_path)


def test_what_was_joined_is_recorded(reference, filled):
    assert {name: (record.rows, record.scored) for name, record in reference.joins.items()} == {"train": (4, 0), "eval": (2, 0)}
    assert {record.where.store for record in reference.joins.values()} == {str(filled)}
