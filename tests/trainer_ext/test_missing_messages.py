"""What is missing is told once, for all datasets, with the command that scores all of it."""

import json
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from trl import KTOConfig

from reflogp.store import ReferenceNotFoundError, Store, StoreNotFoundError, describe_reference
from reflogp.trainer import CachedKTOTrainer, MissingLogpsError, ReferenceSource, join_reference_logps
from reflogp.trainer.values import needs_remote_code
from tests.conftest import write_rows
from tests.trainer_ext.conftest import score_pairs


@pytest.fixture
def few(reference_folder, data_file, tmp_path):
    """A store of its own that has the dataset's 80 pairs."""
    shutil.copytree(score(reference_folder, data_file, tmp_path / "few"), tmp_path / "copy")
    return ReferenceSource(tmp_path / "copy", model=str(reference_folder), dtype="float32")


def score(model, data, store) -> Path:
    score_pairs(model, data, store)
    return store


def pairs(rows, *numbers) -> Dataset:
    return Dataset.from_list([rows[number] for number in numbers])


def run_scoring(command: str, reflogp) -> None:
    words = shlex.split(command)
    assert words[:2] == ["reflogp", "score"]
    assert reflogp(*words[1:])[0] == 0


def test_all_datasets_misses_come_in_one_go(few, cached_trainer, pair_rows, reflogp):
    train = pairs(pair_rows, *range(8), 120, 121)
    evaluation = {"seen": pairs(pair_rows, 0, 1), "first": pairs(pair_rows, 2, 122), "third": pairs(pair_rows, 123)}
    options = {"reference": few, "train_dataset": train, "eval_dataset": evaluation}
    with pytest.raises(MissingLogpsError) as caught:
        cached_trainer(dict(options))
    words = str(caught.value)
    assert "2 of 10 rows of train (rows 8, 9)" in words
    assert "1 of 2 rows of eval_dataset['first'] (rows 1)" in words
    assert "seen" not in words
    assert caught.value.rows == [8, 9]
    assert caught.value.datasets["first"] == [1]
    assert words.count("reflogp score") == 1
    assert len(pq.read_table(shlex.split(caught.value.command)[3])) == 4
    run_scoring(caught.value.command, reflogp)
    assert set(cached_trainer(dict(options)).joins) == {"train", "seen", "first", "third"}


def test_evaluate_names_all_sets_too(few, cached_trainer, pair_rows, reflogp):
    trainer = cached_trainer({"reference": few})
    new = {"a": pairs(pair_rows, 0, 120), "b": pairs(pair_rows, 1), "c": pairs(pair_rows, 121, 122)}
    with pytest.raises(MissingLogpsError) as caught:
        trainer.evaluate(new)
    assert caught.value.datasets == {"a": [1], "c": [0, 1]}
    run_scoring(caught.value.command, reflogp)
    assert "eval_c_loss" in trainer.evaluate(new)
    with pytest.raises(MissingLogpsError, match="1 of 2 rows of eval "):
        trainer.evaluate(pairs(pair_rows, 0, 123))


def test_ktos_first_run_is_not_a_tokenizer_problem(policy, config, dataset, tokenizer, reference_folder, data_file, tmp_path):
    Store(tmp_path / "kto").create_table(describe_reference(str(reference_folder), "float32"))
    source = ReferenceSource(tmp_path / "kto", model=str(reference_folder), dtype="float32")

    def make():
        args = config(KTOConfig, max_length=220)
        return CachedKTOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer, reference=source)

    with pytest.raises(MissingLogpsError) as first:
        make()
    assert "chat template" not in str(first.value)
    assert "values for these pairs. The rows' own completions have no values yet either" in str(first.value)
    score_pairs(reference_folder, data_file, tmp_path / "kto")
    with pytest.raises(MissingLogpsError) as second:
        make()
    assert "a first run always lacks values for these pairs" in str(second.value)
    assert "own completions have no values" not in str(second.value)
    score_pairs(reference_folder, Path(shlex.split(second.value.command)[3]), tmp_path / "kto")
    make()


def test_a_store_that_is_not_there_yet(cached_trainer, reference_folder, pair_rows, tmp_path, reflogp):
    """The whole command, with the rows of all datasets."""
    source = ReferenceSource(tmp_path / "new", model=str(reference_folder), dtype="float32")
    options = {"reference": source, "train_dataset": pairs(pair_rows, 0, 1), "eval_dataset": pairs(pair_rows, 2)}
    with pytest.raises(StoreNotFoundError) as caught:
        cached_trainer(dict(options))
    command = str(caught.value).partition("Score the data: ")[2]
    assert len(pq.read_table(shlex.split(command)[3])) == 3
    run_scoring(command, reflogp)
    cached_trainer(dict(options))
    with pytest.raises(StoreNotFoundError, match=r"reflogp score .* DATA --store .* --dtype float32"):
        join_reference_logps(
            cached_trainer().train_dataset, ReferenceSource(tmp_path / "x", model=str(reference_folder), dtype="float32")
        )


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_forgotten_dtype_is_scored_in_the_policys(weights, cached_trainer, policy, reference_folder, pair_rows, tmp_path):
    forgotten = "bfloat16" if weights == "float32" else "float32"
    source = ReferenceSource(tmp_path / "new", model=str(reference_folder), dtype=forgotten)
    options = {"reference": source, "train_dataset": pairs(pair_rows, 0), "model": policy().to(getattr(torch, weights))}
    with pytest.raises(StoreNotFoundError) as caught:
        cached_trainer(dict(options))
    assert f'--dtype {weights}, and pass dtype="{weights}" to ReferenceSource' in str(caught.value)
    score_pairs(reference_folder, write_rows(tmp_path / "one.jsonl", pair_rows[:1]), tmp_path / "new", dtype=weights)
    with pytest.raises(ReferenceNotFoundError, match=f'--dtype {weights}, and pass dtype="{weights}"'):
        cached_trainer(dict(options))
    with pytest.raises(ReferenceNotFoundError, match=f"--dtype {forgotten}$"):
        cached_trainer({**options, "step_zero_tolerance": 1.0})


def test_a_model_with_code_of_its_own(reference_folder, few, cached_trainer, pair_rows, tmp_path):
    brings = tmp_path / "brings"
    shutil.copytree(reference_folder, brings)
    config = json.loads((brings / "config.json").read_text())
    assert not needs_remote_code(str(brings))
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MyModel"}
    (brings / "config.json").write_text(json.dumps(config))
    assert not needs_remote_code(str(brings)), "transformers knows a llama without it"
    config["model_type"] = "mine"
    (brings / "config.json").write_text(json.dumps(config))
    assert needs_remote_code(str(brings))
    source = ReferenceSource(tmp_path / "new", model=str(brings), dtype="float32")
    with pytest.raises(StoreNotFoundError, match=r"--trust-remote-code$"):
        cached_trainer({"reference": source, "train_dataset": pairs(pair_rows, 0)})


def test_moved_is_said_of_what_moved(cached_trainer, policy):
    trainer = cached_trainer({"policy_starts_at_reference": False})
    trainer.train()
    not_run = trainer.audit.as_dict()["not_run"]
    assert "does not start from the reference's weights" in not_run["step_zero"]
    assert "does not start from the reference's weights" in not_run["spot_check"]
    assert "changed" not in not_run["spot_check"]
