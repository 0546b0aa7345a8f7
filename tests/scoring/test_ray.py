"""Scoring on a real Ray cluster: two nodes (raylets) of one CPU on this machine; workers and nodes that are really killed."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import load_tokenizer
from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.on_ray.cluster import connected, require_visible
from reflogp.scoring.on_ray.workers import ClusterWorkers
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.vision import load_processor
from reflogp.store import Store, UsageError, describe_reference
from tests.conftest import write_rows
from tests.scoring.deadly import POISON, deadly_model
from tests.scoring.spread_runs import assert_same_runs, odd_rows
from tests.scoring.stored_rows import rows_of, same_rows
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
    """score(file, store, on_ray=…) -> summary; a token budget small enough that a run takes a while."""

    def run(file, store="store", *, on_ray=True, model=None, watcher=None, form=None, workers=2, code=False, **options):
        folder = str(model or reference_folder)
        reference = describe_reference(folder, "float32")
        choice = EngineChoice("torch", "cpu", 256, trust_remote_code=code)
        tokenizer_folder = folder if (Path(folder) / "tokenizer.json").exists() else str(reference_folder)
        dataset = TokenizedDataset(
            RowSource(str(file)),
            lambda: load_tokenizer(tokenizer_folder),
            form,
            load_vision=lambda: load_processor(tokenizer_folder, folder),
        )
        if not on_ray:
            return score_dataset(dataset, Store(tmp_path / store), reference, Scheduler(lambda: choice.make(folder, reference)))
        run.scorer = scorer = Scheduler(workers=ClusterWorkers(folder, None, reference, choice, workers))
        try:
            return score_dataset(dataset, Store(tmp_path / store), reference, scorer, watcher=watcher, **options)
        finally:
            scorer.close()

    return run


def actors(name):
    """Processes of the actors of a class that are alive."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if f"ray::{name}" in " ".join(process.info["cmdline"] or [])
    ]


def test_the_same_rows_as_without_ray_and_the_same_bad_ones(cluster, score, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", odd_rows())
    watching = Watching()
    here, there = score(file, "here", on_ray=False), score(file, "there", watcher=watching)
    assert_same_runs(here, there, watching, tmp_path)
    again = score(file, "there")
    assert (again.scored, again.failed, again.bad_rows) == (0, 1, 5)


def test_a_killed_worker_loses_nothing(cluster, score, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(600, seed=2))

    def kill():
        actors("NodeWorker")[0].send_signal(signal.SIGKILL)

    with pytest.warns(UserWarning, match="was lost: the worker's process was killed"):
        summary = score(file, "there", watcher=Watching(3, kill))
    assert (summary.scored, summary.failed, summary.bad_rows) == (1200, 0, 0)
    here = score(file, "here", on_ray=False)
    same_rows(rows_of(tmp_path / "here", here.reference_id), rows_of(tmp_path / "there", here.reference_id))


def test_pairs_with_images_have_the_same_values_as_without_ray_although_a_worker_is_killed(cluster, score, tmp_path):
    make("LLaVA", tmp_path / "llava")
    file = write_rows(tmp_path / "rows.jsonl", pairs_with_files(tmp_path, 300))
    here = score(file, "here", on_ray=False, model=tmp_path / "llava")

    def kill():
        actors("NodeWorker")[0].send_signal(signal.SIGKILL)

    with pytest.warns(UserWarning, match="was lost"):
        there = score(file, "there", model=tmp_path / "llava", watcher=Watching(1, kill))
    assert (here.scored, here.bad_rows) == (there.scored, 0) and here.scored > 400
    same_rows(rows_of(tmp_path / "here", here.reference_id), rows_of(tmp_path / "there", here.reference_id))


def test_a_sequence_that_kills_its_worker_is_found_and_the_others_are_scored(cluster, score, tmp_path, reference_folder):
    model = deadly_model(reference_folder, tmp_path / "deadly")
    rows = token_rows(2, seed=3)
    rows[1]["rejected_ids"][4:8] = POISON
    watching = Watching()
    with pytest.warns(UserWarning, match="was lost"):
        summary = score(write_rows(tmp_path / "rows.jsonl", rows), model=model, watcher=watching, code=True)
    assert watching.bad.keys() == {1}
    assert "the sequence killed two workers (the worker's process was killed" in watching.bad[1]
    assert (summary.scored, summary.failed) == (3, 1)


def test_a_worker_that_can_be_placed_nowhere_is_not_waited_for_for_ever(cluster, reference_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("reflogp.scoring.on_ray.workers._PLACE_SECONDS", 2)
    reference = describe_reference(str(reference_folder), "float32")
    workers = ClusterWorkers(str(reference_folder), None, reference, EngineChoice(device="cuda"), 1)
    scorer = Scheduler(workers=workers)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(1, seed=5))
    dataset = TokenizedDataset(RowSource(str(file)), lambda: load_tokenizer(str(reference_folder)))
    with closing(scorer), pytest.raises(EngineError, match=r"each worker needs 1 GPU.* has 0 GPUs and 2 CPUs on 2 nodes"):
        score_dataset(dataset, Store(tmp_path / "store"), reference, scorer)
    with pytest.raises(UsageError, match="Ray assigns a GPU to each worker"):
        ClusterWorkers(str(reference_folder), None, reference, EngineChoice(device="cuda:1"))


def test_a_node_that_has_another_model_or_store_is_refused(cluster, score, tmp_path, reference_folder):
    """As the workers see it: the model's folder changes, or the store's is gone, after the run has begun."""
    file = write_rows(tmp_path / "rows.jsonl", token_rows(2, seed=6))
    model = shutil.copytree(reference_folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())

    def change(rows):
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))

    watching = Watching()
    watching.read = change
    with pytest.raises(UsageError, match=r"on node [0-9.]+ \(\w+\): .* is a different model on this worker's machine"):
        score(file, model=model, watcher=watching)
    watching.read = lambda rows: shutil.rmtree(model)
    with pytest.raises(UsageError, match=r"on node [0-9.]+ \(\w+\): .*model"):
        score(file, model=model, watcher=watching)
    with pytest.raises(EngineError, match="use a folder on a filesystem that all nodes share"):
        require_visible(str(tmp_path / "elsewhere" / "probe"))


def test_the_command_line_goes_on_after_an_interrupt(cluster, reflogp, reference_folder, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(600, seed=7))
    numerics = ["--dtype", "float32", "--token-budget", "256", "--device", "cpu"]
    rest = [reference_folder, file, "--store", tmp_path / "store", *numerics]
    arguments = ["score", "--ray", cluster.address, *map(str, rest)]
    command = [sys.executable, "-c", "from reflogp.cli import main; main()", *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list((tmp_path / "store").glob("*/logprobs/_delta_log/*.json"))) < 3:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "")
    assert (
        err.strip().splitlines()[-1]
        == "reflogp: interrupted; committed values are kept; run the same command again to continue"
    )
    code, out, _ = reflogp(
        "score", "--ray", *rest, "--ray-workers", 2, "--json"
    )  # the cluster that this process is connected to
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

    with pytest.warns(UserWarning, match="was lost"):
        summary = score(file, "there", watcher=Watching(3, kill))
    assert (summary.scored, summary.failed, summary.bad_rows) == (6000, 0, 0)
    here = score(file, "here", on_ray=False)
    same_rows(rows_of(tmp_path / "here", here.reference_id), rows_of(tmp_path / "there", here.reference_id))
