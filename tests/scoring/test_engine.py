import json
import random
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from reflogp.scoring.data.encode import tokenize_rows
from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.load import in_memory


def random_sequences(count: int, vocab: int = 128, longest: int = 60, seed: int = 0) -> list[Sequence]:
    source = random.Random(seed)

    def ids():
        return [source.randrange(vocab) for _ in range(source.randint(1, longest))]

    return [Sequence(ids(), ids()) for _ in range(count)]


def tokenized_pairs(rows, tokenizer) -> list[Sequence]:
    return [Sequence(p, c) for [(p, sides)] in tokenize_rows(rows, "preference", tokenizer) for c in sides]


_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
#: Sizes of a tiny model whose heads share keys.
GQA = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}


def test_a_model_in_memory_gives_the_values_of_its_checkpoint(reference_folder):
    sequences = random_sequences(20)
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    engine = TorchEngine(in_memory(model))  # neither the default dtype nor the default device
    assert engine.self_check.path == "packed" and not any(p.requires_grad for p in model.parameters())
    expected = TorchEngine(str(reference_folder), "float32").score(sequences)
    for ours, from_files in zip(engine.score(sequences), expected, strict=True):
        assert np.abs(ours - from_files).max() <= 1e-5


def test_log_probs_are_never_above_zero(tmp_path):
    """A model that is certain: bfloat16 logits of hundreds round by whole units."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**GQA))
    model.lm_head.weight.data.mul_(500)
    model.save_pretrained(tmp_path)
    assert max(float(logps.max()) for logps in TorchEngine(str(tmp_path), "bfloat16").score(random_sequences(30))) <= 0.0


def test_random_states_are_untouched(reference_folder):
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    TorchEngine(str(reference_folder), "float32").score(random_sequences(4))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_a_weight_that_the_files_lack_is_an_error_not_a_random_number(tmp_path):
    MistralForCausalLM(MistralConfig(**GQA)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="up_proj"):
        TorchEngine(str(tmp_path), "float32")


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path, reference_folder):
    shutil.copytree(reference_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(EngineError):
        TorchEngine(str(tmp_path), "float32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_running_out_of_memory_halves_the_budget_and_loses_nothing(reference_folder, tmp_path):
    """A real limit on the address space of a process of its own; then one sequence that no budget can help."""
    shutil.copytree(reference_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 2_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = f"""
        import resource
        import numpy as np, torch
        from reflogp.scoring.torch_engine import Sequence, TorchEngine
        from reflogp.scoring.errors import InvalidSequencesError
        torch.set_num_threads(1)
        engine = TorchEngine({str(tmp_path)!r}, "float32", token_budget=10_000_000)
        engine.score([Sequence([1] * 20, [2] * 20)])
        sequences = [Sequence([i % 100] * 700, [(i + 1) % 100] * 700) for i in range(60)]
        expected = TorchEngine({str(tmp_path)!r}, "float32", token_budget=1500).score(sequences[:3])
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 300_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        results = engine.score(sequences)
        assert len(results) == 60 and all(len(r) == 700 and np.isfinite(r).all() for r in results)
        assert max(np.abs(a - b).max() for a, b in zip(expected, results)) < 1e-4
        assert 1 <= engine.token_budget < 60 * 1400 and not engine.self_check.refused_kernels, engine.provenance()
        before = engine.token_budget
        long = Sequence([3] * 10, [4] * 1_000_000)
        try:
            engine.score([sequences[0], long, sequences[1]])
        except InvalidSequencesError as error:
            assert list(error.problems) == [1] and "does not fit" in error.problems[1], error.problems
            assert all(np.isfinite(error.results[i]).all() for i in (0, 2))
        else:
            raise AssertionError("the long one fitted")
        assert engine.token_budget == before
        print("budget", engine.token_budget)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "budget" in done.stdout
