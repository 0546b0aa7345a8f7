"""Whether a policy is at its reference is known from its weights, whatever was trained, loaded or changed in between."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

from reflogp.store import Store, describe_reference
from reflogp.trainer import CachedDPOTrainer, MissingLogpsError, ReferenceAudit, ReferenceSource, StepZeroError
from reflogp.trainer.policy_weights import fingerprint, weights_of
from tests.trainer_ext.conftest import losses, score_pairs
from tests.trainer_ext.on_cpu import ON_CPU

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def partly_scored(reference_folder, data_file, tmp_path) -> ReferenceSource:
    """A source that has 30 of the 80 pairs, and lets the trainer compute the others."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in data_file.read_text().splitlines()[:30]))
    score_pairs(reference_folder, few, tmp_path / "few-store")
    return ReferenceSource(tmp_path / "few-store", model=str(reference_folder), dtype="float32", on_miss="compute")


class TestFingerprint:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_every_change_is_seen(self, dtype, policy):
        generator = random.Random(5)
        model = policy().to(dtype)
        before = fingerprint(model)
        assert fingerprint(copy.deepcopy(model)) == before
        for _ in range(20):
            parameter = generator.choice(list(model.parameters())).data.view(-1)
            first, second = generator.sample(range(len(parameter)), 2)
            kept = parameter.clone()
            match generator.randrange(3):
                case 0:  # the smallest step that the dtype has
                    parameter[first] = torch.nextafter(parameter[first], torch.tensor(9.0, dtype=dtype))
                case 1:  # two changes that a sum would not see
                    bits = parameter.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()])
                    bits[first] += 1
                    bits[second] -= 1
                case 2:
                    parameter[first] = float("nan")
            assert fingerprint(model).content != before.content
            assert fingerprint(model).layout == before.layout
            parameter.copy_(kept)
        assert fingerprint(model) == before

    def test_another_form_is_another_layout(self, policy):
        model = policy()
        assert fingerprint(policy().to(torch.bfloat16)).layout != fingerprint(model).layout

    def test_adapters_do_not_count_and_what_is_behind_them_does(self, policy):
        model = get_peft_model(policy(), LoraConfig(**LORA, modules_to_save=["norm"]))
        model.add_adapter("ref", LoraConfig(**LORA))
        before = fingerprint(model)
        for name, parameter in model.named_parameters():
            kept = parameter.data.clone()
            parameter.data += 1
            assert (fingerprint(model) != before) == (".default" not in name), name
            assert fingerprint(model, with_adapters=True) != before
            parameter.data.copy_(kept)


@pytest.mark.slow
def test_train_twice(cached_trainer, trl_trainer):
    trainers = cached_trainer(), trl_trainer(precompute_ref_log_probs=False)
    for trainer in trainers:
        trainer.train()
        trainer.train()
    ours, trls = trainers
    assert np.abs(np.array(losses(ours)) - np.array(losses(trls))).max() <= 1e-5
    audited = ours.audit.as_dict()
    assert audited["verdict"] == "passed"
    assert audited["step_zero"]["sequences"] == 8, "of the first time"
    assert "have changed since the trainer was created" in audited["not_run"]["spot_check"]


