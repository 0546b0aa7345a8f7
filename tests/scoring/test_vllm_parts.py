"""What the vLLM and remote engines decide without vLLM: what an answer says, whom a crash is due to, what vLLM is asked for.

tests/vllm has the same against a real vLLM.
"""

import base64
import io
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.vllm_engine.answers import Answer, Request, VllmEndedError, believable
from reflogp.scoring.vllm_engine.engine import VllmEngine
from reflogp.scoring.vllm_engine.options import parse_options, vllm_options
from reflogp.scoring.vllm_engine.server import VllmServer, values
from reflogp.service.settings import read_settings
from reflogp.store import UsageError, describe_reference
from tests import vision_models
from tests.scoring.test_engine import random_sequences


def packed(logps):
    out = io.BytesIO()
    np.save(out, np.array(logps, np.float32)[:, None])
    return base64.b64encode(out.getvalue()).decode()


REQUEST = Request(np.array([5, 6, 7, 8]), 2, True)
ALL_TOKENS = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.5}}, {"8": {"logprob": -9999.0}, "3": {"logprob": -1}}]


@pytest.mark.parametrize(
    ("form", "answer", "expected"),
    [
        ("token_ids", {"prompt_token_id_logprobs": packed([-0.5, -2.0])}, [-0.5, -2.0]),
        ("prompt", {"prompt_logprobs": ALL_TOKENS}, [-2.5, -np.inf]),  # what JSON cannot say is minus infinity again
        ("completions", {"choices": [{"prompt_logprobs": ALL_TOKENS}]}, [-2.5, -np.inf]),
        ("token_ids", {"prompt_token_id_logprobs": packed([-0.5])}, None),
        ("token_ids", {"prompt_token_id_logprobs": "not base64"}, None),
        ("prompt", {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}, None),
        ("prompt", {"prompt_logprobs": [None, {}, {}, {}]}, None),
        ("completions", {"choices": []}, None),
    ],
)
def test_an_answer_is_read_or_lacks_a_value_and_only_log_probs_are_believed(form, answer, expected):
    found, sequence = values(form, answer, REQUEST), Sequence([5, 6], [7, 8])
    assert found is None if expected is None else found.tolist() == expected
    assert believable(found, 1, sequence) == (expected is not None and bool(np.isfinite(expected).all()))
    assert not believable(found, 2, sequence), "the cache holds no value of the first completion token"
    assert not believable(np.array([-1, 1e31], np.float32), 0, sequence)


class Fragile:
    """A Transport that ends where some sequences are in a question, as a process that dies does; a value is minus its token."""

    max_tokens, token_budget, reads_cache, block_size, ended, deaths = 2048, 400, False, None, False, 0

    def __init__(self, deadly):
        self._deadly = deadly

    def ask(self, requests, salt):
        self.ended = self.ended or any(self._deadly(request.ids.tolist()) for request in requests)
        if self.ended:
            raise VllmEndedError
        for at, request in enumerate(requests):
            yield Answer(at, -request.ids[request.prompt_len :].astype(np.float32), 0)

    def revive(self):
        was, self.ended = self.ended, False
        self.deaths += was
        return was

    def provenance(self):
        return {"engine": "fragile"}

    def close(self):
        """Nothing to let go of."""


def test_the_sequence_that_ends_vllm_is_found_and_one_that_always_ends_is_given_up(reference_folder):
    reference = describe_reference(str(reference_folder), "float32")
    sequences, poison = random_sequences(60), 37
    transport = Fragile(lambda ids: ids == sequences[poison].ids().tolist())
    engine = VllmEngine(transport, reference)
    found = dict(engine.stream(sequences))
    assert "exited twice while it was scoring this sequence alone" in found.pop(poison)
    assert len(found) == 59 and transport.deaths == engine.restarts <= 12
    assert all(values.tolist() == [-token for token in sequences[at].completion_ids] for at, values in found.items())
    with pytest.raises(EngineError, match="without returning a value"):
        VllmEngine(Fragile(lambda ids: True), reference).score(sequences[:20])


