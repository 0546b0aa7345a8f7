"""Build tiny random models of many families, for the fidelity tests and for the table in docs/fidelity.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCAB = 160
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

#: name -> a function that builds the model with random weights
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GQA)),
    "Llama (tied head, attention bias)": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**_GQA, tie_word_embeddings=True, attention_bias=True)
    ),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GQA)),
    "Qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GQA, head_dim=16)),
    "Qwen3-MoE": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_GQA, **_MOE, head_dim=16)),
    "Qwen3-Next (linear attention)": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(
            **{**_GQA, "num_hidden_layers": 4},
            **_MOE,
            head_dim=16,
            shared_expert_intermediate_size=48,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    ),
    "Mistral, sliding window 8": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GQA, sliding_window=8)),
    "Mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2)),
    "Gemma 2 (soft caps, sliding window 8)": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **_GQA,
            head_dim=16,
            sliding_window=8,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=3.0,
            attn_implementation="eager",  # transformers before 5.21 ignores the soft cap unless told so
        )
    ),
    "Gemma 3 (sliding window 8)": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GQA, head_dim=16, sliding_window=8)),
    "Phi-3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GQA)),
    "Phi (partial rotary, biased head)": lambda: tf.PhiForCausalLM(tf.PhiConfig(**_GQA)),
    "StableLM (partial rotary)": lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**_GQA)),
    "GPT-2 (learned positions)": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
    ),
    "OPT (learned positions)": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=64,
        )
    ),
    "GPT-NeoX": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_SIZES)),
    "Falcon": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=False, bos_token_id=1
        )
    ),
    "Bloom (ALiBi)": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=3, n_head=4)),
    "OLMo 2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_GQA)),
    "Granite (scaled embeddings, logits)": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(
            **_GQA, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.2
        )
    ),
    "Cohere (logit scale)": lambda: tf.CohereForCausalLM(tf.CohereConfig(**_GQA, logit_scale=0.3)),
    "Starcoder 2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**_GQA, sliding_window=None)),
    "gpt-oss (sinks, sliding window 8)": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**_GQA, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
    "DeepSeek-V3 (latent attention)": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            **_SIZES,
            num_key_value_heads=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            first_k_dense_replace=3,  # the family without experts, to test attention alone
        )
    ),
    "Mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, state_size=8, pad_token_id=0)
    ),
    "Falcon-H1 (attention and Mamba 2)": lambda: tf.FalconH1ForCausalLM(
        tf.FalconH1Config(
            **_GQA, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
        )
    ),
}


def build(name: str) -> Any:
    """Return the family's model, with weights so large that every token's log-prob depends on its whole context."""
    torch.manual_seed(3)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # A recurrent state that grows without limit would not be a fair test.
            recurrent = "mixer" in parameter_name or "mamba" in parameter_name
            if parameter.dim() >= 2 and not recurrent:
                parameter.mul_(3)
            if "embed" in parameter_name or "wte" in parameter_name or "head" in parameter_name:
                parameter.mul_(4)
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return model
