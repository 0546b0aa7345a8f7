"""What a run computes in is found from its weights and its mixed precision, and only values of that dtype pass the gate."""

import shlex

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig

from reflogp.store import ReferenceNotFoundError, StoreNotFoundError, UsageError
from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, MissingLogpsError, ReferenceSource, StepZeroError
from reflogp.trainer.tolerances import computes_in
from tests.store.test_reference import copied, edit_config
from tests.trainer_ext.conftest import losses, score_pairs

AUTOCAST = "bfloat16-autocast"


@pytest.fixture(scope="session")
def stores(reference_folder, data_file, tmp_path_factory):
    """dtype -> a store with the pairs scored in it."""
    folders = {}
    for dtype in ("bfloat16", "float32", AUTOCAST):
        folders[dtype] = tmp_path_factory.mktemp("store")
        score_pairs(reference_folder, data_file, folders[dtype], dtype)
    return folders


@pytest.fixture
def by_default(cached_trainer, stores, reference_folder):
    """by_default(dtype of the store, trainer options): a run of float32 weights whose precision is TRL's default."""

    def make(dtype, options=None, **changes):
        source = ReferenceSource(stores[dtype], model=str(reference_folder), dtype=dtype)
        trainer = cached_trainer({"reference": source, **(options or {})}, **{"bf16": None, **changes})
        assert trainer.args.bf16, "TRL's default"
        return trainer

    return make


@pytest.mark.slow
def test_values_scored_under_autocast_pass_the_gate_of_trls_defaults(by_default):
    trainer = by_default(AUTOCAST)
    trainer.train()
    seen = trainer.audit.step_zero
    assert (seen.reference_dtype, seen.policy_dtype) == (AUTOCAST, AUTOCAST)
    assert seen.max_per_root_token <= 0.02  # a fifth of what is allowed
    assert len(losses(trainer)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_of_a_plain_dtype_are_refused_with_the_command_that_helps(
    by_default, dtype, reflogp, data_file, stores, reference_folder
):
    trainer = by_default(dtype)
    with pytest.raises(StepZeroError) as refused:
        trainer.train()
    message = str(refused.value)
    assert f"were computed in {dtype}, but the policy computes in {AUTOCAST} (float32 weights under torch.autocast" in message
    [command] = [part for part in message.split("`") if part.startswith("reflogp score")]
    words = [str(data_file) if word == "DATA" else word for word in shlex.split(command)[1:]]
    assert reflogp(*words)[0] == 0
    source = ReferenceSource(stores[dtype], model=str(reference_folder), dtype=AUTOCAST)
    again = by_default(dtype, {"reference": source})
    again.train()
    assert again.audit.step_zero.passed


@pytest.mark.slow
def test_the_values_are_those_of_trls_own_reference_model(by_default, config, policy, dataset, tokenizer):
    """Sums of TRL's precomputation under its defaults: the old stores are several times as far off."""
    args = config(bf16=None, precompute_ref_log_probs=True, per_device_train_batch_size=8)
    theirs = DPOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    columns = ("ref_chosen_logps", "ref_rejected_logps")
    apart = {}
    for dtype in ("bfloat16", "float32", AUTOCAST):
        ours = by_default(dtype).train_dataset
        apart[dtype] = sum(
            float((torch.tensor(ours[name][:]) - torch.tensor(theirs[name][:])).abs().mean()) / 2 for name in columns
        )
    assert apart[AUTOCAST] < min(apart["bfloat16"], apart["float32"]) / 2


@pytest.mark.slow
def test_an_adapter_under_autocast(by_default):
    trainer = by_default(AUTOCAST, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])})
    trainer.train()
    assert trainer.audit.step_zero.passed
    assert trainer.audit.step_zero.policy_dtype == AUTOCAST


@pytest.mark.slow
def test_kto_under_autocast(policy, config, dataset, tokenizer, reference_folder, stores):
    source = ReferenceSource(stores[AUTOCAST], model=str(reference_folder), dtype=AUTOCAST)
    arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": source}
    try:
        trainer = CachedKTOTrainer(policy(), args=config(KTOConfig, bf16=None), **arguments)
    except MissingLogpsError as missing:  # the KL term's sequences
        words = shlex.split(missing.command)
        assert words[words.index("--dtype") + 1] == AUTOCAST
        score_pairs(reference_folder, words[3], stores[AUTOCAST], AUTOCAST)
        trainer = CachedKTOTrainer(policy(), args=config(KTOConfig, bf16=None), **arguments)
    trainer.train()
    assert trainer.audit.step_zero.policy_dtype == AUTOCAST
    assert trainer.audit.step_zero.passed


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
    model = policy().to(getattr(torch, weights))
    trainer = DPOTrainer(model, args=config(DPOConfig, **changes), train_dataset=dataset, processing_class=tokenizer)
    assert computes_in(trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator) == expected
    seen = {}
    layer = trainer.ref_model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.update(product=output.dtype, states=inputs[0].dtype))
    trainer.ref_model(input_ids=torch.arange(3, 20)[None])
    assert seen["product"] == getattr(torch, expected.removesuffix("-autocast"))
    assert seen["states"] == getattr(torch, weights)


