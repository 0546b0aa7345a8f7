"""Traces of `reflogp score`: the spans that a real collector gets, and what happens without one."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.collector import collector
from tests.conftest import INTERRUPTIBLE, write_rows
from tests.service.serving import token_rows, wait_until


@pytest.fixture
def taken():
    with collector() as found:
        yield found


@pytest.fixture
def score(reference_folder, tmp_path):
    """Start `reflogp score` with environment variables; more options, and what runs Python."""

    def score(file, *options, python=(sys.executable, "-c", INTERRUPTIBLE), **environment):
        command = [*python, "score", reference_folder, file, "--store", tmp_path / "store", "--dtype", "float32", *options]
        known = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        pipe = subprocess.PIPE
        return subprocess.Popen(list(map(str, command)), env=known | environment, text=True, stdout=pipe, stderr=pipe)

    return score


def test_a_run_is_a_trace(score, taken, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [*token_rows(1100, 0), {"prompt_ids": "bad"}])
    process = score(file, OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    assert process.wait(120) == 3, process.stderr.read()
    [root] = taken.named("reflogp score")
    assert root.parent == "" and not root.is_error
    counts = {"rows": 1101, "bad_rows": 1, "sequences": 2200, "scored": 2200, "hits": 0}
    assert {name: root.attributes[f"reflogp.{name}"] for name in counts} == counts
    assert root.attributes["reflogp.store"].endswith("/store")
    stages = taken.children(root)
    assert {span.name for span in stages} == {"read and tokenize", "look up", "load model", "score", "commit"}
    assert len(stages) == len(taken.spans) - 1
    assert all(root.start <= span.start <= span.end <= root.end and not span.is_error for span in stages)
    again = score(file, OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    assert again.wait(120) == 3
    second = taken.named("reflogp score")[1]
    assert second.attributes["reflogp.hits"] == 2200
    assert {span.name for span in taken.children(second)} == {"read and tokenize", "look up"}
    assert sum(span.attributes["reflogp.hits"] for span in taken.children(second) if span.name == "look up") == 2200


def test_a_run_on_several_devices_has_a_span_for_each_unit(score, taken, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(300, 1))
    process = score(file, "--devices", "cpu,cpu", OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    assert process.wait(240) == 0, process.stderr.read()
    [root] = taken.named("reflogp score")
    units = taken.named("score and commit")
    assert sum(unit.attributes["reflogp.sequences"] for unit in units) == 600
    assert all(unit.parent == root.id and unit.attributes["reflogp.worker"].startswith("cpu") for unit in units)
    assert all(root.start <= unit.start <= unit.end <= root.end for unit in units)


def test_ctrl_c_ends_the_run_and_sends_its_spans(score, taken, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(30_000, 2))
    process = score(file, "--token-budget", "1024", OTEL_EXPORTER_OTLP_ENDPOINT=taken.url, OTEL_BSP_SCHEDULE_DELAY="500")
    wait_until(lambda: taken.named("score"))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and time.monotonic() - began < 15
    [root] = taken.named("reflogp score")
    assert root.is_error and root.attributes["error.type"] == "KeyboardInterrupt"
    assert len({span.id for span in taken.spans}) == len(taken.spans)


def test_a_collector_that_hangs_or_is_away_delays_a_run_by_a_few_seconds(score, tmp_path):
    def run(seed: int, **environment) -> tuple[float, str]:
        rows = write_rows(tmp_path / f"{seed}.jsonl", token_rows(20, seed))
        began = time.monotonic()
        process = score(rows, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "40 scored" in out and "Traceback" not in err, err
        return time.monotonic() - began, err

    before, _ = run(3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts connections and never answers
        hanging, _ = run(4, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}")
    away, err = run(5, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert "Connection refused" in err, err
    # The machine may be busier or less busy than before, and the exporter is imported. The SDK itself would wait 30 s.
    assert max(hanging, away) < 1.5 * max(before, run(6)[0]) + 10


def test_without_the_extra_one_sentence_names_it_and_the_work_goes_on(score, tmp_path):
    """And without an endpoint nothing of opentelemetry is imported."""
    script = tmp_path / "command.py"
    told = "import atexit, sys\natexit.register(lambda: print('opentelemetry.sdk' in sys.modules))"
    script.write_text(f"{told}\n{INTERRUPTIBLE}")
    python = (sys.executable, "-m", "tests.without", "opentelemetry", "--", script)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(20, 6))
    process = score(file, python=python, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "40 scored" in out, err
    assert err.count("pip install 'reflogp[otel]'") == 1, err
    file = write_rows(tmp_path / "more.jsonl", token_rows(20, 7))
    process = score(file, python=python)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "40 scored" in out and "otel" not in err, err
    assert out.splitlines()[-1] == "False"
