"""Traces of `reflogp score` and of `score` from Python: the spans that a real collector gets, and what happens without one."""

import os
import signal
import subprocess
import sys
import time

import pytest

from reflogp.scoring.otel import MOST_SPANS
from tests.collector import collector
from tests.conftest import write_rows
from tests.service.serving import token_rows, wait_until

OFF = [sys.executable, "-m", "tests.without"]
COMMAND = "from reflogp.cli import main; main()"


@pytest.fixture
def taken():
    with collector() as found:
        yield found


@pytest.fixture
def score(reference_folder, tmp_path):
    """Start `reflogp score` with environment variables; more options, and what runs Python."""

    def score(file, *options, python=(sys.executable, "-c", COMMAND), **environment):
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
    assert {span.name for span in stages} == {"read", "tokenize", "look up", "load model", "score", "commit"}
    assert len(stages) == len(taken.spans) - 1
    assert all(root.start <= span.start <= span.end <= root.end and not span.is_error for span in stages)
    again = score(file, OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    assert again.wait(120) == 3
    second = taken.named("reflogp score")[1]
    assert second.attributes["reflogp.hits"] == 2200
    assert {span.name for span in taken.children(second)} == {"read", "tokenize", "look up"}
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


def test_an_error_is_the_runs_status(score, taken, tmp_path):
    process = score(write_rows(tmp_path / "rows.jsonl", [{"question": "?"}]), OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    [root] = taken.named("reflogp score")
    assert root.is_error and "columns" in root.message and root.message in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_spans_and_sends_them(score, taken, tmp_path, number):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(30_000, 2))
    process = score(file, "--token-budget", "1024", OTEL_EXPORTER_OTLP_ENDPOINT=taken.url)
    wait_until(lambda: taken.named("score"))
    began = time.monotonic()
    process.send_signal(number)
    code = process.wait(60)
    assert code == (-signal.SIGTERM if number == signal.SIGTERM else 130) and time.monotonic() - began < 15
    [root] = taken.named("reflogp score")
    assert root.is_error and ("SIGTERM" in root.message or root.attributes["error.type"] == "KeyboardInterrupt")
    assert len({span.id for span in taken.spans}) == len(taken.spans)


def test_a_run_without_a_collector_ends_in_time_and_says_so_once(score, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(20, 3))
    plain = score(file)
    began = time.monotonic()
    assert plain.wait(120) == 0
    usual = time.monotonic() - began
    file = write_rows(tmp_path / "more.jsonl", token_rows(20, 4))
    began = time.monotonic()
    process = score(file, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "40 scored" in out
    assert time.monotonic() - began < usual + 10, err
    assert err.count("does not accept traces") == 1 and "Connection refused" in err and "Traceback" not in err, err


def test_a_collector_that_refuses_is_named_with_its_reason(score, tmp_path, taken):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(20, 5))
    process = score(file, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{taken.url}/elsewhere")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.count("does not accept traces") == 1 and "404" in err, err


def test_without_the_extra_one_sentence_names_it_and_the_work_goes_on(score, tmp_path):
    """And without an endpoint nothing of opentelemetry is imported."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    python = (*OFF, "opentelemetry", "--", script)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(20, 6))
    process = score(file, python=python, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "40 scored" in out, err
    assert err.count("pip install 'reflogp[otel]'") == 1, err
    file = write_rows(tmp_path / "more.jsonl", token_rows(20, 7))
    process = score(file, python=python)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "40 scored" in out and "otel" not in err, err


def test_nothing_is_imported_without_an_endpoint(score, tmp_path):
    script = tmp_path / "command.py"
    script.write_text(f"import atexit, sys\natexit.register(lambda: print('opentelemetry.sdk' in sys.modules))\n{COMMAND}")
    file = write_rows(tmp_path / "rows.jsonl", token_rows(20, 8))
    for environment, imported in (({}, "False"), ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "True")):
        process = score(file, python=(sys.executable, script), **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip().splitlines()[-1] == imported, err


def test_spans_are_sent_again_after_an_exporter_has_raised(taken, monkeypatch):
    """As older exporters do where nothing listens."""
    from reflogp.scoring import otel, tracing

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taken.url)
    monkeypatch.setattr(tracing, "_senders", [])
    export, raised = otel.OTLPSpanExporter.export, []

    def raises_once(self, spans):
        if raised:
            return export(self, spans)
        raised.append(spans)
        raise ConnectionError("Connection refused")

    monkeypatch.setattr(otel.OTLPSpanExporter, "export", raises_once)
    lost = pytest.warns(UserWarning, match="does not accept traces.*Connection refused")
    with lost, tracing.run_span("1", flush_at_end=True):
        pass
    with tracing.run_span("2", flush_at_end=True):
        pass
    assert raised and not taken.named("1") and taken.named("2")


def test_a_handler_of_sigterm_that_is_set_during_a_run_stays(taken, monkeypatch):
    from reflogp.scoring import tracing

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taken.url)
    monkeypatch.setattr(tracing, "_senders", [])
    before = signal.getsignal(signal.SIGTERM)

    def own(number, frame):
        pass

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with tracing.run_span("plain", flush_at_end=True):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with tracing.run_span("with a handler", flush_at_end=True):
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_number_of_spans_is_bounded(taken, monkeypatch):
    """Further stages only count."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taken.url)
    from reflogp.scoring import tracing

    monkeypatch.setattr(tracing, "_senders", [])
    with tracing.run_span("many", flush_at_end=True):
        for _ in range(MOST_SPANS + 500):
            with tracing.span("outer"), tracing.span("inner stage"):
                pass
            with tracing.span("none") as none:
                none.discard()
    assert len(taken.named("outer")) == len(taken.named("inner stage")) == MOST_SPANS
    [root] = taken.named("many")
    assert root.attributes["reflogp.outer.count"] == root.attributes["reflogp.inner_stage.count"] == MOST_SPANS + 500
    assert root.attributes["reflogp.outer.seconds"] >= root.attributes["reflogp.inner_stage.seconds"] > 0
    assert not taken.named("none") and "reflogp.none.count" not in root.attributes
