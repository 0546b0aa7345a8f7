"""Real TRL runs on a small reference model whose pairs are scored in float32."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig

from reflogp.scoring import score
from reflogp.store import Store
from reflogp.store.joins import PAIR_COLUMNS
from reflogp.store.schema import shard_table
from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, MissingLogpsError, Reference
from tests.conftest import save_llama, write_rows
from tests.trainer_ext.framework_runs import SIZE, run_command
from tests.trainer_ext.on_cpu import ON_CPU


def score_pairs(model: Path, data: Path, store: Path, dtype: str = "float32") -> None:
    score(str(model), str(data), store, dtype=dtype, progress=False)


def score_missing(error: MissingLogpsError) -> None:
    """Run the error's command."""
    run_command(shlex.split(error.command)[1:])


def damaged_copy(store: Path, folder: Path, change) -> Path:
    """A store with the same keys under the same reference id, and other values: `change`d arrays, one per sequence."""
    [reference_id] = [path.name for path in store.iterdir() if (path / "logprobs").is_dir()]
    original = Store(store)[reference_id]
    shards = [pq.read_table(file) for file in sorted((store / reference_id / "logprobs").rglob("*.parquet"))]
    rows = pa.concat_tables(shards)
    copy = Store(folder).create_table(original.reference)
    values = [np.asarray(value, np.float32) for value in rows["token_logps"].to_pylist()]
    changed = pa.array([change(value) for value in values], pa.list_(pa.float32()))
    keys = rows["key"].combine_chunks()
    lens = [rows[name].to_numpy() for name in ("prompt_len", "completion_len")]
    copy.replace([], [copy.write(shard_table(keys, *lens, changed, {}))])  # as another writer could; append refuses NaN
    return folder


@pytest.fixture(scope="session")
def data_file(pair_rows, tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", pair_rows[:80])


@pytest.fixture(scope="session")
def stores(reference_folder, data_file, tmp_path_factory):
    """stores(dtype, model): a store with the pairs scored by the model."""

    @cache
    def of(dtype: str, model: Path = reference_folder) -> Path:
        store = tmp_path_factory.mktemp("store")
        score_pairs(model, data_file, store, dtype)
        return store

    return of


@pytest.fixture(scope="session")
def store(stores) -> Path:
    return stores("float32")


@pytest.fixture(scope="session")
def small_model(tokenizer, tmp_path_factory) -> Path:
    """What the frameworks train."""
    return save_llama(tmp_path_factory.mktemp("small-model"), tokenizer, **SIZE)


@pytest.fixture
def dataset(data_file, tmp_path) -> Dataset:
    """From a file, in a cache of the test's own, as a user would load it: TRL's cache works for such datasets only."""
    return load_dataset("json", data_files=str(data_file), split="train", cache_dir=str(tmp_path / "datasets-cache"))


@pytest.fixture
def policy(reference_folder):
    return lambda dtype="float32": AutoModelForCausalLM.from_pretrained(reference_folder, dtype=getattr(torch, dtype))


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def columns(dataset) -> np.ndarray:
    return np.stack([np.array(dataset[name]) for name in PAIR_COLUMNS.values()])


def apart(ours, trl) -> float:
    """Largest difference of two trainers' losses."""
    assert len(losses(ours)) == len(losses(trl)) > 1
    return float(np.abs(np.array(losses(ours)) - np.array(losses(trl))).max())


@pytest.fixture
def config(tmp_path):
    def make(kind=DPOConfig, **changes):
        settings = {**ON_CPU, "output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4, "max_steps": 2}
        return kind(**{**settings, **changes})

    return make


@pytest.fixture
def trl_trainer(policy, config, dataset, tokenizer):
    """trl_trainer(trainer options, **config changes), with a reference model beside the policy unless told otherwise"""

    def make(options=None, kind=DPOTrainer, **changes) -> DPOTrainer:
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, **(options or {})}
        return kind(arguments.pop("model", None) or policy(), args=config(**changes), **arguments)

    return make


@pytest.fixture
def cached_trainer(trl_trainer, store):
    """cached_trainer(trainer options, **config changes)"""
    return lambda options=None, **changes: trl_trainer({"reference": store, **(options or {})}, CachedDPOTrainer, **changes)


@pytest.fixture
def cached_kto_trainer(policy, config, dataset, tokenizer, tmp_path):
    """cached_kto_trainer(**config changes), on a store of its own that has what TRL's rows need"""

    def make(**changes) -> CachedKTOTrainer:
        args = config(KTOConfig, **{"max_steps": 3, "max_length": 220, **changes})
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": Reference(tmp_path / "kto-store")}
        try:
            return CachedKTOTrainer(policy(), args=args, **arguments)
        except MissingLogpsError as missing:
            score_missing(missing)
        return CachedKTOTrainer(policy(), args=args, **arguments)

    return make
