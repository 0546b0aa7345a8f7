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
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from typer.testing import CliRunner

from reflogp.cli.main import app
from reflogp.scoring import score
from reflogp.store import Store
from reflogp.store.schema import shard_table
from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, MissingLogpsError, Reference
from tests.conftest import write_rows
from tests.trainer_ext.on_cpu import ON_CPU


def score_pairs(model: Path, data: Path, store: Path, dtype: str = "float32") -> None:
    score(str(model), str(data), store, dtype=dtype, progress=False)


def score_missing(error: MissingLogpsError) -> None:
    """Run the error's command."""
    done = CliRunner().invoke(app, shlex.split(error.command)[1:])
    assert done.exit_code == 0, done.exception or done.output


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
    """stores(dtype): a store with the pairs scored in it."""

    @cache
    def of(dtype: str) -> Path:
        store = tmp_path_factory.mktemp("store")
        score_pairs(reference_folder, data_file, store, dtype)
        return store

    return of


@pytest.fixture(scope="session")
def store(stores) -> Path:
    return stores("float32")


@pytest.fixture
def dataset(data_file, tmp_path) -> Dataset:
    """From a file, in a cache of the test's own, as a user would load it: TRL's cache works for such datasets only."""
    return load_dataset("json", data_files=str(data_file), split="train", cache_dir=str(tmp_path / "datasets-cache"))


@pytest.fixture
def policy(reference_folder):
    return lambda dtype="float32": AutoModelForCausalLM.from_pretrained(reference_folder, dtype=getattr(torch, dtype))


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
def cached_trainer(policy, config, dataset, tokenizer, store):
    """cached_trainer(trainer options, **config changes)"""

    def make(options=None, **changes) -> CachedDPOTrainer:
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": store, **(options or {})}
        return CachedDPOTrainer(arguments.pop("model", None) or policy(), args=config(**changes), **arguments)

    return make


@pytest.fixture
def trl_trainer(policy, config, dataset, tokenizer):
    """trl_trainer(trainer options, **config changes), with a reference model beside the policy unless told otherwise"""

    def make(options=None, **changes) -> DPOTrainer:
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, **(options or {})}
        return DPOTrainer(arguments.pop("model", None) or policy(), args=config(**changes), **arguments)

    return make


@pytest.fixture
def cached_kto_trainer(policy, config, dataset, tokenizer, tmp_path):
    """cached_kto_trainer(trainer options, **config changes), on a store of its own that has what TRL's rows need"""

    def make(options=None, **changes) -> CachedKTOTrainer:
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": Reference(tmp_path / "kto-store")}
        settings = {"max_steps": 3, "max_length": 220, **changes}
        try:
            return CachedKTOTrainer(policy(), args=config(KTOConfig, **settings), **arguments, **(options or {}))
        except MissingLogpsError as missing:
            score_missing(missing)
        return CachedKTOTrainer(policy(), args=config(KTOConfig, **settings), **arguments, **(options or {}))

    return make


@pytest.fixture
def trl_kto_trainer(policy, config, dataset, tokenizer):
    """trl_kto_trainer(**config changes), with a reference model beside the policy"""

    def make(**changes) -> KTOTrainer:
        args = config(KTOConfig, **{"max_steps": 3, "max_length": 220, **changes})
        return KTOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer)

    return make