@pytest.mark.slow
def test_a_policy_that_trained_does_not_compute_reference_values(cached_trainer, partly_scored, pair_rows):
    new = Dataset.from_list(pair_rows[120:124])
    trainer = cached_trainer({"reference": partly_scored})
    before = trainer.evaluate(new)
    assert trainer.joins["eval"].computed == 4
    trainer.train()
    trainer.state.global_step = 0  # as a new train(), or a new state, sets it
    with pytest.raises(
        MissingLogpsError, match="on_miss='compute' cannot compute the values: the policy's weights have changed"
    ):
        trainer.evaluate(new)
    assert np.isfinite(before["eval_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("audit", [None, False])
def test_a_policy_that_was_trained_before_its_trainer_was_made(audit, cached_trainer, partly_scored, policy):
    """Nothing but the values of rows that were scored can tell."""
    model = policy()
    cached_trainer({"model": model}, learning_rate=1e-3, max_steps=4).train()
    with pytest.raises(MissingLogpsError, match=r"this trainer's model is not the reference: its log-probs of rows 0, 1"):
        cached_trainer({"model": model, "reference": partly_scored, "audit": audit})


@pytest.mark.slow
def test_an_adapter_may_move_and_still_computes_them(cached_trainer, trl_trainer, partly_scored, pair_rows):
    lora = {"peft_config": LoraConfig(**LORA)}
    trainer = cached_trainer({**lora, "reference": partly_scored}, learning_rate=1e-3)
    trainer.train()
    new = Dataset.from_list(pair_rows[120:124])
    trl = trl_trainer(dict(lora), precompute_ref_log_probs=False, learning_rate=1e-3)
    trl.train()
    assert abs(trainer.evaluate(new)["eval_loss"] - trl.evaluate(new)["eval_loss"]) <= 1e-5
    with torch.no_grad():
        trainer.model.get_base_model().model.norm.weight.data += 0.01
    with pytest.raises(MissingLogpsError, match="have changed since"):
        trainer.evaluate(Dataset.from_list(pair_rows[124:128]))


def changed(model) -> None:
    """As a user may load other weights into the model that a trainer has; no version counter moves."""
    for parameter in model.parameters():
        parameter.data.mul_(1.03)


class ChangesWhenTrainingBegins(TrainerCallback):
    def __init__(self, event):
        setattr(self, event, lambda args, state, control, model=None, **kwargs: changed(model))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before train", "on_train_begin", "on_step_begin"])
def test_a_policy_that_a_user_changes(when, cached_trainer):
    options = {} if when == "before train" else {"callbacks": [ChangesWhenTrainingBegins(when)]}
    trainer = cached_trainer(options, max_steps=1)
    if when == "before train":
        changed(trainer.model)
    trainer.train()
    audited = trainer.audit.as_dict()
    assert audited["verdict"] == "passed"
    assert "have changed" in audited["not_run"]["step_zero"]


@pytest.mark.slow
def test_a_checkpoint_of_weights_alone(cached_trainer, tmp_path):
    """Its global_step may say anything; the weights are not the reference's."""
    settings = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "save_only_model": True}
    cached_trainer(**settings).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "global_step": 0}))
    resumed = cached_trainer(**settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert "have changed" in resumed.audit.as_dict()["not_run"]["step_zero"]
    assert resumed.audit.as_dict()["verdict"] == "passed"


def test_a_wrong_reference_is_still_found_at_the_first_train(cached_trainer, policy):
    other = policy()
    changed(other)
    with pytest.raises(StepZeroError, match="weights other than"):
        cached_trainer({"model": other}).train()


@pytest.mark.slow
def test_any_trainer_is_watched_from_when_it_is_attached(trl_trainer):
    trainer = trl_trainer()
    audit = ReferenceAudit().attach(trainer)
    assert weights_of(trainer).unchanged
    trainer.train()
    assert not weights_of(trainer).unchanged
    trainer.train()
    assert audit.as_dict()["verdict"] == "passed"


class TestAPolicyThatIsNotFinite:
    """TRL goes on, so do we, and nobody says that the reference is wrong."""

    def seen(self, trainer, tmp_path, caplog):
        trainer.train()
        written = json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())
        assert written["verdict"] == "warned"
        assert "differ from this run's reference log-probs" not in caplog.text
        return written["findings"]

    def test_from_the_beginning(self, cached_trainer, policy, tmp_path, caplog):
        model = policy()
        model.lm_head.weight.data[5] = float("nan")
        found = self.seen(cached_trainer({"model": model}), tmp_path, caplog)
        assert "the policy's log-probs of 8 sequences in the first batch are not finite" in found["step_zero"][0]


def test_no_arguments_at_all(policy, dataset, tokenizer, source, tmp_path, monkeypatch):
    """TRL makes a config for a trainer without one, and ours is the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl.trainer.dpo_trainer.DPOConfig", lambda folder: DPOConfig(folder, **ON_CPU))  # no GPU here
    rows = {"train_dataset": dataset, "processing_class": tokenizer}
    ours, trls = CachedDPOTrainer(policy(), reference=source, **rows), DPOTrainer(policy(), **rows)
    assert ours.args.output_dir == trls.args.output_dir
    assert ours.args.precompute_ref_log_probs


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_tags_are_trls_and_ours(kind, cached_trainer, cached_kto_trainer, tmp_path):
    trainer = cached_trainer() if kind == "dpo" else cached_kto_trainer()
    assert {"trl", kind, "reflogp"} <= set(trainer.model.model_tags)
    trainer.create_model_card()
    card = next((tmp_path / "run").glob("README.md")).read_text()
    assert all(f"- {tag}\n" in card for tag in ("trl", kind, "reflogp"))


@pytest.mark.slow
def test_a_store_with_nothing_in_it(cached_trainer, policy, reference_folder, tmp_path):
    """Where no value can be compared, the weights are: those of the reference's files, or nothing is computed."""
    empty = ReferenceSource(tmp_path / "none", model=str(reference_folder), dtype="float32", on_miss="compute")
    with pytest.raises(Exception, match="there is no store at"):
        cached_trainer({"reference": empty})
    Store(tmp_path / "none").create_table(describe_reference(str(reference_folder), "float32"))
    assert cached_trainer({"reference": empty}).joins["train"].computed == 80
    lora = {"peft_config": LoraConfig(**LORA, modules_to_save=["norm"])}
    assert cached_trainer({"reference": empty, **lora}).joins["train"].computed == 80
    other = policy()
    other.model.norm.weight.data[0] += 1e-3
    with pytest.raises(
        MissingLogpsError, match=r"this trainer's model is not the reference: its weight model\.norm\.weight differs"
    ):
        cached_trainer({"reference": empty, "model": other})
    unnamed = ReferenceSource(tmp_path / "none", reference_id=empty.reference_id, on_miss="compute")
    with pytest.raises(MissingLogpsError, match="no row has stored values with which to check"):
        cached_trainer({"reference": unnamed})
