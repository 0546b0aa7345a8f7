"""Load a frozen causal language model from safetensors files, in evaluation mode and without gradients.

Weights are read from the files and moved to the device a few tensors at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.memory import is_out_of_memory, is_quantized, memory_errors, require_room
from reflogp.store import ReflogpError
from reflogp.store.checkpoint import Adapter, Checkpoint, read_checkpoint, resolve_model
from reflogp.store.reference import autocast_dtype, resolve_dtype
from reflogp.store.texts import first_line

#: Largest number of rows that a table of positions has beyond those that tokens use (OPT and RoBERTa begin at 2).
_POSITION_OFFSET = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready for scoring, and its limits.

    Attributes:
        autocast: dtype of matrix products under torch.autocast; None if autocast is not used.
        vocab_size: number of rows of the output embedding; token ids must be smaller than this number.
        max_positions: maximum number of tokens of a sequence; None if there is no limit.
        rope_limit: for models with "longrope" or "dynamic" RoPE scaling, the length above which a sequence changes the rotary
            embeddings of all sequences in its pass; None for other models. Sequences longer than `rope_limit` are scored alone.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_positions: int | None
    rope_limit: int | None
    autocast: torch.dtype | None = None

    @property
    def product_dtype(self) -> torch.dtype:
        return self.autocast or self.dtype

    @property
    def dtype_name(self) -> str:
        """The name of the dtype that the model computes in, such as "bfloat16-autocast" (see `reflogp.store.reference`)."""
        name = str(self.product_dtype).removeprefix("torch.")
        return name if self.autocast is None else f"{name}-autocast"

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context manager that enables autocast as accelerate does, or disables autocast if `autocast` is None."""
        return autocasting(self.device, self.autocast)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch.autocast with this dtype. If `dtype` is None, autocast is disabled, even if the caller has enabled it."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def choose_device(device: str) -> torch.device:
    """Return the torch device for a name: "auto" selects CUDA if available, otherwise the CPU; other names are passed to torch.

    "cuda" without a number selects this thread's current device. Raises EngineError if the device does not exist or is neither
    a CPU nor a CUDA device.
    """
    if device == "auto":
        return choose_device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # A CUDA tensor's device has a number. Without a number, "cuda" would mean a different device in each thread.
        chosen = torch.empty(0, device=device).device
        if chosen.type not in ("cpu", "cuda"):
            raise EngineError(f"device {device!r}: the engine 'torch' supports only 'cpu' and 'cuda'")
        return chosen
    except (RuntimeError, AssertionError) as error:
        why = first_line(error)
        raise EngineError(f"device {device!r} cannot be used ({why}): use 'auto', 'cpu', 'cuda' or 'cuda:NUMBER'") from error


def _with_adapter(model: Any, adapter: Adapter, device: torch.device) -> Any:
    """Insert the adapter's layers into the model, in the model's dtype and on its device; return the model.

    The adapter is not merged into the weights, because the merged weights would be rounded to the weights' dtype, and the
    adapter's small changes would be lost.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise EngineError(f"{adapter.folder} is an adapter, which needs peft: pip install peft") from error
    if adapter.config.get("alora_invocation_tokens"):
        raise EngineError(
            f"{adapter.folder}: an activated LoRA (aLoRA) acts only after its invocation tokens, which is not supported"
        )
    try:
        with memory_errors(device, f"the adapter {adapter.folder} was being loaded"):
            _enlarge_vocabulary(model, adapter)
            wrapped = PeftModel.from_pretrained(model, adapter.folder, autocast_adapter_dtype=False, torch_device=str(device))
    except EngineError:
        raise
    except Exception as error:  # for example, shapes that differ from the model's, or an unknown type of adapter
        raise EngineError(f"{adapter.folder}: the adapter cannot be loaded into the model: {first_line(error)}") from error
    if wrapped.active_peft_config.is_prompt_learning:
        raise EngineError(f"{adapter.folder}: adapters that prepend virtual tokens are not supported")
    return wrapped.get_base_model()


def _enlarge_vocabulary(model: Any, adapter: Adapter) -> None:
    """Give the model as many token embeddings as the adapter's file has, if it has more: it was trained with new tokens."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if any(module is part for part in parts)}
    tables = (tensor for key, tensor in adapter.tensors().items() if key.split(".")[-2:-1] and key.split(".")[-2] in names)
    rows = max((tensor.shape[0] for tensor in tables), default=0)
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)


