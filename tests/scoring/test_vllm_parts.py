"""What the vLLM and remote engines decide without vLLM: who may read its cache, how a server is asked, whom a crash is due to.

tests/vllm has the same against a real vLLM.
"""

import base64
import io
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflogp.scoring.data.images import RowImage
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.sequences import SequenceImages, prefix_order
from reflogp.scoring.vllm_engine import engine as vllm_engine
from reflogp.scoring.vllm_engine.answers import (
    Answer,
    Request,
    VllmEndedError,
    answers_of,
    answers_table,
    believable,
    problem_of_answer,
    requests_body,
    requests_of,
)
from reflogp.scoring.vllm_engine.engine import VllmEngine, may_read_cache
from reflogp.scoring.vllm_engine.options import parse_options, vllm_options
from reflogp.scoring.vllm_engine.server import VllmServer, question, values
from reflogp.scoring.wire import SentImages
from reflogp.service.settings import read_settings
from reflogp.store import UsageError, describe_reference
from reflogp.store.schema import stream_bytes
from tests import vision_models
from tests.scoring.test_engine import random_sequences

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def hit(sequence, others, block):
    """Tokens that vLLM can find in its cache: whole blocks in common with some other sequence, but never all of this one."""
    ids = sequence.ids().tolist()
    common = [0]
    for other in others:
        theirs = other.ids().tolist()
        common.append(
            next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), min(len(ids), len(theirs)))
        )
    return min(max(common), len(ids) - 1) // block * block


@settings(max_examples=300)
@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=12), st.integers(1, 5))
def test_no_reader_can_hit_into_its_completion(pairs, block):
    sequences = [Sequence(prompt, completion) for prompt, completion in pairs]
    order = prefix_order([sequence.ids() for sequence in sequences])
    assert sorted(order) == list(range(len(sequences)))
    ordered = [sequences[at] for at in order]
    for at, (sequence, reads) in enumerate(zip(ordered, may_read_cache(ordered, block), strict=True)):
        others = ordered[:at] + ordered[at + 1 :]
        possible = hit(sequence, others, block) <= len(sequence.prompt_ids) - 1
        assert possible or not reads, "a reader loses a value"
        if hit(sequence, others, 1) < len(sequence.ids()) - 1:  # equal ones apart, it is no stricter than needed
            assert reads == possible


def test_the_order_is_the_dictionarys_whatever_the_ids():
    sequences = [Sequence([256], [1]), Sequence([1], [0]), Sequence([1, 256], [0]), Sequence([1, 2], [70_000])]
    assert prefix_order([sequence.ids() for sequence in sequences]) == [1, 3, 2, 0]


def packed(logps):
    out = io.BytesIO()
    np.save(out, np.array(logps, np.float32)[:, None])
    return base64.b64encode(out.getvalue()).decode()


REQUEST = Request(np.array([5, 6, 7, 8]), 2, True)


def test_each_form_of_an_answer_is_read():
    all_tokens = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.5}}, {"8": {"logprob": -9999.0}, "3": {"logprob": -1}}]
    assert values("token_ids", {"prompt_token_id_logprobs": packed([-0.5, -2.0])}, REQUEST).tolist() == [-0.5, -2.0]
    for form, answer in (
        ("prompt", {"prompt_logprobs": all_tokens}),
        ("completions", {"choices": [{"prompt_logprobs": all_tokens}]}),
    ):
        found = values(form, answer, REQUEST)
        assert found.tolist() == [-2.5, -np.inf], "what JSON cannot say is minus infinity again"
        assert not believable(found, 0, Sequence([5, 6], [7, 8]))


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("token_ids", {"prompt_token_id_logprobs": None}),
        ("token_ids", {"prompt_token_id_logprobs": packed([-0.5])}),
        ("token_ids", {"prompt_token_id_logprobs": "not base64"}),
        ("prompt", {"prompt_logprobs": None}),
        ("prompt", {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}),
        ("prompt", {"prompt_logprobs": [None, {}, {}, {}]}),
        ("completions", {"choices": []}),
        ("completions", {"error": "full"}),
    ],
)
def test_an_answer_that_lacks_a_value_is_none(form, answer):
    assert values(form, answer, REQUEST) is None
    assert "returned no valid log-probs" in problem_of_answer(None)


