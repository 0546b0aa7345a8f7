"""Adapters and quantized weights as references: in the reference id, scored as peft and transformers themselves run them."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from reflogp.scoring.data.tokenize import load_tokenizer
from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.store import CheckpointError, UsageError, describe_reference
from tests.conftest import largest_error, plain_token_logps
from tests.scoring.test_engine import GQA, random_sequences


def save_adapter(base_folder, folder, std=0.3, add_tokens=0, **config):
    """Save a LoRA adapter whose weights are far from zero on a model, and return the adapted model."""
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    if add_tokens:
        base.resize_token_embeddings(base.config.vocab_size + add_tokens)
    torch.manual_seed(4)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 16, **config}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def adapter(reference_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(reference_folder, folder, target_modules=["q_proj", "v_proj", "down_proj"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compile_layers", "most"), [("float32", False, 1e-4), ("float32", True, 1e-4), ("bfloat16-autocast", False, 0.01)]
)
def test_an_adapter_is_scored_as_peft_itself_runs_it(adapter, reference_folder, dtype, compile_layers, most):
    base = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    expected_model = PeftModel.from_pretrained(base, adapter).eval()
    sequences = random_sequences(12)
    engine = TorchEngine(str(adapter), dtype, compile_layers=compile_layers)
    assert engine.self_check.path == "packed"
    plain_base = TorchEngine(str(reference_folder), dtype).score(sequences)
    for ours, sequence, without in zip(engine.score(sequences), sequences, plain_base, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != "float32"):
            plain = plain_token_logps(expected_model, sequence.prompt_ids, sequence.completion_ids)
        error = np.abs(ours - plain).max() if dtype == "float32" else np.sqrt(np.mean((ours - plain) ** 2))
        assert error <= most < np.abs(ours - without).max(), "and the adapter does something"


def test_an_adapter_on_the_head_is_not_overlooked(reference_folder, tmp_path):
    model, sequences = save_adapter(reference_folder, tmp_path, 0.01, target_modules=["lm_head"]), random_sequences(6)
    assert largest_error(TorchEngine(str(tmp_path), "float32").score(sequences), model, sequences) <= 1e-4


def test_an_adapter_that_was_trained_with_new_tokens(reference_folder, tmp_path):
    trained = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    model, size = save_adapter(reference_folder, tmp_path, add_tokens=2, **trained), len(load_tokenizer(str(reference_folder)))
    sequences = [Sequence([5, size, 6], [size + 1, 7, 8])]
    assert largest_error(TorchEngine(str(tmp_path), "float32").score(sequences), model, sequences) <= 1e-4


def test_an_adapter_that_acts_only_in_pefts_own_forward_is_refused(reference_folder, tmp_path):
    save_adapter(reference_folder, tmp_path, target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    with pytest.raises(EngineError, match="aLoRA"):
        TorchEngine(str(tmp_path), "float32")


def test_an_adapters_folder_without_a_tokenizer_has_its_bases(adapter, reference_folder):
    assert load_tokenizer(str(adapter)).get_vocab() == load_tokenizer(str(reference_folder)).get_vocab()


def test_what_is_missing_is_named(adapter, tmp_path):
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        describe_reference(str(pickled))
    lost = shutil.copytree(adapter, tmp_path / "lost")
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/no/such/base"}))
    with pytest.raises(UsageError, match="/no/such/base"):
        describe_reference(str(lost))


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    ],
    ids=["8-bit", "4-bit"],
)
def test_a_quantized_checkpoint_is_scored_as_transformers_runs_it(settings, tmp_path):
    torch.manual_seed(0)
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    sizes = {"hidden_size": 128, "intermediate_size": 256}  # that 4-bit blocks divide
    LlamaForCausalLM(LlamaConfig(**{**GQA, **sizes}, initializer_range=0.1)).save_pretrained(plain)
    quantization = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=quantization, device_map={"": "cpu"}, dtype=torch.float32
    )
    model.save_pretrained(quantized)
    sequences = random_sequences(8)
    engine = TorchEngine(str(quantized), "float32", device="cpu")
    if "load_in_4bit" in settings:  # 8-bit looks for outliers over the whole pass, so it may be left to go one by one
        assert engine.self_check.path == "packed"
    assert largest_error(engine.score(sequences), model, sequences) <= 1e-4
    ids = {describe_reference(str(folder), "float32").reference_id for folder in (plain, quantized)}
    assert len(ids) == 2
