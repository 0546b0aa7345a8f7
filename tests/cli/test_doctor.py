"""`reflogp doctor`: what is there is ok, what is missing has a command, what is broken fails."""

import shutil

import pytest

from tests.conftest import last_object
from tests.service.serving import running


def findings(out: str) -> dict[str, list[dict]]:
    """What was found, by what it is about."""
    found: dict[str, list[dict]] = {}
    for entry in last_object(out)["findings"]:
        found.setdefault(entry["what"], []).append(entry)
    return found


def test_a_whole_installation_with_a_model_and_a_store(reflogp, reference_folder, pairs_file, tmp_path):
    store = tmp_path / "store"
    code, out, _ = reflogp("doctor", "--model", reference_folder, "--store", store, "--json")
    found = findings(out)
    assert code == 0
    assert found["service"][0]["state"] == found["trainer"][0]["state"] == found["reflogp"][0]["state"] == "ok"
    assert "LlamaForCausalLM" in found["model"][0]["said"]
    assert found["store"][0]["state"] == "note" and not store.exists(), "it is not there yet"
    assert reflogp("score", reference_folder, pairs_file, "--store", store, "--dtype", "float32")[0] == 0
    code, out, _ = reflogp("doctor", "--store", store)
    assert code == 0 and "1 reference (" in out and "nothing is broken" in out
    next(store.glob("*/reference.json")).write_text("{")
    code, out, _ = reflogp("doctor", "--store", store, "--json")
    assert (code, [entry["state"] for entry in findings(out)["store"]]) == (1, ["broken"])


def test_what_is_broken_fails_and_has_a_step(reflogp, reference_folder, tmp_path, monkeypatch):
    cut = shutil.copytree(reference_folder, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:-10])
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("REFLOGP_VLLM_PYTHON", "/no/such/python")
    where = ["--model", cut, "--store", tmp_path / "file", "--url", "http://127.0.0.1:9"]
    code, out, _ = reflogp("doctor", *where, "--json")
    assert code == 1
    found = findings(out)
    for what, words in {"model": "truncated", "store": "is a file", "vllm": "/no/such/python"}.items():
        assert found[what][0]["state"] == "broken"
        assert words in found[what][0]["said"]
    assert any("cannot be reached" in entry["said"] for entry in found["service"])
    assert all(entry["help"] for entries in found.values() for entry in entries if entry["state"] == "broken")


@pytest.mark.slow
def test_a_service_is_asked_with_the_token(reflogp, tmp_path):
    settings = tmp_path / "serve.toml"
    settings.write_text(f'store = "{tmp_path / "store"}"')
    secret = reflogp("token", 'the "doctor"', "--config", settings)[1].strip()
    with running("--config", settings) as service:
        for token, exit_code, said in (
            ([], 1, "requires a token"),
            (["--token", "wrong"], 1, "does not accept the token"),
            (["--token", secret], 0, "accepts the token"),
        ):
            code, out, _ = reflogp("doctor", "--url", service.url, *token)
            assert code == exit_code and said in out