def test_what_a_server_is_asked():
    path, body = question("token_ids", "sft", REQUEST, "salt")
    wanted = {"prompt_logprob_token_ids": [[7], [8]], "prompt_logprob_start": 1, "skip_reading_prefix_cache": False}
    assert path == "/inference/v1/generate"
    assert wanted.items() <= body["sampling_params"].items()
    assert (body["token_ids"], body["cache_salt"]) == ([5, 6, 7, 8], "salt")
    path, body = question("prompt", "sft", REQUEST, "salt")
    assert body["sampling_params"]["skip_reading_prefix_cache"] is True, "this form cannot tell what a hit cost"
    path, body = question("completions", "sft", REQUEST, "salt")
    assert (path, body["prompt"], body["prompt_logprobs"]) == ("/v1/completions", [5, 6, 7, 8], 0)
    json.dumps(body)


def test_only_log_probs_are_believed():
    sequence = Sequence([5, 6], [7, 8])
    good = np.array([-1.0, -2.0], np.float32)
    assert believable(good, 1, sequence)
    assert not believable(good, 2, sequence), "the cache holds no value of the first completion token"
    for bad in (None, good[:1], np.array([-1, np.nan], np.float32), np.array([-1, 1e31], np.float32)):
        assert not believable(bad, 0, sequence)


def test_requests_with_images_cross_the_pipe_with_each_image_once():
    images = SentImages((b"a" * 16, b"b" * 16), (1, 2), (b"file a", b"file b"), 9)
    sent = [
        (7, Request(np.array([5, 2**31 + 1, 2**32 - 1, 2**31, 6]), 4, True, images)),
        (8, Request(np.array([2**31 + 1, 6]), 1, False, SentImages((b"a" * 16,), (1,), (b"file a",), 9))),
        (9, REQUEST),
    ]
    body = requests_body(sent)
    assert body.count(b"file a") == body.count(b"file b") == 1
    found = requests_of(body)
    assert [(number, request.ids.tolist(), *request[1:]) for number, request in found] == [
        (number, request.ids.tolist(), *request[1:]) for number, request in sent
    ]
    assert found[0][1].model_ids() == [5, 9, 9, 9, 6]
    answers = [Answer(7, None, 3, "why"), Answer(8, np.array([-0.5], np.float32), 0)]
    [one, two] = answers_of(stream_bytes(answers_table(answers)))
    assert one == answers[0] and two.problem is None and two.values.tolist() == [-0.5]


class Fragile:
    """A Transport to the torch engine that ends where some sequences are in a question, as a process that dies does."""

    max_tokens, token_budget, reads_cache, block_size = 2048, 400, False, None

    def __init__(self, model, deadly):
        self._engine = TorchEngine(model, "float32", compile_layers=False)
        self._deadly = deadly
        self.ended = False
        self.deaths = 0

    def ask(self, requests, salt):
        sequences = [Sequence(r.ids[: r.prompt_len], r.ids[r.prompt_len :]) for r in requests]
        if self.ended or any(self._deadly(sequence) for sequence in sequences):
            self.ended = True
            return self._end()
        return (Answer(at, logps, 0) for at, logps in self._engine.stream(sequences))

    def _end(self):
        raise VllmEndedError
        yield

    def revive(self):
        was, self.ended = self.ended, False
        self.deaths += was
        return was

    def provenance(self):
        return {"engine": "fragile"}

    def close(self):
        """Nothing to let go of."""


def test_the_sequence_that_ends_vllm_is_found_and_the_others_have_their_values(reference_folder):
    sequences = random_sequences(60)
    poison = 37
    transport = Fragile(str(reference_folder), lambda s: s.ids().tolist() == sequences[poison].ids().tolist())
    engine = VllmEngine(transport, describe_reference(str(reference_folder), "float32"))
    found = dict(engine.stream(sequences))
    assert "exited twice while it was scoring this sequence alone" in found.pop(poison)
    assert len(found) == 59
    expected = TorchEngine(str(reference_folder), "float32", compile_layers=False).score(sequences)
    assert all(np.abs(found[at] - expected[at]).max() <= 1e-5 for at in found)
    assert transport.deaths == engine.restarts <= 12


