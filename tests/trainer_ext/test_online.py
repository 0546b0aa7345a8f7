"""Remote references for TRL's online trainers: the same losses, rewards and KL as with TRL's own reference model."""

import gc
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from reflogp.client import DeadlineExceededError, ServiceUnreachableError
from reflogp.store import ReferenceNotFoundError, UsageError
from reflogp.trainer import (
    AuditError,
    ReferenceAudit,
    ReferenceChangedError,
    ReferenceSource,
    RemoteReference,
    StepZeroError,
    UnusableLogpsError,
)
from tests.conftest import plain_token_logps, save_llama
from tests.service.serving import Service, float32, running, settings_file
from tests.service.warm_python import WarmPython
from tests.trainer_ext import online_run
from tests.trainer_ext.distributed_run import launch
from tests.trainer_ext.online_run import MOST_NEW_TOKENS, build, train

RANKS = f"{online_run.__name__}:ranks"
TRAINERS = ("rloo", "grpo", "online_dpo")
#: Of one process, or of the machine: not compared.
OWN = ("time", "runtime", "per_second")


@pytest.fixture(scope="module")
def models(reference_folder, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """The reference, the same architecture with other weights, and one with learned positions."""
    size = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6}
    other = save_llama(tmp_path_factory.mktemp("other"), tokenizer, **size)
    wrong = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        wrong.lm_head.weight.mul_(1.05)
    wrong.save_pretrained(other)
    gpt2 = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1}
    config = GPT2Config(vocab_size=len(tokenizer), resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shape, **ids)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    tokenizer.save_pretrained(gpt2)
    return {"ref": reference_folder, "other": other, "gpt2": gpt2}


@pytest.fixture(scope="module")
def service(models, tmp_path_factory, warm_python):
    place = tmp_path_factory.mktemp("online")
    offered = {name: float32(folder) for name, folder in models.items()}
    offered["half"] = {"model": str(models["ref"]), "dtype": "bfloat16"}
    file = settings_file(place, place / "store", offered, pinned="ref", max_loaded=len(offered))
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


@pytest.fixture
def settings(service, models, pair_rows, tmp_path):
    prompts = [row["chosen"][0]["content"][: 60 + 15 * (at % 5)] for at, row in enumerate(pair_rows[:40])]
    return {"model": str(models["ref"]), "source": service.url, "prompts": prompts, "out": str(tmp_path), "trainer": "rloo"}


def differences(ours: dict, theirs: dict) -> dict[str, float]:
    """Largest difference of each logged number, relative where it is above 1, and of the losses of micro-batches.

    Before the first step policy and reference are the same, so a margin's sign is rounding, and no accuracy is compared. Of
    OnlineDPO's numbers, the KL is a sum over a completion's tokens and counts per token; the loss is rounded to four digits.
    """
    assert len(ours["logs"]) == len(theirs["logs"]) > 0
    found = {"micro-batches' losses": float(np.abs(np.subtract(ours["losses"], theirs["losses"])).max())}
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        shared = {name for name in other if isinstance(other[name], int | float) and not any(own in name for own in OWN)}
        assert shared <= set(mine)
        not_compared = {"rewards/accuracies"} if other["step"] == 1 else set()
        if "objective/kl" in other:
            not_compared.add("loss")
        for name in shared - not_compared:
            apart = abs(mine[name] - other[name]) / max(1.0, abs(other[name]))
            found[name] = max(found.get(name, 0.0), apart / (MOST_NEW_TOKENS if name == "objective/kl" else 1))
    return found


def assert_equal(ours: dict, theirs: dict) -> None:
    apart = differences(ours, theirs)
    assert max(apart.values()) <= 1e-5, {name: value for name, value in apart.items() if value > 1e-5}


