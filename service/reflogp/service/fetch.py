"""Fetch datasets by URI, but only from buckets and Hub repositories that an administrator allows.

The setting dataset_uris lists the allowed prefixes. s3://, gs:// and az:// allow every bucket with that scheme, and hf:// every
dataset repository on the Hub. A prefix that names a repository without a revision allows all its revisions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.service.dataset_files import Incoming
from reflogp.service.hub_split import files_of_split
from reflogp.service.ledger_file import LedgerError
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import ReflogpError, UsageError
from reflogp.store.hub import HubFile, HubPlace
from reflogp.store.storage import STORAGE_ERRORS, open_filesystem, sentence, with_defaults
from reflogp.store.texts import hide_secrets

_OBJECT_STORES = ("s3", "gs", "az")
_HUB = "hf"
#: Matches the path of a URI that names a whole repository on the Hub, with or without a revision.
_REPOSITORY = re.compile(r"/[\w.-]+/(?P<name>[\w.-]+)(@(refs/convert/parquet|[\w.-]+))?/?", re.ASCII)
_CHUNK = 8 << 20
#: Matches 1 to 4,096 characters. `#`, `?` and `%` are excluded, because libraries differ in what they make of them.
_URI = re.compile(r"[A-Za-z0-9\-._~:/@!$&'()*+,;=]{1,4096}")
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9]*)://([^/]*)(/.*)?")
_BUCKET = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


class FetchCancelledError(DatasetError):
    """The job was cancelled or the service stopped while the dataset was being fetched."""


@dataclass(frozen=True)
class _Uri:
    scheme: str  # in lower case
    host: str  # a bucket, or "datasets" for the Hub; empty only in a prefix from the settings (s3://)
    path: str  # empty, or begins with a slash

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}"


def check_uri(uri: str, settings: ServerSettings, config: str | None = None) -> HubPlace | HubFile | _Uri:
    """Return the repository, file or object that a URI names, without opening a connection.

    Raises Problem: 403 if the settings do not allow the URI, 422 if it is malformed, names neither a dataset file nor a whole
    repository on the Hub, or names a file although `config` is given. Raises UsageError for a malformed prefix in the settings.
    """
    try:
        parsed = _parse(uri)
        hub = _on_hub(parsed)
        if not isinstance(hub, HubPlace):
            if not parsed.host or dataset_suffix(parsed.path.rpartition("/")[2]) is None:
                raise ValueError(f"the URI has no bucket, or its path does not end in {SUFFIXES_IN_WORDS}")
            if config is not None:
                raise ValueError("a config can be specified only for a whole dataset on the Hub")
    except ValueError as error:
        raise Problem(
            422,
            f"the URI cannot be fetched: {error}",
            "use the URI of a file (s3://bucket/folder/file.jsonl) without a config, or the URI of a whole dataset on the Hub"
            " (hf://datasets/ORGANISATION/NAME)",
        ) from error
    if not any(_allows(prefix, parsed, hub) for prefix in settings.dataset_uris):
        raise Problem(
            403,
            "fetching this URI is not allowed: this service's settings do not allow fetching from this location",
            "send the dataset as an upload: PUT /v1/uploads/NAME",
        )
    return hub or parsed


def fetch(
    uri: str,
    incoming: Incoming,
    settings: ServerSettings,
    cancelled: Callable[[], bool],
    *,
    config: str | None = None,
    split: str = "train",
) -> tuple[Path, str]:
    """Fetch a dataset, and return the path and digest of its file, or of a folder with its files. This call blocks.

    Args:
        cancelled: returns True if the fetch must stop. It is called a few times per second.
        config, split: what to fetch if the URI names a whole dataset on the Hub; None for the default config.

    Raises FetchCancelledError, DatasetError, or LedgerError if the ledger could not be read to find datasets to delete.
    """

    def check() -> None:
        if cancelled():
            raise FetchCancelledError("the job was cancelled, or the service is stopping")

    try:
        found = check_uri(uri, settings, config)
        files = files_of_split(found, config, split, check) if isinstance(found, HubPlace) else [found]
        with incoming:
            for number, file in enumerate(files):
                size, chunks = file.read(_CHUNK) if isinstance(file, HubFile) else _read_object(file)
                incoming.begin(f"{number:05}{dataset_suffix(file.path)}", size)
                for chunk in chunks:
                    incoming.write(chunk)
                    check()
                if incoming.file_size != size:
                    raise ValueError("the file changed while it was being read")
            return incoming.keep()
    except (FetchCancelledError, LedgerError):
        raise
    except (Problem, ValueError, ReflogpError, *STORAGE_ERRORS, pa.ArrowException) as error:
        raise DatasetError(f"{hide_secrets(uri)[:200]} could not be fetched: {sentence(error)}") from error


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


def _on_hub(uri: _Uri) -> HubPlace | HubFile | None:
    """Return the repository or file that an hf:// URI names; None for another URI. Raise ValueError if it names neither."""
    if uri.scheme != _HUB:
        return None
    found = _REPOSITORY.fullmatch(uri.path)
    try:
        if found is None or dataset_suffix(found["name"]) is not None:  # in team/a.jsonl, a.jsonl is a file
            return HubFile.parse(str(uri))
        return HubPlace.parse(str(uri))
    except UsageError as error:
        raise ValueError(str(error)) from error


def _allows(text: str, uri: _Uri, hub: HubPlace | HubFile | None) -> bool:
    """Return whether a prefix in the settings allows a URI. Raise UsageError if the prefix is malformed."""
    try:
        prefix = _parse(text)
        if prefix.path and not prefix.host:
            raise ValueError("a path needs a bucket")
    except ValueError as error:
        raise UsageError(f"setting dataset_uris: {text!r}: {error}") from error
    names = [str(uri)]
    if isinstance(hub, HubPlace):
        names = [f"{hub}/", f"{HubPlace(hub.repository)}/"]
    elif hub is not None:
        names.append(hub.without_revision())
    if not prefix.host:
        return prefix.scheme == uri.scheme
    return any(name == str(prefix) or name.startswith(f"{str(prefix).removesuffix('/')}/") for name in names)


def _read_object(uri: _Uri) -> tuple[int, Iterator[bytes]]:
    """Return the size of an object in an object store, and its content in chunks. Raises STORAGE_ERRORS and ValueError."""
    root, key = f"{uri.scheme}://{uri.host}", uri.path.removeprefix("/")
    filesystem = open_filesystem(root, with_defaults(root, None))
    about = filesystem.get_file_info(key)
    if about.type != pafs.FileType.File:
        raise ValueError("the object does not exist")

    def chunks() -> Iterator[bytes]:
        with filesystem.open_input_stream(key, compression=None) as source:  # do not decompress
            while chunk := source.read(_CHUNK):
                yield chunk

    return about.size, chunks()