@pytest.mark.slow
def test_the_policy_computes_as_it_is_said_to(by_default):
    """The gate's batch goes through the policy under autocast: bfloat16 products of float32 states."""
    trainer, seen = by_default(AUTOCAST), set()
    trainer.model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, inputs, output: seen.add((inputs[0].dtype, output.dtype))
    )
    trainer.train()
    assert seen == {(torch.float32, torch.bfloat16)}


@pytest.mark.slow
def test_a_model_that_is_given_by_path_is_such_a_run(reference_folder, config, dataset, tokenizer, stores):
    """TRL loads a path in float32, whatever the checkpoint is in."""
    source = ReferenceSource(stores[AUTOCAST], model=str(reference_folder), dtype=AUTOCAST)
    arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": source}
    trainer = CachedDPOTrainer(str(reference_folder), args=config(bf16=None), **arguments)
    trainer.train()
    assert trainer.audit.step_zero.policy_dtype == AUTOCAST
    assert AutoModelForCausalLM.from_pretrained(reference_folder).dtype == torch.float32


class TestDtypeNotGiven:
    @pytest.mark.slow
    @pytest.mark.parametrize(("dtype", "changes"), [(AUTOCAST, {"bf16": None}), ("float32", {"bf16": False})])
    def test_is_the_runs(self, cached_trainer, stores, reference_folder, dtype, changes):
        source = ReferenceSource(stores[dtype], model=str(reference_folder))
        trainer = cached_trainer({"reference": source}, **changes)
        trainer.train()
        assert trainer.audit.step_zero.reference_dtype == dtype
        assert trainer.audit.step_zero.passed

    @pytest.mark.slow
    def test_of_one_source_for_two_runs_is_each_ones_own(self, cached_trainer, stores, reference_folder, reflogp, data_file):
        assert reflogp("score", reference_folder, data_file, "--store", stores["float32"], "--dtype", "bfloat16")[0] == 0
        source = ReferenceSource(stores["float32"], model=str(reference_folder))
        half = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.bfloat16)
        trainers = [cached_trainer({"reference": source, "model": half}), cached_trainer({"reference": source})]
        assert [trainer.joins["train"].where.reference_dtype for trainer in trainers] == ["bfloat16", "float32"]

    @pytest.mark.slow
    def test_is_the_stores_where_it_holds_one(self, cached_trainer, tmp_path, data_file, reference_folder, caplog):
        score_pairs(reference_folder, data_file, tmp_path / "store", "float32")
        source = ReferenceSource(tmp_path / "store", model=str(reference_folder))
        half = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.bfloat16)
        with pytest.raises(StepZeroError, match="computed in float32, but the policy computes in bfloat16"):
            cached_trainer({"reference": source, "model": half}).train()
        caplog.clear()
        trainer = cached_trainer({"reference": source, "model": half, "step_zero_tolerance": 1.0})
        trainer.train()
        seen = trainer.audit.step_zero
        assert (seen.reference_dtype, seen.policy_dtype, seen.passed) == ("float32", "bfloat16", True)
        [said] = [record.message for record in caplog.records if "reference log-probs in" in record.message]
        assert "reference log-probs in float32" in said and "the policy computes in bfloat16" in said

    @pytest.mark.slow
    def test_of_two_that_are_not_the_runs_is_asked_for(self, cached_trainer, tmp_path, reference_folder, data_file):
        for dtype in ("float32", "bfloat16"):
            score_pairs(reference_folder, data_file, tmp_path / "store", dtype)
        source = ReferenceSource(tmp_path / "store", model=str(reference_folder))
        with pytest.raises(UsageError, match="in float32 and in bfloat16: say which one to use"):
            cached_trainer({"reference": source}, bf16=None)

    @pytest.mark.parametrize("is_there", [False, True])
    def test_that_was_never_scored_is_named_in_the_command(
        self, cached_trainer, tmp_path, reference_folder, data_file, is_there
    ):
        store = tmp_path / "store"
        if is_there:
            other = copied(reference_folder, tmp_path / "other")
            edit_config(other, rms_norm_eps=1e-3)
            score_pairs(other, data_file, store, "float32")
        with pytest.raises((ReferenceNotFoundError, StoreNotFoundError)) as refused:
            cached_trainer({"reference": ReferenceSource(store, model=str(reference_folder))}, bf16=None)
        assert f"--dtype {AUTOCAST}" in str(refused.value)
