"""Files that are replaced under a running service: weights, chat templates, datasets."""

import contextlib
import json
import re
import shutil
import signal
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reflogp.client import Client, ServicePath
from reflogp.scoring.data import read
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.store import Store, describe_reference, sequence_keys
from tests.conftest import plain_token_logps, write_rows
from tests.scoring.test_identity import in_place, link_swapped, renamed_over
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until

pytestmark = pytest.mark.slow

SEQUENCE = {"prompt_ids": [5, 6, 7, 8], "completion_ids": [9, 10, 11]}


def score(service, reference, write=True, **sequence):
    body = {"sequences": [sequence or SEQUENCE]}
    return httpx.post(f"{service.url}/v1/score", params={"reference": reference, "cache_write": write}, json=body, timeout=120)


def other_model(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def killed_and_replaced(service) -> None:
    """Kill the service's worker, and wait for the next one."""
    [worker] = service.workers()
    worker.kill()
    wait_until(lambda: [found for found in service.workers() if found.pid != worker.pid])
    service.worker_ready()


def test_weights_that_were_replaced_while_they_were_unloaded_are_refused_and_other_references_go_on(
    tmp_path, reference_folder, warm_python
):
    first, second = shutil.copytree(reference_folder, tmp_path / "first"), other_model(reference_folder, tmp_path / "second")
    expected = {
        name: plain_token_logps(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), *SEQUENCE.values())
        for name, folder in (("a", first), ("b", second))
    }
    reference = describe_reference(str(first), "float32")
    file = settings_file(tmp_path, tmp_path / "store", {"a": float32(first), "b": float32(second)}, pinned="a", max_loaded=2)
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready()
        assert score(service, "a").json()["token_logps"][0] == pytest.approx(expected["a"], abs=2e-4)
        in_place(first / "model.safetensors", (second / "model.safetensors").read_bytes())
        # what is loaded stays what it was, also where it was rewritten in place
        longer = {"prompt_ids": SEQUENCE["prompt_ids"], "completion_ids": [*SEQUENCE["completion_ids"], 12]}
        values = score(service, "a", **longer).json()["token_logps"][0]
        assert values[:3] == pytest.approx(expected["a"], abs=2e-4)
        wait_until((tmp_path / "store" / reference.reference_id / "reference.json").is_file)  # written a little later
        killed_and_replaced(service)  # although the reference that it should hold is not there any more
        refused = score(service, "a", prompt_ids=[20, 21], completion_ids=[22, 23])
        assert refused.status_code == 503, refused.text
        assert "changed" in refused.json()["detail"] and reference.reference_id in refused.json()["detail"]
        assert score(service, "b").json()["token_logps"][0] == pytest.approx(expected["b"], abs=2e-4)
    keys = sequence_keys([SEQUENCE["prompt_ids"], [20, 21]], [SEQUENCE["completion_ids"], [22, 23]])
    found, unscored = Store(tmp_path / "store")[reference.reference_id].snapshot().token_logps(keys)
    assert unscored is None and (found is None or list(found[:3]) == pytest.approx(expected["a"], abs=2e-4))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    (folder / "data").mkdir()
    return folder


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    model = shutil.copytree(reference_folder, place / "model")
    file = settings_file(place, place / "store", {"ref": float32(model)}, dataset_roots=[str(place / "data")])
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


def keys_of(client, job, folder) -> list[bytes]:
    return pq.read_table(client.result(job.id, folder / f"{job.id}.parquet"))["chosen_key"].to_pylist()


def expected_keys(rows) -> list[bytes]:
    return sequence_keys([row["prompt_ids"] for row in rows], [row["chosen_ids"] for row in rows]).to_pylist()


@pytest.mark.parametrize(
    ("kind", "restarted"), [(renamed_over, False), (in_place, False), (link_swapped, False), (in_place, True)]
)
def test_rows_are_tokenized_by_the_template_that_the_model_has_when_the_job_begins(
    service, place, tmp_path, pair_rows, kind, restarted
):
    file, template = write_rows(tmp_path / "pairs.jsonl", pair_rows[:3]), place / "model" / "chat_template.jinja"
    with Client(service.url) as client:
        for _ in range(2):
            kind(template, template.read_bytes().replace(b"{%", b"Hm. {%", 1))
            if restarted:
                killed_and_replaced(service)
            job = client.watch(client.submit(file, "ref").id)
            assert job.state == "done", job.error
            tokenizer = load_tokenizer(str(place / "model"))
            [window] = tokenize_dataset(RowSource(str(file)), tokenizer)
            wanted = sequence_keys(window.table["prompt_ids"], window.table["chosen_ids"]).to_pylist()
            assert keys_of(client, job, tmp_path) == wanted


