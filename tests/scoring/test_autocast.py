"""float32 weights under torch.autocast: values beside plain forward passes and beside TRL's own, and who refuses it."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from reflogp.client import Client
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.torch_engine import Sequence, TorchEngine, attention, cpu_attention
from reflogp.service.settings import ReferenceSettings
from reflogp.store import Store, UsageError, describe_reference
from tests.conftest import plain_token_logps
from tests.service.serving import serving
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


@pytest.mark.parametrize("path", ["packed", "padded", "single"])
def test_every_path_agrees(path, tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(8)
    engine = quiet_engine(tmp_path, "bfloat16-autocast")
    assert engine.self_check.path == "packed"
    rejected = {"packed": [], "padded": ["packed"], "single": ["packed", "padded"]}[path]
    engine.self_check = replace(engine.self_check, path=path, rejected=dict.fromkeys(rejected, "for this test"))
    assert rms(engine.score(sequences), plain_autocast(tmp_path, sequences)) < 0.005


@pytest.mark.slow
def test_values_are_those_of_trls_own_pass(reference_folder, pair_rows, tokenizer):
    """Of its fused head as well: padded batches of 8 pairs, as its precomputation runs under TRL's defaults."""
    from tests.scoring.test_engine import tokenized_pairs

    sequences = tokenized_pairs(pair_rows[:32], tokenizer)
    theirs = trl_token_logps(reference_folder, sequences, autocast=torch.bfloat16)
    apart = {d: rms(TorchEngine(str(reference_folder), d).score(sequences), theirs) for d in ("bfloat16", "bfloat16-autocast")}
    assert apart["bfloat16-autocast"] < apart["bfloat16"] / 4


def test_float16(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(8)
    engine = TorchEngine(str(tmp_path), "float16-autocast")
    assert engine.provenance()["dtype"] == "float16-autocast"
    assert rms(engine.score(sequences), plain_autocast(tmp_path, sequences, torch.float16)) < 0.001


def test_a_float32_head_leaves_autocast(tmp_path):
    """`cast_lm_head_to_fp32` of TRL: hidden states and weights of the head in float32, outside autocast."""
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.ids())
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
            logps = torch.log_softmax(model.lm_head(hidden.float()), -1)
        start = len(sequence.prompt_ids)
        expected.append(logps[torch.arange(start - 1, len(ids) - 1), ids[start:]].numpy())
    mixed = TorchEngine(str(tmp_path), "bfloat16-autocast", lm_head_dtype="float32").score(sequences)
    rounded = TorchEngine(str(tmp_path), "bfloat16-autocast").score(sequences)
    assert rms(mixed, expected) < rms(rounded, expected) / 2


def test_temperature_divides_the_rounded_logits(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(4)
    values = TorchEngine(str(tmp_path), "bfloat16-autocast").score(sequences, temperature=0.7)
    assert rms(values, plain_autocast(tmp_path, sequences, temperature=0.7)) < 0.01


@pytest.mark.slow
def test_a_compiled_model_agrees(tmp_path):
    build("Qwen2").save_pretrained(tmp_path)
    sequences = some_pairs(8)
    engine = TorchEngine(str(tmp_path), "bfloat16-autocast", compile_layers=True)
    assert engine.self_check.compiled
    plain = plain_autocast(tmp_path, sequences)
    assert rms(engine.score(sequences), plain) < rms(TorchEngine(str(tmp_path), "bfloat16").score(sequences), plain)


def test_an_adapter_runs_under_autocast_too(reference_folder, tmp_path):
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32), config).eval()
    tuned.save_pretrained(tmp_path)
    sequences = [Sequence(list(range(3, 40)), list(range(40, 70))), Sequence([5, 9, 7], list(range(100, 150)))]
    ours = TorchEngine(str(tmp_path), "bfloat16-autocast").score(sequences)
    for values, sequence in zip(ours, sequences, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = plain_token_logps(tuned, sequence.prompt_ids, sequence.completion_ids)
        assert np.sqrt(np.mean((values - theirs) ** 2)) < 0.01


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


@pytest.mark.parametrize("length", [40, 300, 1100])
def test_the_cpu_kernel_rounds_as_torchs_does(length):
    """Few roundings may differ, by the order of float32 sums: before, one in eight did, and a sum was 0.05 nats off."""
    if not torch.cpu.get_capabilities().get("avx512_bf16") or cpu_attention.problem(64, 64):
        pytest.skip("this CPU does not multiply bfloat16, or there is no compiler")
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, length, 64, generator=random).bfloat16() for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)
    spans = torch.tensor([[0, length, 0]])
    ours = cpu_attention.attend(query[0], key[0], value[0], spans, torch.arange(length), 0.125, None)
    assert float((ours != theirs).float().mean()) < 0.01


