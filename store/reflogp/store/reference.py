"""Compute the reference id: a digest of a reference model's content and dtypes, but not of its name or location.

This module defines which parts of a checkpoint can change a log-prob and are therefore part of the id. It loads no tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from reflogp.store.checkpoint import Checkpoint, read_checkpoint, resolve_model
from reflogp.store.digests import FileIdentity, Progress, file_digests, require_unchanged
from reflogp.store.errors import ContentMismatchError, FileChangedError, StoreFormatError, UsageError
from reflogp.store.schema import FORMAT
from reflogp.store.texts import counted, short_repr

#: Dtypes that a model can compute in. With a plain name, weights and activations have that dtype. With "…-autocast", weights
#: are float32, and torch.autocast casts the operands of matrix products, as in accelerate's mixed precision (bf16=True,
#: fp16=True).
Dtype = Literal["float32", "bfloat16", "float16", "bfloat16-autocast", "float16-autocast"]
_AUTOCAST = "-autocast"
#: Name of the file that describes a reference model, in its folder of a store and in an export.
REFERENCE_FILE = "reference.json"
#: A dtype argument that stands for the dtype in which the model's log-probs in the store were computed. The function
#: `store.choose_reference` replaces "auto" with that dtype. `describe_reference` does not accept "auto".
AUTO = "auto"

#: Config entries that are not part of the id, at any depth of config.json. Most of them cannot change the logits of an
#: evaluation forward pass over given tokens: where the model came from, which software wrote it, and settings for generation,
#: training, classification and the outputs to return. The other ignored entries are recorded elsewhere: the id contains the
#: compute dtype instead of the checkpoint's dtype, and auto_map with digests of the code files. The provenance of the
#: values records how attention was computed. Every entry that is not listed here is part of the id. Therefore, an entry that
#: reflogp does not know leads to a new id, and never to a hit on the values of a different model.
IGNORED_CONFIG_KEYS = frozenset(
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

#: Entries of adapter_config.json that are not part of the id: where the adapter came from, and settings that affect only
#: training.
_ADAPTER_NOT_SEMANTIC = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version", "lora_dropout"}
)


@dataclass(frozen=True)
class Reference:
    """The description of a reference model, with the reference id that identifies it.

    A store keeps this description in reference.json, next to the model's table.

    Attributes:
        reference_id: 32 hex digits.
        name: name of the model's folder, or the model's hub id. A store keeps the name under which it first stored the
            reference. The name is not part of the reference id.
        dtype: dtype that the model computes in, one of the values of `Dtype`.
        lm_head_dtype: dtype in which the output layer computes logits.
        weights: sorted sha256 digests of the weight files.
        config: the entries of config.json that can change a log-prob, including quantization.
        adapter: None, or a dict with the sha256 of the adapter's weights ("weights") and the entries of the adapter's config
            that can change a log-prob, such as rank, scale and targets ("config").
        format: format number of the store.
    """

    reference_id: str
    name: str
    dtype: str
    lm_head_dtype: str
    weights: tuple[str, ...]
    config: dict[str, Any]
    adapter: dict[str, Any] | None = None
    format: int = FORMAT

    def __repr__(self) -> str:
        parts = counted(len(self.weights), "weight file") + (" and an adapter" if self.adapter is not None else "")
        return short_repr("Reference", f"{self.reference_id}: {self.name} in {self.dtypes()}, {parts}")

    def dtypes(self) -> str:
        """Return the dtypes as text, such as "bfloat16 with logits in float32"."""
        return self.dtype + (f" with logits in {self.lm_head_dtype}" if self.lm_head_dtype != self.dtype else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Reference:
        """Parse a reference.json. Raises StoreFormatError for a newer store format, and ValueError for an invalid reference."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
            raise ValueError("the format number is missing")
        check_format(fields["format"])
        if not re.fullmatch(r"[0-9a-f]{32}", str(fields.get("reference_id"))):
            raise ValueError("the reference_id is not 32 hex digits")
        try:
            found = cls(**{**fields, "weights": tuple(fields["weights"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing, unknown or of the wrong type: {error}") from error
        texts = (found.name, found.dtype, found.lm_head_dtype, *found.weights)
        if not all(isinstance(text, str) for text in texts) or not isinstance(found.config, dict):
            raise ValueError("a field has the wrong type")
        return found


def check_format(number: int) -> None:
    if number > FORMAT:
        raise StoreFormatError(
            f"store format {number} is too new for this version of reflogp, which reads formats up to {FORMAT}: upgrade reflogp"
        )


def describe_reference(
    model: str,
    dtype: str = "bfloat16",
    *,
    lm_head_dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Describe a model (a folder or hub id) that computes in the given dtypes, and compute its reference id.

    Args:
        model: folder with config.json and safetensors weights (or a PEFT adapter's folder), or a hub id.
        dtype: "float32", "bfloat16" or "float16" for weights and activations in that dtype; "bfloat16-autocast" or
            "float16-autocast" for float32 weights under torch.autocast; "checkpoint" for the dtype that config.json names.
        lm_head_dtype: "float32" if logits are computed in float32, or None if logits are computed in `dtype`.
        revision: revision of the model, if `model` is a hub id.
        progress: called with (bytes hashed, total bytes) while files are hashed.

    Returns:
        A Reference, whose reference_id depends only on the content of the files and on the dtypes.

    Raises:
        UsageError: the model does not exist or cannot be downloaded, the folder is not a model folder, or a dtype is invalid.
        CheckpointError: the weights are missing or truncated or exist only as pickles, or a config file cannot be read.
        FileChangedError: a file was written to or replaced while it was being read.

    Examples:
        >>> from reflogp.store import describe_reference
        >>> describe_reference("./sft-model", "bfloat16")
        Reference(...: sft-model in bfloat16, 1 weight file)
    """
    return read_reference_files(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=progress).reference


def describe_all_numerics(
    model: str, *, lm_head_dtype: str | None = None, revision: str | None = None, progress: Progress | None = None
) -> list[Reference]:
    """Return a model's references for all compute dtypes. The weights are hashed only once.

    If `lm_head_dtype` is None, there are two for each compute dtype except float32: with logits in that dtype, and in float32.
    The other arguments and the errors are the same as for `describe_reference`.
    """
    heads = (None, "float32") if lm_head_dtype is None else (lm_head_dtype,)
    files = read_reference_files(model, revision=revision, progress=progress)
    found = [_reference_of(model, files.checkpoint, files.digests, dtype, head) for head in heads for dtype in get_args(Dtype)]
    return list({reference.reference_id: reference for reference in found}.values())


@dataclass(frozen=True)
class ReferenceFiles:
    """A model folder's files as they were when their digests were computed.

    Attributes:
        reference: the reference for these files and the dtypes given to `read_reference_files`.
        digests: sha256 of each weight and code file, by path.
        identities: size and times of every file that can affect the model's output, by path.
    """

    reference: Reference
    checkpoint: Checkpoint
    digests: dict[Path, str]
    identities: dict[Path, FileIdentity]

    def require(self, reference: Reference) -> None:
        """Raise ContentMismatchError if the files are not those of `reference`, which has the dtypes that were given to
        `read_reference_files`.
        """
        if self.reference.reference_id != reference.reference_id:
            folder = (self.checkpoint.adapter or self.checkpoint).folder
            raise ContentMismatchError(
                f"the files of {folder} changed: the model's reference id is now {self.reference.reference_id}, not "
                f"{reference.reference_id}. Put the old files back, or run again with the new files (for a service: restart it)"
            )

    @contextmanager
    def unchanged(self) -> Iterator[Checkpoint]:
        """Yield the checkpoint to load, and raise FileChangedError if a file changes before the block ends or fails."""
        try:
            yield self.checkpoint
        finally:
            require_unchanged(self.identities)


def read_reference_files(
    model: str,
    dtype: str = "bfloat16",
    *,
    lm_head_dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ReferenceFiles:
    """Read a model's config, compute the digests of its files, and describe the reference.

    The arguments and errors are the same as for `describe_reference`.
    """
    folder = resolve_model(model, revision)
    checkpoint = read_checkpoint(folder)
    identities = {file: FileIdentity.at(file) for file in checkpoint.files()}
    if read_checkpoint(folder) != checkpoint:
        raise FileChangedError(f"{folder} changed while it was being read; run again when its files no longer change")
    digests = file_digests(checkpoint.hashed_files(), progress)
    reference = _reference_of(model, checkpoint, digests, dtype, lm_head_dtype)
    return ReferenceFiles(reference, checkpoint, digests, identities)


def _reference_of(
    model: str, checkpoint: Checkpoint, digests: dict[Path, str], dtype: str, lm_head_dtype: str | None
) -> Reference:
    compute_dtype = resolve_dtype(dtype, checkpoint.config)
    head_dtype = resolve_dtype(lm_head_dtype or compute_dtype, checkpoint.config)
    if autocast_dtype(head_dtype) and head_dtype != compute_dtype:
        raise UsageError(f"lm_head_dtype {head_dtype!r}: use 'float32', or leave it out to compute logits in the model's dtype")
    adapter, on_top = checkpoint.adapter, None
    if adapter is not None:
        settings = {key: value for key, value in adapter.config.items() if key not in _ADAPTER_NOT_SEMANTIC}
        on_top = {"weights": digests[adapter.weight_file], "config": settings}
    config = _semantic(checkpoint.config)
    content: dict[str, Any] = {
        "weights": sorted(digests[file] for file in checkpoint.weight_files),
        "config": config,
        "adapter": on_top,
        "dtype": compute_dtype,
        "lm_head_dtype": head_dtype,
    }
    if "auto_map" in checkpoint.config:  # modeling code that comes with the weights can change log-probs
        content["code"] = sorted(digests[file] for file in checkpoint.code_files)
        content["auto_map"] = checkpoint.config["auto_map"]
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
    """Check a dtype argument, and replace "checkpoint" with the dtype that config.json names (float32 if it names none)."""
    if dtype == "checkpoint":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise UsageError(
            f"dtype {dtype!r} is not supported: use one of {', '.join(map(repr, get_args(Dtype)))}, or 'checkpoint' if "
            "config.json names one of these dtypes"
        )
    return cast(Dtype, dtype)


def autocast_dtype(dtype: str) -> str | None:
    """Return "bfloat16" for "bfloat16-autocast", and None for a plain dtype."""
    return dtype.removesuffix(_AUTOCAST) if dtype.endswith(_AUTOCAST) else None


def _semantic(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _semantic(entry) for key, entry in value.items() if key not in IGNORED_CONFIG_KEYS}
    if isinstance(value, list):
        return [_semantic(entry) for entry in value]
    return value


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