def test_a_vllm_that_always_ends_is_given_up(reference_folder):
    engine = VllmEngine(Fragile(str(reference_folder), lambda _: True), describe_reference(str(reference_folder), "float32"))
    with pytest.raises(EngineError, match="without returning a value"):
        engine.score(random_sequences(20))


def test_two_readers_of_one_engine_do_not_end_each_others_process(reference_folder):
    """A job's stream that stands still while an online request finds the process ended must not start it a second time."""
    sequences = random_sequences(40)
    transport = Fragile(str(reference_folder), lambda _: False)
    engine = VllmEngine(transport, describe_reference(str(reference_folder), "float32"))
    job = engine.passes(sequences)
    values = dict(next(job))
    transport.ended = True
    assert len(engine.score(sequences[:3])) == 3
    for landed in job:
        values.update(landed)
    assert len(values) == 40
    assert transport.deaths == 1


def test_options_are_read_and_those_that_change_values_refused():
    read = parse_options(["gpu_memory_utilization=0.8", "enforce_eager=true", "attention_backend=FLASHINFER"])
    assert read == {"gpu_memory_utilization": 0.8, "enforce_eager": True, "attention_backend": "FLASHINFER"}
    for entry in ("quantization=fp8", "hf_overrides={}", "speculative_config={}", "no-equals"):
        with pytest.raises(UsageError):
            parse_options([entry])


@pytest.mark.parametrize(
    ("rope", "outcome"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, EngineError),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "default", "rope_theta": 10_000.0}, -1),
    ],
)
def test_rotary_embeddings_that_vllm_fixes_once(reference_folder, tmp_path, rope, outcome):
    import shutil

    folder = shutil.copytree(reference_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    reference = describe_reference(str(folder), "bfloat16", lm_head_dtype="float32")
    if outcome is EngineError:
        with pytest.raises(EngineError, match="--engine torch"):
            vllm_options(str(folder), reference, 1, False, {})
        return
    options = vllm_options(str(folder), reference, 2, False, {"max_num_seqs": 8}).options
    assert options["max_model_len"] == outcome
    for length in (outcome + 1, -1, "1k"):
        if outcome > 0:
            with pytest.raises(UsageError, match=f"from 1 to {outcome}"):
                vllm_options(str(folder), reference, 2, False, {"max_model_len": length})
        elif length != "1k":
            assert vllm_options(str(folder), reference, 2, False, {"max_model_len": length}).options["max_model_len"] == length
    assert vllm_options(str(folder), reference, 2, False, {"max_model_len": 64}).options["max_model_len"] == 64
    assert options["hf_overrides"] == {"head_dtype": "float32"}
    assert (options["tensor_parallel_size"], options["max_num_seqs"]) == (2, 8)


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
        ("Gemma 3", None, "image tokens of gemma3 models use causal instead of bidirectional attention"),
        ("InternVL", None, "not been verified for internvl models"),
    ],
)
def test_which_models_vllm_is_asked_for_images_of(tmp_path, family, change, reason):
    vision_models.make(family, tmp_path)
    if change is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        change(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
    loading = vllm_options(str(tmp_path), describe_reference(str(tmp_path), "float32"), 1, False, {})
    if reason is None:
        assert loading.no_images is None
        assert loading.options["limit_mm_per_prompt"] == {"image": 64} and not loading.options["skip_tokenizer_init"]
    else:
        assert reason in loading.no_images
        assert loading.options["language_model_only"] is True


def test_a_model_of_text_is_loaded_as_before(reference_folder):
    loading = vllm_options(str(reference_folder), describe_reference(str(reference_folder), "float32"), 1, False, {})
    assert loading.no_images == "the model takes text only"
    assert loading.options["skip_tokenizer_init"] is True and "language_model_only" not in loading.options


def test_a_pass_holds_few_bytes_of_images(reference_folder, monkeypatch):
    """An image counts once for a pass; one that is too large by itself is a pass of its own."""
    monkeypatch.setattr(vllm_engine, "_IMAGE_BYTES", 256)
    transport = Fragile(str(reference_folder), lambda _: False)
    transport.token_budget = 10_000
    engine = VllmEngine(transport, describe_reference(str(reference_folder), "float32"))
    kind = ((8, 8), "RGB")
    small, large, huge = (RowImage(bytes([size % 256]) * 16, kind, bytes(size)) for size in (100, 120, 300))
    held = [[small], [small], [large], [small, large], [huge], [], [large]]
    sequences = {}
    for at, images in enumerate(held):
        shown = SequenceImages(tuple(images), (4,) * len(images), None, True) if images else None
        sequences[at] = Sequence([5] * 8, [6], images=shown)
    assert list(engine._split(sequences, list(sequences))) == [[0, 1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ({"engine": "remote"}, "requires a url"),
        ({"tensor_parallel": 2}, "tensor_parallel is a setting of engine vllm"),
        ({"engine": "vllm", "url": "http://x"}, "url is a setting of engine remote"),
        ({"engine": "vllm", "vllm_options": {"seed": 1}}, "vLLM option seed cannot be set"),
        ({"engine": "vllm", "vllm_options": {"pipeline_parallel_size": 0}}, "pipeline_parallel_size=0: use an integer from 1"),
        ({"engine": "vllm", "vllm_options": {"pipeline_parallel_size": "2"}}, "parallel_size='2': use an integer from 1"),
    ],
)
def test_a_services_settings_fit_the_engine(tmp_path, reference, complaint):
    with pytest.raises(UsageError, match=complaint):
        read_settings(store=str(tmp_path), references={"sft": {"model": "/m", **reference}})


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({}, 1),
        ({"engine": "vllm", "tensor_parallel": 4}, 4),
        ({"engine": "vllm", "tensor_parallel": 2, "vllm_options": {"pipeline_parallel_size": 3}}, 6),
        ({"engine": "remote", "url": "http://x"}, 0),
    ],
)
def test_each_engine_has_the_gpus_of_all_its_layers_and_stages(tmp_path, settings, gpus):
    reference = read_settings(store=str(tmp_path), references={"sft": {"model": "/m", **settings}}).references["sft"]
    assert reference.gpus() == gpus


