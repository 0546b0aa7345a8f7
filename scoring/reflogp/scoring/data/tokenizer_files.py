"""Open a tokenizer's files, compute a digest of their content, and load the tokenizer from the open files."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reflogp.scoring.errors import TokenizerError
from reflogp.store import FileChangedError, read_checkpoint, resolve_model
from reflogp.store.digests import OpenFiles, folder_of_open_files
from reflogp.store.texts import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Suffixes of files that are never part of a tokenizer: weights, indexes of weights, and documentation.
_NOT_READ = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json", ".md")
#: Subfolder of a tokenizer's folder that contains named chat templates (transformers.utils.CHAT_TEMPLATE_DIR).
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """The open files of a tokenizer.

    Attributes:
        folder: the folder that contains the files.
        files: the open files, which include every file that transformers may read to load the tokenizer.
        digest: digest of the files' names and content.
    """

    folder: Path
    files: OpenFiles
    digest: str

    def load(self, trust_remote_code: bool) -> PreTrainedTokenizerBase:
        """Load the tokenizer from the open files, even if their paths now lead to other files.

        If the system cannot create links to open files, the tokenizer is loaded by path. Then a file also counts as changed if
        its path now leads to another file.

        Raises:
            TokenizerError: there is no tokenizer, or the tokenizer cannot be loaded.
            FileChangedError: a file has changed since it was opened.
        """
        from transformers import AutoTokenizer  # not needed to compute the digest

        opened = {str(path.relative_to(self.folder)): file for path, file in self.files.files.items()}
        with folder_of_open_files(opened, f"tokenizer_{self.digest}") as folder:
            try:
                tokenizer = AutoTokenizer.from_pretrained(folder or self.folder, trust_remote_code=trust_remote_code)
            except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for a broken tokenizer
                self.files.check(by_path=folder is None)
                text = first_line(error).replace(str(folder), str(self.folder))
                raise TokenizerError(f"{self.folder}: the tokenizer cannot be loaded: {text}") from error
            self.files.check(by_path=folder is None)
        tokenizer.name_or_path = str(self.folder)
        return tokenizer


@contextmanager
def open_tokenizer(model: str) -> Iterator[TokenizerFiles]:
    """Open the tokenizer files of a model folder for the duration of the block.

    If `model` is an adapter whose folder contains no tokenizer, the tokenizer files of its base model are opened.

    Raises:
        UsageError: `model` is neither a folder nor a hub model that can be downloaded, or the folder contains no model.
        UsageError, CheckpointError: the adapter or its base model cannot be used.
        TokenizerError: the tokenizer's files cannot be read.
        FileChangedError: the tokenizer's files change while they are being opened.
    """
    folder = resolve_model(model)
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        folder = read_checkpoint(folder).folder
    try:
        files = OpenFiles(_paths(folder))
    except OSError as error:
        raise TokenizerError(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    with files:
        names = sorted((str(path.relative_to(folder)), digest) for path, digest in files.digests().items())
        digest = hashlib.blake2b(repr(names).encode(), digest_size=16, person=b"reflogp.tokenize")
        yield TokenizerFiles(folder, files, digest.hexdigest())


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

        Raises the same errors as `open_tokenizer`.
        """
        with open_tokenizer(model) as opened:
            return TokenizerRef(model, trust_remote_code, opened.digest, self)

    def get(self, named: TokenizerRef) -> PreTrainedTokenizerBase:
        key = (named.digest, named.trust_remote_code)
        if key not in self._loaded:
            with open_tokenizer(named.model) as opened:
                if opened.digest != named.digest:
                    raise FileChangedError(f"the tokenizer's files in {opened.folder} changed during the run; run again")
                self._loaded[key] = opened.load(named.trust_remote_code)
        self._loaded.move_to_end(key)
        while len(self._loaded) > self._most:
            self._loaded.popitem(last=False)
        return self._loaded[key]


@dataclass(frozen=True)
class TokenizerRef:
    """A tokenizer, identified by the content of its files.

    Attributes:
        model: the model folder from which the tokenizer is loaded; see `open_tokenizer`.
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