def count_passes_without_adapter(trainer) -> list[str]:
    """Grows with each forward pass of the policy while its adapter is off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    passes: list[str] = []
    policy = trainer.accelerator.unwrap_model(trainer.model)
    layer = next(module for module in policy.modules() if isinstance(module, BaseTunerLayer))
    layer.register_forward_pre_hook(lambda module, args: passes.append("off") if module.disable_adapters else None)
    return passes


def language_models() -> int:
    gc.collect()
    return sum(isinstance(entry, PreTrainedModel) and hasattr(entry, "lm_head") for entry in gc.get_objects())


class TestEqualToTrl:
    @pytest.mark.slow
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_ten_steps(self, trainer, settings):
        settings["trainer"] = trainer
        theirs = train(build({**settings, "trl": True}))
        before = language_models()
        remote = build(settings)
        assert language_models() == before + 1, "the policy alone"
        ours = train(remote)
        assert_equal(ours, theirs)
        assert remote.args.beta == 0.1
        kl = "objective/kl" if trainer == "online_dpo" else "kl"
        assert max(abs(entry[kl]) for entry in ours["logs"]) > 1e-3, "the policy moved"
        assert ours["audit"]["verdict"] == "passed"
        assert ours["audit"]["step_zero"]["max_difference"] <= 1e-4
        asked = ours["audit"]["remote"]
        assert (asked["batches"], asked["sequences"]) == (10, 40)
        assert 0 <= asked["waited_seconds"] <= asked["seconds"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("trainer", "changes"),
        [
            ("rloo", {"mask_truncated_completions": True, "temperature": 0.6, "steps_per_generation": 2, "num_iterations": 2}),
            ("grpo", {"steps_per_generation": 2, "num_iterations": 2, "pad_to_multiple_of": 8}),
            ("online_dpo", {"max_length": 40, "gradient_accumulation_steps": 2}),
        ],
        ids=["masked rows and reused generations", "old policy's values", "left truncation by padded width"],
    )
    def test_settings_that_change_what_the_reference_sees(self, trainer, changes, settings):
        settings |= {"trainer": trainer, "args": {"max_steps": 4, **changes}}
        assert_equal(train(build(settings)), train(build({**settings, "trl": True})))

    @pytest.mark.slow
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_learned_positions_see_left_padding_as_the_policy_does(self, trainer, settings, models):
        settings |= {"trainer": trainer, "model": str(models["gpt2"]), "args": {"max_steps": 3}}
        remote = build({**settings, "reference": "gpt2"})
        assert remote.ref_model.absolute_positions
        assert_equal(train(remote), train(build({**settings, "trl": True})))

    @pytest.mark.slow
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_an_adapter_as_policy(self, trainer, settings):
        """TRL's reference is the policy with its adapter off; here that pass is not made."""
        settings |= {"trainer": trainer, "lora": True, "args": {"max_steps": 3, "learning_rate": 1e-3}}
        theirs = train(build({**settings, "trl": True}))
        remote = build(settings)
        passes = count_passes_without_adapter(remote)
        assert_equal(train(remote), theirs)
        assert not passes

    @pytest.mark.slow
    def test_evaluation_asks_too(self, settings):
        settings["args"] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
        seen = []
        for trl in (True, False):
            trainer = build({**settings, "trl": trl, "evaluate": 2})
            train(trainer)
            seen.append([entry["eval_kl"] for entry in trainer.state.log_history if "eval_kl" in entry])
        assert len(seen[0]) == 2 and seen[1] == pytest.approx(seen[0], abs=1e-5)

    @pytest.mark.slow
    def test_two_processes(self, settings, tmp_path):
        """Each trainer with TRL's reference and with the service's, in one launch; metrics are means over both."""
        runs = [
            {**settings, "trainer": name, "trl": trl, "out": str(tmp_path / f"{name}-{trl}")}
            for name in TRAINERS
            for trl in (True, False)
        ]
        _, ranks, _ = launch({"runs": runs}, tmp_path, timeout=420, function=RANKS)
        for seen in ranks:
            for theirs, ours in zip(seen["runs"][::2], seen["runs"][1::2], strict=True):
                apart = differences(ours, theirs)
                apart.pop("val/contain_eos_token", None)  # of one process in TRL
                assert max(apart.values()) <= 1e-5, {name: value for name, value in apart.items() if value > 1e-5}
                assert ours["audit"]["verdict"] == "passed"
                assert ours["audit"]["metrics"]["logs_compared"] == 10
        mine, other = ([run["logs"] for run in seen["runs"][1::2]] for seen in ranks)
        for logs, others in zip(mine, other, strict=True):
            assert logs[0]["loss"] == pytest.approx(others[0]["loss"], abs=1e-6)

    @pytest.mark.slow
    def test_sharded_policies(self, settings, tmp_path):
        """No process makes a reference model, whole or in shards; the KL is as with the whole policy on each."""
        settings["args"] = {"max_steps": 2, "max_completion_length": 6}
        kinds = {"ddp": "MULTI_CPU", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
        seen = []
        for mode, kind in kinds.items():
            run = {**settings, "mode": mode, "out": str(tmp_path / mode)}
            _, ranks, _ = launch({"runs": [run]}, tmp_path / mode, timeout=300, function=RANKS)
            seen.append([rank["runs"][0] for rank in ranks])
            for one in seen[-1]:
                assert one["distributed"] == kind
                assert one["audit"]["verdict"] == "passed"
                assert "step_zero" not in one["audit"]["not_run"]
        whole, *sharded = [[entry["kl"] for entry in ranks[0]["logs"]] for ranks in seen]
        for kl in sharded:
            assert kl == pytest.approx(whole, abs=1e-5)


class TestSchedule:
    """Items 3 and 5 of the problems that this project answers."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("trainer", "changes"),
        [
            ("rloo", {"gradient_accumulation_steps": 2, "num_iterations": 2, "steps_per_generation": 4}),
            ("online_dpo", {"gradient_accumulation_steps": 2}),
        ],
    )
    def test_checkpoints_at_save_steps_and_resume(self, trainer, changes, settings):
        settings["trainer"] = trainer
        settings["args"] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2, **changes}
        first = build(settings)
        seen = train(first)
        saved = sorted(Path(first.args.output_dir).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        assert [entry["step"] for entry in seen["logs"]] == [2, 4]
        assert seen["audit"]["verdict"] == "passed"
        again = build(settings)
        resumed = train(again, resume=str(saved[1]))
        assert again.state.global_step == 5
        assert resumed["audit"]["schedule"]["first_step"] == 4
        assert resumed["audit"]["schedule"]["optimizer_steps"] == 1
        assert resumed["audit"]["verdict"] == "passed"
        report = json.loads((Path(again.args.output_dir) / "reflogp_audit.json").read_text())
        assert report["step_zero"] == seen["audit"]["step_zero"], "what the first start saw"

    def test_online_dpo_with_a_model_in_data_parallel(self, settings):
        """Its wrapper has no config; with two devices in sight transformers wraps the policy."""
        settings |= {"trainer": "online_dpo", "args": {"max_steps": 2, "per_device_train_batch_size": 1}}
        results = []
        for trl in (True, False):
            trainer = build({**settings, "trl": trl})
            trainer.args._n_gpu = 2
            results.append(train(trainer))
            assert isinstance(trainer.model_wrapped, torch.nn.DataParallel)
        assert_equal(*results)

    def test_rloo_says_what_to_do_instead_of_data_parallel(self, settings, monkeypatch):
        from transformers import TrainingArguments

        monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda args: 2))
        with pytest.raises((UsageError, ValueError), match="accelerate launch"):
            build(settings)


class TestFailure:
    @pytest.mark.slow
    def test_a_service_that_restarts_pauses_the_run(self, settings, models, tmp_path, caplog, warm_python):
        """Killed in the middle of a run, and started again on its port seconds later."""
        settings |= {"trainer": "online_dpo", "args": {"max_steps": 6}}
        expected = train(build(settings))
        first = own_service(tmp_path, models["ref"], warm_python)
        trainer = build({**settings, "source": first.url})
        later: list[Service] = []

        def restart():
            first.kill()
            time.sleep(1.5)
            later.append(own_service(tmp_path, models["ref"], warm_python, port=first.url.rsplit(":", 1)[1]))

        def kill_at_step_three(*args, **kwargs):
            if trainer.state.global_step == 3 and not later and not killer.is_alive():
                killer.start()
                first.process.wait()
            return ask(*args, **kwargs)

        killer = threading.Thread(target=restart)
        ask, trainer.ref_model.begin = trainer.ref_model.begin, kill_at_step_three
        try:
            seen = train(trainer)
        finally:
            killer.join()
            [service.stop() for service in later]
        assert differences(seen, expected)["micro-batches' losses"] <= 1e-6
        assert seen["audit"]["verdict"] == "passed"
        waited = seen["audit"]["remote"]["waited_seconds"]
        assert waited > 1.5
        assert waited < 6 or "the step has waited" in caplog.text

    def test_a_service_that_stays_away_ends_the_run_at_the_deadline(self, settings, models, tmp_path, warm_python):
        service = own_service(tmp_path, models["ref"], warm_python)
        trainer = build({**settings, "source": service.url, "more": {"reference_deadline": 2.0}})
        service.kill()
        began = time.monotonic()
        with pytest.raises((ServiceUnreachableError, DeadlineExceededError)) as caught:
            trainer.train()
        assert "Resume the run from its checkpoint" in caught.value.__notes__[0]
        assert 1.0 < time.monotonic() - began < 30
        assert json.loads((Path(trainer.args.output_dir) / "reflogp_audit.json").read_text())["verdict"] == "unfinished"

    def test_one_process_that_gets_no_answer_ends_all(self, settings, tmp_path):
        runs = [{**settings, "deadlines": [60.0, 0.001]}]
        status, ranks, _ = launch({"runs": runs}, tmp_path, check=False, function=RANKS)
        assert status
        assert [seen["error"] for seen in ranks] == ["RankFailedError", "DeadlineExceededError"]
        assert "failed on rank 1 (of 2 processes)" in ranks[0]["words"]

    @pytest.mark.slow
    def test_another_model_under_the_same_name_cannot_slip_in(self, settings, models, tmp_path, warm_python):
        service = own_service(tmp_path, models["ref"], warm_python)
        trainer = build({**settings, "source": service.url})
        service.stop()
        swapped = own_service(tmp_path, models["other"], warm_python, port=service.url.rsplit(":", 1)[1])
        try:
            with pytest.raises(ReferenceChangedError, match="no longer serves reference"):
                trainer.train()
        finally:
            swapped.stop()

    def test_rows_that_the_reference_cannot_score_are_named(self, service):
        reference = RemoteReference(ReferenceSource(service.url, reference="ref"))
        with pytest.raises(UnusableLogpsError, match="vocabulary") as caught:
            reference.per_token_logps(torch.tensor([[5, 6, 7], [5, 6, 999_999]]))
        assert caught.value.rows == [1]


class TestRefused:
    @pytest.mark.parametrize(
        ("trainer", "change", "words"),
        [
            ("rloo", {"args": {"beta": 0.0}}, "makes TRL ignore the reference"),
            ("grpo", {"args": {"beta": 0.0}}, "makes TRL ignore the reference"),
            ("rloo", {"args": {"sync_ref_model": True}}, "set sync_ref_model=False"),
            ("rloo", {"more": {"reference_deadline": 0}}, "above 0"),
            ("rloo", {"reference": "half"}, 'dtype = "float32"'),
            ("online_dpo", {"reference": "half"}, 'dtype = "float32"'),
            ("rloo", {"args": {"bf16": True}}, 'dtype = "bfloat16-autocast"'),
        ],
    )
    def test_settings(self, trainer, change, words, settings):
        with pytest.raises(UsageError, match=words):
            build({**settings, "trainer": trainer, **change})

    @pytest.mark.slow
    def test_a_head_in_float32_is_agreed(self, settings, models, tmp_path, warm_python):
        """`cast_lm_head_to_fp32` with a policy in bfloat16: the service has to do the same, and says no where it does not."""
        settings |= {"trainer": "grpo", "dtype": "bfloat16", "args": {"max_steps": 1, "cast_lm_head_to_fp32": True}}
        with pytest.raises(UsageError, match='lm_head_dtype = "float32"'):
            build({**settings, "reference": "half"})
        offered = {"ref": {"model": str(models["ref"]), "dtype": "bfloat16", "lm_head_dtype": "float32"}}
        with running("--config", settings_file(tmp_path, tmp_path / "store", offered), warm=warm_python) as service:
            assert train(build({**settings, "source": service.url}))["audit"]["verdict"] == "passed"

    @pytest.mark.slow
    def test_float32_weights_under_autocast_are_agreed(self, settings, models, tmp_path, warm_python):
        """TRL's defaults for a policy that is given by path, at a temperature of its own."""
        settings |= {"trainer": "rloo", "args": {"max_steps": 1, "bf16": True, "temperature": 0.7}}
        offered = {"ref": {"model": str(models["ref"]), "dtype": "bfloat16-autocast"}}
        with running("--config", settings_file(tmp_path, tmp_path / "store", offered), warm=warm_python) as service:
            audit = train(build({**settings, "source": service.url}))["audit"]
        assert audit["verdict"] == "passed"
        assert audit["step_zero"]["policy_dtype"] == "bfloat16-autocast"

    def test_another_dtype_can_be_accepted(self, settings):
        accepted = {"reference": "half", "more": {"step_zero_tolerance": 0.5}, "args": {"max_steps": 1}}
        assert train(build({**settings, **accepted}))["audit"]["step_zero"]["max_difference"] > 1e-3

    def test_a_reference_that_is_not_there(self, settings):
        with pytest.raises(ReferenceNotFoundError, match="has no reference nothing"):
            build({**settings, "reference": "nothing"})

    def test_a_store_instead_of_a_service(self, settings, models, tmp_path):
        with pytest.raises(UsageError, match="is not a service"):
            RemoteReference(ReferenceSource(tmp_path, model=str(models["ref"]), dtype="float32"))

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_other_weights_than_the_policys(self, trainer, settings):
        remote = build({**settings, "trainer": trainer, "reference": "other"})
        with pytest.raises(StepZeroError):
            remote.train()
        assert remote.state.global_step == 0

    def test_other_weights_are_meant_when_the_policy_starts_elsewhere(self, settings):
        more = {"policy_starts_at_reference": False}
        seen = train(build({**settings, "reference": "other", "more": more, "args": {"max_steps": 1}}))
        assert seen["audit"]["verdict"] == "passed" and "step_zero" in seen["audit"]["not_run"]

    def test_no_room_for_a_prompt(self, settings):
        settings |= {"trainer": "online_dpo", "args": {"max_length": 16}}
        with pytest.raises(UsageError, match="increase max_length"):
            build(settings).train()


class TestAudit:
    def test_a_trainer_of_trl_keeps_its_reference_model(self, settings):
        """The negative control: the same audit on TRL's own trainer."""
        trainer = build({**settings, "trl": True})
        ReferenceAudit(checks=("forwards", "schedule")).attach(trainer)
        with pytest.raises(AuditError, match="keeps a reference model"):
            trainer.train()

    def test_a_reference_model_that_runs_anyway_is_found(self, settings, models):
        hidden = AutoModelForCausalLM.from_pretrained(models["ref"])
        trainer = build(settings)
        score = trainer._calculate_rewards

        def scored_twice(*args, **kwargs):
            hidden(torch.tensor([[5, 6, 7]]))
            return score(*args, **kwargs)

        trainer._calculate_rewards = scored_twice
        with pytest.raises(AuditError, match="ran 1 time in a training step"):
            trainer.train()

    def test_a_reward_model_may_run(self, settings, models, tokenizer, tmp_path):
        from transformers import AutoModelForSequenceClassification

        judge = AutoModelForSequenceClassification.from_pretrained(models["ref"], num_labels=1)
        judge.config.pad_token_id = tokenizer.pad_token_id
        trainer = build({**settings, "args": {"max_steps": 2}})
        plain = build({**settings, "args": {"max_steps": 2}, "out": str(tmp_path / "plain")})
        for one in (trainer, plain):
            one.reward_funcs, one.reward_processing_classes = [judge], [tokenizer]
        assert train(trainer)["audit"]["verdict"] == "passed"

    def test_a_batch_without_a_completion_in_the_loss_is_not_taken_for_a_comparison(self, settings):
        """One token a completion, none of them an end: every row is masked out."""
        settings["args"] = {"max_steps": 1, "mask_truncated_completions": True, "max_completion_length": 1}
        trainer = build(settings)
        trainer.eos_token_ids = []
        audit = train(trainer)["audit"]
        assert audit["verdict"] == "passed" and audit["step_zero"] is None
        assert "no completion" in audit["not_run"]["step_zero"]


class TestOwnLoop:
    def test_values_of_padded_batches(self, service, models):
        """Padding on both sides: as a plain forward over each row's own tokens; zero elsewhere."""
        model = AutoModelForCausalLM.from_pretrained(models["ref"], dtype=torch.float32)
        reference = RemoteReference(ReferenceSource(service.url, reference="ref"))
        ids = torch.randint(200, 900, (5, 18), generator=torch.Generator().manual_seed(0))
        spans = [(0, 18), (4, 18), (0, 11), (3, 12), (7, 8)]
        mask = torch.zeros_like(ids)
        for row, (first, behind) in enumerate(spans):
            mask[row, first:behind] = 1
        every = reference.per_token_logps(ids, mask, temperature=0.8)
        some = reference.per_token_logps(ids, mask, completion_tokens=7, temperature=0.8)
        assert every.shape == (5, 17) and some.shape == (5, 7) and some.dtype == torch.float32
        for row, (first, behind) in enumerate(spans):
            own = ids[row, first:behind].tolist()
            expected = np.zeros(18)
            if len(own) > 1:
                expected[first + 1 : behind] = plain_token_logps(model, own[:1], own[1:], 0.8)
            assert every[row].numpy() == pytest.approx(expected[1:], abs=1e-4)
            if first < 11 and row != 4:
                assert some[row].numpy() == pytest.approx(expected[11:], abs=1e-4)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"completion_tokens": 0}, "must be 1 to 4"),
            ({"completion_tokens": 9}, "must be 1 to 4"),
            ({"attention_mask": torch.ones(2, 3)}, "the shape"),
            ({"temperature": 0.0}, "above 0"),
        ],
    )
    def test_arguments_that_do_not_fit(self, changes, words, service):
        reference = RemoteReference(ReferenceSource(service.url, reference="ref"))
        with pytest.raises(UsageError, match=words):
            reference.per_token_logps(torch.full((2, 4), 7), **changes)

    def test_it_says_that_it_is_no_model(self, service):
        reference = RemoteReference(ReferenceSource(service.url, reference="ref"))
        with pytest.raises(RuntimeError, match="per_token_logps"):
            reference(torch.tensor([[5, 6]]), attention_mask=None)
        with pytest.raises(AttributeError):
            reference.parameters()


def own_service(folder: Path, model: Path, warm: WarmPython, port: str = "0") -> Service:
    file = settings_file(folder, folder / "store", {"ref": float32(model)}, pinned="ref")
    return Service("--config", file, "--port", port, warm=warm)
