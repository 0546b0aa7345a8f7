"""What goes wrong with TRL's own precomputation (checked here, with the installed TRL) and right with the store.

Each test first shows TRL's answer. Where an upstream release mends it, the first half fails and says so.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.store.windows import TrainerSettings
from reflogp.trainer import MissingLogpsError
from tests.conftest import plain_token_logps
from tests.trainer_ext.conftest import score_pairs
from tests.trainer_ext.test_cached_dpo import ForwardPasses, columns

PRECOMPUTE = {"precompute_ref_log_probs": True}


def truth(trainer, folder, max_length, mode, ld_alpha=None) -> np.ndarray:
    """Reference sums of the trainer's rows by plain forwards over what its collator leaves."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums = []
    for row in trainer.train_dataset.select(range(12)):
        sides = []
        for side in ("chosen_ids", "rejected_ids"):
            ids, start = row["prompt_ids"] + row[side], len(row["prompt_ids"])
            if max_length is not None and mode == "keep_start":
                ids = ids[:max_length]
            if max_length is not None and mode == "keep_end":
                start = max(start - max(len(ids) - max_length, 0), 1)
                ids = ids[-max_length:]
            sides.append(plain_token_logps(model, ids[:start], ids[start:]))
        shared = min(map(len, sides))
        weigh = 1.0 if ld_alpha is None else ld_alpha
        sums.append([sum(side[:shared]) + weigh * sum(side[shared:]) for side in sides])
    return np.array(sums).T


def assert_right(trainer, folder, max_length, mode="keep_start", ld_alpha=None):
    assert np.abs(columns(trainer)[:, :12] - truth(trainer, folder, max_length, mode, ld_alpha)).max() <= 1e-3


@pytest.mark.slow
def test_keep_end_with_another_max_length(trl_trainer, cached_trainer, reference_folder, data_file, tmp_path):
    long, short = {"max_length": 512, "truncation_mode": "keep_end"}, {"max_length": 32, "truncation_mode": "keep_end"}
    theirs = [columns(trl_trainer(**PRECOMPUTE, **settings)) for settings in (long, short)]
    assert (theirs[0] == theirs[1]).all(), "TRL serves the first run's values"

    with pytest.raises(MissingLogpsError, match="--truncation-mode keep_end"):
        cached_trainer(**short)
    store = tmp_path / "own-store"
    for settings in (long, short):
        score_pairs(reference_folder, data_file, store, settings=TrainerSettings(**settings))
        assert_right(cached_trainer({"reference": store}, **settings), reference_folder, settings["max_length"], "keep_end")


def test_ld_alpha_changed(trl_trainer, cached_trainer, reference_folder):
    without, weighed = {"max_length": None}, {"max_length": None, "ld_alpha": 0.5}
    theirs = [columns(trl_trainer(**PRECOMPUTE, **settings)) for settings in (without, weighed)]
    assert (theirs[0] == theirs[1]).all(), "TRL serves unweighted values"
    for settings in (without, weighed):
        assert_right(cached_trainer(**settings), reference_folder, None, ld_alpha=settings.get("ld_alpha"))


@pytest.mark.slow
def test_a_changed_learning_rate_scores_nothing_again(trl_trainer, cached_trainer):
    trl_trainer(**PRECOMPUTE, learning_rate=1e-4)
    with ForwardPasses() as passes:
        trl_trainer(**PRECOMPUTE, learning_rate=2e-4)
    assert sum(passes.of.values()) == 20, "TRL scores all 80 rows again"
    with ForwardPasses() as passes:
        for rate in (1e-4, 2e-4):
            cached_trainer(learning_rate=rate)
    assert not passes.of


@pytest.mark.slow
def test_columns_that_a_dataset_brings_along(trl_trainer, cached_trainer, dataset):
    brought = dataset.add_column("ref_chosen_logps", [-1.0] * 80).add_column("ref_rejected_logps", [-2.0] * 80)
    with pytest.raises(ValueError, match="duplicate"):
        trl_trainer({"train_dataset": brought}, **PRECOMPUTE)
    ignoring = trl_trainer({"train_dataset": brought})
    assert ignoring.ref_model is not None, "TRL loads the reference model all the same"
    assert (columns(cached_trainer({"train_dataset": brought})) == columns(cached_trainer())).all(), "the store's are used"


def test_a_max_length_sweep_is_served_by_one_scoring(cached_trainer, reference_folder):
    with ForwardPasses() as passes:
        trainers = {length: cached_trainer(max_length=length) for length in (1024, 250, 120, 90)}
    assert not passes.of
    for length, trainer in trainers.items():
        assert_right(trainer, reference_folder, length)
    assert len(trainers[90].train_dataset) < 80, "TRL's own filter drops rows, and the join follows the rows"
