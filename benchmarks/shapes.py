"""Make models with random weights in the shapes of Qwen2's sizes. Needs only torch and transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

#: Shapes of Qwen2 models: hidden, intermediate, layers, heads, key heads.
SHAPES = {
    "tiny": (128, 384, 4, 4, 2),
    "20M": (384, 1024, 6, 6, 2),
    "0.1B": (768, 2048, 12, 12, 4),
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "7B": (3584, 18944, 28, 28, 4),
}


def sizes_of(shape: str) -> dict[str, int]:
    """Return a shape as arguments of a transformers configuration."""
    hidden, intermediate, layers, heads, key_heads = SHAPES[shape]
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
    }


def random_model(shape: str, vocab_size: int, device: str) -> Any:
    """Return a Qwen2 of this shape in bfloat16, with random weights drawn on the device."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        **sizes_of(shape),
        max_position_embeddings=32_768,
        tie_word_embeddings=shape != "7B",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
