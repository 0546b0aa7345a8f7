"""The remote engine: a real server's values, its failures, and whether it serves what its user says."""

import json
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.store import ReflogpError, Store, UsageError, describe_reference
from tests.conftest import largest_error, write_rows
from tests.scoring.test_images import engine_sequences
from tests.vision_models import make, pair, picture
from tests.vllm.serving import VllmServe, free_port, vllm_serve

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def arguments():
    return ["--dtype", "float32", "--enable-scale-out", "--served-model-name", "sft"]


@pytest.fixture(scope="module")
def server(model, arguments):
    with vllm_serve(model, free_port(), *arguments) as server:
        yield server


def connect(server, model, **choice):
    return EngineChoice("remote", url=server.url, **choice).make(model, describe_reference(model, "float32"))


@pytest.mark.parametrize("every_server", [False, True], ids=["the best form", "the form of every server"])
def test_a_servers_values_are_a_plain_forwards(server, model, pairs, plain_model, every_server):
    engine, some = connect(server, model), pairs[:200]
    assert engine._transport.form == ("token_ids" if torch.cuda.is_available() else "prompt")
    if every_server:
        engine._transport.form = "completions"
    form = engine._transport.form
    assert largest_error(engine.score(some), plain_model, some) <= 1e-5
    made = engine.provenance()
    assert (made["engine"], made["method"], made["reference"]) == ("remote", form, "checked")
    assert made["reference_difference"] < 1e-5
    assert server.url not in json.dumps(made)
    with pytest.raises(EngineError, match="temperature"):
        next(engine.passes(some, temperature=0.5))


def test_rows_with_images_are_refused_by_name(server, model, tmp_path):
    make("LLaVA", tmp_path)
    sequences = engine_sequences(str(tmp_path), [pair("what is it?", [picture(1)]), pair("no picture", [])])
    problems = connect(server, model).problems(sequences)
    assert list(problems) == [0, 1]
    assert problems[0].startswith("the sequence has images, but a vLLM server generates") and problems[0].endswith(
        "; use --engine torch"
    )


def test_a_server_of_other_weights_is_refused(server, model, tokenizer, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.02)
    other.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="does not serve"):
        connect(server, str(tmp_path))


def test_what_is_not_there_is_said(server, model):
    with pytest.raises(UsageError, match=r"does not serve 'mistral'; it serves sft"):
        connect(server, model, served_model="mistral")
    with pytest.raises(UsageError, match="--url"):
        EngineChoice("remote", url="localhost:8000").make(model, describe_reference(model, "float32"))
    with pytest.raises(EngineError, match="has been unreachable or busy for"):
        EngineChoice("remote", url=f"http://127.0.0.1:{free_port()}", patience_seconds=1).make(
            model, describe_reference(model, "float32")
        )


def test_a_server_that_is_killed_in_the_middle_is_waited_for(model, arguments, pair_rows, tmp_path, reflogp):
    """One run outlives the server; one gives up, and the next run scores only what is left."""
    port = free_port()
    data = write_rows(tmp_path / "pairs.jsonl", pair_rows[:200])
    store = tmp_path / "store"
    servers, committed = [VllmServe(model, port, *arguments).wait()], []
    command = ["score", model, data, "--store", store, "--dtype", "float32", "--engine", "remote", "--json"]
    command += ["--url", servers[0].url, "--concurrency", 1, "--commit-sequences", 40]

    def kill_and_start_again():
        reference_id = describe_reference(model, "float32").reference_id
        while True:
            try:
                if done := len(Store(str(store))[reference_id].snapshot()):
                    break
            except ReflogpError:
                pass
            time.sleep(0.05)
        servers[0].kill()
        committed.append(done)
        time.sleep(1)
        servers.append(VllmServe(model, port, *arguments))

    watching = threading.Thread(target=kill_and_start_again)
    watching.start()
    try:
        code, out, err = reflogp(*command)
        watching.join()
        assert code == 0, err
        summary = json.loads(out.splitlines()[-1])
        assert summary["scored"] + summary["duplicates"] == summary["sequences"] == 400
        assert summary["provenance"]["engine"] == "remote"
        assert 0 < committed[0] < summary["scored"]
        rest = write_rows(tmp_path / "more.jsonl", pair_rows[:210])
        command[2] = rest
        servers[1].kill()
        code, _, err = reflogp(*command, "--patience", 1, "--trust-claim")
        assert code == 1 and "run the same command again" in err
    finally:
        for server in servers:
            server.kill()


def test_without_weights_the_claim_is_recorded(server, model, pair_rows, tmp_path, reflogp, tokenizer):
    data = write_rows(tmp_path / "pairs.jsonl", pair_rows[:10])
    code, described, _ = reflogp("reference", model, "--dtype", "float32")
    assert code == 0
    claim = tmp_path / "sft.reference.json"
    claim.write_text(described)
    bare = tmp_path / "bare"
    tokenizer.save_pretrained(bare)
    store = tmp_path / "store"
    command = ["score", bare, data, "--store", store, "--engine", "remote", "--url", server.url, "--json"]
    code, out, err = reflogp(*command, "--claim", claim)
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    reference_id = describe_reference(model, "float32").reference_id
    assert summary["reference_id"] == reference_id
    assert summary["provenance"]["reference"] == "claimed"
    code, out, _ = reflogp(*command, "--claim", reference_id)  # the store knows it now
    assert json.loads(out.splitlines()[-1])["hits"] == 20
    code, _, err = reflogp("score", model, data, "--store", store, "--dtype", "float32", "--strict-engine")
    assert code == 1 and "the store has values from remote" in err
