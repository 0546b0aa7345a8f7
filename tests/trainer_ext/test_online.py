"""Remote references for TRL's online trainers: the same losses, rewards and KL as with TRL's own reference model."""

import gc
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, TrainingArguments

from reflogp.client import DeadlineExceededError, ServiceUnreachableError
from reflogp.store import ReferenceNotFoundError, UsageError
from reflogp.trainer import Reference, StepZeroError
from reflogp.trainer.errors import ReferenceChangedError, UnusableLogpsError
from reflogp.trainer.online import RemoteReference
from tests.conftest import plain_token_logps
from tests.service.serving import Service, float32, running, settings_file
from tests.service.warm_python import WarmPython
from tests.trainer_ext.distributed_run import launch
from tests.trainer_ext.online_run import MOST_NEW_TOKENS, build, train

TRAINERS = ("rloo", "grpo", "online_dpo")
#: Of one process, or of the machine: not compared. TRL logs the share of completions with an end of one process.
OWN = ("time", "runtime", "per_second", "val/contain_eos_token")


@pytest.fixture(scope="module")
def models(reference_folder, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """The reference, the same model with other weights, and one with learned positions."""
    other, gpt2 = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("gpt2")
    wrong = AutoModelForCausalLM.from_pretrained(reference_folder)
    wrong.lm_head.weight.data.mul_(1.05)
    wrong.save_pretrained(other)
    torch.manual_seed(0)
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1}
    plain = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **plain)).save_pretrained(gpt2)
    for folder in (other, gpt2):
        tokenizer.save_pretrained(folder)
    return {"ref": reference_folder, "other": other, "gpt2": gpt2}


@pytest.fixture(scope="module")
def service(models, tmp_path_factory, warm_python):
    folder = tmp_path_factory.mktemp("online")
    offered = {name: float32(model) for name, model in models.items()}
    offered["half"] = {"model": str(models["ref"]), "dtype": "bfloat16"}
    offered["half-float32-head"] = {**offered["half"], "lm_head_dtype": "float32"}
    offered["autocast"] = {"model": str(models["ref"]), "dtype": "bfloat16-autocast"}
    file = settings_file(folder, folder / "store", offered, pinned="ref", max_loaded=len(offered))
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


@pytest.fixture
def settings(service, models, pair_rows, tmp_path):
    prompts = [row["chosen"][0]["content"][: 60 + 15 * (number % 5)] for number, row in enumerate(pair_rows[:40])]
    return {"model": str(models["ref"]), "source": service.url, "prompts": prompts, "out": str(tmp_path), "trainer": "rloo"}


def assert_equal(ours: dict, theirs: dict) -> None:
    """Each logged number, relative where it is above 1, and the losses of micro-batches.

    Before the first step policy and reference are the same, so a margin's sign is rounding, and no accuracy is compared. Of
    OnlineDPO's numbers, the KL is a sum over a completion's tokens and counts per token; the loss is rounded to four digits.
    """
    assert len(ours["logs"]) == len(theirs["logs"]) > 0
    assert np.abs(np.subtract(ours["losses"], theirs["losses"])).max() <= 1e-5
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        names = {name for name in other if isinstance(other[name], int | float) and not any(own in name for own in OWN)}
        assert names <= set(mine)
        names -= {"rewards/accuracies"} if other["step"] == 1 else set()
        names -= {"loss"} if "objective/kl" in other else set()
        tolerance = {name: 1e-5 * (MOST_NEW_TOKENS if name == "objective/kl" else 1) for name in names}
        far = {n: (mine[n], other[n]) for n in names if abs(mine[n] - other[n]) > tolerance[n] * max(1.0, abs(other[n]))}
        assert not far


def language_models() -> int:
    gc.collect()
    return sum(isinstance(entry, PreTrainedModel) and hasattr(entry, "lm_head") for entry in gc.get_objects())


