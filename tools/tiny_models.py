"""Build a tiny model with random weights of any class that transformers lists for text, from its config's defaults."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING

VOCAB = 160
#: Size of the logits, about their root mean square: soft caps act, and a wrong scale changes every log-prob.
LOGITS = 12.0

#: Part of a field's name -> its size in a tiny model; the first expression that matches the whole name counts.
_SIZES = {
    r"\w*vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab|codebook_size|num_embeddings": VOCAB,
    r"(original_)?max_position_embeddings|n_positions|n_ctx|model_max_length|max_seq_len|max_target_positions": 256,
    r"context_length": 256,
    r"max_source_positions|seq_len|max_2d_position_embeddings|max_num_patches|max_vit_seq_len|position_embedding_size": 64,
    r"img_max_token_num|max_img_size": 64,
    r"(attention_|sliding_)?window_size|sliding_window(_size)?|local_attention|\w*attention_chunk_size": 8,
    r"\w*(kv_heads|key_value_heads|kv_n_heads|query_groups)": 2,
    # With few heads of an indexer, many tokens have the score 0, and rounding decides which of them are attended to.
    r"index_n_heads|indexer_n_heads": 64,
    r"\w*heads|n_head": 4,
    r"topk_group": 1,
    r"index_topk": 8,
    r"\w*(topk|top_k|experts_per_tok|experts_per_token|moe_k)": 2,
    r"\w*(n_group|expert_group|n_groups|ngroups)": 2,
    r"n_routed_experts|(num_local_|moe_num_|num_)experts|zero_expert_num": 4,
    r"qk_head_dim": 24,
    r"\w*rope_head_dim|rotary_dim": 8,
    r"\w*head_dim|d_head|d_kv|dim_head|mamba_d_head|mamba_headdim|attention_head_size": 16,
    r"\w*_rank": 16,
    r"state_size|mamba_d_state|ssm_state_size": 8,
    r"\w*(intermediate|ffn|mlp|d_ff|dff|dim_ff|feed_forward|ff_dim|d_inner|expert_dim)\w*": 96,
    r"image_size|crop_size|resolution": 32,
    r"patch_size|encoder_stride": 8,
    r"(mamba_)?chunk_size": 16,
    r"\w*(hidden|embed|embd|emb|width|projection|dim|d_model|channels?)\w*": 64,
}
_KV_HEADS = re.compile(r"\w*(kv_heads|key_value_heads|kv_n_heads)")
_TOKEN_ID = re.compile(r"\w*(_token_ids?|_token_index|_id|_index)")
#: Names of numbers of layers; per-layer lists of the same config have that length.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "encoder_layers",
    "depth",
    "num_layers_per_stack",
    "conf_num_hidden_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "resampler_depth",
)
#: Most layers of a tiny model: one of each kind.
_MOST_LAYERS = 4

#: model type -> arguments of its config, where the defaults describe no model
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "model_type": "gemma4_text"}
    },
}
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}
_ROPE_BY_KIND = {
    kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    for kind in ("full_attention", "sliding_attention")
}
_GLM_ROPE = {"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}}
_MROPE = {"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}}
_SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_QWEN4 = {
    "indexer_n_heads": 64,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 40,
    "split_ngram_parts": 4,
}
_BPE_IMAGE_TOKENS = {"vocabulary_map": {"<image>": 150, "IMGIMGA": 151, "IMGIMGB": 152}}
#: model type -> fields of its tiny config that do not follow from the defaults
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "chameleon": _BPE_IMAGE_TOKENS,
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE_BY_KIND}},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "cosmos3_edge": _MROPE,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {**_SPARSE, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": _SPARSE,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dots1": {**_SPARSE, "n_shared_experts": 1},
    "dots3_note": {"text_config": {"head_dim": 24}, "audio_config": {"adapter_input_size": 64}},
    "dots3_note_text": {"head_dim": 24},
    "emu3": {**_BPE_IMAGE_TOKENS, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [3, 3, 2]}}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "glm46v": _GLM_ROPE,
    "glm4v": _GLM_ROPE,
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}, "head_dim": 16}},
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 4}},
    "glm_ocr": _GLM_ROPE,
    "glmga": _GLM_ROPE,
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "granitemoehybrid": _MAMBA_HEADS,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moshi": {"audio_encoder_config": {"codebook_size": 256}},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": _MROPE,
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 140},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"chunk_size": 16},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
    },
    "step3p7": {"text_config": {"sliding_window": 8}},
}


def tiny_config(model_type: str) -> Any:
    """Return a config of this type with the defaults' structure: one layer of each kind, every size small."""
    kind = CONFIG_MAPPING[model_type]
    fields = _shrunk(kind(**_ARGUMENTS.get(model_type, {})).to_dict(), {})
    return kind.from_dict(_replaced(fields, _FIELDS.get(model_type, {})))


