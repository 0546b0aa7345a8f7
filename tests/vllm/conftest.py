"""What these tests share: a model that vLLM's CPU kernels know, sequences, and their values by a plain forward."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.torch_engine import Sequence
from reflogp.store import describe_reference
from tests.conftest import REPOSITORY, save_llama
from tests.scoring.test_engine import tokenized_pairs

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, for each vLLM that a test starts
VLLM_PYTHON = Path(os.environ.get("REFLOGP_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))


@pytest.fixture(scope="session")
def model(tokenizer, tmp_path_factory) -> str:
    """A small Llama; vLLM's CPU attention wants heads of 32 at least."""
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return str(save_llama(tmp_path_factory.mktemp("reference"), tokenizer, **size))


@pytest.fixture(scope="session")
def pairs(pair_rows, tokenizer) -> list[Sequence]:
    """The sequences of the 300 shipped pairs."""
    return tokenized_pairs(pair_rows, tokenizer)


@pytest.fixture(scope="session")
def plain_model(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load(model, dtype="float32", lm_head_dtype=None, **choice):
    """A vLLM engine on a model folder."""
    assert VLLM_PYTHON.is_file(), "make setup-vllm makes the environment of these tests"
    reference = describe_reference(str(model), dtype, lm_head_dtype=lm_head_dtype)
    return EngineChoice("vllm", vllm_python=str(VLLM_PYTHON), **choice).make(str(model), reference)


@pytest.fixture(scope="session")
def engine(model):
    """vLLM in float32, its prefix cache on."""
    engine = load(model)
    yield engine
    engine.close()
