"""Every loss that reads a reference trains as it does with TRL's own reference model beside the policy, to 1e-5."""

import numpy as np
import pytest

from tests.trainer_ext.conftest import losses

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
    ours = cached_trainer(**SETTINGS, **changes)
    ours.train()
    trl = trl_trainer(precompute_ref_log_probs=False, **SETTINGS, **changes)
    trl.train()
    apart = np.abs(np.array(losses(ours)) - np.array(losses(trl)))
    scale = np.maximum(1, np.abs(losses(trl)))  # losses of hundreds are rounded at their seventh digit
    assert len(losses(ours)) == 3
    assert (apart <= 1e-5 * scale).all(), apart
    assert ours.audit.as_dict()["verdict"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, cached_kto_trainer, trl_kto_trainer):
    ours = cached_kto_trainer(loss_type=loss_type)
    ours.train()
    trl = trl_kto_trainer(loss_type=loss_type)
    trl.train()
    assert np.abs(np.array(losses(ours)) - np.array(losses(trl))).max() <= 1e-5
    assert ("ref_KL_logps" in ours.train_dataset.column_names) == (loss_type == "kto")
    passes = 2 if loss_type == "kto" else 1
    assert ours.audit.as_dict()["forwards"] == {"micro_batches": 3, "policy_passes": 3 * passes}
    assert ours.audit.as_dict()["verdict"] == "passed"
