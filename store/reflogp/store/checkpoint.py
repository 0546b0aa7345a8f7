"""Read a model folder's config, list the files that transformers would load from it, and check that the weights are complete.

The rules are those of transformers' `from_pretrained` (`_get_resolved_checkpoint_files` in modeling_utils.py, and
auto_factory.py for adapters); tests/store/test_layouts.py compares them. The module loads no tensors and does not import torch.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reflogp.store.errors import CheckpointError, UsageError
from reflogp.store.texts import counted, short_repr

_ADAPTER_CONFIG = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
#: Maximum size of a safetensors header in bytes, as defined by the format.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter: its folder, its adapter_config.json and its weight file."""

    folder: Path
    config: dict[str, Any]
    weight_file: Path

    def tensors(self) -> dict[str, StoredTensor]:
        return _header(self.weight_file)[1]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in a safetensors header: its dtype there, such as "BF16" or "U8", and its size in the file in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model folder with `config.json` and complete safetensors weights, plus the adapter to apply, if any."""

    folder: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    adapter: Adapter | None = None

    def __repr__(self) -> str:
        parts = counted(len(self.weight_files), "weight file") + (" and an adapter" if self.adapter is not None else "")
        return short_repr("Checkpoint", f"{self.folder}: {self.config.get('model_type', 'a model')}, {parts}")

    @cached_property
    def code_files(self) -> list[Path]:
        """The Python files of the folder and of repositories that the config names, if the config refers to modeling code."""
        if "auto_map" not in self.config:
            return []
        named = re.findall(r'"([^"]+)--', json.dumps(self.config["auto_map"]))  # repository--module.Class
        others = sorted(set(named))
        folders = [self.folder, *(resolve_model(other, weights=False) for other in others)]
        return [file for folder in folders for file in sorted(folder.rglob("*.py"))]

    def hashed_files(self) -> list[Path]:
        """Return the files whose digests are part of the reference id."""
        return [*self.weight_files, *self.code_files, *([self.adapter.weight_file] if self.adapter is not None else [])]

    def files(self) -> list[Path]:
        """Return all files whose content can affect the model's output."""
        entry = _weights_entry(self.folder, self.config)
        read = [self.folder / "config.json", *([entry] if entry not in self.weight_files else [])]
        return [*read, *([self.adapter.folder / _ADAPTER_CONFIG] if self.adapter is not None else []), *self.hashed_files()]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the model's tensors, without an adapter's, by name. Raises CheckpointError if a header cannot be read."""
        return {name: tensor for file in self.weight_files for name, tensor in _header(file)[1].items()}


def resolve_model(model: str, revision: str | None = None, weights: bool = True) -> Path:
    """Return the local folder of a model. For a hub model, first download the files that huggingface_hub's cache lacks.

    Args:
        model: a folder (its path is returned) or a hub id.
        revision: revision of a hub model, or None for the main branch.
        weights: whether to download a hub model's weights too; its config, tokenizer and code files are always downloaded.

    Returns:
        The path of the local folder.

    Raises:
        UsageError: `model` is neither a folder nor the id of a hub model that can be downloaded.

    Examples:
        >>> from reflogp.store import resolve_model
        >>> resolve_model("./sft-model")
        PosixPath('sft-model')
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"model {model!r} is a file; use the folder that contains config.json and the weights")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"model {model!r}: no such folder")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UsageError(
            f"model {model!r} is not a local folder; to use a hub model, install huggingface_hub: pip install 'reflogp[hub]'"
        ) from error
    patterns = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UsageError(
            f"model {model!r} is neither a local folder nor a hub model that can be downloaded ({type(error).__name__})"
        ) from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder's config and check that every weight file exists and is complete.

    If the folder contains a PEFT adapter and config.json, the adapter belongs to the folder's model. If it contains an adapter
    alone, the base model that adapter_config.json names is read too. The base model's name is tried as a path relative to the
    adapter's folder, then as a path relative to the working directory, and then as a hub id.

    Args:
        folder: a model folder, or a PEFT adapter's folder.

    Returns:
        A Checkpoint with the config and the paths of the weight files. If `folder` is an adapter's folder, the config and
        weight files are the base model's, and the Checkpoint also contains the adapter. No tensor is loaded.

    Raises:
        UsageError: the folder has neither config.json nor adapter_config.json, or an adapter's base model cannot be used.
        CheckpointError: a config cannot be read, or the weights are missing, truncated or unreadable, or exist only as pickles.

    Examples:
        >>> from pathlib import Path
        >>> from reflogp.store import read_checkpoint
        >>> read_checkpoint(Path("./sft-model"))
        Checkpoint(sft-model: ..., 1 weight file)
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        if (folder / _ADAPTER_CONFIG).is_file():
            return _read_adapter(folder)
        raise UsageError(f"{folder} is not a model folder: it contains no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config_file} cannot be read: {error}") from error
    files = _weight_files(folder, config)
    for file in files:
        _check_whole(file)
    return Checkpoint(folder, config, files, _adapter_in(folder) if (folder / _ADAPTER_CONFIG).is_file() else None)