def load_model(model: str | Checkpoint, dtype: str, device: str, trust_remote_code: bool = False) -> LoadedModel:
    checkpoint = model if isinstance(model, Checkpoint) else read_checkpoint(resolve_model(model))
    name = resolve_dtype(dtype, checkpoint.config)
    products = autocast_dtype(name)
    torch_dtype = torch.float32 if products else getattr(torch, name)
    where = choose_device(device)
    quantized = is_quantized(checkpoint)
    devices = [where] if where.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),  # building a model draws random numbers, which must not affect the caller's generators
        memory_errors(where, f"{checkpoint.folder} was being loaded"),
        _unloadable(checkpoint.folder),
    ):
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True)
        model_class, parameters = _model_class(config, trust_remote_code)
        require_room(checkpoint, config, name, where, parameters)
        with _weights(checkpoint) as weights:
            loaded, info = model_class.from_pretrained(
                checkpoint.folder if quantized else None,  # quantizers read the files themselves
                config=_text_config(config) if _is_of_its_text(model_class, config) else config,
                state_dict=None if quantized else weights,
                dtype=torch_dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                device_map={"": str(where)},
            )
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys") or ())
    if absent:
        raise EngineError(
            f"{checkpoint.folder}: weights are missing from the files or do not have the shape that config.json specifies "
            f"({', '.join(absent[:3])}; {len(absent)} in total): use the config that was saved with the weights"
        )
    read_by_transformers = quantized and (checkpoint.folder / "adapter_config.json").is_file()
    if checkpoint.adapter is not None and not read_by_transformers:
        loaded = _with_adapter(loaded, checkpoint.adapter, where)
    loaded = _frozen(loaded)
    if where.type == "cpu" and quantized:
        _take_out_of_files(loaded)
    return _described(loaded, where, torch_dtype, getattr(torch, products) if products else None)


def require_device(checkpoint: Checkpoint, dtype: str, device: str, trust_remote_code: bool = False) -> None:
    """Raise OutOfMemoryError if a model would not fit even on an otherwise empty device. No weights are read."""
    where = choose_device(device)
    with torch.random.fork_rng([where] if where.type == "cuda" else []), _unloadable(checkpoint.folder):
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True)
        _, parameters = _model_class(config, trust_remote_code)
        require_room(checkpoint, config, resolve_dtype(dtype, checkpoint.config), where, parameters, alone=True)


def in_memory(model: Any) -> LoadedModel:
    """Prepare a transformers causal language model that is already in memory, so that it can be used for scoring.

    This function switches the model to evaluation mode and turns off gradients for its parameters. All parameters must be on
    the same device and have the same dtype.
    """
    first = next(model.parameters())
    return _described(_frozen(model), first.device, first.dtype, None)


def _frozen(model: Any) -> Any:
    for parameter in model.eval().parameters():
        parameter.requires_grad_(False)
    return model


def _described(model: Any, device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None) -> LoadedModel:
    text_config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        vocab_size=int(output_embedding(model).weight.shape[0]),
        max_positions=_max_positions(model),
        rope_limit=_rope_limit(text_config),
        autocast=autocast,
    )


def output_embedding(model: Any) -> Any:
    """Return the layer of a model, or of the language model in it, that computes logits. Raise EngineError if it has none."""
    parts = (part for part in (model, *model.children()) if hasattr(part, "get_output_embeddings"))
    found = next((layer for part in parts if (layer := part.get_output_embeddings()) is not None), None)
    if found is None:
        raise EngineError(f"{type(model).__name__} has no output embedding, so its log-probs cannot be computed")
    return found


@contextmanager
def _unloadable(folder: Path) -> Iterator[None]:
    """Convert errors that transformers and its dependencies raise in the block to EngineError."""
    try:
        yield
    except ReflogpError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = first_line(error)
        raise EngineError(f"{folder}: the model cannot be loaded: {first}") from error