@pytest.mark.parametrize("lacks", ["vllm", "reflogp"])
def test_an_environment_without_vllm_or_reflogp_is_named(lacks, reference_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = Path(sys.executable)
    if lacks == "reflogp":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
        python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(UsageError, match=r"lacks vLLM or reflogp.*--vllm-python or in REFLOGP_VLLM_PYTHON"):
        EngineChoice("vllm", vllm_python=str(python)).make(
            str(reference_folder), describe_reference(str(reference_folder), "float32")
        )


class _ServerWithPoison(BaseHTTPRequestHandler):
    """Answers requests for log-probs as vLLM does, with -1 for each token, and fails with sequences that have the token 7."""

    def do_GET(self):
        self._send(200, {"data": [{"id": "model", "max_model_len": 100}]} if self.path == "/v1/models" else {"version": "1"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids, settings = body["token_ids"], body["sampling_params"]
        if 7 in ids:
            self._send(500, {"error": {"message": "the engine failed"}})
            return
        count = len(ids) - 1 - settings["prompt_logprob_start"]
        packed = io.BytesIO()
        np.save(packed, np.full((count, 1), -1, np.float32))
        self._send(200, {"prompt_token_id_logprobs": base64.b64encode(packed.getvalue()).decode()})

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
    with ThreadingHTTPServer(("127.0.0.1", 0), _ServerWithPoison) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        connection = VllmServer(f"http://127.0.0.1:{server.server_port}", patience_seconds=60)
        engine = VllmEngine(connection, describe_reference(str(reference_folder), "float32"))
        outcomes = dict(engine.stream(sequences))
        engine.close()
        server.shutdown()
    problem = outcomes.pop(others // 2)
    assert isinstance(problem, str) and "failed 3 times with this sequence" in problem and "the engine failed" in problem
    assert len(outcomes) == others and all(values.tolist() == [-1, -1] for values in outcomes.values())
