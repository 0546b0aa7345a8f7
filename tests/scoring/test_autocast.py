"""float32 weights under torch.autocast: values beside plain forward passes and beside TRL's own, and who refuses it."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.service.settings import ReferenceSettings
from reflogp.store import UsageError, describe_reference
from tests.scoring.test_engine import tokenized_pairs
from tools.families import build
from tools.fidelity import rms, some_pairs, trl_token_logps

#: One of each kind of attention, head, path and of experts.
KINDS = [
    "Llama",
    "Qwen3-MoE",
    "Gemma 2 (soft caps, sliding window 8)",
    "gpt-oss (sinks, sliding window 8)",
    "Phi (partial rotary, biased head)",
    "Granite (scaled embeddings, logits)",
    "GPT-2 (learned positions)",
    "Mixtral",
    "Falcon",
]


def plain_autocast(folder, sequences: list[Sequence], dtype=torch.bfloat16, temperature: float = 1.0) -> list[np.ndarray]:
    """log p by transformers alone: float32 weights, torch.autocast, one unpadded sequence a pass, log-softmax in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        logits = [model(input_ids=torch.from_numpy(s.ids())[None], use_cache=False).logits[0] for s in sequences]
    assert {found.dtype for found in logits} == {dtype}
    values = []
    for found, sequence in zip(logits, sequences, strict=True):
        logps = torch.log_softmax(found.float() / temperature, -1)
        start, ids = len(sequence.prompt_ids), torch.from_numpy(sequence.ids())
        values.append(logps[torch.arange(start - 1, len(ids) - 1), ids[start:]].numpy())
    return values


def quiet_engine(folder, dtype: str, **options) -> TorchEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TorchEngine(str(folder), dtype, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_a_plain_forward_under_autocast(name, tmp_path):
    """Nearer than the values of either plain dtype: those round elsewhere, these only sum in another order."""
    build(name).save_pretrained(tmp_path)
    sequences = some_pairs(8)
    plain = plain_autocast(tmp_path, sequences)
    apart = {
        dtype: rms(quiet_engine(tmp_path, dtype).score(sequences), plain)
        for dtype in ("bfloat16", "float32", "bfloat16-autocast")
    }
    assert apart["bfloat16-autocast"] < min(apart["bfloat16"], apart["float32"]) / 2
    assert apart["bfloat16-autocast"] < 0.02


@pytest.mark.parametrize(
    ("dtype", "path", "temperature", "most"),
    [
        ("bfloat16", "packed", 1.0, 0.005),
        ("bfloat16", "padded", 1.0, 0.005),
        ("bfloat16", "single", 1.0, 0.005),
        ("bfloat16", "packed", 0.7, 0.01),
        ("float16", "packed", 1.0, 0.001),
    ],
)
def test_every_path_dtype_and_temperature(dtype, path, temperature, most, tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(8)
    engine = quiet_engine(tmp_path, f"{dtype}-autocast")
    assert engine.self_check.path == "packed" and engine.provenance()["dtype"] == f"{dtype}-autocast"
    rejected = {"packed": [], "padded": ["packed"], "single": ["packed", "padded"]}[path]
    engine.self_check = replace(engine.self_check, path=path, rejected=dict.fromkeys(rejected, "for this test"))
    plain = plain_autocast(tmp_path, sequences, getattr(torch, dtype), temperature)
    assert rms(engine.score(sequences, temperature=temperature), plain) < most


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-autocast"])
def test_a_float32_head_is_outside_of_the_models_dtype(dtype, tmp_path):
    """`cast_lm_head_to_fp32` of TRL: hidden states and weights of the head in float32."""
    build("Llama").save_pretrained(tmp_path)
    sequences, is_mixed = some_pairs(16), dtype.endswith("autocast")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32 if is_mixed else torch.bfloat16).eval()
    expected = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.ids())
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
                hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
            logps = torch.log_softmax(hidden.float() @ model.lm_head.weight.float().T, -1)
        start = len(sequence.prompt_ids)
        expected.append(logps[torch.arange(start - 1, len(ids) - 1), ids[start:]].numpy())
    own, half = (TorchEngine(str(tmp_path), dtype, lm_head_dtype=head).score(sequences) for head in ("float32", None))
    assert rms(own, expected) < rms(half, expected) / (2 if is_mixed else 1)


@pytest.mark.slow
def test_values_are_those_of_trls_own_pass(reference_folder, pair_rows, tokenizer):
    """Of its fused head as well: padded batches of 8 pairs, as its precomputation runs under TRL's defaults."""
    sequences = tokenized_pairs(pair_rows[:32], tokenizer)
    theirs = trl_token_logps(reference_folder, sequences, autocast=torch.bfloat16)
    apart = {d: rms(TorchEngine(str(reference_folder), d).score(sequences), theirs) for d in ("bfloat16", "bfloat16-autocast")}
    assert apart["bfloat16-autocast"] < apart["bfloat16"] / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-autocast"])
def test_autocast_around_the_caller_changes_nothing(dtype, tmp_path):
    """A trainer that scores inside its own autocast gets the values that the reference id names."""
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(4)
    engine = TorchEngine(str(tmp_path), dtype)
    values = engine.score(sequences)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = TorchEngine(str(tmp_path), dtype)
        again = engine.score(sequences)
    assert inside.self_check.difference == engine.self_check.difference
    for a, b in zip(values, again, strict=True):
        assert np.array_equal(a, b)


def test_a_head_cannot_be_under_autocast_alone(reference_folder):
    with pytest.raises(UsageError, match="leave it out to compute logits in the model's dtype"):
        describe_reference(str(reference_folder), "bfloat16", lm_head_dtype="bfloat16-autocast")


@pytest.mark.parametrize(("engine", "options"), [("vllm", {}), ("remote", {"url": "http://127.0.0.1:9"})])
def test_other_engines_refuse_it_before_they_start(engine, options, reflogp, reference_folder, pairs_file, tmp_path):
    with pytest.raises(ValueError, match="use the torch engine"):
        ReferenceSettings(model=str(reference_folder), dtype="bfloat16-autocast", engine=engine, **options)
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    arguments = ("--store", tmp_path / "store", "--dtype", "bfloat16-autocast", "--engine", engine, *more)
    code, _, err = reflogp("score", reference_folder, pairs_file, *arguments)
    assert code == 2 and f"which the {engine} engine does not support; use the torch engine" in " ".join(err.split())
