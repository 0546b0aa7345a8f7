"""Two processes in bfloat16, as GPUs are trained: losses beside those of TRL's own runs with a live reference model."""

import numpy as np
import pytest

from tests.trainer_ext.conftest import score_pairs
from tests.trainer_ext.distributed_run import launch

pytestmark = pytest.mark.slow

#: Dtype in which a policy computes under FSDP2 and DeepSpeed with bf16=True, whether its weights are float32 or bfloat16.
COMPUTES_IN = "bfloat16"
#: Largest difference between KTO losses of two of TRL's own runs: half of DPO's, because a KTO loss is a sigmoid. (Its KL rows
#: depend on the batch, so it has no run with another split.) FSDP2 rounds log-probs to bfloat16, in steps of 4 nats at -784.
KTO_APART = {"fsdp2": 0.03, "zero3": 0.005}


def losses(ranks) -> np.ndarray:
    return np.array([entry["loss"] for entry in ranks[0]["logs"]])


@pytest.mark.parametrize(("trainer", "weights"), [("dpo", "bfloat16"), ("kto", "float32")])
@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_losses_differ_as_those_of_two_of_trls_own_runs(mode, trainer, weights, reference_folder, data_file, tmp_path):
    args = {"bf16": True, "max_steps": 5, "max_length": 220, "learning_rate": 1e-3}
    settings = {
        "model": str(reference_folder),
        "data": str(data_file),
        "mode": mode,
        "dtype": weights,
        "trainer": trainer,
        "args": args,
        "source": str(tmp_path / "store"),
        "reference": {"model": str(reference_folder), "dtype": COMPUTES_IN},
    }
    score_pairs(reference_folder, data_file, tmp_path / "store", COMPUTES_IN)
    if trainer == "kto":  # score the KL sequences, which depend on the batch, as the first run says
        _, ranks, _ = launch(settings, tmp_path / "first", check=False)
        assert "MissingLogpsError" in {seen.get("error") for seen in ranks}
        score_pairs(reference_folder, tmp_path / "first" / "run" / "reflogp-missing.parquet", tmp_path / "store", COMPUTES_IN)
    _, ranks, _ = launch(settings, tmp_path / "ours")
    assert all(seen["dtypes_read_by_the_loss"] == ["float32"] for seen in ranks)
    assert all(seen["audit"]["verdict"] == "passed" for seen in ranks)
    _, own, _ = launch({**settings, "trl": True}, tmp_path / "own")
    apart = KTO_APART[mode]
    if trainer == "dpo":
        split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        _, again, _ = launch({**settings, "trl": True, "args": {**args, **split}}, tmp_path / "again")
        apart = np.abs(losses(again) - losses(own)).max()
    difference = np.abs(losses(ranks) - losses(own)).max()
    print(f"{mode}, {trainer}, weights in {weights}: {difference:.4f} from TRL, whose own runs differ by {apart:.4f}")
    assert difference <= 2 * apart
