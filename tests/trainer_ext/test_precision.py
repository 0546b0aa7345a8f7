"""What a run computes in is found from its weights and its mixed precision. Values of another dtype train, with one warning."""

import shlex

import pytest
import torch
from trl import DPOConfig, DPOTrainer

from reflogp.trainer import Reference, StepZeroError
from reflogp.trainer.gate import compare, computes_in, tolerance
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
    """Beside what a product of the prepared reference model really comes out in."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    args = config(DPOConfig, **changes)
    trainer = DPOTrainer(policy(weights), args=args, train_dataset=dataset, processing_class=tokenizer)
    assert computes_in(trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator) == expected
    seen = {}
    layer = trainer.ref_model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.update(product=output.dtype, states=inputs[0].dtype))
    trainer.ref_model(input_ids=torch.arange(3, 20)[None])
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


class TestComparison:
    def seen(self, policy, reference, tokens=(100, 100), dtypes=("bfloat16", "bfloat16"), config=None):
        return compare(torch.as_tensor(policy), torch.as_tensor(reference), torch.tensor(tokens), *dtypes, config)

    def test_allows_for_the_dtype_of_the_trainers_sums(self):
        reference = torch.tensor([-784.9, -1570.3])
        rounded = self.seen(reference.to(torch.bfloat16), reference, (10, 10))
        assert rounded.max_difference > 0.9 and rounded.max_per_root_token == 0.0
        assert not self.seen(reference.to(torch.bfloat16).float(), reference, (4, 4)).passed

    def test_takes_the_coarser_dtypes_tolerance(self):
        for dtypes in (("float32", "bfloat16"), ("bfloat16", AUTOCAST)):
            assert self.seen([-50.0, -60.0], [-50.9, -60.0], dtypes=dtypes).passed
        assert not self.seen([-50.0, -60.0], [-50.9, -60.0], dtypes=("float32", "float32")).passed
        experts = type("Config", (), {"num_experts": 8})()
        assert self.seen([-50.0, -60.0], [-52.5, -60.0], config=experts).tolerance == tolerance("bfloat16", True) == 0.3

    def test_what_is_not_a_number(self):
        policy = self.seen([float("nan"), -60.0], [-50.0, -60.0])
        assert policy.passed and policy.not_finite == 1 and policy.sequences == 1
        with pytest.raises(StepZeroError):
            self.seen([-50.0, -60.0], [float("nan"), -60.0]).require()

    def test_completions_without_tokens(self):
        assert self.seen([0.0, 0.0], [0.0, 0.0], (0, 0)).passed
