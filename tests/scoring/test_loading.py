"""Loading: weights go from file to device, what does not fit is refused unread, memory that runs out is an error of ours."""

import asyncio
import contextlib
import gc
import io
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
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError, OutOfMemoryError
from reflogp.scoring.machine import growing_segments, without_growing_segments
from reflogp.scoring.torch_engine import Sequence, TorchEngine, load, memory, selfcheck
from reflogp.scoring.torch_engine import engine as torch_engine
from reflogp.scoring.torch_engine.load import load_model
from reflogp.scoring.vllm_engine.child import VllmProcess
from reflogp.scoring.vllm_engine.options import Loading
from reflogp.service import processes
from reflogp.service.worker.__main__ import Worker
from reflogp.service.worker.engine_loop import Engines
from reflogp.service.worker.protocol import ModelConfig, WorkerConfiguration
from reflogp.store import ReflogpError, describe_reference
from reflogp.store.checkpoint import read_checkpoint
from tools.families import build
from tools.fidelity import some_pairs

GIB = 1 << 30
CUDA = torch.device("cuda:0")


def sparse_checkpoint(folder: Path, shard_bytes: int, shards: int, dtype: str = "BF16", **config) -> Path:
    """A Llama whose weights are zeros that take no disk: files made by seeking. Shards of about `shard_bytes`.

    Each shard holds as many layers as fit; the first one the embedding, too. Heads are tied.
    """
    itemsize = {"BF16": 2, "F32": 4}[dtype]
    hidden, middle = 4096, 11264
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    per_shard = round(shard_bytes / (itemsize * sum(map(prod, layer.values()))))
    sizes = {
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": per_shard * shards,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": True,
    }
    LlamaConfig(**{**sizes, **config}, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    index = {}
    for shard in range(shards):
        tensors = {"model.embed_tokens.weight": (2048, hidden), "model.norm.weight": (hidden,)} if shard == 0 else {}
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            tensors |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        header, at = {}, 0
        for name, shape in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + prod(shape) * itemsize]}
        head = json.dumps(header).encode()
        file = f"model-{shard}.safetensors"
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(head)) + head)
            out.truncate(8 + len(head) + at)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def in_a_child(program: str) -> dict:
    """What a program prints as JSON at its end, in a process of its own, whose peak memory is its own."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


PEAK = """
    import json, sys
    def peak(name="VmHWM"):
        line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
        return int(line.split()[1]) * 1024
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "shard"), [("BF16", 5_000_000_000), ("F32", 1_600_000_000)], ids=["20 GB", "3 GB, converted"]
)
def test_loading_onto_a_device_takes_little_more_of_the_host_than_the_largest_shard(tmp_path, stored, shard, record_property):
    """The device is a stand-in: where transformers has read a tensor and copies it to its device, the copy is on "meta", which
    takes no memory; all else is what loads onto a GPU."""
    sparse_checkpoint(tmp_path, shard, 4 if stored == "BF16" else 2, stored)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    found = in_a_child(
        PEAK
        + f"""
    import torch
    from reflogp.scoring.torch_engine import load
    from transformers import core_model_loading
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
    )
    assert found["copied"] == pytest.approx(sum(sizes) / (1 if stored == "BF16" else 2), rel=0.01)
    above = found["peak"] - found["before"]
    record_property("told", f"loading: {above >> 20} MiB of the host above the start, the largest shard {max(sizes) >> 20} MiB")
    assert above <= 1.2 * max(sizes)


@pytest.mark.slow
def test_loading_on_a_cpu_holds_the_model_once(tmp_path, record_property):
    sparse_checkpoint(tmp_path, 820_000_000, 3)
    files = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    found = in_a_child(
        PEAK
        + f"""
    from reflogp.scoring.torch_engine import load
    before = peak("VmRSS")
    model = load.load_model({str(tmp_path)!r}, "bfloat16", "cpu")
    print(json.dumps({{"before": before, "peak": peak(), "mapped": ".safetensors" in open("/proc/self/maps").read()}}))
    """
    )
    above = found["peak"] - found["before"]
    record_property("told", f"loading on a CPU: {above >> 20} MiB above the start, the model {sum(files) >> 20} MiB")
    assert sum(files) * 0.9 < above <= sum(files) + 1.2 * max(files)
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


class Gpu:
    """What is asked of a GPU's memory."""

    def __init__(self, monkeypatch, free: float, total: float = 80 * GIB, count: int = 8) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(free), int(total)))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 3 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 2 * GIB)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def refusal(folder: Path, dtype: str, device: torch.device = CUDA) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        memory.require_room(read_checkpoint(folder), AutoConfig.from_pretrained(folder), dtype, device)
    return str(caught.value)


