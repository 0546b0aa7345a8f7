"""Where values come from: a running service, a joined file, this trainer's own model; map-style rows and streams."""

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, set_seed
from trl import DPOTrainer

from reflogp.client import Client
from reflogp.store import UsageError
from reflogp.trainer import (
    BroughtColumnsError,
    CachedDPOTrainer,
    CachedReferenceMixin,
    MissingLogpsError,
    ReferenceSource,
    join_reference_logps,
)
from tests.service.serving import running, settings_file
from tests.trainer_ext.conftest import losses, score_pairs

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def columns(dataset) -> np.ndarray:
    return np.stack([np.array(dataset[name]) for name in COLUMNS])


@pytest.fixture(scope="module")
def service(reference_folder, tmp_path_factory, warm_python):
    """A service that has scored nothing yet."""
    folder = tmp_path_factory.mktemp("service")
    models = {"sft": {"model": str(reference_folder), "dtype": "float32"}}
    with running("--config", settings_file(folder, folder / "store", models), warm=warm_python) as service:
        yield service


@pytest.mark.slow
def test_a_service_scores_what_it_misses_and_is_a_source_after(service, cached_trainer):
    asked = ReferenceSource(service.url, reference="sft", on_miss="score")
    trainer = cached_trainer({"reference": asked}, max_length=220)
    assert trainer.joins["train"].scored == 80
    assert np.abs(columns(trainer.train_dataset) - columns(cached_trainer(max_length=220).train_dataset)).max() <= 1e-3
    trainer.train()
    audited = trainer.audit.as_dict()
    assert audited["verdict"] == "passed"
    assert audited["spot_check"]["by"] == "service"
    assert audited["joins"]["train"]["store"] == service.url

    again = cached_trainer({"reference": ReferenceSource(service.url, reference="sft")}, max_length=130, ld_alpha=0.4)
    assert again.joins["train"].scored == 0
    from_store = cached_trainer(max_length=130, ld_alpha=0.4)
    assert np.abs(columns(again.train_dataset) - columns(from_store.train_dataset)).max() <= 1e-3


def test_a_service_that_misses_says_what_scores_it(service, cached_trainer, pair_rows):
    source = ReferenceSource(service.url, reference="sft")
    with pytest.raises(MissingLogpsError, match=r"reflogp submit http://.*--reference sft --format tokens --watch"):
        cached_trainer({"reference": source, "train_dataset": Dataset.from_list(pair_rows[200:204])})


def test_a_service_without_the_reference_names_what_it_has(service, cached_trainer):
    with pytest.raises(Exception, match="has no reference other; its references: sft"):
        cached_trainer({"reference": ReferenceSource(service.url, reference="other")})


def test_a_jobs_result_and_a_joined_file_are_sources(
    service, cached_trainer, store, reference_folder, data_file, tmp_path, dataset, reflogp
):
    joined = tmp_path / "joined.parquet"
    arguments = [reference_folder, data_file, "--store", store, "--dtype", "float32", "--max-length", "220"]
    assert reflogp("join", *arguments, "--output", joined)[0] == 0
    with Client(service.url) as client:
        job = client.watch(client.submit(data_file, "sft", max_length=220).id, check=True)
        result = client.result(job.id, tmp_path / "result.parquet")
    shuffled = dataset.shuffle(seed=3)
    expected = columns(cached_trainer({"train_dataset": shuffled}, max_length=220).train_dataset)
    for file in (joined, result):
        trainer = cached_trainer({"reference": ReferenceSource(file), "train_dataset": shuffled}, max_length=220)
        assert np.abs(columns(trainer.train_dataset) - expected).max() <= 1e-3
        with pytest.raises(UsageError, match=r"max_length=220.*max_length=130"):
            cached_trainer({"reference": ReferenceSource(file)}, max_length=130)
    with pytest.raises(UsageError, match="contains values of reference"):
        cached_trainer({"reference": ReferenceSource(joined, reference_id="00" * 16)}, max_length=220)
    other = tmp_path / "other.parquet"
    dataset.to_parquet(other)
    with pytest.raises(UsageError, match="cannot be read as a Parquet file that `reflogp join`"):
        ReferenceSource(other).open()


def test_a_file_that_lacks_rows(cached_trainer, store, reference_folder, data_file, tmp_path, pair_rows, reflogp):
    joined = tmp_path / "joined.parquet"
    assert reflogp("join", reference_folder, data_file, "--store", store, "--dtype", "float32", "-o", joined)[0] == 0
    more = Dataset.from_list(pair_rows[:4] + pair_rows[200:202])
    with pytest.raises(MissingLogpsError, match="Create the file again") as caught:
        cached_trainer({"reference": ReferenceSource(joined), "train_dataset": more}, max_length=None)
    assert caught.value.rows == [4, 5]


