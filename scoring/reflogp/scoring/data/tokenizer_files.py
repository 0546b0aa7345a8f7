"""Compute a digest of a tokenizer's files, and load the tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reflogp.scoring.errors import TokenizerError
from reflogp.store import read_checkpoint, resolve_model
from reflogp.store.digests import FileIdentity, file_digests
from reflogp.store.texts import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Suffixes of files that are never part of a tokenizer: weights, indexes of weights, and documentation.
_NOT_READ = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json", ".md")
#: Subfolder of a tokenizer's folder that contains named chat templates (transformers.utils.CHAT_TEMPLATE_DIR).
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a model's tokenizer.

    Attributes:
        folder: the folder that contains the files: that of the model, or of its base model.
    """

    model: str
    trust_remote_code: bool
    folder: Path
    digest: str

    def load(self) -> PreTrainedTokenizerBase:
        """Raises TokenizerError if there is no tokenizer or it cannot be loaded."""
        from transformers import AutoTokenizer  # not needed to compute the digest

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for a broken tokenizer
            raise TokenizerError(f"{self.folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
        return tokenizer


def read_tokenizer_files(model: str, trust_remote_code: bool = False) -> TokenizerFiles:
    """If `model` is an adapter whose folder contains no tokenizer, the tokenizer files are those of its base model."""
    folder = resolve_model(model)
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        folder = read_checkpoint(folder).folder
    try:
        digests = file_digests({path: FileIdentity.at(path) for path in _paths(folder)})
    except OSError as error:
        raise TokenizerError(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    names = sorted((str(path.relative_to(folder)), digest) for path, digest in digests.items())
    digest = hashlib.blake2b(repr(names).encode(), digest_size=16, person=b"reflogp.tokenize")
    return TokenizerFiles(model, trust_remote_code, folder, digest.hexdigest())


def _paths(folder: Path) -> list[Path]:
    found = [*folder.glob("*"), *folder.glob(f"{_TEMPLATES}/*")]
    return sorted(
        file for file in found if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_READ)
    )
