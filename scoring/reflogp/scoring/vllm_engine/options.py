"""Choose the arguments of `vllm.LLM` for a reference, and refuse references for which vLLM would silently compute wrong values.

This module does not import vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reflogp.scoring.errors import EngineError
from reflogp.store import Reference, UsageError, read_checkpoint
from reflogp.store.checkpoint import Adapter, Checkpoint
from reflogp.store.images import image_token

#: The arguments of `vllm.LLM` that users may set. They change only how vLLM uses the machine. Other arguments could change the
#: log-probs.
ALLOWED = frozenset(
    {
        "attention_backend",
        "block_size",
        "cpu_offload_gb",
        "disable_custom_all_reduce",
        "distributed_executor_backend",
        "enable_expert_parallel",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "pipeline_parallel_size",
    }
)
#: Maximum number of images in a sequence.
_MOST_IMAGES = 64
#: Model families (`model_type`) for which the log-probs that vLLM computes for sequences with images agree with those that
#: transformers computes. The tests in tests/vllm compare these log-probs.
FAMILIES = frozenset({"idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
#: Dict from each component that vLLM needs for images to the names of the files that can define the component. For each
#: component, the model's folder must contain at least one of these files.
_PARTS = {
    "image processor": ("processor_config.json", "preprocessor_config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
}
#: Adapter ranks that vLLM has kernels for (vllm.config.lora.MaxLoRARanks). Adapters with other ranks are padded to the next
#: larger rank.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: If a tensor's name contains one of these strings, the tensor belongs to an embedding or output layer. An adapter with such a
#: tensor is refused, because vLLM would apply the adapter incorrectly (for the output layer, see
#: github.com/vllm-project/vllm/issues/51594).
_TABLES = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "word_embeddings", "output_embedding", "lora_embedding")


@dataclass(frozen=True)
class Loading:
    """The arguments and the adapter that vLLM needs to load a reference.

    Attributes:
        no_images: clause that says why vLLM cannot use this model to score rows with images, or None if vLLM can.
    """

    options: dict[str, Any]
    adapter: str | None
    no_images: str | None = "the model takes text only"
    top_k: int = 0


def parse_options(entries: list[str]) -> dict[str, Any]:
    """Parse the NAME=VALUE entries of --vllm-option."""
    options: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            raise UsageError(f"--vllm-option {entry}: use the form NAME=VALUE")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    check_options(options)
    return options


def check_options(options: dict[str, Any]) -> None:
    """Raise UsageError if `options` contains an argument that is not in ALLOWED, or if `pipeline_parallel_size`, by which
    machines are divided among engines, is not a positive integer."""
    if refused := sorted(set(options) - ALLOWED):
        raise UsageError(f"vLLM option {refused[0]} cannot be set; choose from {', '.join(sorted(ALLOWED))}")
    stages = options.get("pipeline_parallel_size", 1)
    if type(stages) is not int or stages < 1:
        raise UsageError(f"vLLM option pipeline_parallel_size={stages!r}: use an integer from 1")


def vllm_options(
    model: str, reference: Reference, tensor_parallel: int, trust_remote_code: bool, chosen: dict[str, Any], top_k: int = 0
) -> Loading:
    """Return the `vllm.LLM` arguments, and the adapter if any, that vLLM needs to compute a reference's values.

    Raises:
        EngineError: vLLM does not support the adapter, or would compute values that differ from the reference's.
    """
    check_options(chosen)
    checkpoint = read_checkpoint(Path(model))
    config = checkpoint.config.get("text_config", checkpoint.config)
    rope = _rope_options(config)
    longest = rope.get("max_model_len")
    asked = chosen.get("max_model_len", longest)
    if longest is not None and not (isinstance(asked, int) and 0 < asked <= longest):
        raise UsageError(
            f"with vLLM option max_model_len={asked}, vLLM's rotary embeddings would differ from those of transformers for "
            f"short sequences: set the option to a number from 1 to {longest}, or use --engine torch"
        )
    options: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "dtype": reference.dtype,
        "max_model_len": -1,  # vLLM uses the greatest length that the model allows and the cache can hold
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": tensor_parallel,
        "trust_remote_code": trust_remote_code,
        "disable_log_stats": True,
        **rope,
    }
    if top_k:
        options["max_logprobs"] = top_k  # vLLM's own limit is 20
    if reference.lm_head_dtype != reference.dtype:
        options["hf_overrides"] = {"head_dtype": reference.lm_head_dtype}
    if checkpoint.adapter is not None:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank(checkpoint.adapter)}
        # Name the adapted modules. Otherwise, vLLM prepares the output layer for an adapter too. The layer would then expect
        # one row for each request, but for a prompt's log-probs it gets one row for each token.
        options["lora_target_modules"] = _targets(checkpoint.adapter)
    folder = str(checkpoint.adapter.folder) if checkpoint.adapter is not None else None
    no_images = _no_images(checkpoint)
    if no_images is None:
        # vLLM's image processor needs the tokenizer. vLLM's cache of processed images is turned off for two reasons:
        # vllm_engine.images has its own cache, and refused requests could change the state of vLLM's cache.
        limits = {"image": _MOST_IMAGES} | ({"video": 0} if "video_token_id" in checkpoint.config else {})
        options |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    elif _is_vision(checkpoint):
        options["language_model_only"] = True
    return Loading(options | chosen, folder, no_images, top_k)


def _is_vision(checkpoint: Checkpoint) -> bool:
    return image_token(SimpleNamespace(**checkpoint.config)) is not None


def _unlike_tested(kind: Any, config: dict[str, Any]) -> str:
    """Return a phrase that says how a model differs from the tested models of its family, for the end of an error message."""
    if kind == "llava" and (tower := config.get("vision_config", {}).get("model_type")) != "clip_vision_model":
        return f" with a vision tower of type {tower}"
    if kind == "llava" and not isinstance(config.get("vision_feature_layer", -2), int):
        return " with image features from several layers"
    rope = config.get("text_config", {})
    rope = rope.get("rope_parameters") or rope.get("rope_scaling") or {}
    # transformers always interleaves the rotary frequencies of time, height and width. vLLM does so only if the config says so.
    if kind == "qwen3_vl" and not rope.get("mrope_interleaved"):
        return " without mrope_interleaved in their config"
    return ""


def _no_images(checkpoint: Checkpoint) -> str | None:
    kind = checkpoint.config.get("model_type")
    if not _is_vision(checkpoint):
        return "the model takes text only"
    unlike = _unlike_tested(kind, checkpoint.config)
    if kind not in FAMILIES or unlike:
        return f"vLLM's values for sequences with images have not been verified for {kind} models{unlike}"
    if checkpoint.adapter is not None:
        return "the model has an adapter, and vLLM ignores an adapter's changes outside the text decoder"
    for what, names in _PARTS.items():
        if not any((checkpoint.folder / name).is_file() for name in names):
            return f"the {what} that vLLM needs for images is missing from the model's folder"
    return None


def _rope_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return `vllm.LLM` arguments with which vLLM computes the same rotary embeddings as transformers.

    Raise EngineError if no arguments achieve this.

    With rotary embeddings of type "dynamic" or "longrope", the frequencies depend on the length of the sequence. vLLM chooses
    the frequencies once, for the longest sequence that it accepts. transformers chooses them for each forward pass. Therefore,
    "dynamic" is refused, and for "longrope" the arguments limit sequences to the model's original maximum length.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {entry.get("rope_type") or entry.get("type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if "dynamic" in kinds:
        raise EngineError("vLLM computes 'dynamic' rotary embeddings differently from transformers: use --engine torch")
    if "longrope" in kinds:
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return {"max_model_len": int(original)} if original else {}
    return {}


def _rank(adapter: Adapter) -> int:
    """Return the `max_lora_rank` that an adapter needs.

    Raises EngineError if vLLM does not support the adapter or would apply it incorrectly.
    """
    config = adapter.config
    advice = "use --engine torch, or merge the adapter into the model (peft: merge_and_unload) and use the merged model"
    if config.get("peft_type") != "LORA":
        raise EngineError(f"{adapter.folder}: vLLM supports only LoRA adapters, not {config.get('peft_type')}; {advice}")
    tables = sorted({name for name in adapter.tensors() if any(table in name for table in _TABLES)})
    if config.get("modules_to_save") or tables:
        what = tables[0] if tables else config["modules_to_save"][0]
        raise EngineError(
            f"the adapter {adapter.folder} changes {what}, and vLLM would apply these changes incorrectly; {advice}"
        )
    rank = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    if rank > _RANKS[-1]:
        raise EngineError(f"the adapter {adapter.folder} has rank {rank}, but vLLM supports at most {_RANKS[-1]}; {advice}")
    return min(size for size in _RANKS if size >= rank)


def _targets(adapter: Adapter) -> list[str]:
    """Return the last component of each adapted module's name.

    For the tensor "….self_attn.q_proj.lora_A.weight", for example, the component is "q_proj".
    """
    names = (name.partition(".lora_")[0] for name in adapter.tensors() if ".lora_" in name)
    return sorted({name.rpartition(".")[2] for name in names})