def _adapter_in(folder: Path) -> Adapter:
    try:
        config = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _ADAPTER_CONFIG} cannot be read as the config of a PEFT adapter") from error
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise CheckpointError(f"{folder} contains no adapter_model.safetensors (pickled adapters are not accepted)")
    _check_whole(weights)
    return Adapter(folder, config, weights)


def _read_adapter(folder: Path) -> Checkpoint:
    adapter = _adapter_in(folder)
    config, base = adapter.config, str(adapter.config.get("base_model_name_or_path") or "")
    beside = folder / base
    if beside.resolve() == folder.resolve():
        raise CheckpointError(
            f"{folder / _ADAPTER_CONFIG} names no base model: enter its folder or hub id as base_model_name_or_path"
        )
    try:
        model = read_checkpoint(beside if beside.is_dir() else resolve_model(base, config.get("revision")))
    except UsageError as error:
        raise UsageError(f"{folder} is an adapter whose base model {base!r} cannot be used: {error}") from error
    if model.adapter is not None:
        raise UsageError(
            f"{folder} is an adapter for {base!r}, which is an adapter itself: merge that adapter into its base model (peft: "
            "merge_and_unload)"
        )
    return Checkpoint(model.folder, model.config, model.weight_files, adapter)


def _weights_entry(folder: Path, config: dict[str, Any]) -> Path:
    """Return the file that transformers would open first: the only weight file, or the index of several."""
    named = config.get("transformers_weights")
    single = folder / (named or "model.safetensors")
    return single if named or single.is_file() else folder / _INDEX


def _weight_files(folder: Path, config: dict[str, Any]) -> tuple[Path, ...]:
    entry = _weights_entry(folder, config)
    if entry.is_file() and entry.suffix != ".json":
        return (entry,)
    if entry.is_file():
        try:
            names = sorted(set(json.loads(entry.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{entry} cannot be read: {error}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:5])}")
        return tuple(folder / name for name in names)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} contains only pickled weights ({pickles[0]}). Loading a pickle can run code, so save the model as "
            "safetensors with model.save_pretrained, and use the new folder"
        )
    single = config.get("transformers_weights") or "model.safetensors"
    raise CheckpointError(f"{folder} contains no weights: neither {single} nor {_INDEX}")


def _check_whole(file: Path) -> None:
    """Raise CheckpointError unless the file has the size that its header specifies."""
    expected, _ = _header(file)
    size = file.stat().st_size
    if size != expected:
        raise CheckpointError(f"{file} is truncated or damaged: it has {size} bytes, but its header specifies {expected}")


def _header(file: Path) -> tuple[int, dict[str, StoredTensor]]:
    """Return the size in bytes that a safetensors file must have, and its tensors ('Format' in
    github.com/huggingface/safetensors).
    """
    try:
        with file.open("rb") as handle:
            (header_bytes,) = struct.unpack("<Q", handle.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is not a safetensors file")
            header = json.loads(handle.read(header_bytes))
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, about in header.items():
            start, stop = about["data_offsets"]
            tensors[name] = StoredTensor(str(about["dtype"]), tuple(about["shape"]), stop - start)
            end = max(end, stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file: its header cannot be read") from error
    return 8 + header_bytes + end, tensors
