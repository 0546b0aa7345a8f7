"""Two processes on CPU (gloo): the same losses and metrics as one, whatever shards the policy, and none waits for ever."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from reflogp.client import Client
from reflogp.store import Store, describe_reference
from tests.conftest import write_rows
from tests.service.serving import Service, settings_file
from tests.trainer_ext.conftest import damaged_copy, score_pairs
from tests.trainer_ext.distributed_run import launch

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(("mode", "kind"), [("ddp", "MULTI_CPU"), ("fsdp2", "FSDP"), ("zero3", "DEEPSPEED")])
def test_two_processes_equal_one(mode, kind, settings, alone, tmp_path):
    _, ranks, _ = launch({**settings, "mode": mode}, tmp_path)
    assert [seen["distributed"] for seen in ranks] == [kind, kind]
    if mode == "fsdp2":
        assert sum(seen["holds"] for seen in ranks) == alone["holds"], "the policy was not sharded"
    for seen in ranks:
        for name in SHARED:
            apart = np.abs(series(seen, name) - series(alone, name))
            assert (apart <= 1e-5 * np.maximum(1, np.abs(series(alone, name)))).all(), (mode, name, apart)
        assert seen["audit"]["verdict"] == "passed"
        assert seen["audit"]["metrics"]["logs_compared"] == 3
        assert seen["audit"]["forwards"] == {"micro_batches": 3, "policy_passes": 3}
    assert json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())["step_zero"]["sequences"] == 8


def test_kto_in_two_processes(settings, reference_folder, tmp_path):
    """Its KL sequences depend on the batch of a process, so the values come from the rows that TRL prepared."""
    args = {"max_length": 220}
    kto = {**settings, "trainer": "kto", "args": args, "source": str(tmp_path / "kto-store")}
    Store(tmp_path / "kto-store").create_table(describe_reference(str(reference_folder), "float32"))
    status, ranks, _ = launch(kto, tmp_path / "first", check=False)
    assert status != 0
    assert {seen["error"] for seen in ranks} == {"MissingLogpsError", "RankFailedError"}
    score_pairs(reference_folder, tmp_path / "first" / "run" / "reflogp-missing.parquet", tmp_path / "kto-store")
    _, ranks, _ = launch(kto, tmp_path / "second")
    assert (series(ranks[0], "loss") == series(ranks[1], "loss")).all()
    assert all(seen["audit"]["verdict"] == "passed" for seen in ranks)
    _, trl, _ = launch({**kto, "trl": True}, tmp_path / "trl")
    assert np.abs(series(ranks[0], "loss") - series(trl[0], "loss")).max() <= 1e-5


def test_an_in_memory_dataset_is_what_trl_fails_on(settings, tmp_path):
    status, ranks, _ = launch({**settings, "trl": True, "args": {"precompute_ref_log_probs": True}}, tmp_path, check=False)
    assert status != 0
    assert "FileNotFoundError" in {seen.get("error") for seen in ranks}


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_in_two_processes(dispatch, settings, tmp_path):
    loop = {"max_length": 220, "accelerator_config": {"dispatch_batches": dispatch}}
    _, ranks, _ = launch({**settings, "stream": True, "args": loop}, tmp_path)
    assert all(len(seen["logs"]) == 3 and seen["audit"]["verdict"] == "passed" for seen in ranks)


def test_two_nodes_without_a_shared_disk(settings, alone, tmp_path):
    """Each node's process looks up for itself and maps a file of its own cache folder."""
    caches = [str(tmp_path / "first"), str(tmp_path / "second")]
    _, ranks, _ = launch(settings, tmp_path / "run", processes=1, caches=caches)
    assert len(ranks) == 2
    assert all(len(list(Path(cache).glob("joined/*.arrow"))) == 1 for cache in caches)
    for seen in ranks:
        assert np.abs(series(seen, "loss") - series(alone, "loss")).max() <= 1e-5


def test_uneven_last_batches(settings, tmp_path):
    """11 rows in batches of 2 on 2 processes: the last step has 3 rows for 4 places."""
    epoch = {"max_steps": -1, "num_train_epochs": 2, "max_length": 220, "gradient_accumulation_steps": 2}
    _, ranks, _ = launch({**settings, "rows": 11, "args": epoch}, tmp_path / "ours")
    _, trl, _ = launch({**settings, "rows": 11, "args": epoch, "trl": True}, tmp_path / "trl")
    assert len(ranks[0]["logs"]) == len(trl[0]["logs"])
    assert np.abs(series(ranks[0], "loss") - series(trl[0], "loss")).max() <= 1e-5
    assert all(seen["audit"]["verdict"] == "passed" for seen in ranks)


class TestBadInput:
    """A clear error on every process at once; `launch` fails a test whose processes wait for each other."""

    def errors(self, settings, folder, **options) -> list[tuple[str, str]]:
        status, ranks, _ = launch(settings, folder, timeout=150, check=False, **options)
        assert status != 0
        assert len(ranks) == 2
        return [(seen["error"], seen["words"]) for seen in ranks]

    def test_other_rows_on_one_process(self, settings, tmp_path):
        seen = self.errors({**settings, "other_rows_on": [1]}, tmp_path)
        assert [error for error, _ in seen] == ["UsageError", "UsageError"]
        assert all("process 0 has 80 rows, process 1 has 79 rows" in words for _, words in seen)

    def test_rows_that_were_never_scored(self, settings, tmp_path, pair_rows):
        more = write_rows(tmp_path / "more.jsonl", pair_rows[:8] + pair_rows[200:202])
        seen = self.errors({**settings, "data": str(more)}, tmp_path)
        assert [error for error, _ in seen] == ["MissingLogpsError", "RankFailedError"]
        assert all("2 of 10 rows of train (rows 8, 9) have no reference log-probs" in words for _, words in seen)
        assert all("reflogp score" in words for _, words in seen)

    def test_a_cache_folder_that_cannot_be_written(self, settings, tmp_path):
        (tmp_path / "file").write_text("")
        seen = self.errors(settings, tmp_path, caches=[str(tmp_path / "file")])
        assert [error for error, _ in seen] == ["UsageError", "RankFailedError"]
        assert all("cannot be written" in words and "REFLOGP_CACHE_DIR" in words for _, words in seen)

    def test_a_value_that_is_not_a_number(self, settings, store, reference_folder, tmp_path):
        bad = damaged_copy(store, tmp_path / "bad", lambda values: values * np.nan)
        seen = self.errors({**settings, "source": str(bad)}, tmp_path)
        assert [error for error, _ in seen] == ["UnusableLogpsError", "RankFailedError"]

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
        asked = {"reference": "sft", "on_miss": "score", "score_timeout": 10}
        seen = self.errors({**settings, "source": service.url, "reference": asked}, tmp_path / "run")
        killer.join(10)
        assert [error for error, _ in seen] == ["ServiceUnreachableError", "RankFailedError"]
        assert all(service.url in words for _, words in seen)

    @pytest.mark.parametrize("arguments", [{"sync_ref_model": True}], ids=str)
    def test_settings_that_move_the_reference(self, arguments, settings, tmp_path):
        seen = self.errors({**settings, "args": arguments}, tmp_path)
        assert [error for error, _ in seen] == ["UsageError", "UsageError"]
