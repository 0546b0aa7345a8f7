"""Loading: weights go from file to device, what does not fit is refused unread, memory that runs out is an error of ours."""

import contextlib
import gc
import json
import os
import struct
import subprocess
import sys
import textwrap
import weakref
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError, OutOfMemoryError
from reflogp.scoring.machine import growing_segments, without_growing_segments
from reflogp.scoring.torch_engine import TorchEngine, load, memory, selfcheck
from reflogp.scoring.torch_engine import engine as torch_engine
from reflogp.scoring.torch_engine.load import load_model
from reflogp.service.worker.engine_loop import Engines
from reflogp.store import ReflogpError, describe_reference
from reflogp.store.checkpoint import read_checkpoint
from tools.families import build
from tools.fidelity import some_pairs

GIB = 1 << 30
CUDA = torch.device("cuda:0")


def sparse_checkpoint(folder: Path, layers: int, shards: int, dtype: str = "BF16") -> Path:
    """A Llama whose weights are zeros that take no disk: files made by seeking. A layer has 206 million weights."""
    sizes = {"vocab_size": 2048, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in LlamaForCausalLM(config).named_parameters()}
    index = {}
    for shard, names in enumerate(np.array_split(list(shapes), shards)):
        header, at = {}, 0
        for name in names.tolist():
            end = at + prod(shapes[name]) * {"BF16": 2, "F32": 4}[dtype]
            header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [at, at := end]}
        head = json.dumps(header).encode()
        with (folder / f"model-{shard}.safetensors").open("wb") as out:
            out.write(struct.pack("<Q", len(head)) + head)
            out.truncate(8 + len(head) + at)
        index |= dict.fromkeys(header, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "layers", "shards"), [("BF16", 48, 4), ("F32", 4, 2)], ids=["20 GB", "3 GB, converted"])
