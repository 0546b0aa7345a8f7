"""Traces of jobs: a real client, a real service with its worker, and a real collector, which gets the spans."""

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from reflogp.client import Client
from reflogp.store import describe_reference
from tests.collector import collector
from tests.conftest import write_rows
from tests.scoring.deadly import POISON, deadly_model
from tests.service.serving import float32, running, settings_file, token_rows, wait_until

ROWS = 2600  # three windows


@pytest.fixture(scope="module")
def taken():
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def service(reference_folder, tmp_path_factory, taken, warm_python):
    folder = tmp_path_factory.mktemp("traces")
    models = {"ref": float32(reference_folder)}
    models["lost"] = {**float32(folder / "lost"), "trust_remote_code": True}
    deadly_model(reference_folder, folder / "lost", raises=f"the forward failed: https://host/x?t={'hush' * 200} again")
    file = settings_file(folder, folder / "store", models, token_budget=4096)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taken.url)
        with running("--config", file, warm=warm_python) as service:
            service.folder = folder
            service.worker_ready()
            yield service


def roots_of(taken, job):
    """The root spans of a job, one for each attempt."""
    return [span for span in taken.named("reflogp job") if span.attributes["reflogp.job_id"] == job]


def root_of(taken, job):
    """The root span of a job; it is sent last."""
    wait_until(lambda: roots_of(taken, job), 30)
    [root] = roots_of(taken, job)
    return root


def test_a_job_is_a_tree_of_spans_below_the_clients_span(service, taken, reference_folder):
    file = write_rows(service.folder / "rows.jsonl", token_rows(ROWS, 0))
    tracer = TracerProvider().get_tracer("the caller")
    with tracer.start_as_current_span("training") as training, Client(service.url) as client:
        job = client.watch(client.submit(file, "ref").id)
    assert job.state == "done", "".join(service.log)
    root = root_of(taken, job.id)
    caller = training.get_span_context()
    assert (root.trace, root.parent) == (format_trace_id(caller.trace_id), format_span_id(caller.span_id))
    reference = describe_reference(str(reference_folder), "float32").reference_id
    ids = {"reflogp.job_id": job.id, "reflogp.reference_id": reference}
    ids["reflogp.request_id"] = root.attributes["reflogp.request_id"]
    assert any(f"[request {ids['reflogp.request_id']}]" in line and job.id in line for line in service.log)
    tokens = ROWS * 2 * 40
    counts = {"rows": ROWS, "sequences": 2 * ROWS, "scored": 2 * ROWS, "hits": 0, "tokens": tokens, "bad_rows": 0}
    assert {name: root.attributes[f"reflogp.{name}"] for name in counts} == counts
    assert root.resource["service.name"] == "reflogp" and not root.is_error

    stages = taken.children(root)
    assert ids.items() <= root.attributes.items() and all(span.trace == root.trace for span in stages)
    assert not any(span.is_error for span in stages)
    assert all(root.start <= span.start <= span.end <= root.end for span in stages)
    assert {span.name for span in stages} == {"read and tokenize", "look up", "load model", "score and commit", "write result"}
    scored = [span for span in stages if span.name == "score and commit"]
    assert sum(span.attributes["reflogp.tokens"] for span in scored) == tokens
    assert max(span.attributes["reflogp.snapshot"] for span in scored) == job.summary["snapshot"]
    assert {span.attributes["reflogp.worker"] for span in scored} == {"worker 0"}


@pytest.mark.parametrize("sent", ["00-" + "0" * 32 + "-" + "1" * 16 + "-01", "nonsense", "x" * 10_000])
def test_a_bad_traceparent_is_left_out(service, taken, sent):
    content = write_rows(service.folder / "bad.jsonl", token_rows(2, len(sent))).read_bytes()
    headers = {"content-type": "application/jsonl", "traceparent": sent, "x-request-id": f"bad-{len(sent)}"}
    answer = httpx.post(f"{service.url}/v1/jobs?reference=ref", content=content, headers=headers)
    root = root_of(taken, answer.raise_for_status().json()["id"])
    assert (root.parent, root.attributes["reflogp.request_id"]) == ("", f"bad-{len(sent)}")


def test_a_failed_job_has_the_error_as_its_status(service, client, taken):
    file = write_rows(service.folder / "other.jsonl", [{"question": "a?", "answer": "b"}])
    job = client.watch(client.submit(file, "ref").id)
    assert job.state == "failed", job
    root = root_of(taken, job.id)
    assert root.is_error and root.message in job.error and "columns" in root.message, (root, job)
    assert root.attributes["error.type"] == "DatasetError"


def test_a_worker_that_dies_of_an_error_is_in_its_jobs_trace(service, client, taken):
    """Secrets in messages are hidden."""
    rows = token_rows(4, 5)
    rows[2]["chosen_ids"][4:8] = POISON
    job = client.watch(client.submit(write_rows(service.folder / "lost.jsonl", rows), "lost").id)
    assert (job.state, job.summary["failed"]) == ("done", 1), job
    failed = [span for span in taken.children(root_of(taken, job.id)) if "reflogp.error" in span.attributes]
    assert failed, "".join(service.log)
    for span in failed:
        assert span.name == "score and commit" and span.attributes["reflogp.worker"] == "worker 0"
        assert "the forward failed" in span.attributes["reflogp.error"] and "hush" not in span.attributes["reflogp.error"]
    assert any("the forward failed" in line for line in service.log)
    assert not any("hush" in line for line in service.log)


def test_a_cancelled_job_is_stopped_and_no_error(service, client, taken):
    file = write_rows(service.folder / "long.jsonl", token_rows(20_000, 6))
    job = client.submit(file, "ref")
    wait_until(lambda: client.job(job.id).progress.scored > 0)
    client.cancel(job.id)
    assert client.watch(job.id).state == "cancelled"
    root = root_of(taken, job.id)
    assert not root.is_error and root.attributes["reflogp.stopped"] == "cancelled"


def test_a_job_that_a_restart_interrupts_sends_its_spans_and_goes_on_in_the_same_trace(serve, taken, tmp_path, monkeypatch):
    """SIGTERM ends the first attempt; the second one is another span below the same parent."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{taken.url}/v1/traces")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    settings = {"token_budget": 2048, "commit_seconds": 0.5}
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    content = write_rows(tmp_path / "rows.jsonl", token_rows(6000, 7)).read_bytes()
    with serve(**settings) as first, Client(first.url) as client:
        first.worker_ready()
        headers = {"content-type": "application/jsonl", "traceparent": parent, "x-request-id": "mine"}
        answer = httpx.post(f"{first.url}/v1/jobs?reference=ref", content=content, headers=headers)
        job = answer.raise_for_status().json()["id"]
        wait_until(lambda: client.job(job).progress.scored > 0)
        first.stop()
    [root] = roots_of(taken, job)
    assert root.attributes["reflogp.stopped"] == "end" and root.resource["service.name"] == "ours"
    with serve(**settings) as second, Client(second.url) as client:
        assert client.watch(job).state == "done"
    attempts = roots_of(taken, job)
    assert len(attempts) == 2
    for span in attempts:
        assert (span.trace, span.parent, span.attributes["reflogp.request_id"]) == ("a" * 32, "b" * 16, "mine")