class ServerWithPoison(BaseHTTPRequestHandler):
    """Answers requests for log-probs as vLLM does, with -1 for each token, and fails with sequences that have the token 7."""

    def do_GET(self):
        self._send(200, {"data": [{"id": "model", "max_model_len": 100}]} if self.path == "/v1/models" else {"version": "1"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids, settings = body["token_ids"], body["sampling_params"]
        if 7 in ids:
            self._send(500, {"error": {"message": "the engine failed"}})
        else:
            logps = packed([-1.0] * (len(ids) - 1 - settings["prompt_logprob_start"]))
            self._send(200, {"prompt_token_id_logprobs": logps})

    def _send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("others", [14, 0])
def test_a_sequence_with_which_a_server_always_fails_is_one_bad_sequence(others, reference_folder):
    sequences = [Sequence([1, 2, number], [8, 9]) for number in range(10, 10 + others)]
    sequences.insert(others // 2, Sequence([1, 2, 7], [8, 9]))
    with ThreadingHTTPServer(("127.0.0.1", 0), ServerWithPoison) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        connection = VllmServer(f"http://127.0.0.1:{server.server_port}", patience_seconds=60)
        engine = VllmEngine(connection, describe_reference(str(reference_folder), "float32"))
        outcomes = dict(engine.stream(sequences))
        engine.close()
        server.shutdown()
    problem = outcomes.pop(others // 2)
    assert isinstance(problem, str) and "failed 3 times with this sequence" in problem and "the engine failed" in problem
    assert len(outcomes) == others and all(values.tolist() == [-1, -1] for values in outcomes.values())


def test_options_are_read_and_those_that_change_values_refused():
    read = parse_options(["gpu_memory_utilization=0.8", "enforce_eager=true", "attention_backend=FLASHINFER"])
    assert read == {"gpu_memory_utilization": 0.8, "enforce_eager": True, "attention_backend": "FLASHINFER"}
    for entry in ("quantization=fp8", "hf_overrides={}", "speculative_config={}", "no-equals"):
        with pytest.raises(UsageError):
            parse_options([entry])


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, None),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "default", "rope_theta": 10_000.0}, -1),
    ],
)
def test_rotary_embeddings_that_vllm_fixes_once(reference_folder, tmp_path, rope, limit):
    folder = shutil.copytree(reference_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    reference = describe_reference(str(folder), "bfloat16", lm_head_dtype="float32")

    def options(**given):
        return vllm_options(str(folder), reference, 2, False, given).options

    if limit is None:
        with pytest.raises(EngineError, match="--engine torch"):
            options()
        return
    found = options(max_num_seqs=8)
    assert (found["max_model_len"], found["tensor_parallel_size"], found["max_num_seqs"]) == (limit, 2, 8)
    assert found["hf_overrides"] == {"head_dtype": "float32"} and options(max_model_len=64)["max_model_len"] == 64
    for length in (513, -1, "1k") if limit > 0 else ():
        with pytest.raises(UsageError, match=f"from 1 to {limit}"):
            options(max_model_len=length)


def wide_tower(config):
    config["vision_config"]["model_type"] = "siglip_vision_model"


def one_direction(config):
    config["text_config"]["rope_parameters"].pop("mrope_interleaved")


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("Idefics 3", None, None),
        ("LLaVA", None, None),
        ("LLaVA", wide_tower, "llava models with a vision tower of type siglip_vision_model"),
        ("LLaVA", lambda config: config.update(vision_feature_layer=[-2, -1]), "image features from several layers"),
        ("Qwen3-VL", one_direction, "without mrope_interleaved"),
        ("InternVL", None, "not been verified for internvl models"),
        (None, None, "the model takes text only"),
    ],
)
def test_which_models_vllm_is_asked_for_images_of(tmp_path, reference_folder, family, change, reason):
    folder = tmp_path if family else reference_folder
    if family:
        vision_models.make(family, folder)
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
    loading = vllm_options(str(folder), describe_reference(str(folder), "float32"), 1, False, {})
    if reason is None:
        assert loading.no_images is None
        assert loading.options["limit_mm_per_prompt"] == {"image": 64} and not loading.options["skip_tokenizer_init"]
    else:
        assert reason in loading.no_images
        assert (loading.options.get("language_model_only"), loading.options["skip_tokenizer_init"]) == (
            (True, True) if family else (None, True)
        )


@pytest.mark.parametrize(
    ("reference", "gpus"),
    [
        ({}, 1),
        ({"engine": "vllm", "tensor_parallel": 4}, 4),
        ({"engine": "vllm", "tensor_parallel": 2, "vllm_options": {"pipeline_parallel_size": 3}}, 6),
        ({"engine": "remote", "url": "http://x"}, 0),
        ({"engine": "remote"}, "requires a url"),
        ({"tensor_parallel": 2}, "tensor_parallel is a setting of engine vllm"),
        ({"engine": "vllm", "vllm_options": {"seed": 1}}, "vLLM option seed cannot be set"),
        ({"engine": "vllm", "vllm_options": {"pipeline_parallel_size": 0}}, "pipeline_parallel_size=0: use an integer from 1"),
    ],
)
def test_a_services_engine_has_the_gpus_of_all_its_layers_and_stages_or_settings_that_do_not_fit_are_named(
    tmp_path, reference, gpus
):
    with pytest.raises(UsageError, match=gpus) if isinstance(gpus, str) else nullcontext():
        settings = read_settings(store=str(tmp_path), references={"sft": {"model": "/m", **reference}})
        assert settings.references["sft"].choice().gpus() == gpus


@pytest.mark.parametrize("lacks", ["vllm", "reflogp"])
def test_an_environment_without_vllm_or_reflogp_is_named(lacks, reference_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = Path(sys.executable)
    if lacks == "reflogp":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
        python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(UsageError, match=r"lacks vLLM or reflogp.* in REFLOGP_VLLM_PYTHON"):
        EngineChoice("vllm", vllm_python=str(python)).make(
            str(reference_folder), describe_reference(str(reference_folder), "float32")
        )