class TestEqualToTrl:
    @pytest.mark.slow
    @pytest.mark.parametrize("trainer", TRAINERS)
    @pytest.mark.parametrize(
        "change",
        [
            {
                "rloo": {"mask_truncated_completions": True, "temperature": 0.6, "num_iterations": 2},
                "grpo": {"steps_per_generation": 2, "num_iterations": 2, "pad_to_multiple_of": 8},
                "online_dpo": {"max_length": 40, "gradient_accumulation_steps": 2},
            },
            {"model": "gpt2"},
            {"lora": True, "args": {"learning_rate": 1e-3}},
        ],
        ids=["masked rows, reused generations, left truncation", "learned positions see left padding", "an adapter"],
    )
    def test_what_changes_what_the_reference_sees(self, trainer, change, settings, models):
        """With an adapter, TRL's reference is the policy with its adapter off; here that pass is not made."""
        name = change.get("model", "ref")
        settings |= {**change, "trainer": trainer, "model": str(models[name]), "reference": name}
        settings["args"] = {"max_steps": 3, **change.get("args", {}), **change.get(trainer, {})}
        ours = train(build(settings))
        assert_equal(ours, train(build({**settings, "trl": True})))
        assert ours["record"]["remote"]["sequences"]

    @pytest.mark.parametrize("trainer", ["rloo", "grpo"])
    def test_evaluation_asks_once_per_sequence(self, trainer, settings):
        """Four in each evaluation, before and after a step, which has four too."""
        evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2, "eval_on_start": True}
        settings |= {"trainer": trainer, "evaluate": 2, "args": {"max_steps": 1, **evaluation}}
        seen = []
        for trl in (True, False):
            remote = None
            before = language_models()
            remote = build({**settings, "trl": trl})
            assert language_models() == before + 1 + trl, "the policy, and TRL's reference model"
            train(remote)
            seen.append([entry["eval_kl"] for entry in remote.state.log_history if "eval_kl" in entry])
        assert len(seen[0]) == 2 and seen[1] == pytest.approx(seen[0], abs=1e-5)
        traffic = remote.ref_model.traffic
        assert (traffic.sequences, 0 <= traffic.waited_seconds <= traffic.seconds) == (3 * 4, True)
        assert remote.step_zero.sequences == 4, "of the first batch in training"

    @pytest.mark.slow
    def test_two_processes(self, settings, tmp_path):
        """Each trainer with TRL's reference and with the service's, in one launch; metrics are means over both."""
        settings["args"] = {"max_steps": 4}
        sides = [{"trainer": name, "trl": trl} for name in TRAINERS for trl in (True, False)]
        runs = [{**settings, **side, "out": str(tmp_path / str(number))} for number, side in enumerate(sides)]
        _, ranks = launch({"runs": runs}, tmp_path, timeout=420)
        for seen in ranks:
            for theirs, ours in zip(seen["runs"][::2], seen["runs"][1::2], strict=True):
                assert_equal(ours, theirs)
                assert ours["wrapped"] == "DistributedDataParallel"
                assert max(abs(entry.get("kl", entry.get("objective/kl"))) for entry in ours["logs"]) > 1e-3, "the policy moved"
                record = ours["record"]
                assert (record["step_zero"]["passed"], record["step_zero"]["sequences"]) == (True, 8)
                assert (record["remote"]["batches"], record["remote"]["sequences"]) == (4, 16)

    @pytest.mark.slow
    def test_sharded_policies(self, settings, tmp_path):
        """No process makes a reference model, whole or in shards; the KL is as with the whole policy on each."""
        settings["args"] = {"max_steps": 2, "max_completion_length": 6}
        kinds = {"ddp": "MULTI_CPU", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
        seen = []
        for mode, kind in kinds.items():
            run = {**settings, "mode": mode, "out": str(tmp_path / mode)}
            _, ranks = launch({"runs": [run]}, tmp_path / mode, timeout=300)
            seen.append([rank["runs"][0] for rank in ranks])
            assert [one["distributed"] for one in seen[-1]] == [kind, kind]
            assert seen[-1][0]["record"]["step_zero"]["passed"]
        whole, *sharded = [[entry["kl"] for entry in ranks[0]["logs"]] for ranks in seen]
        for kl in sharded:
            assert kl == pytest.approx(whole, abs=1e-5)


class TestOneProcess:
    def test_online_dpo_with_a_model_in_data_parallel(self, settings):
        """Its wrapper has no config; with two devices in sight transformers wraps the policy."""
        settings |= {"trainer": "online_dpo", "args": {"max_steps": 2, "per_device_train_batch_size": 1}}
        results = []
        for trl in (True, False):
            trainer = build({**settings, "trl": trl})
            trainer.args._n_gpu = 2
            results.append(train(trainer))
            assert results[-1]["wrapped"] == "DataParallel"
        assert_equal(*results)

    def test_rloo_says_what_to_do_instead_of_data_parallel(self, settings, monkeypatch):
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
        port = first.url.rsplit(":", 1)[1]
        restart = threading.Timer(1.5, lambda: later.append(own_service(tmp_path, models["ref"], warm_python, port)))
        ask = trainer.ref_model.begin

        def kill_at_step_three(batch):
            if trainer.state.global_step == 3 and first.process.poll() is None:
                first.kill()
                restart.start()
            ask(batch)

        trainer.ref_model.begin = kill_at_step_three
        try:
            seen = train(trainer)
        finally:
            restart.join()
            [service.stop() for service in later]
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        waited = seen["record"]["remote"]["waited_seconds"]
        assert waited > 1.5
        assert waited < 6 or "waited 5 of at most 600 seconds" in caplog.text

    def test_a_service_that_stays_away_ends_the_run_at_the_deadline(self, settings, models, tmp_path, warm_python):
        service = own_service(tmp_path, models["ref"], warm_python)
        trainer = build({**settings, "source": service.url, "more": {"reference_deadline": 2.0}})
        service.kill()
        began = time.monotonic()
        with pytest.raises((ServiceUnreachableError, DeadlineExceededError)) as caught:
            trainer.train()
        assert "Resume the run from its checkpoint" in caught.value.__notes__[0]
        assert 1.0 < time.monotonic() - began < 30

    def test_one_process_that_gets_no_answer_ends_all(self, settings, tmp_path):
        runs = [{**settings, "deadlines": [60.0, 0.001]}]
        status, ranks = launch({"runs": runs}, tmp_path, check=False)
        assert status
        assert [seen["error"] for seen in ranks] == ["RankFailedError", "DeadlineExceededError"]
        assert "failed on rank 1" in ranks[0]["words"]

    @pytest.mark.slow
    def test_another_model_under_the_same_name_cannot_slip_in(self, settings, models, tmp_path, warm_python):
        service = own_service(tmp_path, models["ref"], warm_python)
        trainer = build({**settings, "source": service.url})
        service.stop()
        swapped = own_service(tmp_path, models["other"], warm_python, service.url.rsplit(":", 1)[1])
        try:
            with pytest.raises(ReferenceChangedError, match="no longer serves reference"):
                trainer.train()
        finally:
            swapped.stop()

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_other_weights_than_the_policys(self, trainer, settings):
        settings |= {"trainer": trainer, "reference": "other", "args": {"max_steps": 1}}
        remote = build(settings)
        with pytest.raises(StepZeroError):
            remote.train()
        assert remote.state.global_step == 0
        seen = train(build({**settings, "more": {"policy_starts_at_reference": False}}))
        assert seen["record"]["step_zero"] == "not compared: the policy does not start from the reference's weights"


class TestArguments:
    @pytest.mark.parametrize(
        ("trainer", "change", "error", "words"),
        [
            ("grpo", {"args": {"beta": 0.0}}, UsageError, "makes TRL ignore the reference"),
            ("rloo", {"args": {"sync_ref_model": True}}, UsageError, "set it to False"),
            ("rloo", {"more": {"reference_deadline": 0}}, UsageError, "above 0"),
            ("online_dpo", {"more": {"ref_model": torch.nn.Linear(1, 1)}}, UsageError, "remove ref_model"),
            ("online_dpo", {"source": "./logps"}, UsageError, "is not a service"),
            ("rloo", {"reference": "nothing"}, ReferenceNotFoundError, "does not serve nothing"),
        ],
    )
    def test_refused(self, trainer, change, error, words, settings):
        with pytest.raises(error, match=words):
            build({**settings, "trainer": trainer, **change})

    def test_images_are_refused(self, settings):
        ids = torch.ones(1, 4, dtype=torch.int64)
        remote = build(settings)
        for model in (remote.model, remote.ref_model):
            with torch.no_grad(), pytest.raises(UsageError, match="this batch has images"):
                remote._get_per_token_logps_and_entropies(model, ids, ids, 2, pixel_values=torch.ones(1))
        remote = build({**settings, "trainer": "online_dpo"})
        with pytest.raises(UsageError, match="this batch has images"):
            remote._forward(remote.model, ids, ids, ids, ids, {"pixel_values": torch.ones(1)})

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("trainer", "change", "warned"),
        [
            ("rloo", {"reference": None}, None),
            ("rloo", {"reference": "half"}, "computed in bfloat16, but the policy computes in float32"),
            ("grpo", {"reference": "autocast", "args": {"bf16": True, "temperature": 0.7}}, None),
            ("grpo", {"reference": "half-float32-head", "dtype": "bfloat16", "args": {"cast_lm_head_to_fp32": True}}, None),
            ("grpo", {"reference": "half", "dtype": "bfloat16", "args": {"cast_lm_head_to_fp32": True}}, "output layer"),
        ],
    )
    def test_dtypes(self, trainer, change, warned, settings):
        """Another dtype is a warning; no name means the policy's checkpoint in the policy's dtype."""
        settings |= {"trainer": trainer, **change, "args": {"max_steps": 1, **change.get("args", {})}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            remote = build(settings)
        said = [str(one.message) for one in caught if "the reference log-probs were computed in" in str(one.message)]
        assert len(said) == (warned is not None) and all(warned in one for one in said)
        assert train(remote)["record"]["step_zero"]["passed"]


class TestOwnLoop:
    def test_values_of_padded_batches(self, service, models):
        """Padding on both sides: as a plain forward over each row's own tokens; zero elsewhere."""
        model = AutoModelForCausalLM.from_pretrained(models["ref"], dtype=torch.float32)
        reference = RemoteReference(Reference(service.url, model="ref"))
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

    def test_what_it_cannot_do(self, service):
        reference = RemoteReference(Reference(service.url, model="ref"))
        with pytest.raises(RuntimeError, match="per_token_logps"):
            reference(torch.tensor([[5, 6]]), attention_mask=None)
        with pytest.raises(UnusableLogpsError, match="vocabulary") as caught:
            reference.per_token_logps(torch.tensor([[5, 6, 7], [5, 6, 999_999]]))
        assert caught.value.rows == [1]
        changes = [{"completion_tokens": 0}, {"completion_tokens": 9}, {"attention_mask": torch.ones(2, 3)}, {"temperature": 0}]
        for change in changes:
            with pytest.raises(UsageError, match="1 to 4 completion tokens"):
                reference.per_token_logps(torch.full((2, 4), 7), **change)


def own_service(folder: Path, model: Path, warm: WarmPython, port: str = "0") -> Service:
    file = settings_file(folder, folder / "store", {"ref": float32(model)}, pinned="ref")
    return Service("--config", file, "--port", port, warm=warm)
