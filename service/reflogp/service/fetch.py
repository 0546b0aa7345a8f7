"""Fetch datasets by URI, but only from hosts, buckets and Hub repositories that an administrator allows.

`check_uri` checks a URI without opening a connection. `fetch` blocks, so call it in a thread.

The settings list the allowed URI prefixes. If a prefix names a host (https://data.example.org/prefs/), the host is trusted,
even if it has internal addresses. The prefix https:// (or http://) without a host allows every host that has only public
addresses, but only on port 443 (or 80). `fetch` checks all addresses of such a host, then connects to one of them without
resolving the host name again. The prefixes s3://, gs:// and az:// allow every bucket of the object store with that scheme, and
hf:// allows every dataset repository on the Hugging Face Hub. A prefix that names a repository without a revision allows the
repository's files at every revision.

If the URI of a dataset names a whole repository (hf://datasets/team/prefs), the files of one split are fetched into a folder.

The time limit (setting fetch_seconds) does not interrupt the resolution of a host name, or a request to an object store or the
Hub. The resolver and the client libraries have their own timeouts for these operations, so a fetch may take a few minutes
longer than the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urljoin

import httpx
import pyarrow as pa
import pyarrow.fs as pafs

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.service.confined_paths import folder_digest
from reflogp.service.fetched import PARTIAL, FetchedFolder
from reflogp.service.hub_split import files_of_split
from reflogp.service.problems import Problem
from reflogp.service.public_addresses import is_public
from reflogp.service.settings import ServerSettings
from reflogp.store import StoreUnavailableError, UsageError
from reflogp.store.hub import HubFile, HubPlace
from reflogp.store.storage import STORAGE_ERRORS, open_filesystem, sentence, with_defaults
from reflogp.store.texts import hide_secrets, shortened

_PORTS = {"http": 80, "https": 443}
_OBJECT_STORES = ("s3", "gs", "az")
_HUB = "hf"
#: Matches the path of a URI that names a whole repository on the Hub, with or without a revision.
_REPOSITORY = re.compile(r"/[\w.-]+/(?P<name>[\w.-]+)(@(refs/convert/parquet|[\w.-]+))?/?", re.ASCII)
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
#: If a public host has more addresses than this, `fetch` tries to connect only to the first ones.
_MOST_ADDRESSES = 4
_CHUNK = 8 << 20
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.2
#: An HTTP download is stopped if fewer bytes than this arrive within `body_idle_seconds` plus the time allowed for connecting,
#: so that a server cannot keep the download open by sending one byte per minute.
_LEAST_BYTES = 4 << 10
#: Matches 1 to 4,096 characters that RFC 3986 allows in URIs. `#` is excluded, so URIs with a fragment are refused.
_URI = re.compile(r"[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]{1,4096}")
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://([^/?]*)(/[^?]*)?(\?.*)?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_BUCKET = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
#: Matches the last label of a host name if the label is a decimal, octal or hexadecimal number. Resolvers would interpret such
#: a host name as an IPv4 address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchCancelledError(DatasetError):
    """The job was cancelled or the service stopped while the dataset was being fetched."""


@dataclass(frozen=True)
class _Uri:
    """The parts of a URI, each in a form that all libraries interpret in the same way.

    Attributes:
        scheme: scheme in lower case.
        host: host name in lower case, IP address (an IPv6 address without brackets), bucket of an object store, or "datasets"
            for the Hub. The host may be empty only in a prefix from the settings (https://).
        port: port of the host, or None for object stores, the Hub and an empty host.
        path: empty, or begins with a slash.
        query: empty, or begins with a question mark.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    query: str = ""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port in (None, _PORTS.get(self.scheme)) else f"{host}:{self.port}"


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
            "use the URI of a file (https://host/folder/file.jsonl) without a config, or the URI of a whole dataset on the Hub"
            " (hf://datasets/ORGANISATION/NAME)",
        ) from error
    try:
        trusted = _admit(parsed, settings)
        if not trusted and (address := _literal(parsed.host)) is not None:
            _check_public([address])
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
        uri: URI that is allowed by a prefix in the settings. Its scheme is https, http, s3, gs, az or hf.
        folder: folder to fetch the dataset into. The folder's quota limits the total size of uploads and fetched datasets.
        settings: allowed prefixes, and limits on time and size.
        cancelled: function that returns True if the fetch must stop. It is called a few times per second during an HTTP
            download and while the files of a Hub dataset are looked up. During a download from an object store or the Hub, it
            is called after each chunk.
        arrived: called after each chunk with the total number of bytes that have arrived.
        config, split: config and split to fetch if the URI names a whole dataset on the Hub. If `config` is None, the default
            config is fetched.

    Raises:
        FetchCancelledError: `cancelled` returned True.
        DatasetError: the URI is malformed or not allowed, the dataset cannot be read, it cannot be written to the folder, or
            it is larger or arrives more slowly than the settings allow.
        LedgerError: the quota was reached, and the ledger could not be read to find datasets that can be deleted.
        UsageError: a prefix in the settings is malformed.
    """
    try:
        parsed = _parse(uri)
        place = _repository(parsed)
        suffix = "" if place is not None else _suffix(parsed)
        trusted = _admit(parsed, settings)
        if place is not None:
            return _fetch_split(place, config, split, folder, settings, cancelled, arrived)
        with _partial(folder, arrived) as sink:
            if parsed.scheme in _OBJECT_STORES:
                _copy_object(parsed, sink, settings, cancelled)
            elif parsed.scheme == _HUB:
                _copy_from_hub(_hub_file(parsed), sink, settings, cancelled, time.monotonic() + settings.fetch_seconds)
            else:
                asyncio.run(_download_bounded(parsed, trusted, sink, settings, cancelled))
            return sink.keep(suffix)
    except ValueError as error:
        raise DatasetError(f"{hide_secrets(uri)[:200]} could not be fetched: {error}") from error


# URIs


def _parse(uri: str) -> _Uri:
    """Split a URI into parts. Raise ValueError for a URI that two libraries might interpret differently."""
    if not _URI.fullmatch(uri):
        raise ValueError("the URI contains characters that are not allowed, or is longer than 4,096 characters")
    found = _PARTS.fullmatch(uri)
    if not found:
        raise ValueError("the URI does not have the form scheme://host/path")
    scheme, authority, path, query = found[1].lower(), found[2], found[3] or "", found[4] or ""
    if scheme in _OBJECT_STORES:
        if authority and not _BUCKET.fullmatch(authority):
            raise ValueError("the bucket name is not valid")
        if query or "%" in path:
            raise ValueError(
                "the key of an object must not contain % or ?, because percent-encoding and queries are not supported"
            )
        host, port = authority, None
    elif scheme == _HUB:
        if authority not in ("", "datasets") or query or "%" in path:
            raise ValueError(
                "the URI of a dataset on the Hub must be hf://datasets/ORGANISATION/NAME[@REVISION][/PATH], without % or ?"
            )
        host, port = authority, None
    elif scheme in _PORTS:
        host, port = _host_and_port(scheme, authority) if authority else ("", None)
    else:
        raise ValueError(f"the scheme must be one of {', '.join([*_PORTS, *_OBJECT_STORES, _HUB])}")
    _check_path(path)
    return _Uri(scheme, host, port, path, query)


def _host_and_port(scheme: str, authority: str) -> tuple[str, int]:
    if "@" in authority:
        raise ValueError("the URI contains a user name or other credentials")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([1-9][0-9]{0,4}))?", authority)
    if not found or int(found[2] or 1) > 65535:
        raise ValueError("the host and port cannot be parsed")
    host, port = found[1].lower().strip("[]"), int(found[2]) if found[2] else _PORTS[scheme]
    if ":" in host:
        return str(ipaddress.IPv6Address(host)), port
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(ipaddress.IPv4Address(host)), port
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("the host is not a valid host name")
    return host, port


def _check_path(path: str) -> None:
    if re.search(r"%(?![0-9A-Fa-f]{2})|%25|%2[Ff]|%5[Cc]|%[01][0-9A-Fa-f]|%7[Ff]", path):
        raise ValueError(
            "the path contains an encoded slash, backslash, percent sign or control character, or an invalid percent-encoding"
        )
    parts = path.split("/")[1:]
    if any(unquote(part).split(";")[0] in (".", "..") for part in parts) or "" in parts[:-1]:
        raise ValueError("the path contains a segment that is empty, `.` or `..`")


def _suffix(uri: _Uri) -> str:
    """Return the suffix that names the dataset's format, such as .jsonl, from the end of a URI's path.

    Raise ValueError if the URI has no host, if its path does not end in the suffix of a dataset format, or if an hf:// URI does
    not name a file in a dataset repository.
    """
    suffix = dataset_suffix(unquote(uri.path).rpartition("/")[2])
    if not uri.host or suffix is None:
        raise ValueError(f"the URI has no host or bucket, or its path does not end in {SUFFIXES_IN_WORDS}")
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


def _admit(uri: _Uri, settings: ServerSettings) -> bool:
    """Check that a prefix in the settings allows a URI, and return whether the URI's host is trusted.

    Allowed buckets and repositories are always trusted. An HTTP or HTTPS host is trusted only if a prefix names it.

    Raises:
        ValueError: no prefix allows the URI.
        UsageError: a prefix in the settings is malformed.
    """
    any_host = False
    paths = [uri.path]
    if (place := _repository(uri)) is not None:
        paths = [f"{str(some).removeprefix(f'{_HUB}://{uri.host}')}/" for some in (place, HubPlace(place.repository))]
    elif uri.scheme == _HUB:
        paths.append(_hub_file(uri).without_revision().removeprefix(f"{_HUB}://{uri.host}"))
    for text in settings.dataset_uris:
        try:
            prefix = _parse(text)
        except ValueError as error:
            raise UsageError(f"setting dataset_uris: {text!r}: {error}") from error
        if prefix.query or (not prefix.host and prefix.path):
            raise UsageError(
                f"setting dataset_uris: {text!r} must be a scheme alone (https://), or a scheme with a host or bucket and an "
                "optional path (s3://bucket/folder/); queries are not supported"
            )
        if prefix.scheme != uri.scheme:
            continue
        if not prefix.host:
            any_host |= uri.port == _PORTS.get(uri.scheme)
        elif (prefix.host, prefix.port) == (uri.host, uri.port):
            folder = prefix.path.removesuffix("/")
            if any(path == prefix.path or path.startswith(f"{folder}/") for path in paths):
                return True
    if not any_host:
        raise ValueError("this service's settings do not allow fetching from this location")
    return uri.scheme not in _PORTS


# Addresses


def _literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_public(addresses: list[_Address]) -> None:
    """Raise ValueError unless all addresses are public.

    The message contains no address, so that it reveals nothing about an internal network.
    """
    if not all(map(is_public, addresses)):
        raise ValueError("the host is not public")


async def _public_addresses(uri: _Uri) -> list[str]:
    """Return up to _MOST_ADDRESSES addresses of the URI's host.

    Raise ValueError if the host name cannot be resolved, or if any address of the host is not public.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(uri.host, uri.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError("the host name cannot be resolved") from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    _check_public(addresses)
    return list(dict.fromkeys(map(str, addresses)))[:_MOST_ADDRESSES]


# HTTP


async def _download_bounded(
    uri: _Uri, trusted: bool, sink: _Sink, settings: ServerSettings, cancelled: Callable[[], bool]
) -> None:
    """Download the content of a URI into a sink.

    Raise ValueError if the download fails or exceeds a time limit, and FetchCancelledError if `cancelled` returns True.
    """
    download = asyncio.create_task(_download(uri, trusted, sink, settings))
    deadline = time.monotonic() + settings.fetch_seconds
    patience = settings.body_idle_seconds + _CONNECT_SECONDS * _MOST_ADDRESSES
    size, since = 0, time.monotonic()
    try:
        while not (await asyncio.wait([download], timeout=_POLL_SECONDS))[0]:
            _check_going_on(deadline, settings, cancelled)
            if sink.size - size >= _LEAST_BYTES:
                size, since = sink.size, time.monotonic()
            elif time.monotonic() - since > patience:
                raise ValueError(f"fewer than {_LEAST_BYTES:,} bytes arrived within {patience:g} seconds")
        await download
    except httpx.HTTPError as error:
        raise ValueError(f"the connection failed ({type(error).__name__})") from error
    finally:
        download.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await download


def _check_going_on(deadline: float, settings: ServerSettings, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise FetchCancelledError("the job was cancelled, or the service is stopping")
    if time.monotonic() > deadline:
        raise ValueError(f"the fetch took longer than {settings.fetch_seconds:g} seconds")


async def _download(uri: _Uri, trusted: bool, sink: _Sink, settings: ServerSettings) -> None:
    """Write the content of a URI to a sink, and follow redirects that `_admit` allows.

    Raise ValueError or httpx.HTTPError if the download fails.
    """
    try:
        context = httpx.create_ssl_context()  # root certificates: certifi's, or those in SSL_CERT_FILE or SSL_CERT_DIR
    except OSError as error:
        raise ValueError(
            f"the service cannot read the root certificates that SSL_CERT_FILE or SSL_CERT_DIR names ({error.strerror})"
        ) from error
    for _ in range(1 + _MOST_REDIRECTS):
        addresses = [uri.host] if trusted else await _public_addresses(uri)
        # A transport is used instead of a client, because a transport ignores proxies, cookies, redirects and .netrc.
        async with httpx.AsyncHTTPTransport(verify=context, trust_env=False) as transport:
            response = await _ask(transport, uri, addresses, settings.body_idle_seconds)
            try:
                if response.status_code not in _REDIRECTS:
                    await _take_body(response, sink, settings)
                    return
                uri, trusted = _redirected(uri, response.headers.get("location", ""), settings)
            finally:
                await response.aclose()
    raise ValueError(f"the server redirects more than {_MOST_REDIRECTS} times")


async def _ask(transport: httpx.AsyncHTTPTransport, uri: _Uri, addresses: list[str], idle_seconds: float) -> httpx.Response:
    """Request a URI from the first address that can be reached, and return the response before its body is read.

    The Host header and the certificate check use the URI's host name, not the address.
    """
    headers = {"Host": uri.authority, "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "reflogp"}
    patience = httpx.Timeout(idle_seconds, connect=min(idle_seconds, _CONNECT_SECONDS)).as_dict()
    extensions = {"timeout": patience, "sni_hostname": uri.host}
    for number, address in enumerate(addresses, 1):
        host = f"[{address}]" if ":" in address else address
        request = httpx.Request(
            "GET", f"{uri.scheme}://{host}:{uri.port}{uri.path or '/'}{uri.query}", headers=headers, extensions=extensions
        )
        try:
            return await transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if number == len(addresses):
                raise
    raise ValueError("the host has no address")


def _redirected(uri: _Uri, location: str, settings: ServerSettings) -> tuple[_Uri, bool]:
    """Return the URI that a redirect leads to, and whether that URI's host is trusted.

    Raise ValueError if the redirect does not lead to an HTTP or HTTPS URI that the settings allow.
    """
    try:
        target = _parse(urljoin(f"{uri.scheme}://{uri.authority}{uri.path}", location))
    except ValueError as error:
        raise ValueError(f"the server redirects to a URI that cannot be fetched: {error}") from error
    if not location or target.scheme not in _PORTS or not target.host:
        raise ValueError("the server's redirect does not lead to an http or https URI")
    try:
        return target, _admit(target, settings)
    except ValueError as error:
        raise ValueError(f"the server redirects to {shortened(target.authority, 100)!r}, but {error}") from error


async def _take_body(response: httpx.Response, sink: _Sink, settings: ServerSettings) -> None:
    if response.status_code != 200:
        raise ValueError(f"the server responded with status {response.status_code}")
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ValueError("the response has a content encoding that was not requested")
    length = response.headers.get("content-length", "")
    if not length.isdigit() and "chunked" not in response.headers.get("transfer-encoding", "").lower():
        raise ValueError("the response has neither a Content-Length nor chunked encoding, so it may be incomplete")
    if length.isdigit():
        sink.check_room(int(length), settings)
    async for chunk in response.aiter_raw():
        sink.write(chunk, settings)


# Object stores


def _copy_object(uri: _Uri, sink: _Sink, settings: ServerSettings, cancelled: Callable[[], bool]) -> None:
    """Copy an object from an object store into a sink. Raise ValueError if the copy fails."""
    deadline = time.monotonic() + settings.fetch_seconds
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
                _check_going_on(deadline, settings, cancelled)
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
    deadline = time.monotonic() + settings.fetch_seconds
    files = files_of_split(place, config, split, lambda: _check_going_on(deadline, settings, cancelled))
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
            _check_going_on(deadline, settings, cancelled)
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
