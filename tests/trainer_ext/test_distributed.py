"""Two processes on CPU (gloo): the same losses and metrics as one, whatever shards the policy, and none waits for ever."""

import json

import numpy as np
import pytest

from tests.trainer_ext.distributed_run import launch

SHARED = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@pytest.fixture(scope="module")
def settings(reference_folder, data_file, store):
    return {"model": str(reference_folder), "data": str(data_file), "source": str(store)}


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory):
    """One process, with the batch of two."""
    _, [seen], _ = launch(
        {**settings, "args": {"per_device_train_batch_size": 4}}, tmp_path_factory.mktemp("alone"), processes=1
    )
    return seen


def series(seen, name) -> np.ndarray:
    return np.array([entry[name] for entry in seen["logs"]])


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "zero3"])
def test_two_processes_equal_one(mode, settings, alone, tmp_path):
    _, ranks, _ = launch({**settings, "mode": mode}, tmp_path)
    assert len(ranks) == 2
    for seen in ranks:
        for name in SHARED:
            apart = np.abs(series(seen, name) - series(alone, name))
            assert (apart <= 1e-5 * np.maximum(1, np.abs(series(alone, name)))).all(), (mode, name, apart)
        assert seen["audit"]["verdict"] == "passed"
        assert seen["audit"]["metrics"]["logs_compared"] == 3
        assert seen["audit"]["forwards"] == {"micro_batches": 3, "policy_passes": 3}
    assert json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())["step_zero"]["sequences"] == 8
