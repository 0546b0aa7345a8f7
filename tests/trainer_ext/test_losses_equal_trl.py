"""Every loss that reads a reference trains as it does with TRL's own reference model beside the policy, to 1e-5."""

import numpy as np
import pytest
from trl import KTOConfig, KTOTrainer

from tests.trainer_ext.conftest import apart, losses

SETTINGS = {"max_steps": 3, "max_length": 130}
LOSSES = [
    *({"loss_type": [name]} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot")),
    *({"loss_type": [name]} for name in ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm")),
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    {"loss_type": ["robust"], "label_smoothing": 0.1},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.4},
    {"loss_type": ["ipo"], "ld_alpha": 0.4},
    {"loss_type": ["sigmoid"], "use_weighting": True},
    {"f_divergence_type": "forward_kl"},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    {"f_divergence_type": "js_divergence", "ld_alpha": 0.4, "loss_type": ["hinge"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", LOSSES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()).replace("'", ""))
def test_losses(changes, cached_trainer, trl_trainer):
    ours, trl = cached_trainer(**SETTINGS, **changes), trl_trainer(**SETTINGS, **changes)
    ours.train()
    trl.train()
    scale = max(1, np.abs(losses(trl)).max())  # losses of hundreds are rounded at their seventh digit
    assert apart(ours, trl) <= 1e-5 * scale
    assert ours.step_zero.passed


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, cached_kto_trainer, policy, config, dataset, tokenizer):
    ours = cached_kto_trainer(loss_type=loss_type)
    args = config(KTOConfig, max_steps=3, max_length=220, loss_type=loss_type)
    trl = KTOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer)
    ours.train()
    trl.train()
    assert apart(ours, trl) <= 1e-5
    assert ("ref_KL_logps" in ours.train_dataset.column_names) == (loss_type == "kto")
    assert ours.step_zero.passed