def padded(rows, size: int) -> bytes:
    """Rows as JSON Lines, filled with empty lines to exactly `size` bytes."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert len(text) <= size
    return text + b"\n" * (size - len(text))


def appended(file, content) -> None:
    with file.open("ab") as opened:
        opened.write(content)


def folder_swapped(file, content) -> None:
    """The folder becomes a link to one outside the root."""
    outside = file.parent.parent.parent / f"outside-{file.parent.name}"
    outside.mkdir()
    (outside / file.name).write_bytes(content)
    file.parent.rename(file.parent.with_name(f"moved-{file.parent.name}"))
    file.parent.symlink_to(outside)


def link_led_outside(file, content) -> None:
    outside = file.parent.parent.parent / f"secret-{file.parent.name}.jsonl"
    outside.write_bytes(content)
    link = file.with_name("link.jsonl")
    link.symlink_to(outside)
    link.rename(file)


def runner_of(service, job: str) -> psutil.Process:
    """Wait until a job has begun, and return the process that reads its dataset."""

    def pids() -> list[str]:
        return [re.search(r"job started, pid (\d+),", line)[1] for line in service.log if job in line and "job started" in line]

    wait_until(pids)
    return psutil.Process(int(pids()[0]))


CHANGES = [renamed_over, in_place, appended, link_led_outside, folder_swapped]


@pytest.mark.parametrize(
    ("moment", "change", "whole_folder"),
    [("as it begins", change, whole) for change in CHANGES for whole in (False, True)]
    + [("while it is read", change, at % 2 == 1) for at, change in enumerate(CHANGES)],
)
def test_a_dataset_that_is_replaced_after_its_job_begins(service, place, tmp_path, moment, change, whole_folder):
    count = 3 if moment == "as it begins" else 30_000
    number = len(list((place / "data").iterdir()))
    folder = place / "data" / f"set-{number}"
    folder.mkdir()
    seed = 1000 * number
    few = token_rows(3, seed=seed)
    rows = few * (count // 3)
    size = 2 * len("".join(json.dumps(row) + "\n" for row in rows))
    old, new = padded(rows, size), padded(token_rows(3, seed=seed + 1), size)
    file = folder / "rows.jsonl"
    file.write_bytes(old)
    with Client(service.url) as client:
        job = client.submit(ServicePath(str(folder if whole_folder else file)), "ref")
        runner = runner_of(service, job.id)
        if moment == "while it is read":
            found = wait_for(client, job.id, lambda job: job.progress.rows > 0 or job.state == "done")
            assert found.progress.rows < count
        with contextlib.suppress(psutil.NoSuchProcess):  # three rows are soon done
            runner.send_signal(signal.SIGSTOP)
        change(file, new)
        with contextlib.suppress(psutil.NoSuchProcess):
            runner.send_signal(signal.SIGCONT)
        ended = client.watch(job.id)
        if ended.state == "done":
            assert keys_of(client, ended, tmp_path) == expected_keys(rows)
        else:
            said = ("chang", "no such file", "not under a folder")
            assert ended.state == "failed" and any(text in ended.error for text in said), ended.error
            assert "secret" not in ended.error and "outside" not in ended.error
        (tmp_path / "copy.jsonl").write_bytes(old)
        again = client.watch(client.submit(tmp_path / "copy.jsonl", "ref", title="the old content").id)
        assert again.state == "done", again.error
        assert keys_of(client, again, tmp_path) == expected_keys(rows)


@pytest.mark.parametrize("change", [renamed_over, in_place, appended])
@pytest.mark.parametrize("command", ["score", "join", "report"])
def test_a_dataset_that_changes_under_a_command_is_told(reflogp, tmp_path, reference_folder, command, change, monkeypatch):
    rows = token_rows(6, seed=3)
    file, store = tmp_path / "rows.jsonl", tmp_path / "store"
    size = 4000
    file.write_bytes(padded(rows, size))
    to = {"score": (), "join": ("-o", tmp_path / "out.parquet"), "report": ("-o", tmp_path / "report")}
    arguments = [reference_folder, file, "--store", store, "--dtype", "float32"]
    if command != "score":
        assert reflogp("score", *arguments)[0] == 0

    def changing(*options):
        for batch in read.batched(*options):
            yield batch
            if file.read_bytes() == padded(rows, size):
                change(file, padded(token_rows(6, seed=4), size))

    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", changing)
    code, _, error = reflogp(command, *arguments, *to[command])
    assert code == 1 and "rows.jsonl was changed" in error.replace("\n", "") and "run again" in error.replace("\n", " ")
    assert not (tmp_path / "out.parquet").exists() and not (tmp_path / "report" / "index.html").exists()
    if command == "score":  # what was scored is kept under its own keys
        reference = describe_reference(str(reference_folder), "float32")
        found = Store(store)[reference].get([rows[0]["prompt_ids"]], [rows[0]["chosen_ids"]])
        model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
        np.testing.assert_allclose(found[0], plain_token_logps(model, rows[0]["prompt_ids"], rows[0]["chosen_ids"]), atol=2e-4)
