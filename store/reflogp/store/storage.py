"""Access a store's files, in a local folder or an object store, through an Arrow filesystem.

Object stores are accessed through delta-rs' client, with the same credentials as the Delta log.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from reflogp.store.errors import StoreUnavailableError, UsageError

#: Errors that delta-rs and Arrow raise when I/O fails.
STORAGE_ERRORS = (OSError, pa.ArrowInvalid, DeltaError)

#: Description of where a store can be, shown in help texts and error messages. Other schemes that delta-rs supports work too.
PLACES = "a folder, or an s3://, gs:// or az:// URI"
#: Size of a write buffer in bytes. delta-rs' streams accept only bytes objects. Arrow passes bytes objects to them only if each
#: write fits in Arrow's buffer.
_WRITE_BUFFER = 1 << 20


class _Handler(DeltaStorageHandler):
    """delta-rs' handler for an object store.

    Its own calls for listing, opening and deleting files hold Python's global lock while they wait for the object store, so a
    store that does not answer would stop all threads. Each of them is preceded by a call that waits without the lock. A file
    whose size is given does not need that: it is opened without a request.
    """

    def __init__(self, uri: str, options: dict[str, str] | None, sizes: Mapping[str, int]) -> None:
        super().__init__(uri, options, dict(sizes))
        self._sizes = sizes

    def _wait_for_answer(self, path: str) -> None:
        self.get_file_info([f"{path}/_".lstrip("/")])  # a path without an object: its parent would be listed as a whole

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        self._wait_for_answer(selector.base_dir)
        return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> pa.PythonFile:
        if path not in self._sizes:
            self._wait_for_answer(path)
        return super().open_input_file(path)

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        self._wait_for_answer(path)
        return super().open_output_stream(path, metadata)

    def delete_file(self, path: str) -> None:
        self._wait_for_answer(path)
        super().delete_file(path)


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Within the block, replace the storage's errors by StoreUnavailableError. Its message begins with `what`."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"{what}: {sentence(error)}") from error


def normalize_uri(uri: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local folder, or a URI (s3://, gs://, az://, …) without a trailing slash.

    Raises UsageError for a URI with a single slash after the colon, and for a local path that contains an escape such as %20.
    """
    text = os.fspath(uri)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if re.match(r"(s3a?|gs|az|abfss?|https?):/(?!/)", text):
        raise UsageError(f"store {text!r}: a URI needs two slashes after the colon")
    if "://" in text:
        return text.rstrip("/")
    if re.search(r"%[0-9A-Fa-f]{2}", text):
        raise UsageError(f"store {text!r}: delta-rs would read the percent sign as an escape; use another folder name")
    return str(Path(text).expanduser().absolute())


#: How often delta-rs repeats a request that an object store does not answer. Each try takes up to 30 seconds, or AWS_TIMEOUT.
_RETRIES = "3"


def with_defaults(uri: str, options: dict[str, str] | None) -> dict[str, str] | None:
    """Return the delta-rs storage options of a store: `options`, and for an object store also the following.

    - max_retries, so that an object store that hangs is an error after about two minutes (with delta-rs' own default: five).
    - AWS_FORCE_CREDENTIAL_LOAD, if AWS_PROFILE is set in `options` or the environment, and AWS_ACCESS_KEY_ID in neither.
      Without it, delta-rs ignores AWS profiles and credential files if an endpoint is given.
    """
    if is_local(uri):
        return options
    named = {name.upper() for name in options or {}} | os.environ.keys()
    of_profile = uri.startswith("s3") and "AWS_PROFILE" in named and "AWS_ACCESS_KEY_ID" not in named
    profile = {"AWS_FORCE_CREDENTIAL_LOAD": "true"} if of_profile else {}
    return {"max_retries": _RETRIES} | profile | (options or {})


def is_local(uri: str) -> bool:
    return "://" not in uri


def may_exist(uri: str) -> bool:
    """Return False only if `uri` is a local path at which there is no folder: object stores have no folders."""
    return not is_local(uri) or Path(uri).is_dir()


def open_filesystem(
    uri: str, options: dict[str, str] | None = None, sizes: Mapping[str, int] = MappingProxyType({})
) -> pafs.FileSystem:
    """Return an Arrow filesystem whose root is `uri`: Arrow's own for a local folder, and delta-rs' for an object store.

    `sizes` has the sizes in bytes of files that never change, for which an object store is not asked.

    Raises UsageError for a scheme that delta-rs does not support; other errors of delta-rs are passed on.
    """
    if is_local(uri):
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    try:
        return pafs.PyFileSystem(_Handler(uri, options, sizes))
    except (*STORAGE_ERRORS, ValueError) as error:
        if "Unknown scheme" in str(error):  # delta-rs' own message lists about fifty schemes
            raise UsageError(f"store {uri}: the scheme is not supported; use {PLACES}") from error
        raise


def require_scheme(uri: str) -> None:
    """Raise UsageError for a scheme that delta-rs does not support. Whether the storage can be reached is not checked."""
    if not is_local(uri):
        with contextlib.suppress(*STORAGE_ERRORS):
            open_filesystem(uri)


def make_folder(uri: str) -> None:
    """Create a local store's folder; do nothing for an object store."""
    if is_local(uri):
        try:
            Path(uri).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailableError(f"the store {uri} cannot be created: {error.strerror or error}") from error


def write_file(filesystem: pafs.FileSystem, path: str, data: bytes | pa.Buffer) -> None:
    """Write a file. If an error interrupts the write, delete what was written."""
    try:
        with filesystem.open_output_stream(path, buffer_size=_WRITE_BUFFER) as sink:
            view = memoryview(data)
            for start in range(0, len(view), _WRITE_BUFFER // 2):
                sink.write(view[start : start + _WRITE_BUFFER // 2])
    except BaseException:
        with contextlib.suppress(*STORAGE_ERRORS):
            filesystem.delete_file(path)
        raise


def read_file(filesystem: pafs.FileSystem, path: str) -> bytes | None:
    """Return a small file's bytes, or None if it does not exist."""
    try:
        with filesystem.open_input_stream(path) as source:
            return bytes(source.read())
    except FileNotFoundError:
        return None


def list_files(filesystem: pafs.FileSystem, folder: str = "") -> dict[str, int]:
    """Return a dict from the path of each file in a folder, without subfolders, to its size in bytes; {} without the folder."""
    entries = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return {entry.path.lstrip("/"): int(entry.size) for entry in entries if entry.type == pafs.FileType.File}


def sentence(error: BaseException) -> str:
    """Return the message of a storage error as one line: an XML answer's <Message>, or the first and the last line, without
    lines that begin with "at " and without color codes. If nothing is left, return the name of the error's class.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    said = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if said:
        return " ".join(said.group(1).split())
    lines = [re.sub(r"^\s*(↳|\d+:.*)\s*", "", line).strip() for line in text.split("\n")]
    kept = [line for line in lines if line and not line.startswith("at ")]
    return f"{kept[0]}: {kept[-1]}" if len(kept) > 1 else "".join(kept) or type(error).__name__


def split_table_uri(uri: str) -> tuple[str, str]:
    """Split a table's URI, `<store>/<reference id>/logprobs`, into (store URI, reference id)."""
    store, reference_id, _ = uri.rsplit("/", 2)
    return store, reference_id