def _shrunk(fields: dict[str, Any], token_ids: dict[int, int]) -> dict[str, Any]:
    """Return the fields of a config with small sizes.

    Args:
        fields: a config or a part of one.
        token_ids: token id of the defaults -> id in the tiny vocabulary; is filled.
    """
    counts = [fields[name] for name in _LAYERS if type(fields.get(name)) is int]
    count = counts[0] if counts else len(fields.get("layers_block_type") or ())
    kept = _kept_layers(fields, count)
    heads, width = fields.get("num_attention_heads") or fields.get("n_heads"), fields.get("hidden_size")
    head_dim = fields.get("head_dim") or (width // heads if type(heads) is int and type(width) is int else 0)

    def token(number: int) -> int:
        return number if number < 3 else token_ids.setdefault(number, VOCAB - 1 - len(token_ids))

    def number(name: str, value: int) -> int:
        if _TOKEN_ID.fullmatch(name):
            return token(value)
        if name in _LAYERS:
            return len(kept) if value == count else min(value, 2)
        if name in ("first_k_dense_replace", "num_dense_layers"):
            return min(value, 1)
        if name == "head_dim" and value == fields.get("qk_rope_head_dim"):
            return 8
        if _KV_HEADS.fullmatch(name) and heads is not None and value >= heads:
            return 4  # as many as heads, as in the defaults
        return next((min(value, size) for names, size in _SIZES.items() if re.fullmatch(names, name)), value)

    def field(name: str, value: Any) -> Any:
        if name in ("id2label", "label2id", "architectures"):
            return value
        if name == "is_decoder":
            return True  # BERT and its like attend to what follows unless this says that they do not
        if name == "rope_parameters" and value:
            return _tiny_rope(value, head_dim)
        if name == "per_layer_config" and isinstance(value, dict):
            return {f"{kept.index(int(at)):02d}": layer(part) for at, part in value.items() if int(at) in kept}
        if isinstance(value, dict):
            return _shrunk(value, token_ids)
        if type(value) is int:
            return number(name, value)
        if not isinstance(value, list | tuple):
            return value
        if count and len(value) == count:
            return [field(name, value[at]) for at in kept]
        if not value or not all(type(item) is int for item in value):
            return value
        if "token_id" in name:
            return [token(item) for item in value]
        if count and max(value) <= count and re.search("layer|index|indices|ids", name):
            return sorted({min(item * len(kept) // count, len(kept) - 1) for item in value})
        return [number(name, item) for item in value]

    def layer(part: dict[str, Any]) -> dict[str, Any]:
        wider = {"head_dim": 16 * part["head_dim"] // head_dim} if "head_dim" in part else {}  # Gemma 4
        return _shrunk(part, token_ids) | wider

    return {str(name): field(str(name), value) for name, value in fields.items()}


def _kept_layers(fields: dict[str, Any], count: int) -> list[int]:
    """Return the first layer of each kind, by the lists of the config that describe its layers; two layers at least."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == count]
    lists = [value for value in lists if all(isinstance(item, str | int) for item in value)]
    first: dict[Any, int] = {}
    for at in range(count):
        first.setdefault(tuple(value[at] for value in lists), at)
    kept = sorted(first.values())[:_MOST_LAYERS]
    return sorted([*kept, *(at for at in range(count) if at not in kept)][: max(len(kept), min(2, count))])


def _tiny_rope(parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    result = copy.deepcopy(parameters)
    for name, value in parameters.items():
        if isinstance(value, dict):
            result[name] = _tiny_rope(value, head_dim)
        elif name == "original_max_position_embeddings":
            result[name] = min(value, 256)
        elif name == "mrope_section":
            result[name] = [sum(value) * 16 // head_dim - 2 * (16 * value[1] // head_dim), *[16 * value[1] // head_dim] * 2]
    return result


def _replaced(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    for name, value in others.items():
        both = isinstance(value, dict) and isinstance(fields.get(name), dict)
        fields[name] = _replaced(fields[name], value) if both else value
    return fields


def tiny_model(model_type: str, auto_class: Any) -> Any:
    """Return a model with random weights, with which a wrong mask, position or scale changes every log-prob."""
    torch.manual_seed(3)
    model = auto_class.from_config(tiny_config(model_type), attn_implementation="eager").eval()
    with torch.no_grad():
        persistent = model.state_dict().keys()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in persistent and tensor.is_floating_point():
                _draw(name, tensor)
        _enlarge_logits(model)
    return model


#: Parts of the names of weights that keep what the class draws for them: a recurrent state that grows without limit would be
#: no fair test.
_AS_DRAWN = re.compile("A_log|dt_|time_|decay|conv|running_|num_batches|rglru|lambda|slope|x_proj|inv_freq|_scale_|scales")


def _draw(name: str, tensor: torch.Tensor) -> None:
    if _AS_DRAWN.search(name):
        return
    if tensor.dim() < 2 or (tensor == tensor.flatten()[0]).all():  # norms, biases, sinks
        tensor.add_(0.3 * torch.randn_like(tensor))
    elif re.search("embed|wte|wpe|word", name):
        tensor.normal_(0.0, 0.5)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


def _enlarge_logits(model: Any) -> None:
    """Enlarge the norm before the head, or else the head, until the logits have the size `LOGITS`."""
    heads = [part.get_output_embeddings() for part in (model, *model.children()) if hasattr(part, "get_output_embeddings")]
    head, called = next((head for head in heads if head is not None), None), []
    hooks = [
        module.register_forward_hook(lambda module, *_: called.append(module))
        for module in model.modules()
        if not list(module.children())
    ]
    try:
        factor = LOGITS / _size_of_logits(model)
    except Exception:  # a class that needs images or other inputs: the sweep shows what the engine makes of it
        return
    finally:
        for hook in hooks:
            hook.remove()
    if head not in called:
        return
    before = called[: len(called) - 1 - called[::-1].index(head)]
    norms = [module for module in before if getattr(module, "weight", None) is not None and module.weight.dim() == 1]
    if norms:
        weight, bias = norms[-1].weight, getattr(norms[-1], "bias", None)
        is_centred = abs(float(weight.mean())) < 0.5  # Gemma's norms multiply by 1 + weight
        weight.copy_((1 + weight) * factor - 1 if is_centred else weight * factor)
        if bias is not None:
            bias.mul_(factor)
    still = LOGITS / _size_of_logits(model)
    if still > 2:
        head.weight.mul_(still)


def _size_of_logits(model: Any) -> float:
    logits = model(input_ids=torch.arange(3, 43)[None], use_cache=False).logits
    return 1.5 * float(logits.abs().median())  # Chameleon never predicts its image tokens: their logits are minus infinity
