"""`reflogp doctor`: what is there is ok, what is missing has a command, what is broken fails."""

import hashlib
import json
import shutil
import tomllib

import pytest

from tests.service.serving import running


def findings(out: str) -> dict[str, list[dict]]:
    """What was found, by what it is about."""
    found: dict[str, list[dict]] = {}
    for entry in json.loads(out.splitlines()[-1])["findings"]:
        found.setdefault(entry["what"], []).append(entry)
    return found


def test_a_whole_installation_with_a_model_and_a_store(reflogp, reference_folder, pairs_file, tmp_path):
    store = tmp_path / "store"
    code, out, _ = reflogp("doctor", "--model", reference_folder, "--store", store, "--json")
    assert code == 0
    found = findings(out)
    assert found["service"][0]["state"] == found["trainer"][0]["state"] == found["reflogp"][0]["state"] == "ok"
    assert "LlamaForCausalLM" in found["model"][0]["said"]
    assert found["store"][0]["state"] == "note", "it is not there yet"
    assert not store.exists()
    assert reflogp("score", reference_folder, pairs_file, "--store", store, "--dtype", "float32")[0] == 0
    code, out, _ = reflogp("doctor", "--store", store)
    assert code == 0
    assert "1 reference (" in out and "nothing is broken" in out
    next(store.glob("*/reference.json")).write_text("{")
    code, out, _ = reflogp("doctor", "--store", store, "--json")
    assert code == 1
    assert [entry["state"] for entry in findings(out)["store"]] == ["broken"]


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


def test_a_token_without_a_settings_file_is_printed_with_its_lines(reflogp):
    code, out, _ = reflogp("token", "trainers", "--scope", "admin")
    secret, *lines = out.splitlines()
    [entry] = tomllib.loads("\n".join(lines))["tokens"]
    assert (code, entry["name"], entry["scopes"]) == (0, "trainers", ["admin"])
    assert entry["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert reflogp("token", "trainers", "--scope", "everything")[0] == 2
    code, out, err = reflogp("token", "trainers", "--config", "/nowhere/service.toml")
    assert (code, out) == (2, "") and "cannot be written" in err


def test_a_settings_file_has_one_token_of_each_name(reflogp, tmp_path):
    file = tmp_path / "service.toml"
    file.write_text('store = "./logps"')
    for name in ("trainers", "notebooks"):
        assert reflogp("token", name, "--config", file)[0] == 0
    before = file.read_text()
    code, out, err = reflogp("token", "trainers", "--config", file)
    assert (code, out, file.read_text()) == (2, "", before)
    assert "already has a token with the name trainers: choose another name, or delete the lines" in err
    file.write_text("store = ./logps")
    assert "is not a TOML file" in reflogp("token", "trainers", "--config", file)[2]
