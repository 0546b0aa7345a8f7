"""What a run computes in is found from its weights and its mixed precision. Values of another dtype train, with one warning."""

import shlex

import pytest
import torch
from trl import DPOConfig, DPOTrainer

from reflogp.trainer import Reference
from reflogp.trainer.gate import compare, computes_in
from tests.trainer_ext.conftest import losses, score_pairs

AUTOCAST = "bfloat16-autocast"


@pytest.mark.parametrize(
    ("weights", "changes", "launched_with", "expected"),
    [
        ("float32", {"bf16": False}, "no", "float32"),
        ("float32", {"bf16": None}, "no", AUTOCAST),
        ("float32", {"bf16": False}, "bf16", AUTOCAST),  # accelerate launch --mixed_precision bf16
        ("bfloat16", {"bf16": False}, "no", "bfloat16"),
        ("bfloat16", {"bf16": None}, "no", "bfloat16"),
        ("float16", {"bf16": False}, "no", "float16"),
        ("float32", {"bf16": False, "fp16": True}, "no", "float32"),  # accelerate has no float16 on a CPU
    ],
)
def test_what_a_run_computes_in(weights, changes, launched_with, expected, policy, config, dataset, tokenizer, monkeypatch):
    """Beside what a product of the prepared policy really comes out in."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    args = config(DPOConfig, **changes)
    trainer = DPOTrainer(policy(weights), args=args, train_dataset=dataset, processing_class=tokenizer)
    assert computes_in(trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator) == expected
    seen = {}
    layer = trainer.accelerator.unwrap_model(trainer.model).model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.update(product=output.dtype, states=inputs[0].dtype))
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)(input_ids=torch.arange(3, 20)[None])
    assert seen["product"] == getattr(torch, expected.removesuffix("-autocast"))
    assert seen["states"] == getattr(torch, weights)


@pytest.mark.slow
def test_a_bfloat16_store_under_trls_defaults(cached_trainer, reference_folder, stores, recwarn, data_file, tmp_path, reflogp):
    """`reflogp score` on a GPU, then CachedDPOTrainer("./sft", …): float32 weights under autocast. One warning, whose command
    makes the two equal."""
    trainer = cached_trainer({"model": str(reference_folder), "reference": stores("bfloat16")}, bf16=None)
    trainer.train()
    seen = trainer.step_zero
    assert (seen.reference_dtype, seen.policy_dtype, seen.tolerance, seen.passed) == ("bfloat16", AUTOCAST, 0.1, True)
    assert len(losses(trainer)) == 2
    [said] = [str(warning.message) for warning in recwarn if "reference log-probs were computed in" in str(warning.message)]
    assert f"the policy computes in {AUTOCAST} (float32 weights under torch.autocast, enabled by bf16=True" in said
    assert "differ by about 0.1 nats on average" in said
    words = shlex.split(said.partition(f"score the data in {AUTOCAST}: ")[2])
    words[words.index("DATA")] = str(data_file)
    words[words.index("--store") + 1] = str(tmp_path / "own")
    assert reflogp(*words[1:])[0] == 0
    recwarn.clear()
    equal = cached_trainer({"model": str(reference_folder), "reference": tmp_path / "own"}, bf16=None)
    equal.train()
    assert equal.step_zero.max_difference < seen.max_difference / 2
    assert not [warning for warning in recwarn if "reference log-probs were computed in" in str(warning.message)]


@pytest.mark.slow
def test_auto_is_the_policys_dtype_or_else_the_most_precise(cached_trainer, policy, reference_folder, data_file, tmp_path):
    for dtype in (AUTOCAST, "float32"):
        score_pairs(reference_folder, data_file, tmp_path / "store", dtype)
    for weights, changes, expected in (
        ("float32", {"bf16": None}, AUTOCAST),
        ("float32", {}, "float32"),
        ("bfloat16", {}, "float32"),
    ):
        trainer = cached_trainer({"reference": tmp_path / "store", "model": policy(weights)}, **changes)
        assert trainer.joins["train"].where.reference_dtype == expected
        trainer.train()
        assert trainer.step_zero.passed
    named = Reference(tmp_path / "store", dtype=AUTOCAST)
    assert cached_trainer({"reference": named}).joins["train"].where.reference_dtype == AUTOCAST


EXPERTS = type("Config", (), {"num_experts": 8})()


@pytest.mark.parametrize(
    ("policy", "reference", "tokens", "dtypes", "config", "passes"),
    [
        ([-784.0, -1568.0], [-784.9, -1570.3], 10, ("bfloat16", "bfloat16"), None, True),  # the trainer's sums are bfloat16
        ([-50.0, -60.0], [-50.9, -60.0], 100, ("bfloat16", AUTOCAST), None, True),
        ([-50.0, -60.0], [-50.9, -60.0], 100, ("float32", "bfloat16"), None, True),  # the coarser dtype's tolerance
        ([-50.0, -60.0], [-50.9, -60.0], 100, ("float32", "float32"), None, False),
        ([-50.0, -60.0], [-52.5, -60.0], 100, ("bfloat16", "bfloat16"), None, False),
        ([-50.0, -60.0], [-52.5, -60.0], 100, ("bfloat16", "bfloat16"), EXPERTS, True),
        ([float("nan"), -60.0], [-50.0, -60.0], 100, ("bfloat16", "bfloat16"), None, True),  # the policy's own concern
        ([-50.0, -60.0], [float("nan"), -60.0], 100, ("bfloat16", "bfloat16"), None, False),
        ([0.0, 0.0], [0.0, 0.0], 0, ("bfloat16", "bfloat16"), None, True),
    ],
)
def test_what_the_gate_allows(policy, reference, tokens, dtypes, config, passes):
    sums = torch.tensor(policy, dtype=torch.bfloat16 if policy[0] == -784.0 else torch.float32)
    seen = compare(sums, torch.tensor(reference), torch.tensor([tokens, tokens]), *dtypes, config)
    assert seen.passed == passes and seen.not_finite == torch.tensor(policy).isnan().sum()