def test_bytes_needed_are_those_of_the_loaded_model(tmp_path):
    for name in ["Llama", "Llama (tied head, attention bias)", "Qwen3-MoE", "GPT-2 (learned positions)"]:
        folder = tmp_path / name
        model = build(name)
        model.save_pretrained(folder)
        for dtype in ("float32", "bfloat16"):
            loaded = load_model(str(folder), dtype, "cpu").model
            held = sum(parameter.nbytes for parameter in loaded.parameters())
            config = AutoConfig.from_pretrained(folder)
            assert memory.needed_bytes(read_checkpoint(folder), config, dtype, CUDA)[0] == held, (name, dtype)


def test_a_tied_table_that_is_stored_twice_counts_once(tmp_path):
    build("Llama (tied head, attention bias)").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    once = memory.needed_bytes(read_checkpoint(tmp_path), config, "bfloat16", CUDA)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert memory.needed_bytes(read_checkpoint(tmp_path), config, "bfloat16", CUDA) == once


def test_a_refusal_names_what_is_needed_what_is_free_and_what_works(tmp_path, monkeypatch):
    sparse_checkpoint(tmp_path, 5_000_000_000, 4)  # 20 GB in bfloat16, 40 GB in float32
    Gpu(monkeypatch, free=10 * GIB)  # and 1 GiB that torch has reserved
    said = refusal(tmp_path, "bfloat16")
    assert f"{tmp_path} does not fit in the memory of cuda:0 in bfloat16: it needs 18." in said
    assert "GiB for weights" in said and "but only 11.0 GiB are free" in said
    assert "--engine vllm --tensor-parallel 2," in said + "," and "on a machine with" not in said
    assert "--tensor-parallel 4" in refusal(tmp_path, "float32")
    mixed = refusal(tmp_path, "bfloat16-autocast")
    assert "--engine vllm --tensor-parallel 2 --dtype bfloat16" in mixed  # vLLM computes in one dtype
    Gpu(monkeypatch, free=25 * GIB, count=1)
    said = refusal(tmp_path, "float32")
    assert "--dtype bfloat16 (the model then needs 18." in said
    assert "--tensor-parallel 2 on a machine with 2 such GPUs (this machine has 1)" in said
    assert "ending the other processes that use this memory" in said
    Gpu(monkeypatch, free=25 * GIB, total=26 * GIB)
    assert "ending the other processes" not in refusal(tmp_path, "float32")


def test_as_many_gpus_as_divide_the_heads(tmp_path, monkeypatch):
    sparse_checkpoint(tmp_path, 5_000_000_000, 4, num_attention_heads=2, num_key_value_heads=2)
    Gpu(monkeypatch, free=4 * GIB)
    said = refusal(tmp_path, "bfloat16")
    assert "--tensor-parallel" not in said and "ending the other processes that use this memory" in said


def test_what_fits_is_not_refused(tmp_path, monkeypatch):
    sparse_checkpoint(tmp_path, 5_000_000_000, 4)
    Gpu(monkeypatch, free=19 * GIB)
    memory.require_room(read_checkpoint(tmp_path), AutoConfig.from_pretrained(tmp_path), "bfloat16", CUDA)


def test_a_checkpoint_that_does_not_fit_is_not_read(tmp_path, monkeypatch):
    sparse_checkpoint(tmp_path, 5_000_000_000, 8, "F32")
    monkeypatch.setattr(load, "_weights", lambda checkpoint: pytest.fail("it was read"))
    monkeypatch.setattr(memory, "free_memory", lambda: 24 * GIB)
    with pytest.raises(EngineError, match=r"needs 36\.9 GiB .*24\.0 GiB are free.*--dtype bfloat16") as caught:
        TorchEngine(str(tmp_path), "float32", device="cpu")
    assert "vllm" not in str(caught.value)


# Memory that runs out

