"""Two processes on CPU (gloo): the same losses as TRL with KTO's pairs, streams and uneven batches, and none waits for ever."""

import json
import threading
import time

import numpy as np
import pytest

from reflogp.client import Client
from tests.conftest import write_rows
from tests.service.serving import Service, settings_file
from tests.trainer_ext.conftest import damaged_copy, score_pairs
from tests.trainer_ext.distributed_run import launch, losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings(reference_folder, data_file, store):
    return {"model": str(reference_folder), "data": str(data_file), "source": str(store)}


def test_kto_in_two_processes(settings, reference_folder, tmp_path):
    """Its KL sequences depend on the batch of a process, so the values come from the rows that TRL prepared."""
    kto = {**settings, "trainer": "kto", "args": {"max_length": 220}, "source": str(tmp_path / "kto-store")}
    status, ranks = launch(kto, tmp_path / "first", check=False)
    assert status != 0 and {seen["error"] for seen in ranks} == {"MissingLogpsError"}
    score_pairs(reference_folder, tmp_path / "first" / "run" / "reflogp-missing.parquet", tmp_path / "kto-store")
    _, ranks = launch(kto, tmp_path / "second")
    _, trl = launch({**kto, "trl": True}, tmp_path / "trl")
    assert np.abs(losses(ranks) - losses(trl)).max() <= 1e-5


@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_trl_computes_what_is_missing_on_sharded_models(mode, settings, reference_folder, data_file, tmp_path):
    few = write_rows(tmp_path / "few.jsonl", [json.loads(line) for line in data_file.read_text().splitlines()[:70]])
    score_pairs(reference_folder, few, tmp_path / "few")
    given = {**settings, "mode": mode, "source": str(tmp_path / "few"), "reference": {"on_miss": "compute"}, "from_file": True}
    _, ranks = launch(given, tmp_path / "run")
    assert all(seen["computed"] == {"train": 10} for seen in ranks)
    _, trl = launch({**settings, "trl": True}, tmp_path / "trl")
    assert np.abs(losses(ranks) - losses(trl)).max() <= 1e-5


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_in_two_processes(dispatch, settings, tmp_path):
    loop = {"max_length": 220, "accelerator_config": {"dispatch_batches": dispatch}, "bf16": True}
    _, ranks = launch({**settings, "stream": True, "args": loop, "mode": "zero2" if dispatch else "ddp"}, tmp_path)
    assert all(len(seen["logs"]) == 3 and seen["step_zero"]["passed"] for seen in ranks)
    assert all(seen["dtypes_read_by_the_loss"] == ["float32"] for seen in ranks)


def test_uneven_last_batches(settings, tmp_path):
    """11 rows in batches of 2 on 2 processes: the last step has 3 rows for 4 places."""
    epoch = {"max_steps": -1, "num_train_epochs": 2, "max_length": 220, "gradient_accumulation_steps": 2}
    _, ranks = launch({**settings, "rows": 11, "args": epoch}, tmp_path / "ours")
    _, trl = launch({**settings, "rows": 11, "args": epoch, "trl": True}, tmp_path / "trl")
    assert len(losses(ranks)) == len(losses(trl))
    assert np.abs(losses(ranks) - losses(trl)).max() <= 1e-5


class TestBadInput:
    """A clear error on every process at once; `launch` fails a test whose processes wait for each other."""

    def errors(self, settings, folder) -> list[tuple[str, str]]:
        status, ranks = launch(settings, folder, timeout=150, check=False)
        assert status != 0 and len(ranks) == 2
        return [(seen["error"], seen["words"]) for seen in ranks]

    @pytest.mark.parametrize(("change", "error"), [(np.nan, "UnusableLogpsError"), (1.5, "StepZeroError")])
    def test_values_that_are_wrong(self, change, error, settings, store, tmp_path):
        bad = damaged_copy(store, tmp_path / "bad", lambda values: values * change)
        seen = self.errors({**settings, "source": str(bad)}, tmp_path)
        assert [name for name, _ in seen] == [error] * 2

    def test_a_service_that_goes_away_while_it_scores(self, settings, reference_folder, tmp_path):
        models = {"sft": {"model": str(reference_folder), "dtype": "float32"}}
        service = Service("--config", settings_file(tmp_path, tmp_path / "store", models))

        def kill_when_it_has_a_job():
            with Client(service.url) as client:
                while not client.jobs().jobs:
                    time.sleep(0.02)
            service.kill()

        killer = threading.Thread(target=kill_when_it_has_a_job, daemon=True)
        killer.start()
        asking = {**settings, "source": service.url, "reference": {"on_miss": "score"}, "away": 10}
        seen = self.errors(asking, tmp_path / "run")
        killer.join(10)
        assert {error for error, _ in seen} == {"ServiceUnreachableError"}
        assert all(service.url in words for _, words in seen)
