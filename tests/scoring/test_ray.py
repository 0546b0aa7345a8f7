"""Scoring on a real Ray cluster: two nodes (raylets) of one CPU on this machine; workers and nodes that are really killed."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.on_ray.workers import ClusterWorkers, connected
from reflogp.store import UsageError, describe_reference
from tests.conftest import INTERRUPTIBLE, write_rows
from tests.scoring.spread_runs import Runs, odd_rows
from tests.scoring.watching import Watching
from tests.service.serving import token_rows
from tests.vision_models import make, pairs_with_files

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster():
    """A head and a second node. REFLOGP_CACHE_DIR and PYTHONPATH reach the workers through their raylets."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.second = cluster.add_node(**NODE)
    with connected(cluster.address):
        yield cluster
    cluster.shutdown()


@pytest.fixture
def score(reference_folder, tmp_path):
    return Runs(
        reference_folder, tmp_path, lambda folder, reference, choice: ClusterWorkers(folder, None, reference, choice, 2)
    )


def test_the_same_rows_as_without_ray_and_the_same_bad_ones(cluster, score, tmp_path):
    score.assert_same_runs(write_rows(tmp_path / "rows.jsonl", odd_rows()), Watching())


def test_a_killed_worker_loses_nothing_of_pairs_with_images(cluster, score, tmp_path):
    make("LLaVA", tmp_path / "llava")
    file = write_rows(tmp_path / "rows.jsonl", pairs_with_files(tmp_path, 300))

    def kill():
        started = psutil.process_iter(["cmdline"])
        next(each for each in started if "ray::NodeWorker" in " ".join(each.info["cmdline"] or [])).send_signal(signal.SIGKILL)

    warning = "was lost: the worker's process was killed"
    score.assert_nothing_is_lost(file, Watching(1, kill), tmp_path / "llava", warning)


def test_a_worker_that_can_be_placed_nowhere_is_not_waited_for_for_ever(cluster, reference_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("reflogp.scoring.on_ray.workers._PLACE_SECONDS", 2)
    model, choice = str(reference_folder), EngineChoice(device="cuda")

    def workers(folder, reference, _):
        return ClusterWorkers(folder, None, reference, choice, 1)

    file = write_rows(tmp_path / "rows.jsonl", token_rows(1, seed=5))
    with pytest.raises(EngineError, match=r"each worker needs 1 GPU.* has 0 GPUs and 2 CPUs on 2 nodes"):
        Runs(model, tmp_path, workers)(file)
    with pytest.raises(UsageError, match="Ray assigns a GPU to each worker"):
        ClusterWorkers(model, None, describe_reference(model, "float32"), EngineChoice(device="cuda:1"))


def test_the_command_line_goes_on_after_an_interrupt(cluster, reflogp, reference_folder, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(600, seed=7))
    numerics = ["--dtype", "float32", "--token-budget", "256", "--device", "cpu"]
    rest = [reference_folder, file, "--store", tmp_path / "store", *numerics]
    arguments = ["score", "--ray", cluster.address, *map(str, rest)]
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list((tmp_path / "store").glob("*/logprobs/_delta_log/*.json"))) < 3:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1].startswith("reflogp: interrupted; committed values are kept")
    code, out, _ = reflogp("score", "--ray", *rest, "--ray-workers", 2, "--json")  # this process is connected to the cluster
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["workers"]) == (0, 2)
    assert 8 <= summary["hits"] < 1200 == summary["hits"] + summary["scored"]


def test_no_cluster_at_an_address_is_said_at_once(reference_folder, tmp_path):
    rest = ["--ray", "127.0.0.1:9", str(reference_folder), "rows.jsonl", "--store", str(tmp_path / "store")]
    write_rows(tmp_path / "rows.jsonl", token_rows(1, seed=8))
    command = [sys.executable, "-c", "from reflogp.cli import main; main()", "score", *rest]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert "cannot connect to a Ray cluster at 127.0.0.1:9: " in run.stderr and "ray start --head" in run.stderr


def test_a_killed_node_loses_nothing_though_its_worker_can_be_placed_nowhere(cluster, score, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(3000, seed=4))

    def kill():
        if sum(member.is_ready for member in score.scorer._members) < 2:
            return False  # a worker that has not begun is not lost, but placed elsewhere
        cluster.remove_node(cluster.second, allow_graceful=False)
        return True

    score.assert_nothing_is_lost(file, Watching(3, kill))
