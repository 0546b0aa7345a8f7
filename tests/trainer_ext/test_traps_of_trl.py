"""What goes wrong with TRL's own precomputation (checked here, with the installed TRL) and right with the store.

Each test first shows TRL's answer. Where an upstream release mends it, the first half fails and says so.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from reflogp.store.windows import TrainerSettings
from reflogp.trainer import BroughtColumnsError, ReferenceSource
from tests.conftest import plain_token_logps
from tests.trainer_ext.conftest import score_pairs

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def columns(trainer) -> np.ndarray:
    return np.stack([np.array(trainer.train_dataset[name]) for name in COLUMNS])


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
    assert (columns(trl_trainer(**long)) == columns(trl_trainer(**short))).all(), "TRL serves the first run's values"

    store = tmp_path / "own-store"
    source = ReferenceSource(store, model=str(reference_folder), dtype="float32")
    for settings in (long, short):
        score_pairs(reference_folder, data_file, store, settings=TrainerSettings(**settings))
        assert_right(cached_trainer({"reference": source}, **settings), reference_folder, settings["max_length"], "keep_end")


def test_keep_end_that_was_never_scored_is_a_miss_not_a_stale_value(cached_trainer):
    from reflogp.trainer import MissingLogpsError

    with pytest.raises(MissingLogpsError, match="--truncation-mode keep_end"):
        cached_trainer(max_length=32, truncation_mode="keep_end")


def test_ld_alpha_changed(trl_trainer, cached_trainer, reference_folder):
    without, weighed = {"max_length": None}, {"max_length": None, "ld_alpha": 0.5}
    assert (columns(trl_trainer(**without)) == columns(trl_trainer(**weighed))).all(), "TRL serves unweighted values"
    for settings in (without, weighed):
        assert_right(cached_trainer(**settings), reference_folder, None, ld_alpha=settings.get("ld_alpha"))


class ForwardPasses:
    def __enter__(self):
        self.count = 0

        def note(module, args):
            self.count += isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None

        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
        return self

    def __exit__(self, *exc):
        self._handle.remove()


@pytest.mark.slow
def test_a_changed_learning_rate_scores_nothing_again(trl_trainer, cached_trainer):
    trl_trainer(learning_rate=1e-4)
    with ForwardPasses() as passes:
        trl_trainer(learning_rate=2e-4)
    assert passes.count == 20, "TRL scores all 80 rows again"
    with ForwardPasses() as passes:
        for rate in (1e-4, 2e-4):
            cached_trainer(learning_rate=rate)
    assert passes.count == 0


@pytest.mark.slow
def test_columns_that_a_dataset_brings_along(trl_trainer, cached_trainer, dataset):
    brought = dataset.add_column("ref_chosen_logps", [-1.0] * 80).add_column("ref_rejected_logps", [-2.0] * 80)
    with pytest.raises(ValueError, match="duplicate"):
        trl_trainer({"train_dataset": brought})
    ignoring = trl_trainer({"train_dataset": brought}, precompute_ref_log_probs=False)
    assert ignoring.ref_model is not None, "TRL loads the reference model all the same"

    with pytest.raises(BroughtColumnsError, match="80 of its 80 values differ from the reference's") as caught:
        cached_trainer({"train_dataset": brought})
    assert caught.value.rows == list(range(80))

    trls = trl_trainer().train_dataset
    right = dataset.add_column("ref_chosen_logps", trls["ref_chosen_logps"][:])
    trainer = cached_trainer({"train_dataset": right})
    assert trainer.joins["train"].brought == ("ref_chosen_logps",)
    assert (columns(trainer) == columns(cached_trainer())).all(), "verified, and the store's are used"


def test_a_max_length_sweep_is_served_by_one_scoring(cached_trainer, reference_folder):
    with ForwardPasses() as passes:
        trainers = {length: cached_trainer(max_length=length) for length in (1024, 250, 120, 90)}
    assert passes.count == 0
    for length, trainer in trainers.items():
        assert_right(trainer, reference_folder, length)
    assert len(trainers[90].train_dataset) < 80, "TRL's own filter drops rows, and the join follows the rows"
