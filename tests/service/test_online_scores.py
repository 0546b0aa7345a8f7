"""Online scoring over HTTP: values against plain forwards, and what happens when many ask at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.client import Client, RequestRefusedError, SequencesRefusedError, ServiceFailedError
from reflogp.store import Store, describe_reference, sequence_keys
from tests.conftest import plain_token_logps, write_rows
from tests.scoring.deadly import POISON, deadly_model
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    file = settings_file(
        place, place / "store", {"ref": float32(reference_folder)}, token_budget=512, max_queued_tokens=20_000, pinned="ref"
    )
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


@pytest.fixture(scope="module")
def model(reference_folder):
    return AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()


def sequences(count, seed, prompt=12, completion=9):
    """(prompts, completions) of random token ids."""
    draw = np.random.default_rng(seed)
    return draw.integers(10, 900, (count, prompt)).tolist(), draw.integers(10, 900, (count, completion)).tolist()


def ask(service, prompts, completions, timeout=60, **parameters) -> httpx.Response:
    """A request in JSON, as it is sent by hand."""
    both = zip(prompts, completions, strict=True)
    body = {"sequences": [{"prompt_ids": prompt, "completion_ids": completion} for prompt, completion in both]}
    return httpx.post(f"{service.url}/v1/score", params={"reference": "ref", **parameters}, json=body, timeout=timeout)


@contextmanager
def busy(client, seed):
    """The worker computes 19,800 tokens during a `with` block, which lets others ask for 200 more."""
    asked = sequences(330, seed, prompt=30, completion=30)
    thread = threading.Thread(target=lambda: client.score("ref", *asked, cache_read=False))
    thread.start()
    wait_until(lambda: "reflogp_score_queued_tokens 0.0" not in httpx.get(f"{client.url}/metrics").text)
    yield thread
    thread.join()


def kept(client, keys) -> int:
    """How many of the keys the store has."""
    try:
        return int((client.lookup("ref", keys).lengths > 0).sum())
    except RequestRefusedError as error:
        assert "are stored yet" in str(error)
        return 0


def test_json_for_people_names_bad_sequences_beside_the_values_of_the_others(service, model):
    prompts, completions = sequences(2, seed=2)
    answer = ask(service, [*prompts, [], prompts[0]], [*completions, [4], [100_000]]).json()
    assert answer["token_logps"][1] == pytest.approx(plain_token_logps(model, prompts[1], completions[1]), abs=2e-4)
    assert answer["token_logps"][2:] == [None, None] and answer["errors"][:2] == [None, None]
    assert "prompt is empty" in answer["errors"][2] and "vocabulary" in answer["errors"][3]


def test_the_store_is_read_and_written_as_asked_and_only_at_temperature_one(client, place):
    prompts, completions = sequences(6, seed=4)
    keys = sequence_keys(prompts, completions)
    first = client.score("ref", prompts, completions, temperature=0.5, cache_write=True)
    second = client.score("ref", prompts[:4], completions[:4], cache_write=True)
    wait_until(lambda: kept(client, keys) == 4)
    third = client.score("ref", prompts, completions)
    assert (first.hits, second.hits, third.hits) == (0, 0, 4)
    for before, after in zip(second.token_logps, third.token_logps, strict=False):
        assert before.tolist() == after.tolist()
    assert client.score("ref", prompts, completions, cache_read=False).hits == 0
    assert client.score("ref", prompts, completions, temperature=0.5).hits == 0
    assert kept(client, keys) == 4
    [reference] = Store(place / "store").references()
    assert Store(place / "store")[reference.reference_id].totals()[1] == 4


def test_rows_of_padded_batches_have_values_at_their_padding_and_are_neither_looked_up_nor_kept(client, model):
    prompts, completions = sequences(4, seed=6)
    masks = [[0] * at + [1] * (21 - 2 * at) + [0] * at for at in range(4)]
    scores = client.score("ref", prompts, completions, attention_masks=masks, temperature=0.8, cache_write=True)
    ids = torch.tensor([[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.tensor(masks), use_cache=False).logits[:, 11:-1] / 0.8
    expected = logits.log_softmax(-1).gather(2, ids[:, 12:, None])[..., 0]
    assert np.stack(scores.token_logps) == pytest.approx(expected.numpy(), abs=2e-4)
    whole, keys = [[1] * 21] * 4, sequence_keys(prompts, completions)
    client.score("ref", prompts, completions, attention_masks=whole, cache_write=True)
    client.score("ref", prompts[:1], completions[:1], cache_write=True)
    wait_until(lambda: kept(client, keys) == 1)
    assert client.score("ref", prompts, completions, attention_masks=whole).hits == 0
    assert kept(client, keys) == 1


@pytest.mark.parametrize(
    ("mask", "said"),
    [([1] * 20, "20 entries for 21 tokens"), ([2] * 21, "entries other than 0 and 1"), ([0] * 21, "hides every token")],
)
def test_a_mask_that_fits_no_row_is_named(client, mask, said):
    prompts, completions = sequences(2, seed=8)
    with pytest.raises(SequencesRefusedError) as caught:
        client.score("ref", prompts, completions, attention_masks=[[1] * 21, mask])
    assert list(caught.value.problems) == [1] and said in caught.value.problems[1]


def test_many_callers_share_packs_and_each_gets_its_own(client, model):
    asked = [sequences(3, seed=100 + n) for n in range(24)]
    temperatures = [1.0, 0.7] * 12
    with ThreadPoolExecutor(24) as callers:
        answers = list(callers.map(lambda pair, t: client.score("ref", *pair, temperature=t), asked, temperatures))
    for (prompts, completions), temperature, scores in zip(asked, temperatures, answers, strict=True):
        for prompt, completion, values in zip(prompts, completions, scores.token_logps, strict=True):
            assert values == pytest.approx(plain_token_logps(model, prompt, completion, temperature), abs=2e-4)


def test_a_deadline_that_passes_is_504_and_no_work_is_done_for_it(service, client):
    with busy(client, seed=5):
        answer = ask(service, *sequences(1, seed=6), deadline_ms=10)
    assert answer.status_code == 504 and "deadline" in answer.json()["detail"]


def test_a_full_queue_is_429_with_a_time_and_the_client_tries_again(service, client):
    with busy(client, seed=7) as first, busy(client, seed=9):  # too many tokens together, so the second client waits
        statuses = set()
        while first.is_alive() and 429 not in statuses:
            answer = ask(service, *sequences(40, seed=8, prompt=30, completion=30), cache_read=False)
            statuses.add(answer.status_code)
    assert 429 in statuses and int(answer.headers["retry-after"]) >= 1


def test_who_goes_away_is_forgotten(service, client):
    with busy(client, seed=8):
        with pytest.raises(httpx.ReadTimeout):
            ask(service, *sequences(1, seed=9), timeout=0.05)
        gone = 'reflogp_request_seconds_count{route="/v1/score",status="499"} 1.0'
        wait_until(lambda: gone in httpx.get(f"{service.url}/metrics").text, 60)


def test_online_requests_are_served_while_a_job_runs(service, client, tmp_path, model):
    job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(2000, seed=10, length=40)), "ref").id
    wait_for(client, job, lambda found: found.progress.scored > 20)
    for seed in range(20):
        prompts, completions = sequences(2, seed=200 + seed)
        [values, _] = client.score("ref", prompts, completions).token_logps
        assert values == pytest.approx(plain_token_logps(model, prompts[0], completions[0]), abs=2e-4)
    during = client.job(job)
    assert during.state == "running"
    wait_for(client, job, lambda found: found.progress.scored > during.progress.scored)  # it is not starved
    client.cancel(job)
    client.watch(job)


def test_arrow_requests_are_checked(service):
    def send(table, **params):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        headers = {"content-type": "application/vnd.apache.arrow.stream"}
        body = sink.getvalue().to_pybytes()
        return httpx.post(f"{service.url}/v1/score", params={"reference": "ref", **params}, content=body, headers=headers)

    good = pa.table(
        {"prompt_ids": pa.array([[1, 2]], pa.list_(pa.uint32())), "completion_ids": pa.array([[3]], pa.list_(pa.int32()))}
    )
    texts = pa.table({"prompt_ids": [["a"]], "completion_ids": [["b"]]})
    null = pa.table({"prompt_ids": pa.array([None], pa.list_(pa.int64())), "completion_ids": [[3]]})
    assert send(good).status_code == 200
    assert send(good, temperature=0).status_code == 422
    for table in (good.drop_columns(["prompt_ids"]), texts, null):
        assert send(table).status_code == 422
    assert send(pa.concat_tables([good] * 5000)).status_code == 413
    empty = send(good.slice(0, 0))
    assert empty.status_code == 200 and len(pa.ipc.open_stream(empty.content).read_all()) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_answers_all_the_same(tmp_path, reference_folder, model, warm_python):
    file = settings_file(tmp_path, tmp_path / "store", {"ref": float32(reference_folder)}, token_budget=128)
    with running("--config", file, warm=warm_python) as service, Client(service.url) as client:
        service.worker_ready()
        prompts, completions = sequences(400, seed=11, prompt=40, completion=20)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.score("ref", prompts, completions)))
        thread.start()
        time.sleep(1.0)
        [worker] = service.workers()
        worker.kill()
        thread.join()
    assert answers, "".join(service.log)
    for at in (0, 399):
        expected = plain_token_logps(model, prompts[at], completions[at])
        assert answers[0].token_logps[at] == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_a_request_that_kills_workers_is_refused_and_the_others_are_answered(tmp_path, reference_folder, warm_python):
    entry = {**float32(deadly_model(reference_folder, tmp_path / "deadly")), "trust_remote_code": True}
    file = settings_file(tmp_path, tmp_path / "store", {"ref": entry}, window_seconds=0.2)
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready()
        with Client(service.url) as client, ThreadPoolExecutor(4) as callers:
            good = [callers.submit(client.score, "ref", *sequences(2, seed=300 + n)) for n in range(3)]
            bad = callers.submit(client.score, "ref", [[1, 2]], [POISON])
            with pytest.raises(ServiceFailedError, match="workers died"):
                bad.result()
            assert all(len(scores.result().token_logps) == 2 for scores in good)


@pytest.mark.slow
def test_two_references_share_a_worker_that_holds_one(tmp_path, reference_folder, model, warm_python):
    models = {"one": float32(reference_folder), "two": {"model": str(reference_folder), "dtype": "bfloat16"}}
    file = settings_file(tmp_path, tmp_path / "store", models, token_budget=128, commit_seconds=0.1)
    with running("--config", file, warm=warm_python) as service, Client(service.url) as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(3000, seed=12)), "one").id
        wait_for(client, job, lambda found: found.progress.scored > 20)
        prompts, completions = sequences(2, seed=13)
        [exact, _] = client.score("one", prompts, completions).token_logps
        [rounded, _] = client.score("two", prompts, completions).token_logps  # displaces the job's model for a while
        expected = plain_token_logps(model, prompts[0], completions[0])
        assert exact == pytest.approx(expected, abs=2e-4)
        assert rounded == pytest.approx(expected, abs=0.2) and rounded.tolist() != exact.tolist()
        ended = client.watch(job)
        assert (ended.state, ended.summary["hits"] + ended.summary["scored"]) == ("done", 6000)
        with pytest.raises(RequestRefusedError, match="no model for reference 'three'"):
            client.score("three", prompts, completions)


@pytest.mark.slow
def test_a_store_that_is_being_made_is_an_empty_one(tmp_path, reference_folder, warm_python):
    """Also one that a command was making, of a reference that the service does not know, when its disk was full."""
    reference = describe_reference(str(reference_folder), "float32")
    file = settings_file(tmp_path, tmp_path / "store", {"ref": float32(reference_folder)})
    with running("--config", file, warm=warm_python) as service, Client(service.url) as client:
        for made in (reference.reference_id, "0f" * 16):
            (tmp_path / "store" / made / "logprobs").mkdir(parents=True)  # reference.json comes last
            with pytest.raises(RequestRefusedError, match="are stored yet"):
                client.lookup("ref", [b"0" * 16])
            assert [entry.sequences for entry in client.references()] == [0]
            wait_until(lambda: httpx.get(f"{service.url}/readyz").status_code == 200)
