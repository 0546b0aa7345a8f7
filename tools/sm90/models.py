"""Models of many families in the widths of published models, with two layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Family:
    """A model to compile.

    Attributes:
        kind: transformers' `model_type`.
        sizes: hidden size, intermediate size, heads, key heads, rows of the vocabulary.
        more: further fields of the configuration.
    """

    name: str
    kind: str
    sizes: tuple[int, int, int, int, int]
    more: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}"

    def build(self) -> Any:
        """Return the model, with two layers. Its weights are drawn or, with fake tensors, have no values."""
        hidden, intermediate, heads, key_heads, vocabulary = self.sizes
        config = AutoConfig.for_model(
            self.kind,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=vocabulary,
            num_hidden_layers=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.more,
        )
        return AutoModelForCausalLM.from_config(config, dtype=self.dtype)


_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_QWEN2_7B = ("qwen2", (3584, 18944, 28, 4, 152_064), {"max_position_embeddings": 32_768})
_LATENT_SIZES = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LATENT = (
    "deepseek_v3",
    (2048, 10944, 16, 16, 102_400),
    {**_LATENT_SIZES, "first_k_dense_replace": 2, "n_routed_experts": 0, "max_position_embeddings": 8192},
)
_GEMMA2 = {"sliding_window": 4096, **_TWO_KINDS}
_GEMMA4 = {"head_dim": 256, "sliding_window": 1024, "hidden_size_per_layer_input": 0, **_TWO_KINDS}
_GPT_OSS = {"head_dim": 64, "sliding_window": 128, "num_local_experts": 32, **_TWO_KINDS}

FAMILIES = (
    Family(
        "Qwen2 0.5B", "qwen2", (896, 4864, 14, 2, 151_936), {"tie_word_embeddings": True, "max_position_embeddings": 32_768}
    ),
    Family("Qwen2 7B", *_QWEN2_7B),
    Family("Llama 3 8B", "llama", (4096, 14336, 32, 8, 128_256), {"max_position_embeddings": 8192}),
    Family("Qwen3 8B", "qwen3", (4096, 12288, 32, 8, 151_936), {"head_dim": 128}),
    Family("Mistral 7B (window 4096)", "mistral", (4096, 14336, 32, 8, 32_000), {"sliding_window": 4096}),
    Family("Gemma 2 9B", "gemma2", (3584, 14336, 16, 8, 256_000), {"head_dim": 256, **_GEMMA2}),
    Family("Gemma 2 27B", "gemma2", (4608, 36864, 32, 16, 256_000), {"head_dim": 128, "query_pre_attn_scalar": 144, **_GEMMA2}),
    Family(
        "Gemma 3 12B", "gemma3_text", (3840, 15360, 16, 8, 262_208), {"head_dim": 256, "sliding_window": 1024, **_TWO_KINDS}
    ),
    Family("Gemma 4 31B (head size 512)", "gemma4_text", (5376, 21504, 32, 16, 262_144), _GEMMA4),
    Family("Phi-3 mini", "phi3", (3072, 8192, 32, 32, 32_064), {"max_position_embeddings": 4096, "sliding_window": 2047}),
    Family("StableLM 2 1.6B", "stablelm", (2048, 5632, 32, 32, 100_352), {"max_position_embeddings": 4096}),
    Family("DeepSeek (latent attention, dense)", *_LATENT),
    Family("gpt-oss 20B (sinks, experts)", "gpt_oss", (2880, 2880, 64, 8, 201_088), _GPT_OSS),
    Family("Qwen2 7B", *_QWEN2_7B, torch.float32),
    Family("DeepSeek (latent attention, dense)", *_LATENT, torch.float32),
)