SAYINGS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    MemoryError(),
]


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.parametrize("error", SAYINGS, ids=[str(error)[:30] or "MemoryError" for error in SAYINGS])
def test_memory_that_runs_out_anywhere_is_an_error_of_ours(error, reference_folder, tmp_path, monkeypatch):
    assert memory.is_out_of_memory(error)
    adapter = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    places = [
        (load._Weight, "__getitem__", reference_folder),
        (torch_engine, "Head", reference_folder),
        (torch_engine, "auto_token_budget", reference_folder),
        (selfcheck, "_plain", reference_folder),
        (selfcheck, "forward_layout", reference_folder),
    ]
    for place, name, model in places:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, raising(error))
            with pytest.raises(OutOfMemoryError, match="cpu ran out of memory while"):
                TorchEngine(str(model), "float32", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("peft.PeftModel.from_pretrained", raising(error))
        with pytest.raises(OutOfMemoryError, match="the adapter"):
            TorchEngine(str(adapter), "float32", device="cpu")


@pytest.mark.parametrize(("intermediate", "expected"), [(14_336, 65_536), (36_864, 58_254)])
def test_no_activation_has_more_elements_than_32_bits_count(intermediate, expected, monkeypatch):
    """Of Gemma 2 9B and 27B; the larger one's first full pass would compile its MLP again, with 64-bit indices."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 80 << 30)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(vocab_size=256_000, intermediate_size=intermediate, **sizes))
    budget = memory.auto_token_budget(model, torch.device("cuda:0"), torch.bfloat16)
    assert budget == expected and budget * intermediate < 1 << 31


def test_a_halved_budget_grows_again(reference_folder, monkeypatch):
    engine = TorchEngine(str(reference_folder), "float32", device="cpu", token_budget=400)
    plain = engine.score(some_pairs(40))
    forward, left = torch_engine.forward_pack, [2]

    budgets = []

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


# Exchanged models


def test_free_memory_counts_what_torch_has_reserved_and_does_not_use(monkeypatch):
    Gpu(monkeypatch, free=10 * GIB)
    assert memory.free_bytes(CUDA) == 11 * GIB


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

    engines = Engines(make, 1, None, lambda ids: None, lambda reference_id: None)
    pairs = some_pairs(20)
    stopped = engines.get("a").passes(pairs)
    next(stopped)
    facts = held_facts(held[0], pairs)
    engines.get("b")
    assert models["a"]() is None and models["b"]() is not None
    held[0].close()  # once more
    assert held_facts(held[0], pairs) == facts
    assert engines.get("b").score(pairs[:1])[0].size


def held_facts(engine: TorchEngine, sequences: list[Sequence]) -> tuple:
    """What a job asks of its engine between passes."""
    return engine.problems(sequences), engine.token_counts(), engine.provenance()


def test_a_model_that_finds_no_room_gets_that_of_others(reference_folder):
    """The error is over before the second attempt, so nothing of the first one is in memory."""
    first_attempt = []

    class Weights:
        pass

    def make(reference_id):
        if reference_id == "large" and not first_attempt:
            weights = Weights()
            first_attempt.append(weakref.ref(weights))
            with memory.memory_errors(torch.device("cpu"), "large was loaded"):
                raise torch.OutOfMemoryError("CUDA out of memory")
        if first_attempt:
            gc.collect()
            assert first_attempt[0]() is None
        return TorchEngine(str(reference_folder), "float32", "cpu")

    engines = Engines(make, 3, "pinned", lambda ids: None, lambda reference_id: None)
    for reference_id in ("pinned", "small"):
        engines.get(reference_id)
    engines.get("large")
    assert list(engines._loaded) == ["pinned", "large"]

    def broken(reference_id):
        raise EngineError("the model cannot be loaded: no memory_efficient_attention")

    engines = Engines(broken, 3, None, lambda ids: None, lambda reference_id: None)
    with pytest.raises(EngineError, match="cannot be loaded"):
        engines.get("other")


def test_a_model_larger_than_the_device_is_refused_while_others_stay(reference_folder, tmp_path, monkeypatch):
    models = {
        describe_reference(str(reference_folder), dtype).reference_id: ModelConfig(
            str(reference_folder), dtype, None, None, {"name": "torch"}
        )
        for dtype in ("float32", "bfloat16")
    }
    there, larger = models
    limits = {"reader_bytes": GIB, "row_seconds": 10.0, "max_tokens_bytes": GIB}
    worker = Worker(
        WorkerConfiguration(
            device="cpu",
            visible=None,
            workers=1,
            sharing=1,
            token_budget=100,
            models=models,
            capacity=1,
            pinned=None,
            store=str(tmp_path / "store"),
            tokens=str(tmp_path),
            commit_seconds=30.0,
            window_seconds=0.0,
            **limits,
        ),
        io.BytesIO(),
    )
    engines = worker.loop._engines
    loaded = engines.get(there)
    monkeypatch.setattr(memory, "total_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"does not fit in the memory of cpu in bfloat16: .* device has only 0.0 GiB"):
        engines.get(larger)
    assert engines.peek(there) is loaded


# torch's allocator


def test_segments_grow_unless_the_user_said_otherwise():
    assert growing_segments({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert growing_segments({name: "max_split_size_mb:64"}) == {}
    ours = {"A": "1", **growing_segments({})}
    assert without_growing_segments(ours) == {"A": "1"}
    assert without_growing_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}) != {}


@pytest.mark.parametrize("own", ["", "max_split_size_mb:64"])
def test_workers_and_the_command_have_it_and_vllm_has_not(own, reflogp, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", own)
    if not own:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    say = (sys.executable, "-c", "import os; print(os.environ['PYTORCH_ALLOC_CONF'])")
    monkeypatch.setattr(processes, "COMMAND", say)

    async def worker() -> str:
        process = await processes.start_process()
        out, _ = await process.communicate()
        return out.decode().strip()

    assert asyncio.run(worker()) == (own or "expandable_segments:True")
    assert reflogp("--version")[0] == 0
    assert os.environ["PYTORCH_ALLOC_CONF"] == (own or "expandable_segments:True")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "Error: the setting is <$PYTORCH_ALLOC_CONF>" >&2\nexit 3\n')
    python.chmod(0o755)
    with pytest.raises(EngineError, match=f"the setting is <{own}>"):
        VllmProcess(str(python), Loading({}, None), contextlib.nullcontext)
