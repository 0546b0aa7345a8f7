"""One dataset on several workers of this machine: real processes, which are really killed."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from reflogp.scoring import machine
from reflogp.scoring.data.images import RowImage
from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.machine import Place, gpus_in_a_child, places
from reflogp.scoring.runs import scheduler, unit_queue
from reflogp.scoring.runs.pipeline import Miss
from reflogp.scoring.runs.processes import LocalWorkers
from reflogp.scoring.runs.units import ScoringWorker, VisionCache, decode, encode
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages
from reflogp.scoring.vision import load_processor
from reflogp.store import UsageError, describe_reference
from reflogp.store.images import kind_of_image, pixel_digest
from tests.conftest import INTERRUPTIBLE, write_rows
from tests.scoring.deadly import POISON, deadly_model
from tests.scoring.spread_runs import Runs, odd_rows
from tests.scoring.stored_rows import rows_of
from tests.scoring.watching import Watching
from tests.service.serving import token_rows
from tests.vision_models import make, pair, pairs_with_files, picture

TWO = [Place("cpu", "cpu"), Place("cpu", "cpu")]


@pytest.fixture
def score(reference_folder, tmp_path):
    return Runs(reference_folder, tmp_path, lambda *parts: LocalWorkers(*parts, TWO))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "llava"
    make("LLaVA", folder)
    return str(folder)


def workers_of(pid=None):
    """Processes of workers that a run started."""
    servers = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has just ended, or is a zombie
            if "forkserver" in " ".join(child.cmdline()):
                servers.append(child)
    return [child for child in servers if child.parent() in servers]


@pytest.mark.slow
def test_the_same_rows_as_with_one_device_and_the_same_bad_ones(score, tmp_path):
    score.assert_same_runs(write_rows(tmp_path / "rows.jsonl", odd_rows()), Watching())
    assert not workers_of()


@pytest.mark.slow
@pytest.mark.parametrize("has_images", [False, True])
def test_killed_workers_lose_nothing(has_images, score, llava, tmp_path):
    """Workers are killed at random moments of a run, each after values were committed since the last kill."""
    rows = pairs_with_files(tmp_path, 300) if has_images else token_rows(600, seed=2)
    moments, killed = random.Random(3), []

    def kill():
        for worker in workers_of()[:1]:
            worker.send_signal(signal.SIGKILL)
            killed.append(worker)

    class Killing(Watching):
        def committed(self, snapshot):
            super().committed(snapshot)
            if len(killed) < 3 and self.commits % 2 == 0:
                threading.Timer(moments.random() / 2, kill).start()

    file, warning = write_rows(tmp_path / "rows.jsonl", rows), "a worker on cpu was lost: killed by SIGKILL"
    score.assert_nothing_is_lost(file, Killing(), llava if has_images else None, warning)
    assert killed


@pytest.mark.slow
def test_workers_that_are_stopped_are_ended_and_lose_nothing(score, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "PING_SECONDS", 0.2)
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 8.0)
    stopped = []

    def stop():
        stopped.extend(workers_of())
        for worker in stopped:
            worker.send_signal(signal.SIGSTOP)

    file = write_rows(tmp_path / "rows.jsonl", token_rows(600, seed=2))
    warning = r"a worker on cpu was lost: its process has not responded for ([89]|1\d) s"
    score.assert_nothing_is_lost(file, Watching(2, stop), warning=warning)
    assert stopped and not any(worker.is_running() for worker in stopped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangs", "warning", "why"),
    [
        (False, "was lost: killed by SIGKILL", "killed by SIGKILL"),
        (True, "it has scored nothing for .* although its process responds", "it has scored nothing for"),
    ],
)
def test_a_sequence_that_ends_its_worker_or_never_ends_is_found_and_the_others_are_scored(
    hangs, warning, why, score, tmp_path, reference_folder, monkeypatch
):
    for name, value in {"PING_SECONDS": 0.2, "STUCK_SECONDS": 5.0, "STUCK_STEPS": 2}.items() if hangs else ():
        monkeypatch.setattr(scheduler, name, value)
    monkeypatch.setattr(unit_queue, "LEAST", 2)
    rows = token_rows(20, seed=3)
    rows[19]["rejected_ids"][4:8] = POISON
    file, watching = write_rows(tmp_path / "rows.jsonl", rows), Watching()
    with pytest.warns(UserWarning, match=warning):
        summary = score(file, model=deadly_model(reference_folder, tmp_path / "m", hangs=hangs), watcher=watching, code=True)
    assert (summary.scored, summary.failed, watching.bad.keys()) == (39, 1, {19})
    assert f"the sequence killed two workers ({why}" in watching.bad[19]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a worker on cpu was lost")
def test_a_model_that_kills_every_worker_ends_the_run(score, tmp_path, reference_folder):
    rows = token_rows(8, seed=3)
    for row in rows:
        row["chosen_ids"][4:8] = row["rejected_ids"][4:8] = POISON
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(EngineError, match="3 sequences in a row killed two workers each"):
        score(file, model=deadly_model(reference_folder, tmp_path / "deadly"), code=True)
    with pytest.raises(EngineError, match=r"\d workers in a row were lost before they were ready; .*SIGKILL"):
        score(file, model=deadly_model(reference_folder, tmp_path / "dead", on_load=True), code=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a worker on cpu was lost")
def test_three_devices_lost_in_a_row_end_the_run_and_what_was_committed_stays(score, tmp_path, reference_folder):
    rows = token_rows(300, seed=4)
    for row in rows[200:]:
        row["chosen_ids"][4:8] = row["rejected_ids"][4:8] = POISON
    model = deadly_model(reference_folder, tmp_path / "lost", raises="CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineError, match=r"3 workers in a row were lost; .*CUDA error: an illegal memory access"):
        score(write_rows(tmp_path / "rows.jsonl", rows), model=model, code=True)
    assert len(rows_of(tmp_path / "store", describe_reference(str(model), "float32").reference_id)) > 0
    assert not workers_of()


def test_slow_work_and_a_suspended_run_are_no_hang():
    clock, answers = scheduler.Clock(), []
    pulse = scheduler.Pulse(clock, lambda: answers[-1])

    def after(seconds, scored, longest=100):
        clock.now += scheduler.PING_SECONDS
        answers.append(Future())
        assert pulse.problem(longest) is None
        answers[-1].set_result(scored)
        clock.now += seconds - scheduler.PING_SECONDS
        return pulse.problem(longest)

    assert after(36_000, 0) is None, "the first unit takes as long as it takes: a model is compiled, or the processor is slow"
    assert after(20, 8) is None
    clock.longest, clock.slowest = 100, 60.0
    assert after(1_700, 8) is None
    assert after(15_000, 8, longest=400) is None, "a sequence of four times the length takes up to 16 times as long"
    assert "scored nothing for" in after(15_000, 8, longest=400)
    now = clock.now
    clock._ticked_at -= 36_000  # the machine was suspended
    clock.tick()
    assert clock.now - now <= 5


def test_a_model_that_changes_before_a_worker_loads_it_is_refused(score, tmp_path, reference_folder):
    model = shutil.copytree(reference_folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    watching = Watching()
    watching.read = lambda rows: (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(EngineError, match=r"on cpu: the files of .*model changed: the model's reference id is now"):
        score(write_rows(tmp_path / "rows.jsonl", token_rows(2, seed=6)), model=model, watcher=watching)


def test_a_worker_that_does_not_see_the_store_is_refused(reference_folder, tmp_path):
    """As on a node of a cluster that does not share the folder."""
    made_of = describe_reference(str(reference_folder), "float32"), EngineChoice(device="cpu"), str(tmp_path / "none"), 1
    with pytest.raises(EngineError, match="use a folder on a filesystem that all machines share"):
        ScoringWorker(str(reference_folder), None, *made_of).prepare()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_run_and_the_next_one_goes_on(reflogp, reference_folder, tmp_path, how):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(600, seed=7))
    numerics = ["--dtype", "float32", "--token-budget", "256", "--devices", "cpu,cpu"]
    arguments = ["score", *map(str, [reference_folder, file, "--store", tmp_path / "store", *numerics])]
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list((tmp_path / "store").glob("*/logprobs/_delta_log/*.json"))) < 3:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.send_signal(how)
    out, err = run.communicate(timeout=60)
    assert out == ""
    if how == signal.SIGINT:
        assert run.returncode == 130
        assert err.strip().splitlines()[-1].startswith("reflogp: interrupted; committed values are kept")
    _gone, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    code, out, _ = reflogp(*arguments, "--json")
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["workers"], summary["hits"] + summary["scored"]) == (0, 2, 1200)
    assert summary["hits"] > 0


def test_places_are_devices_or_groups_of_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def names(devices, count=8, *more):
        return [(place.name, place.device, place.visible) for place in places(devices, lambda: count, *more)]

    assert names(["all"], 0) == [("cpu", "cpu", None)]
    assert names(["all"], 2) == names(["cuda:0", "cuda:1"]) == [("cuda:0", "cuda:0", None), ("cuda:1", "cuda:1", None)]
    assert names(["cpu", "cpu"]) == [("cpu", "cpu", None)] * 2
    assert names(["auto"], 8, 4, True) == [("auto", "auto", None)]
    pairs = [("cuda:0+cuda:1", "cuda", "0,1"), ("cuda:2+cuda:3", "cuda", "2,3")]
    assert names(["all"], 4, 2, True) == names(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], 8, 2, True) == pairs
    assert names(["all"], 5, 2, True) == pairs
    assert names(["all"], 2, 1, True) == [("cuda:0", "cuda", "0"), ("cuda:1", "cuda", "1")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,7")
    assert [place.visible for place in places(["cuda:2", "cuda:0"], lambda: 3, 2, True)] == ["7,GPU-a"]
    for devices, count, more, why in (
        (["tpu"], 8, (), "use 'all', 'auto', 'cpu'"),
        (["cuda:8"], 8, (), "torch detects 8 GPUs; the highest number is 7"),
        (["all"], 3, (4, True), "3 GPUs cannot be split into groups of 4"),
        (["cuda:0", "cuda:1", "cuda:2"], 8, (2, True), "3 GPUs cannot be split into groups of 2"),
        (["cuda", "cuda"], 8, (1, True), "can contain only GPUs by number"),
    ):
        with pytest.raises(UsageError, match=why):
            names(devices, count, *more)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("print('a warning of the driver'); print(3)", None),
        ("import time; time.sleep(60)", "no answer within 0.5 seconds"),
        ("raise SystemExit('the driver is too old')", "the driver is too old"),
        ("import os; os.abort()", "no error message"),
    ],
)
def test_a_process_counts_the_gpus(script, outcome, monkeypatch):
    monkeypatch.setattr(machine, "_DEVICE_FILES", ("null",))
    monkeypatch.setattr(machine, "_ASK", script)
    monkeypatch.setattr(machine, "_ASK_SECONDS", 0.5 if "sleep" in script else 30.0)
    problem = f"could not be counted \\({outcome}\\); use 'cuda' or 'cpu'"
    with pytest.raises(UsageError, match=problem) if outcome else nullcontext():
        assert gpus_in_a_child() == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--devices", "cpu,cpu", "--ray"], "cannot be combined with --ray"),
        (["--devices", "all", "--engine", "remote", "--url", "http://h"], "cannot be combined with --engine remote"),
        (["--devices", "cuda:7"], "torch detects 0 GPUs"),
        (["--devices", ""], "use 'all', 'auto', 'cpu'"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(reflogp, reference_folder, tmp_path, options, why):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(2, seed=8))
    code, _, err = reflogp("score", reference_folder, file, "--store", tmp_path / "store", *options)
    assert code == 2 and why in err


# Images


def test_a_worker_needs_the_processor_of_the_run_which_may_be_in_another_folder_than_the_model(llava, tmp_path):
    other = load_processor(llava, llava).processor
    other.image_processor.image_mean = [0.1, 0.2, 0.3]
    other.save_pretrained(tmp_path / "other")
    model = Path(shutil.copytree(llava, tmp_path / "model"))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (model / name).write_text("{")  # broken
    vision = load_processor(str(tmp_path / "other"), llava)
    red = RowImage(pixel_digest(picture(1)), kind_of_image(picture(1)), picture(1))
    images = SequenceImages((red,), (4,), vision, True)
    content, _ = encode([Miss(bytes(16), Sequence(np.array([1]), np.array([2]), images=images), 1, [0])])
    [sequence] = [got.sequence for got in decode(content, VisionCache(str(model), False).find)]
    assert sequence.images.vision.tokens.settings == vision.tokens.settings != load_processor(llava, llava).tokens.settings
    (tmp_path / "other").rename(tmp_path / "away")
    with pytest.raises(UsageError, match="image processor is not on this worker's machine"):
        decode(content, VisionCache(llava, False).find)


@pytest.mark.slow
def test_decoded_pictures_of_every_mode_go_to_workers(score, llava):
    def data():  # new ones for each run, because converting a picture with a transparent color changes its palette
        rgb = picture(1)
        clear = rgb.convert("P")
        clear.info["transparency"] = 3
        deep = Image.fromarray(np.arange(48 * 40, dtype=np.uint16).reshape(40, 48) * 30)
        modes = [rgb.convert(mode) for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I", "F")]
        return open_dataset([pair("what?", [image, rgb]) for image in (rgb, clear, deep, *modes)])

    here, there = score(data(), "here", alone=True, model=llava), score(data(), "there", model=llava)
    assert here.scored == there.scored == 24
    score.assert_same_rows(here.reference_id)


@pytest.mark.slow
def test_an_image_that_changes_before_it_is_sent_is_a_bad_row_and_the_others_go_on(score, llava, tmp_path):
    data = pairs_with_files(tmp_path)[:20]
    source = RowSource(str(write_rows(tmp_path / "rows.jsonl", data)))
    gone = next(row["images"][0] for row in data[7:] if row["images"])
    read, seen = source.open_image, []

    def removing(path):
        opened = read(path)
        seen.append(path)
        if path == gone and seen.count(gone) == sum(row["images"].count(gone) for row in data):
            (tmp_path / gone).unlink()
        return opened

    source.open_image = removing
    watching = Watching()
    summary = score(source, watcher=watching, model=llava)
    expected = {number for number, row in enumerate(data) if gone in row["images"]}
    assert set(watching.bad) == expected and summary.bad_rows == len(expected) and summary.scored > 10
    assert all("cannot be read" in problem for problem in watching.bad.values())
