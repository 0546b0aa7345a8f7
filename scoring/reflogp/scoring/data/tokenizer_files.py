"""Compute a digest of a tokenizer's files, and load the tokenizer."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reflogp.scoring.errors import TokenizerError
from reflogp.store import FileChangedError, read_checkpoint, resolve_model
from reflogp.store.digests import FileIdentity, file_digests, require_unchanged
from reflogp.store.texts import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Suffixes of files that are never part of a tokenizer: weights, indexes of weights, and documentation.
_NOT_READ = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json", ".md")
#: Subfolder of a tokenizer's folder that contains named chat templates (transformers.utils.CHAT_TEMPLATE_DIR).
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer as they were when their digest was computed.

    Attributes:
        folder: the folder that contains the files.
        identities: size and times of every file that transformers may read to load the tokenizer, by path.
        digest: digest of the files' names and content.
    """

    folder: Path
    identities: dict[Path, FileIdentity]
    digest: str

    def load(self, trust_remote_code: bool) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            TokenizerError: there is no tokenizer, or the tokenizer cannot be loaded.
            FileChangedError: a file has changed since the digest was computed.
        """
        from transformers import AutoTokenizer  # not needed to compute the digest

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for a broken tokenizer
            require_unchanged(self.identities)
            raise TokenizerError(f"{self.folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
        require_unchanged(self.identities)
        return tokenizer


def read_tokenizer_files(model: str) -> TokenizerFiles:
    """Compute the digest of the tokenizer files of a model folder.

    If `model` is an adapter whose folder contains no tokenizer, the tokenizer files are those of its base model.

    Raises:
        UsageError: `model` is neither a folder nor a hub model that can be downloaded, or the folder contains no model.
        UsageError, CheckpointError: the adapter or its base model cannot be used.
        TokenizerError: the tokenizer's files cannot be read.
        FileChangedError: the tokenizer's files change while they are read.
    """
    folder = resolve_model(model)
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        folder = read_checkpoint(folder).folder
    try:
        identities = {path: FileIdentity.at(path) for path in _paths(folder)}
        digests = file_digests(identities)
    except OSError as error:
        raise TokenizerError(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    names = sorted((str(path.relative_to(folder)), digest) for path, digest in digests.items())
    digest = hashlib.blake2b(repr(names).encode(), digest_size=16, person=b"reflogp.tokenize")
    return TokenizerFiles(folder, identities, digest.hexdigest())


def _paths(folder: Path) -> list[Path]:
    found = [*folder.glob("*"), *folder.glob(f"{_TEMPLATES}/*")]
    return sorted(
        file for file in found if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_READ)
    )


class TokenizerCache:
    """A least-recently-used cache of loaded tokenizers, keyed by the content of their files.

    Args:
        most: maximum number of tokenizers in the cache.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._loaded: OrderedDict[tuple[str, bool], PreTrainedTokenizerBase] = OrderedDict()

    def find(self, model: str, trust_remote_code: bool) -> TokenizerRef:
        """Return a TokenizerRef for the tokenizer that is now in a model folder. The tokenizer is not loaded.

        Raises the same errors as `read_tokenizer_files`.
        """
        return TokenizerRef(model, trust_remote_code, read_tokenizer_files(model).digest, self)

    def get(self, named: TokenizerRef) -> PreTrainedTokenizerBase:
        key = (named.digest, named.trust_remote_code)
        if key not in self._loaded:
            files = read_tokenizer_files(named.model)
            if files.digest != named.digest:
                raise FileChangedError(f"the tokenizer's files in {files.folder} changed during the run; run again")
            self._loaded[key] = files.load(named.trust_remote_code)
        self._loaded.move_to_end(key)
        while len(self._loaded) > self._most:
            self._loaded.popitem(last=False)
        return self._loaded[key]


@dataclass(frozen=True)
class TokenizerRef:
    """A tokenizer, identified by the content of its files.

    Attributes:
        model: the model folder from which the tokenizer is loaded; see `read_tokenizer_files`.
        trust_remote_code: whether to run code from the tokenizer's folder.
        digest: digest of the tokenizer's files.
        cache: the cache that loads the tokenizer when it is first needed.
    """

    model: str
    trust_remote_code: bool
    digest: str
    cache: TokenizerCache

    def load(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises TokenizerError if the tokenizer cannot be loaded, and FileChangedError if the tokenizer is not in the cache
        and its files have changed since `digest` was computed.
        """
        return self.cache.get(self)
