"""Fetch datasets by URI, but only from buckets and Hub repositories that an administrator allows.

`check_uri` checks a URI without opening a connection. `fetch` blocks, so call it in a thread.

The settings list the allowed URI prefixes. The prefixes s3://, gs:// and az:// allow every bucket of the object store with that
scheme, and hf:// allows every dataset repository on the Hugging Face Hub. A prefix that names a repository without a revision
allows the repository's files at every revision.

If the URI of a dataset names a whole repository (hf://datasets/team/prefs), the files of one split are fetched into a folder.

The time limit (_FETCH_SECONDS) does not interrupt a request to an object store or the Hub. The client libraries have
their own timeouts, so a fetch may take a few minutes longer than the limit.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.service.confined_paths import folder_digest
from reflogp.service.fetched import PARTIAL, FetchedFolder
from reflogp.service.hub_split import files_of_split
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import StoreUnavailableError, UsageError
from reflogp.store.hub import HubFile, HubPlace
from reflogp.store.storage import STORAGE_ERRORS, open_filesystem, sentence, with_defaults
from reflogp.store.texts import hide_secrets

_OBJECT_STORES = ("s3", "gs", "az")
_HUB = "hf"
#: Matches the path of a URI that names a whole repository on the Hub, with or without a revision.
_REPOSITORY = re.compile(r"/[\w.-]+/(?P<name>[\w.-]+)(@(refs/convert/parquet|[\w.-]+))?/?", re.ASCII)
_CHUNK = 8 << 20
#: Maximum duration of a fetch, in seconds.
_FETCH_SECONDS = 3_600.0
#: Matches 1 to 4,096 characters. `#`, `?` and `%` are excluded, because libraries differ in what they make of them.
_URI = re.compile(r"[A-Za-z0-9\-._~:/@!$&'()*+,;=]{1,4096}")
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9]*)://([^/]*)(/.*)?")
_BUCKET = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


class FetchCancelledError(DatasetError):
    """The job was cancelled or the service stopped while the dataset was being fetched."""


@dataclass(frozen=True)
class _Uri:
    """The parts of a URI.

    Attributes:
        scheme: scheme in lower case.
        host: bucket of an object store, or "datasets" for the Hub. It may be empty only in a prefix from the settings (s3://).
        path: empty, or begins with a slash.
    """

    scheme: str
    host: str
    path: str


def check_uri(uri: str, settings: ServerSettings, config: str | None = None) -> None:
    """Raise an error if a URI, or the config of a dataset, can be refused without opening a connection.

    Raises:
        Problem: 403 if the settings do not allow the URI. 422 if the URI is malformed, if the URI names neither a file with
            the suffix of a dataset format nor a whole repository on the Hub, or if `config` is given for a file.
        UsageError: a prefix in the settings is malformed.
    """
    try:
        parsed = _parse(uri)
        if _repository(parsed) is None:
            _suffix(parsed)
            if config is not None:
                raise ValueError("a config can be specified only for a whole dataset on the Hub")
    except ValueError as error:
        raise Problem(
            422,
            f"the URI cannot be fetched: {error}",
            "use the URI of a file (s3://bucket/folder/file.jsonl) without a config, or the URI of a whole dataset on the Hub"
            " (hf://datasets/ORGANISATION/NAME)",
        ) from error
    try:
        _admit(parsed, settings)
    except ValueError as error:
        raise Problem(
            403, f"fetching this URI is not allowed: {error}", "send the dataset as an upload: PUT /v1/uploads/NAME"
        ) from error


def fetch(
    uri: str,
    folder: FetchedFolder,
    settings: ServerSettings,
    cancelled: Callable[[], bool],
    arrived: Callable[[int], None] = lambda size: None,
    *,
    config: str | None = None,
    split: str = "train",
) -> tuple[Path, str]:
    """Fetch a dataset, and return the path and SHA-256 digest of its file.

    For a whole dataset on the Hub, return the path and digest of a folder instead. The file or folder is named after its
    digest, and gets this name only when it is complete. From then on, the file or folder is protected from deletion. To end
    this protection, the caller must call `folder.released` once the ledger refers to the dataset, or once the dataset is no
    longer needed.

    Args:
        uri: URI that is allowed by a prefix in the settings. Its scheme is s3, gs, az or hf.
        folder: folder to fetch the dataset into. The folder's quota limits the total size of uploads and fetched datasets.
        settings: allowed prefixes, and the limit on size.
        cancelled: function that returns True if the fetch must stop. It is called after each chunk, and a few times per second
            while the files of a Hub dataset are looked up.
        arrived: called after each chunk with the total number of bytes that have arrived.
        config, split: config and split to fetch if the URI names a whole dataset on the Hub. If `config` is None, the default
            config is fetched.

    Raises:
        FetchCancelledError: `cancelled` returned True.
        DatasetError: the URI is malformed or not allowed, the dataset cannot be read, it cannot be written to the folder, or
            it is larger than the settings allow, or does not arrive within _FETCH_SECONDS.
        LedgerError: the quota was reached, and the ledger could not be read to find datasets that can be deleted.
        UsageError: a prefix in the settings is malformed.
    """
    try:
        parsed = _parse(uri)
        place = _repository(parsed)
        suffix = "" if place is not None else _suffix(parsed)
        _admit(parsed, settings)
        if place is not None:
            return _fetch_split(place, config, split, folder, settings, cancelled, arrived)
        with _partial(folder, arrived) as sink:
            if parsed.scheme in _OBJECT_STORES:
                _copy_object(parsed, sink, settings, cancelled)
            else:
                _copy_from_hub(_hub_file(parsed), sink, settings, cancelled, time.monotonic() + _FETCH_SECONDS)
            return sink.keep(suffix)
    except ValueError as error:
        raise DatasetError(f"{hide_secrets(uri)[:200]} could not be fetched: {error}") from error


# URIs


def _parse(uri: str) -> _Uri:
    """Split a URI into parts. Raise ValueError for a URI that two libraries might interpret differently."""
    found = _PARTS.fullmatch(uri)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in (*_OBJECT_STORES, _HUB):
        raise ValueError(f"the URI must begin with one of {', '.join(f'{name}://' for name in (*_OBJECT_STORES, _HUB))}")
    if not _URI.fullmatch(uri):
        raise ValueError("the URI contains characters that are not supported (such as % ? #), or more than 4,096 characters")
    host, path = found[2], found[3] or ""
    if scheme == _HUB and host not in ("", "datasets"):
        raise ValueError("the URI of a dataset on the Hub must be hf://datasets/ORGANISATION/NAME[@REVISION][/PATH]")
    if scheme != _HUB and host and not _BUCKET.fullmatch(host):
        raise ValueError("the bucket name is not valid")
    parts = path.split("/")[1:]
    if any(part in (".", "..") for part in parts) or "" in parts[:-1]:
        raise ValueError("the path contains a segment that is empty, `.` or `..`")
    return _Uri(scheme, host, path)


def _suffix(uri: _Uri) -> str:
    """Return the suffix that names the dataset's format, such as .jsonl, from the end of a URI's path.

    Raise ValueError if the URI has no bucket, if its path does not end in the suffix of a dataset format, or if an hf:// URI
    does not name a file in a dataset repository.
    """
    suffix = dataset_suffix(uri.path.rpartition("/")[2])
    if not uri.host or suffix is None:
        raise ValueError(f"the URI has no bucket, or its path does not end in {SUFFIXES_IN_WORDS}")
    if uri.scheme == _HUB:
        _hub_file(uri)
    return suffix


def _repository(uri: _Uri) -> HubPlace | None:
    """Return the repository if a URI names a whole repository on the Hub, else None."""
    found = _REPOSITORY.fullmatch(uri.path) if uri.scheme == _HUB and uri.host else None
    if found is None or dataset_suffix(found["name"]) is not None:  # in team/a.jsonl, a.jsonl is a file, not a repository
        return None
    return HubPlace.parse(f"{_HUB}://{uri.host}{uri.path}")


def _hub_file(uri: _Uri) -> HubFile:
    try:
        return HubFile.parse(f"{_HUB}://{uri.host}{uri.path}")
    except UsageError as error:
        raise ValueError(str(error)) from error


def _admit(uri: _Uri, settings: ServerSettings) -> None:
    """Check that a prefix in the settings allows a URI.

    Raises:
        ValueError: no prefix allows the URI.
        UsageError: a prefix in the settings is malformed.
    """
    paths = [uri.path]
    if (place := _repository(uri)) is not None:
        paths = [f"{str(some).removeprefix(f'{_HUB}://{uri.host}')}/" for some in (place, HubPlace(place.repository))]
    elif uri.scheme == _HUB:
        paths.append(_hub_file(uri).without_revision().removeprefix(f"{_HUB}://{uri.host}"))
    for text in settings.dataset_uris:
        try:
            prefix = _parse(text)
            if prefix.path and not prefix.host:
                raise ValueError("a path needs a bucket")
        except ValueError as error:
            raise UsageError(f"setting dataset_uris: {text!r}: {error}") from error
        folder = prefix.path.removesuffix("/")
        if (prefix.scheme, prefix.host) in ((uri.scheme, ""), (uri.scheme, uri.host)) and any(
            path == prefix.path or path.startswith(f"{folder}/") for path in paths
        ):
            return
    raise ValueError("this service's settings do not allow fetching from this location")


def _check_going_on(deadline: float, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise FetchCancelledError("the job was cancelled, or the service is stopping")
    if time.monotonic() > deadline:
        raise ValueError(f"the fetch took longer than {_FETCH_SECONDS:g} seconds")


# Object stores


def _copy_object(uri: _Uri, sink: _Sink, settings: ServerSettings, cancelled: Callable[[], bool]) -> None:
    """Copy an object from an object store into a sink. Raise ValueError if the copy fails."""
    deadline = time.monotonic() + _FETCH_SECONDS
    root, key = f"{uri.scheme}://{uri.host}", uri.path.removeprefix("/")
    try:
        filesystem = open_filesystem(root, with_defaults(root, None))
        about = filesystem.get_file_info(key)
        if about.type != pafs.FileType.File:
            raise ValueError("the object does not exist")
        sink.check_room(about.size, settings)
        with filesystem.open_input_stream(key, compression=None) as source:  # do not decompress
            while chunk := source.read(_CHUNK):
                sink.write(chunk, settings)
                _check_going_on(deadline, cancelled)
    except (FetchCancelledError, UsageError):
        raise
    except (*STORAGE_ERRORS, pa.ArrowException) as error:
        raise ValueError(sentence(error)) from error
    if sink.size != about.size:
        raise ValueError("the object changed while it was being read")


# The Hugging Face Hub


def _fetch_split(
    place: HubPlace,
    config: str | None,
    split: str,
    folder: FetchedFolder,
    settings: ServerSettings,
    cancelled: Callable[[], bool],
    arrived: Callable[[int], None],
) -> tuple[Path, str]:
    """Fetch the files of a split into a folder, and return the folder and its digest.

    Each file is named after its position in the split, so sorting the files by name puts them in the order of the split.
    """
    deadline = time.monotonic() + _FETCH_SECONDS
    files = files_of_split(place, config, split, lambda: _check_going_on(deadline, cancelled))
    with _partial_folder(folder, arrived) as sinks:
        for number, file in enumerate(files):
            with sinks.file(f"{number:05}{dataset_suffix(file.path)}") as sink:
                _copy_from_hub(file, sink, settings, cancelled, deadline)
        return sinks.keep()


def _copy_from_hub(
    file: HubFile, sink: _Sink, settings: ServerSettings, cancelled: Callable[[], bool], deadline: float
) -> None:
    """Copy a file from a dataset repository on the Hub into a sink, using the service's Hub token.

    Raise ValueError if the copy fails.
    """
    try:
        size, pieces = file.read(_CHUNK)
        sink.check_room(size, settings)
        for piece in pieces:
            sink.write(piece, settings)
            _check_going_on(deadline, cancelled)
    except FetchCancelledError:
        raise
    except (UsageError, StoreUnavailableError) as error:
        raise ValueError(str(error)) from error


# Files


class _Sink:
    """A writer that saves one file of a dataset and computes the file's digest.

    Args:
        path: path of the file.
        file: the same file, open for writing.
        folder: folder whose quota limits the written bytes.
        arrived: called after each write with the number of bytes written so far for the whole dataset.
        size: number of bytes that have already been written to other files of the dataset.

    Attributes:
        size: number of bytes written so far for the whole dataset, or 0 after `keep`.
    """

    def __init__(
        self, path: Path, file: BinaryIO, folder: FetchedFolder, arrived: Callable[[int], None], size: int = 0
    ) -> None:
        self._path, self._file = path, file
        self._folder = folder
        self._arrived = arrived
        self._digest = hashlib.sha256()
        self.size = size

    def check_room(self, size: int, settings: ServerSettings) -> None:
        """Raise ValueError if `size` more bytes would make the dataset larger than allowed or exceed the folder's quota."""
        self._check_length(self.size + size, settings)
        self._folder.check_room(size)

    def write(self, chunk: bytes, settings: ServerSettings) -> None:
        self._check_length(self.size + len(chunk), settings)
        self._folder.take(len(chunk))
        self.size += len(chunk)
        self._digest.update(chunk)
        self._file.write(chunk)
        self._arrived(self.size)

    def keep(self, suffix: str) -> tuple[Path, str]:
        """Rename the file to its SHA-256 digest followed by the suffix. Return the new path and the digest."""
        digest = self.written()
        file = self._folder.keep(self._path, f"{digest}{suffix}", self.size)
        self.size = 0
        return file, digest

    def written(self) -> str:
        """Flush the file to disk and return its SHA-256 digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Delete the file, unless `keep` was called."""
        self._folder.give(self.size)
        self._path.unlink(missing_ok=True)

    def _check_length(self, size: int, settings: ServerSettings) -> None:
        if size > settings.max_upload_bytes:
            raise ValueError(f"the dataset is larger than {settings.max_upload_bytes:,} bytes (max_upload_bytes)")


@contextmanager
def _partial(folder: FetchedFolder, arrived: Callable[[int], None]) -> Iterator[_Sink]:
    """Open a hidden file in a folder, and yield a sink for it.

    On exit, delete the file unless the sink's method `keep` was called. Raise ValueError if the file cannot be written.
    """
    path = folder.folder / f"{PARTIAL}{secrets.token_hex(8)}"
    try:
        with path.open("xb") as file:
            sink = _Sink(path, file, folder, arrived)
            try:
                yield sink
            finally:
                sink.abandon()
    except OSError as error:
        raise ValueError(f"the service cannot write the dataset to its disk: {error.strerror}") from error


class _FolderSink:
    """A hidden folder into which the files of a dataset are written one after another."""

    def __init__(self, path: Path, folder: FetchedFolder, arrived: Callable[[int], None]) -> None:
        self._path, self._folder, self._arrived = path, folder, arrived
        self._digests: dict[str, str] = {}
        self._size = 0

    @contextmanager
    def file(self, name: str) -> Iterator[_Sink]:
        """Open a new file in the folder, and yield a sink for it."""
        with (self._path / name).open("xb") as file:
            sink = _Sink(self._path / name, file, self._folder, self._arrived, self._size)
            try:
                yield sink
            finally:
                self._size = sink.size
            self._digests[name] = sink.written()

    def keep(self) -> tuple[Path, str]:
        """Rename the folder to its digest; return the new path and the digest."""
        digest = folder_digest(self._digests)
        kept = self._folder.keep(self._path, digest, self._size)
        self._size = 0
        return kept, digest

    def abandon(self) -> None:
        """Delete the folder, unless `keep` was called."""
        self._folder.give(self._size)
        shutil.rmtree(self._path, ignore_errors=True)


@contextmanager
def _partial_folder(folder: FetchedFolder, arrived: Callable[[int], None]) -> Iterator[_FolderSink]:
    """Create a hidden folder, and yield a sink for it.

    On exit, delete the folder unless the sink's method `keep` was called. Raise ValueError if the folder cannot be written.
    """
    path = folder.folder / f"{PARTIAL}{secrets.token_hex(8)}"
    try:
        path.mkdir()
        sink = _FolderSink(path, folder, arrived)
        try:
            yield sink
        finally:
            sink.abandon()
    except OSError as error:
        raise ValueError(f"the service cannot write the dataset to its disk: {error.strerror}") from error