@pytest.mark.slow
def test_this_trainers_own_model_computes_what_is_missing(cached_trainer, trl_trainer, reference_folder, data_file, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in data_file.read_text().splitlines()[:30]))
    score_pairs(reference_folder, few, tmp_path / "few-store")
    source = ReferenceSource(tmp_path / "few-store", model=str(reference_folder), dtype="float32", on_miss="compute")
    trainer = cached_trainer({"reference": source}, ld_alpha=0.4)
    assert trainer.joins["train"].computed == 50
    expected = trl_trainer(ld_alpha=0.4)
    assert np.abs(columns(trainer.train_dataset) - columns(expected.train_dataset)).max() <= 1e-3
    with pytest.raises(MissingLogpsError, match="the policy does not start from the reference's weights"):
        cached_trainer({"reference": source, "policy_starts_at_reference": False})


def test_a_stream_is_joined_as_it_is_read(cached_trainer, dataset):
    steps = {"max_steps": 3, "max_length": 220}
    streamed = cached_trainer({"train_dataset": dataset.to_iterable_dataset()}, **steps)
    assert isinstance(streamed.train_dataset, IterableDataset)
    streamed.train()
    shuffled_alike = cached_trainer({"train_dataset": dataset}, train_sampling_strategy="sequential", **steps)
    shuffled_alike.train()
    assert np.abs(np.array(losses(streamed)) - np.array(losses(shuffled_alike))).max() <= 1e-6
    assert streamed.audit.as_dict()["verdict"] == "passed"


def test_a_stream_stops_at_a_row_without_values(cached_trainer, pair_rows, tokenizer, source):
    rows = Dataset.from_list(pair_rows[:80] + pair_rows[200:201]).to_iterable_dataset()
    trainer = cached_trainer({"train_dataset": rows}, max_steps=30)
    with pytest.raises(MissingLogpsError) as caught:
        trainer.train()
    assert caught.value.rows == [80]


def test_a_stream_in_a_data_loaders_worker(cached_trainer, dataset):
    trainer = cached_trainer({"train_dataset": dataset.to_iterable_dataset(num_shards=2)}, dataloader_num_workers=2)
    trainer.train()
    assert np.isfinite(losses(trainer)).all()


@pytest.mark.slow
def test_several_evaluation_sets_and_a_new_one_after_training_began(cached_trainer, dataset):
    sets = {"first": dataset.select(range(8)), "second": dataset.select(range(8, 16))}
    trainer = cached_trainer({"eval_dataset": sets}, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert set(trainer.joins) == {"train", "first", "second"}
    seen = trainer.evaluate({"new": dataset.select(range(16, 24)), "newer": dataset.select(range(24, 28))})
    assert np.isfinite([seen["eval_new_loss"], seen["eval_newer_loss"]]).all()


class OwnTrainer(DPOTrainer):
    """A user's own trainer."""

    steps = 0

    def compute_loss(self, *args, **kwargs):
        self.steps += 1
        return super().compute_loss(*args, **kwargs)


class CachedOwnTrainer(CachedReferenceMixin, OwnTrainer):
    pass


@pytest.mark.slow
def test_a_users_own_subclass(policy, config, dataset, tokenizer, source, cached_trainer):
    trainer = CachedOwnTrainer(policy(), args=config(), train_dataset=dataset, processing_class=tokenizer, reference=source)
    trainer.train()
    assert trainer.steps == 2
    usual = cached_trainer()
    usual.train()
    assert losses(trainer) == losses(usual)


@pytest.mark.slow
def test_lora(cached_trainer, trl_trainer):
    from peft import LoraConfig

    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}
    ours = cached_trainer(dict(lora), max_steps=4)
    ours.train()
    trl = trl_trainer(dict(lora), precompute_ref_log_probs=False, max_steps=4)
    trl.train()
    assert np.abs(np.array(losses(ours)) - np.array(losses(trl))).max() <= 1e-5
    assert ours.audit.as_dict()["verdict"] == "passed"
    ours.evaluate(ours.train_dataset.select_columns(["prompt", "chosen", "rejected"]).select(range(4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True},
        {"dataloader_drop_last": False, "per_device_train_batch_size": 7, "num_train_epochs": 1, "max_steps": -1},
        {"pad_to_multiple_of": 8},
        {"train_sampling_strategy": "group_by_length", "length_column_name": "tokens", "remove_unused_columns": False},
    ],
    ids=str,
)
def test_settings_of_the_loop(changes, cached_trainer, trl_trainer, dataset):
    changes = {"max_length": 130, **changes}
    rows = {"train_dataset": dataset.map(lambda row: {"tokens": len(str(row["chosen"]))})}
    ours, trl = cached_trainer(dict(rows), **changes), trl_trainer(dict(rows), precompute_ref_log_probs=False, **changes)
    for trainer in (ours, trl):
        set_seed(7)  # loading a reference model draws random numbers, and lengths are grouped by the next ones
        trainer.train()
    assert len(losses(ours)) == len(losses(trl)) > 1
    assert np.abs(np.array(losses(ours)) - np.array(losses(trl))).max() <= 1e-5
    assert ours.audit.as_dict()["verdict"] == "passed"


