"""The reference id: a digest that names a reference model's content and numerics, never its name or place.

Knows which parts of a checkpoint can change a log-prob. Loads no tensor. Called by everyone who opens a store's table.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from reflogp_store.checkpoint import read_checkpoint, resolve_model
from reflogp_store.digests import Progress, file_digests
from reflogp_store.errors import StoreFormatError, UsageError
from reflogp_store.schema import FORMAT

Dtype = Literal["float32", "bfloat16", "float16"]

#: Config entries that cannot change the logits of an evaluation forward pass over given tokens: where the model came
#: from, what wrote it, what generation or training would do, and how attention is computed (that is provenance).
#: Everything else counts, so an entry that reflogp has never heard of makes a new id, not a wrong hit.
NOT_SEMANTIC = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "attention_dropout",
        "attn_dropout",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "classifier_dropout",
        "decoder_start_token_id",
        "dropout",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)

#: The same for adapter_config.json: where it came from and what only training reads.
_ADAPTER_NOT_SEMANTIC = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version", "lora_dropout"}
)


@dataclass(frozen=True)
class Reference:
    """What a reference id stands for. Written as reference.json beside the model's table.

    Attributes:
        reference_id: 32 hex digits.
        name: a label for people: the folder's or the hub's name at first scoring. Not part of the id.
        dtype: dtype of weights and activations while scoring.
        lm_head_dtype: dtype of the product with the output embedding.
        weights: sorted sha256 digests of the weight files.
        config: the semantic part of config.json (quantization included).
        adapter: None, or the sha256 of an adapter's weights and the semantic part of its config (rank, scale, targets).
        format: number of the store's layout.
    """

    reference_id: str
    name: str
    dtype: str
    lm_head_dtype: str
    weights: tuple[str, ...]
    config: dict[str, Any]
    adapter: dict[str, Any] | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Reference:
        """Raises StoreFormatError for the layout of a newer reflogp, ValueError for what is no reference."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
            raise ValueError("it does not say its format")
        check_format(fields["format"])
        if not re.fullmatch(r"[0-9a-f]{32}", str(fields.get("reference_id"))):
            raise ValueError("its reference_id is not 32 hex digits")
        try:
            return cls(**{**fields, "weights": tuple(fields["weights"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"its fields are not a reference's ({error})") from error


def check_format(number: int) -> None:
    """Raise StoreFormatError when a store's layout is newer than this reflogp knows."""
    if number > FORMAT:
        raise StoreFormatError(f"the store has format {number}, and this reflogp reads up to format {FORMAT}: upgrade reflogp")


def describe_reference(
    model: str,
    dtype: str = "bfloat16",
    *,
    lm_head_dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Reference:
    """The reference that a model folder (or hub id) is under the given numerics.

    Args:
        model: folder with config.json and safetensors weights (or a PEFT adapter's folder), or a hub id.
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype that config.json names.
        lm_head_dtype: "float32" when logits are computed in float32; None when in `dtype`.
        revision: of a hub id.
        progress: called with (bytes hashed, bytes in all) while weight files are read.

    Raises:
        UsageError: no such model, or an unknown dtype.
        CheckpointError: weights that are missing, truncated or pickled.
    """
    checkpoint = read_checkpoint(resolve_model(model, revision))
    compute_dtype = resolve_dtype(dtype, checkpoint.config)
    head_dtype = resolve_dtype(lm_head_dtype or compute_dtype, checkpoint.config)
    adapter = checkpoint.adapter
    digests = file_digests([*checkpoint.weight_files, *([adapter.weight_file] if adapter else [])], progress)
    on_top = None
    if adapter is not None:
        settings = {key: value for key, value in adapter.config.items() if key not in _ADAPTER_NOT_SEMANTIC}
        on_top = {"weights": digests.pop(adapter.weight_file), "config": settings}
    config = _semantic(checkpoint.config)
    content: dict[str, Any] = {
        "weights": sorted(digests.values()),
        "config": config,
        "adapter": on_top,
        "dtype": compute_dtype,
        "lm_head_dtype": head_dtype,
    }
    if "auto_map" in checkpoint.config:  # modelling code that comes with the weights is part of what they mean
        content["code"] = sorted(file_digests(sorted(checkpoint.folder.glob("*.py"))).values())
    digest = hashlib.blake2b(_canonical(content), digest_size=16, person=b"reflogp.ref.v1")
    return Reference(
        reference_id=digest.hexdigest(),
        name=Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model,
        dtype=compute_dtype,
        lm_head_dtype=head_dtype,
        weights=tuple(content["weights"]),
        config=config,
        adapter=on_top,
    )


def resolve_dtype(dtype: str, config: dict[str, Any]) -> Dtype:
    """`dtype` as one of the three names; "auto" is what config.json says (float32 where it says nothing).

    Raises UsageError for anything else.
    """
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise UsageError(f"dtype {dtype!r}: use one of auto, {', '.join(get_args(Dtype))}")
    return cast(Dtype, dtype)


def _semantic(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _semantic(entry) for key, entry in value.items() if key not in NOT_SEMANTIC}
    if isinstance(value, list):
        return [_semantic(entry) for entry in value]
    return value


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