def test_loading_onto_a_device_takes_little_more_of_the_host_than_the_largest_shard(tmp_path, stored, layers, shards):
    """The device is a stand-in: where transformers has read a tensor and copies it to its device, the copy is on "meta", which
    takes no memory; all else is what loads onto a GPU."""
    sparse_checkpoint(tmp_path, layers, shards, stored)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    program = f"""
    import json
    import torch
    from reflogp.scoring.torch_engine import load
    from transformers import core_model_loading
    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    core_model_loading.GLOBAL_WORKERS = 4  # as on a machine with as many cores
    read, at_device = core_model_loading._materialize_copy, []
    def to_device(tensor, device=None, dtype=None):
        here = read(tensor, "cpu", dtype)          # read and converted as a blocking copy to a GPU does it
        assert here.dtype == torch.bfloat16
        at_device.append(here.nbytes)
        return here.to("meta")
    core_model_loading._materialize_copy = to_device
    load.require_room = lambda *arguments: None  # the host itself has no room for it
    before = peak()
    load.load_model({str(tmp_path)!r}, "bfloat16", "cpu")
    print(json.dumps({{"before": before, "peak": peak(), "copied": sum(at_device)}}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["copied"] == pytest.approx(sum(sizes) / (1 if stored == "BF16" else 2), rel=0.01)
    assert found["peak"] - found["before"] <= 1.2 * max(sizes)


@pytest.mark.slow
def test_loading_on_a_cpu_holds_the_model_once(tmp_path):
    sparse_checkpoint(tmp_path, 7, 3)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    program = f"""
    import json
    from reflogp.scoring.torch_engine import load
    def held(name):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
    before = held("VmRSS")
    model = load.load_model({str(tmp_path)!r}, "bfloat16", "cpu")
    print(json.dumps({{"above": held("VmHWM") - before, "mapped": ".safetensors" in open("/proc/self/maps").read()}}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(sizes) * 0.9 < found["above"] <= sum(sizes) + 1.2 * max(sizes)
    assert not found["mapped"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["Llama", "Llama (tied head, attention bias)", "Qwen3-MoE", "gpt-oss (sinks, sliding window 8)", "Phi-3"]
)
def test_weights_are_those_that_transformers_loads(name, dtype, tmp_path):
    build(name).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_model(str(tmp_path), dtype, "cpu").model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    same = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    mine = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert mine.keys() == same.keys()
    for key, tensor in same.items():
        assert tensor.dtype == mine[key].dtype
        assert torch.equal(tensor, mine[key]), key
    is_tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == is_tied


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error(reference_folder, tmp_path, monkeypatch):
    """A file that is mapped into memory would end the process here."""
    for file in reference_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    reference, model_class = describe_reference(str(tmp_path), "float32"), load._model_class

    class Cutting:
        @staticmethod
        def from_pretrained(*args, **options):
            os.truncate(tmp_path / "model.safetensors", 20_000)
            whole = AutoConfig.from_pretrained(reference_folder)
            return model_class(whole, False)[0].from_pretrained(*args, **options)

    monkeypatch.setattr(load, "_model_class", lambda *arguments: (Cutting, 1))
    with pytest.raises(ReflogpError, match=r"model\.safetensors (was changed|is truncated)"):
        EngineChoice(device="cpu").make(str(tmp_path), reference)


# What does not fit


@pytest.mark.parametrize(
    ("dtype", "free", "total", "says"),
    [
        ("bfloat16", 10, 80, ["needs 18.", "GiB for weights", "11.0 GiB are free", "--tensor-parallel", "ending the other"]),
        ("float32", 25, 26, ["--dtype bfloat16 (the model then needs 18.", "--tensor-parallel"]),
        ("bfloat16-autocast", 10, 80, ["ending the other"]),
        ("bfloat16", 19, 80, []),
    ],
)
def test_a_refusal_names_what_is_needed_what_is_free_and_what_works(dtype, free, total, says, tmp_path, monkeypatch):
    """A model of 20 GB in bfloat16 and 40 GB in float32; torch holds 1 GiB of the GPU, which it does not use."""
    sparse_checkpoint(tmp_path, 48, 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free * GIB, total * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 2 * GIB)
    config = AutoConfig.from_pretrained(tmp_path)
    _, parameters = load._model_class(config, False)
    with pytest.raises(OutOfMemoryError) if says else contextlib.nullcontext() as caught:
        memory.require_room(read_checkpoint(tmp_path), config, dtype, CUDA, parameters)
    for part in ("needs 18.", "--dtype bfloat16", "--tensor-parallel", "ending the other", *says):
        if says:
            assert (part in str(caught.value)) == (part in " ".join(says)), part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama", "Llama (tied head, attention bias)", "Qwen3-MoE", "GPT-2 (learned positions)"])
def test_bytes_needed_are_those_of_the_loaded_model(name, dtype, tmp_path):
    build(name).save_pretrained(tmp_path)
    held = sum(parameter.nbytes for parameter in load_model(str(tmp_path), dtype, "cpu").model.parameters())
    config = AutoConfig.from_pretrained(tmp_path)
    _, parameters = load._model_class(config, False)
    assert memory.needed_bytes(read_checkpoint(tmp_path), config, dtype, CUDA, parameters)[0] == held


def test_a_checkpoint_that_does_not_fit_is_not_read(tmp_path, monkeypatch):
    sparse_checkpoint(tmp_path, 48, 8, "F32")
    monkeypatch.setattr(load, "_weights", lambda checkpoint: pytest.fail("it was read"))
    monkeypatch.setattr(memory, "free_memory", lambda: 24 * GIB)
    with pytest.raises(EngineError, match=r"needs 36\.9 GiB .*24\.0 GiB are free.*--dtype bfloat16") as caught:
        TorchEngine(str(tmp_path), "float32", device="cpu")
    assert "vllm" not in str(caught.value)


@pytest.mark.parametrize(("intermediate", "expected"), [(14_336, 65_536), (36_864, 58_254)])
def test_no_activation_has_more_elements_than_32_bits_count(intermediate, expected, monkeypatch):
    """Of Gemma 2 9B and 27B; the larger one's first full pass would compile its MLP again, with 64-bit indices."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 80 << 30)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(vocab_size=256_000, intermediate_size=intermediate, **sizes))
    budget = memory.auto_token_budget(model, torch.device("cuda:0"), torch.bfloat16)
    assert budget == expected and budget * intermediate < 1 << 31


# Memory that runs out

SAYINGS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SAYINGS, ids=[str(error)[:30] or "MemoryError" for error in SAYINGS])
def test_memory_that_runs_out_anywhere_is_an_error_of_ours(error, reference_folder, monkeypatch):
    def fail(*args, **options):
        raise error

    for place, name in ((load._Weight, "__getitem__"), (torch_engine, "Head"), (selfcheck, "forward_layout")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(OutOfMemoryError, match="cpu ran out of memory while"):
                TorchEngine(str(reference_folder), "float32", device="cpu")


def test_a_halved_budget_grows_again(reference_folder, monkeypatch):
    engine = TorchEngine(str(reference_folder), "float32", device="cpu", token_budget=400)
    plain = engine.score(some_pairs(40))
    forward, left, budgets = torch_engine.forward_pack, [2], []

    def full(model, head, pack, *args):
        budgets.append(engine.token_budget)
        if left[0] and len(pack) > 150:
            left[0] -= 1
            raise SAYINGS[0]
        return forward(model, head, pack, *args)

    monkeypatch.setattr(torch_engine, "forward_pack", full)
    monkeypatch.setattr(torch_engine, "_GOOD_PASSES", 5)
    for _ in range(3):
        values = engine.score(some_pairs(40))
        assert max(float(np.abs(a - b).max()) for a, b in zip(values, plain, strict=True)) < 1e-4
    least = min(budgets)
    assert least < 200 and not left[0]
    grown = budgets[budgets.index(least) :]
    assert list(dict.fromkeys(grown)) == [min(least << doubled, 400) for doubled in range(len(set(grown)))]
    assert engine.token_budget == 400


@pytest.mark.slow
@pytest.mark.parametrize("compile_layers", [False, True])
def test_an_exchanged_model_is_gone_before_the_next_one_loads(compile_layers, reference_folder):
    """Whoever still holds the engine, as a job's thread does, and a stream that stopped half way, hold no weights."""
    models, held = {}, []

    def make(reference_id):
        assert all(model() is None for model in models.values()), "the last model is still in memory"
        engine = TorchEngine(str(reference_folder), "float32", "cpu", token_budget=100, compile_layers=compile_layers)
        models[reference_id] = weakref.ref(engine._loaded.model.lm_head.weight)
        held.append(engine)
        return engine

    def facts():  # what a job asks of its engine between passes
        return held[0].problems(pairs), held[0].token_counts(), held[0].provenance()

    engines, pairs = Engines(make, 1, None, lambda ids: None, lambda reference_id: None), some_pairs(20)
    stopped = engines.get("a").passes(pairs)
    next(stopped)
    before = facts()
    engines.get("b")
    assert models["a"]() is None and models["b"]() is not None
    assert facts() == before and engines.get("b").score(pairs[:1])[0].size


def test_a_model_that_finds_no_room_gets_that_of_others_but_the_pinned_one(reference_folder):
    """The error is over before the second attempt, so nothing of the first one is in memory."""

    class Weights:
        pass

    attempts = []

    def make(reference_id):
        if reference_id == "large" and not attempts:
            weights = Weights()
            attempts.append(weakref.ref(weights))
            with memory.memory_errors(torch.device("cpu"), "large was loaded"):
                raise torch.OutOfMemoryError("CUDA out of memory")
        gc.collect()
        assert all(attempt() is None for attempt in attempts)
        return TorchEngine(str(reference_folder), "float32", "cpu")

    engines = Engines(make, 3, "pinned", lambda ids: None, lambda reference_id: None)
    for reference_id in ("pinned", "small", "large"):
        engines.get(reference_id)
    assert list(engines._loaded) == ["pinned", "large"]


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}])
def test_segments_of_gpu_memory_grow_unless_the_user_said_otherwise_and_not_for_vllm(own):
    grown = {**own, **growing_segments(own)}
    assert grown == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert without_growing_segments(grown) == own
