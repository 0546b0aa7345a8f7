"""Where values come from: a running service, a joined file, TRL's own precomputation; map-style rows and streams."""

import sys

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from peft import LoraConfig

from reflogp.client import Client
from reflogp.store import ReferenceNotFoundError, SnapshotNotFoundError, UsageError
from reflogp.store.errors import ReflogpError
from reflogp.store.joins import PAIR_COLUMNS
from reflogp.trainer import MissingLogpsError, Reference
from reflogp.trainer.join import join_reference_logps
from tests.service.serving import running, settings_file
from tests.trainer_ext.conftest import apart, columns, losses, score_pairs


@pytest.fixture(scope="module")
def service(reference_folder, tmp_path_factory, warm_python):
    """A service that has scored nothing yet."""
    folder = tmp_path_factory.mktemp("service")
    models = {"sft": {"model": str(reference_folder), "dtype": "float32"}}
    with running("--config", settings_file(folder, folder / "store", models), warm=warm_python) as service:
        yield service


@pytest.mark.slow
def test_a_service_scores_what_it_misses_and_is_a_source_after(service, cached_trainer):
    trainer = cached_trainer({"reference": Reference(service.url, on_miss="score")}, max_length=220)
    assert trainer.joins["train"].scored == 80
    assert np.abs(columns(trainer.train_dataset) - columns(cached_trainer(max_length=220).train_dataset)).max() <= 1e-3
    trainer.train()
    assert trainer.step_zero.passed and trainer.joins["train"].where.store == service.url
    again = cached_trainer({"reference": Reference(service.url, model="sft")}, max_length=130, ld_alpha=0.4)
    assert again.joins["train"].scored == 0
    from_store = cached_trainer(max_length=130, ld_alpha=0.4)
    assert np.abs(columns(again.train_dataset) - columns(from_store.train_dataset)).max() <= 1e-3


@pytest.mark.slow
def test_a_service_without_a_model_serves_stored_values_to_a_token_that_may_only_read(
    cached_trainer, store, tmp_path, warm_python
):
    config = settings_file(tmp_path, store, {}, {"trainers": ("a-token-of-trainers", ["read"])})
    with running("--config", config, warm=warm_python) as service:
        trainer = cached_trainer({"reference": Reference(service.url, token="a-token-of-trainers")})
        trainer.train()
    assert trainer.step_zero.passed


def test_a_service_that_misses_says_what_scores_it(service, cached_trainer, pair_rows):
    rows = Dataset.from_list(pair_rows[200:204])
    with pytest.raises(MissingLogpsError, match=r"reflogp submit http://.*--reference sft --format tokens --watch"):
        cached_trainer({"reference": service.url, "train_dataset": rows})
    with pytest.raises(ReferenceNotFoundError, match="does not serve other; its references: sft"):
        cached_trainer({"reference": Reference(service.url, model="other")})


def test_what_cannot_be_opened_is_one_sentence(cached_trainer, store, tmp_path, dataset):
    with pytest.raises(ReflogpError, match=r"http://127\.0\.0\.1:9"):
        cached_trainer({"reference": "http://127.0.0.1:9"})
    with pytest.raises(SnapshotNotFoundError, match="999"):
        cached_trainer({"reference": Reference(store, snapshot=999)})
    with pytest.raises(ReferenceNotFoundError, match="0000"):
        cached_trainer({"reference": Reference(store, model="00" * 16)})
    with pytest.raises(UsageError, match="there is no file"):
        cached_trainer({"reference": tmp_path / "none.parquet"})
    dataset.to_parquet(tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="cannot be read as a Parquet file that `reflogp join`"):
        cached_trainer({"reference": tmp_path / "other.parquet"})


def test_a_jobs_result_and_a_joined_file_are_sources(
    service, cached_trainer, store, reference_folder, data_file, tmp_path, dataset, reflogp, pair_rows
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
        trainer = cached_trainer({"reference": file, "train_dataset": shuffled}, max_length=220)
        assert np.abs(columns(trainer.train_dataset) - expected).max() <= 1e-3
        with pytest.raises(UsageError, match=r"max_length=220.*max_length=130"):
            cached_trainer({"reference": file}, max_length=130)
    with pytest.raises(UsageError, match="contains values of reference"):
        cached_trainer({"reference": Reference(joined, model="00" * 16)}, max_length=220)
    more = Dataset.from_list(pair_rows[:4] + pair_rows[200:202])
    with pytest.raises(MissingLogpsError, match="Create the file again") as caught:
        cached_trainer({"reference": joined, "train_dataset": more}, max_length=220)
    assert caught.value.rows == [4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"ld_alpha": 0.4}, {"max_length": 60, "truncation_mode": "keep_end"}], ids=str)