class _Weight:
    """A tensor in an open file. Indexing this object reads the tensor.

    transformers treats this object like a tensor or a safetensors slice.

    Each tensor is read into its own memory. transformers would instead map the files into memory. With mapped files, all
    weights that were read would stay in memory until the last one is loaded, a later write to a file would change the model,
    and a truncated file would crash the process.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        read: torch.Tensor = self._file.get_tensor(self._name)
        return read[index]


@contextmanager
def _weights(checkpoint: Checkpoint) -> Iterator[dict[str, _Weight]]:
    with ExitStack() as stack:
        found: dict[str, _Weight] = {}
        for path in checkpoint.weight_files:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu", backend="pread"))
            found |= {name: _Weight(file, name) for name in file.keys()}  # noqa: SIM118 - the file is not a dictionary
        yield found


def _take_out_of_files(model: Any) -> None:
    """Copy the weights into newly allocated memory, because a quantized checkpoint's weights may be in memory-mapped files."""
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is torch.Tensor:
            tensor.data = tensor.data.clone()


def forget_longest_pass(model: Any, limit: int) -> None:
    """Reset "dynamic" rotary embeddings to those of sequences of at most `limit` tokens.

    Without this reset, later passes would use the embeddings of the longest sequence so far. Only a pass whose longest sequence
    has fewer than `limit` tokens, or more tokens than all earlier sequences, would get other embeddings. Embeddings that were
    not extended, such as those of "longrope", stay unchanged.
    See `dynamic_rope_update` in transformers' modeling_rope_utils.py.
    """
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            if getattr(module, name) > getattr(module, "original_max_seq_len", limit):
                setattr(module, name, limit)
                prefix = name.removesuffix("max_seq_len_cached")
                original = getattr(module, f"{prefix}original_inv_freq", None)
                if original is not None:  # modeling code of a checkpoint may not keep them
                    frequencies = getattr(module, f"{prefix}inv_freq")
                    module.register_buffer(f"{prefix}inv_freq", original.to(frequencies.device, copy=True), persistent=False)


def _max_positions(model: Any) -> int | None:
    """Return the maximum length of a sequence: the length of the model's table of positions, or None if it computes them.

    Rotary embeddings and ALiBi continue for any length, so `max_position_embeddings` is no limit there.
    """
    config = model.config.get_text_config()
    stated = getattr(config, "max_position_embeddings", None)
    named = (*model.named_parameters(), *model.named_buffers())
    tables = [len(tensor) for name, tensor in named if tensor.dim() >= 2 and re.search("pos|wpe", name)]
    return stated if stated is not None and any(stated <= rows <= stated + _POSITION_OFFSET for rows in tables) else None


def _rope_limit(config: Any) -> int | None:
    """Return the length in tokens above which a sequence changes the rotary embeddings of its whole pass, or None.

    See `dynamic_rope_update` in transformers' modeling_rope_utils.py.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer_type or [rope]:
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return int(original or config.max_position_embeddings)
    return None


def _model_class(config: Any, trust_remote_code: bool) -> tuple[Any, int]:
    """Return (class of the model, number of the model's parameters); tied parameters are counted once.

    Vision-language models can be used to score text too, but transformers lists only some of them as causal language models.
    The others are loaded as image-text-to-text models. If transformers lists a config as both, the class that saved the
    checkpoint decides (the causal class of Qwen3.5 has no vision part, that of Emu3 other names of weights).

    Raises EngineError for an encoder-decoder model.
    """
    if config.is_encoder_decoder:
        raise EngineError(
            f"{config.model_type} is an encoder-decoder model: it reads a prompt in another way than it writes a completion, "
            "and only decoder-only models can be scored"
        )
    kind, saved_by = type(config), config.architectures or ()
    both = (AutoModelForCausalLM, AutoModelForImageTextToText)
    listed = [auto for auto in both if kind in auto._model_mapping]
    saved = [auto for auto in listed if auto._model_mapping[kind].__name__ in saved_by]
    auto_class = (*saved, *listed, AutoModelForCausalLM)[0]
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    return type(model), sum(parameter.numel() for parameter in model.parameters())


def _text_config(config: Any) -> Any:
    text = config.get_text_config()
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    return text


def _is_of_its_text(model_class: Any, config: Any) -> bool:
    """Return True if models of `model_class` are built from the text part of `config`, not from the whole config."""
    text_config = config.sub_configs.get("text_config")
    return text_config is not None and getattr(model_class, "config_class", None) == text_config