def test_each_numerics_has_an_id_and_the_old_ones_keep_theirs(reference_folder):
    dtypes = ("float32", "bfloat16", "float16", "bfloat16-autocast", "float16-autocast")
    found = {dtype: describe_reference(str(reference_folder), dtype) for dtype in dtypes}
    assert len({reference.reference_id for reference in found.values()}) == 5
    assert found["bfloat16-autocast"].lm_head_dtype == "bfloat16-autocast"
    float32_head = describe_reference(str(reference_folder), "bfloat16-autocast", lm_head_dtype="float32")
    assert float32_head.reference_id not in {reference.reference_id for reference in found.values()}
    with pytest.raises(UsageError, match="leave it out to compute logits in the model's dtype"):
        describe_reference(str(reference_folder), "bfloat16", lm_head_dtype="bfloat16-autocast")


def test_other_engines_refuse_it_before_they_start(reflogp, reference_folder, pairs_file, tmp_path):
    reference = describe_reference(str(reference_folder), "bfloat16-autocast")
    for engine in ("vllm", "remote"):
        with pytest.raises(UsageError, match=f"which the {engine} engine does not support; use the torch engine"):
            EngineChoice(engine, url="http://127.0.0.1:9").make(str(reference_folder), reference)
        with pytest.raises(ValueError, match="use the torch engine"):
            extra = {"url": "http://127.0.0.1:9"} if engine == "remote" else {}
            ReferenceSettings(model=str(reference_folder), dtype="bfloat16-autocast", engine=engine, **extra)
    arguments = ("--store", tmp_path / "store", "--dtype", "bfloat16-autocast", "--engine", "vllm")
    code, _, err = reflogp("score", reference_folder, pairs_file, *arguments)
    assert code == 2
    assert "use the torch engine" in " ".join(err.split())


@pytest.mark.slow
def test_the_command_line_scores_joins_and_lists_it(reflogp, reference_folder, pairs_file, tmp_path):
    store, dtype = tmp_path / "store", ("--dtype", "bfloat16-autocast")
    assert reflogp("score", reference_folder, pairs_file, "--store", store, *dtype)[0] == 0
    assert reflogp("join", reference_folder, pairs_file, "--store", store, *dtype, "-o", tmp_path / "out.parquet")[0] == 0
    [reference] = Store(store).references()
    assert reference.dtype == "bfloat16-autocast"
    assert "in bfloat16-autocast" in reflogp("store", "ls", store)[1]


@pytest.mark.slow
def test_a_service_computes_in_it(reference_folder, tmp_path):
    sequences = [Sequence([3, 4, 5], list(range(40, 70))), Sequence([5, 9, 7], list(range(100, 150)))]
    arguments = ("--store", tmp_path / "store", "--model", f"sft={reference_folder}", "--dtype", "bfloat16-autocast")
    with serving(*arguments) as url, Client(url) as client:
        [offered] = client.references()
        found = client.score("sft", [s.prompt_ids for s in sequences], [s.completion_ids for s in sequences])
    assert offered.dtype == "bfloat16-autocast"
    expected = TorchEngine(str(reference_folder), "bfloat16-autocast").score(sequences)
    assert rms(found.token_logps, expected) < 0.005


def test_packed_attention_outside_autocast_keeps_the_dtype_it_is_given(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), "float32")
    assert engine.self_check.kernels == [attention.by_branch.__name__]