def test_trl_computes_what_is_missing(changes, cached_trainer, trl_trainer, reference_folder, data_file, tmp_path, dataset):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in data_file.read_text().splitlines()[:30]))
    score_pairs(reference_folder, few, tmp_path / "few-store")
    source = Reference(tmp_path / "few-store", on_miss="compute")
    cached_trainer({"reference": source}, **{**changes, "max_length": 90})  # leaves a cache of TRL's for other settings
    trainer = cached_trainer({"reference": source, "eval_dataset": dataset.select(range(40))}, **changes)
    assert trainer.joins["train"].computed == (80 if "truncation_mode" in changes else 50)
    expected = trl_trainer(precompute_ref_log_probs=False, **changes)
    trainer.train()
    expected.train()
    assert apart(trainer, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_a_trained_policy_computes_only_without_its_adapter(adapter, cached_trainer, policy, pair_rows, store):
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)} if adapter else {}
    trainer = cached_trainer({"reference": Reference(store, on_miss="compute"), **options}, learning_rate=1e-2)
    trainer.train()
    new = Dataset.from_list(pair_rows[200:204])
    if not adapter:
        with pytest.raises(MissingLogpsError):
            trainer.evaluate(new)
        return
    trainer.evaluate(new)
    assert trainer.joins["eval"].computed == 4
    untrained = cached_trainer({"reference": Reference(store, on_miss="compute"), "eval_dataset": new}).eval_dataset
    tokenized = untrained.remove_columns(list(PAIR_COLUMNS.values()))
    computed = trainer._precompute_ref_logps(tokenized, "again", 4)
    assert np.abs(columns(computed) - columns(untrained)).max() <= 1e-3


def test_a_stream_is_joined_as_it_is_read(cached_trainer, dataset):
    steps = {"max_steps": 3, "max_length": 220}
    streamed = cached_trainer({"train_dataset": dataset.to_iterable_dataset()}, **steps)
    assert isinstance(streamed.train_dataset, IterableDataset)
    streamed.train()
    in_order = cached_trainer({"train_dataset": dataset}, train_sampling_strategy="sequential", **steps)
    in_order.train()
    assert apart(streamed, in_order) <= 1e-6
    if sys.version_info < (3, 14):  # since 3.14, worker processes are not forked, and TRL's own filter cannot be pickled
        workers = cached_trainer({"train_dataset": dataset.to_iterable_dataset(num_shards=2)}, dataloader_num_workers=2)
        workers.train()
        assert np.isfinite(losses(workers)).all()


def test_a_stream_stops_at_a_row_without_values(cached_trainer, pair_rows, store):
    rows = Dataset.from_list(pair_rows[:80] + pair_rows[200:201]).to_iterable_dataset()
    trainer = cached_trainer({"train_dataset": rows}, max_steps=30)
    with pytest.raises(MissingLogpsError) as caught:
        trainer.train()
    assert caught.value.rows == [80]
    with pytest.raises(UsageError, match="a stream is read once"):
        cached_trainer({"train_dataset": rows, "reference": Reference(store, on_miss="compute")})


def test_join_for_a_loop_of_ones_own(cached_trainer, store, reference_folder):
    source = Reference(store, model=str(reference_folder))
    expected = cached_trainer(max_length=220).train_dataset
    tokenized = expected.remove_columns(list(PAIR_COLUMNS.values()))
    joined = join_reference_logps(tokenized.shuffle(seed=1), source, max_length=220)
    assert joined["ref_chosen_logps"][:] == expected.shuffle(seed=1)["ref_chosen_logps"][:]
    streamed = list(join_reference_logps(tokenized.to_iterable_dataset(), source, max_length=220))
    assert [row["ref_chosen_logps"] for row in streamed] == expected["ref_chosen_logps"][:]
    with pytest.raises(UsageError, match=r"expected the columns prompt_ids"):
        join_reference_logps(tokenized.remove_columns("chosen_ids"), source)