def test_text_rows_of_a_vision_language_model(config, tokenizer, dataset, data_file, tmp_path):
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"vocab_size": len(tokenizer) + 8, "num_hidden_layers": 2, "pad_token_id": tokenizer.pad_token_id, **size}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    sight = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    policy = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=sight))
    policy.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    score_pairs(tmp_path / "model", data_file, tmp_path / "store")
    trainer = CachedDPOTrainer(
        policy,
        args=config(),
        train_dataset=dataset,
        processing_class=tokenizer,
        reference=ReferenceSource(tmp_path / "store", model=str(tmp_path / "model"), dtype="float32"),
    )
    trainer.train()
    assert trainer.audit.as_dict()["verdict"] == "passed"


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(cached_trainer, tmp_path):
    whole = cached_trainer(max_steps=4)
    whole.train()
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "resumed")}
    first = cached_trainer(max_steps=2, lr_scheduler_type="constant", **settings)
    first.train()
    step_zero = first.audit.step_zero.as_dict()
    resumed = cached_trainer(max_steps=4, lr_scheduler_type="constant", **settings)
    resumed.train(resume_from_checkpoint=True)
    constant = cached_trainer(max_steps=4, lr_scheduler_type="constant")
    constant.train()
    assert np.abs(np.array(losses(resumed)) - np.array(losses(constant))).max() <= 1e-5
    audited = resumed.audit.as_dict({"step_zero": step_zero})
    assert audited["verdict"] == "passed"
    assert audited["schedule"]["first_step"] == 2


def test_join_for_a_loop_of_ones_own(cached_trainer, source, store, reference_folder):
    tokenized = cached_trainer().train_dataset.remove_columns(list(COLUMNS))
    joined = join_reference_logps(tokenized.to_iterable_dataset(), source, max_length=220)
    rows = list(joined)
    expected = join_reference_logps(tokenized, source, max_length=220)
    assert [row["ref_chosen_logps"] for row in rows] == expected["ref_chosen_logps"][:]
    with pytest.raises(BroughtColumnsError):
        list(join_reference_logps(expected.to_iterable_dataset(), source, max_length=60))
    brought = np.array(expected["ref_rejected_logps"][:], np.float32)
    brought[3] -= 50  # in the second batch of a stream that repeats these rows
    second = expected.remove_columns("ref_rejected_logps").add_column("ref_rejected_logps", brought)
    batches = [expected] * (-(-256 // len(expected))) + [second]
    with pytest.raises(BroughtColumnsError) as refused:
        list(join_reference_logps(concatenate_datasets(batches).to_iterable_dataset(), source, max_length=220))
    assert refused.value.rows == [len(expected) * (len(batches) - 1) + 3]
    with pytest.raises(UsageError, match="needs a trainer"):
        join_reference_logps(tokenized, ReferenceSource(store, model=str(reference_folder), dtype="float32", on_miss="compute"))


def test_sources_that_contradict_themselves(store, reference_folder):
    for arguments, words in (
        ({"on_miss": "score", "model": str(reference_folder), "dtype": "float32"}, "needs a running service"),
        ({"on_miss": "guess", "model": str(reference_folder), "dtype": "float32"}, "use 'error', 'score' or 'compute'"),
        ({"reference": "sft"}, "the name of a model in a service"),
        ({}, "needs model="),
    ):
        with pytest.raises(UsageError, match=words):
            ReferenceSource(store, **arguments)


def test_a_reference_id_says_which_dtype_is_meant(store, source, reference_folder):
    named = ReferenceSource(store, model=str(reference_folder), reference_id=source.reference_id)
    assert named.described == source.described and not named.chooses_dtype
    with pytest.raises(UsageError, match="is not an id of the model"):
        ReferenceSource(store, model=str(reference_folder), reference_id="00" * 16)
