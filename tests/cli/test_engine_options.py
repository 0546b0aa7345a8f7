"""`reflogp score --engine …`: which options go together, what a store's other engines mean, what a reference is."""

import json

import pytest

from reflogp.store import describe_reference
from tests.conftest import last_object
from tests.vllm.serving import free_port


@pytest.fixture
def command(reference_folder, pairs_file, tmp_path):
    return ["score", reference_folder, pairs_file, "--store", tmp_path / "store", "--dtype", "float32"]


def test_values_of_another_engine_are_hits_unless_one_engine_is_wanted(reflogp, command):
    assert reflogp(*command)[0] == 0
    nowhere = ["--engine", "remote", "--url", "http://127.0.0.1:9"]  # nothing is missing, so nothing is asked
    code, out, err = reflogp(*command, *nowhere, "--json")
    assert code == 0, err
    assert last_object(out)["hits"] == 80
    code, _, err = reflogp(*command, *nowhere, "--strict-engine")
    assert code == 1
    assert "values from torch for this dataset" in err and "only values from remote" in err
    assert reflogp(*command, "--strict-engine")[0] == 0


REMOTE = "--engine remote --url http://x:8000"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--engine remote", "needs --url"),
        ("--url http://x:8000", "--url is an option of --engine remote, but the engine is torch"),
        ("--tensor-parallel 2", "--tensor-parallel is an option of --engine vllm, but the engine is torch"),
        ("--engine vllm --token-budget 512", "--token-budget is an option of --engine torch, but the engine is vllm"),
        ("--engine vllm --vllm-option seed=1", "vLLM option seed cannot be set"),
        (f"{REMOTE} --ray", "cannot be combined with --ray"),
        (f"{REMOTE} --claim {'ab' * 16}", "neither a file nor the id of a stored reference"),
        (f"{REMOTE} --claim {{pairs}}", "this file is not valid output of `reflogp reference`"),
        (f"{REMOTE} --claim {{claim}}", "the reference given with --claim has dtype bfloat16; omit --dtype"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    reflogp, command, pairs_file, reference_folder, tmp_path, options, complaint
):
    claim = tmp_path / "claim.json"
    claim.write_text(describe_reference(str(reference_folder), "bfloat16").to_json())
    code, _, err = reflogp(*command, *options.format(pairs=pairs_file, claim=claim).split())
    assert code == 2 and complaint in err


def test_a_reference_is_printed_as_a_store_writes_it(reflogp, reference_folder, command, tmp_path):
    assert reflogp(*command)[0] == 0
    code, out, _ = reflogp("reference", reference_folder, "--dtype", "float32")
    assert code == 0
    [written] = (tmp_path / "store").glob("*/reference.json")
    assert json.loads(out) == json.loads(written.read_text())


def test_without_weights_the_claim_is_asked_for(reflogp, command, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command[1] = str(tmp_path / "tokenizer")
    code, _, err = reflogp(*command, *REMOTE.split())
    assert code == 2 and "if the weights are on another machine, name the reference with --claim" in err


@pytest.mark.slow
def test_a_server_that_is_waited_for_is_said(reflogp, command):
    url = f"http://127.0.0.1:{free_port()}"
    code, _, err = reflogp(*command, "--engine", "remote", "--url", url, "--patience", 10, "--trust-claim")
    said = " ".join(err.split())
    assert code == 1 and f"warning: {url} is unreachable or busy (ConnectError" in said
    assert "waiting up to 10 s for the server (--patience)" in said
    assert "run the same command again when the server is back" in said
