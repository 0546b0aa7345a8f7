"""Compute sha256 digests of files, and remember them for files that have not changed since.

A file counts as unchanged while its inode, size, modification time and change time stay the same. The change time is compared
because a program that rewrites a file in place can restore all the others. File systems' clocks have steps, so digests of files
that changed a moment ago are not remembered.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from reflogp.store.errors import FileChangedError, UsageError
from reflogp.store.files import own_folder, write_atomically

logger = logging.getLogger(__name__)

#: A callback that receives (done, total). Both numbers count bytes, rows or files. The docstrings of the functions that
#: take a callback say which.
Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
#: Seconds in which a file may change again without getting a new change time, with a margin for clocks of other machines.
_CLOCK_STEP_SECONDS = 10.0


def cache_dir() -> Path:
    """Return reflogp's cache folder; for a user without a home, as in some containers, a temporary one."""
    if explicit := os.environ.get("REFLOGP_CACHE_DIR"):
        return Path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "reflogp"
    try:
        return Path.home() / ".cache" / "reflogp"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"reflogp-cache-{os.getuid()}"


class FileIdentity(NamedTuple):
    """What reveals that a file was replaced or written to; times in nanoseconds. A device's number may change at a restart."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def at(cls, path: Path) -> FileIdentity:
        about = path.stat()
        return cls(about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


def require_unchanged(files: Mapping[Path, FileIdentity]) -> None:
    """Raise FileChangedError for the first file that no longer has the given identity."""
    for path, identity in files.items():
        try:
            same = FileIdentity.at(path) == identity
        except OSError:
            same = False
        if not same:
            raise FileChangedError(f"{path} was changed, replaced or deleted while it was being read; run again")


def file_digests(paths: Iterable[Path], progress: Progress | None = None) -> dict[Path, str]:
    """Return the sha256 (hex) of each file by path, reusing what an earlier run or a hub cache recorded.

    `progress` is called with (bytes hashed, total bytes), if not all digests are known.

    Raises FileChangedError if a file is written to or replaced while it is read, and OSError if it cannot be read.
    """
    files = {path: FileIdentity.at(path) for path in paths}
    cache = _cache_folder()
    digests = {}
    for path, identity in files.items():
        if known := _hub_blob_digest(path) or _remembered(cache, path, identity):
            digests[path] = known
    pending = [path for path in files if path not in digests]
    total, done = sum(files[path].size for path in pending), 0
    for path in pending:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
        require_unchanged({path: files[path]})
        digests[path] = digest.hexdigest()
        _remember(cache, path, files[path], digests[path])
    return {path: digests[path] for path in files}


def _hub_blob_digest(path: Path) -> str | None:
    """Return the sha256 by which a hub cache names the file (its "blob", to which a snapshot links), or None.

    A blob that was written to after the first link to it was made is not what its name says.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not _SHA256_NAME.fullmatch(blob.name):
        return None
    links = [link for link in blob.parent.parent.glob(f"snapshots/*/{path.name}") if link.resolve() == blob]
    linked_at = min(link.lstat().st_mtime_ns for link in (path, *links))
    identity = FileIdentity.at(blob)
    return blob.name if max(identity.mtime_ns, identity.ctime_ns) <= linked_at else None


def _cache_folder() -> Path | None:
    """Return the folder of remembered digests, one file for each file that was hashed; None if it cannot be used.

    A digest that another user can forge would change the reference id of this user's model.
    """
    try:
        return own_folder(cache_dir(), "digests")
    except OSError as error:
        _warn_once(f"file digests cannot be cached, so every run computes them again: {error}")
        return None


def _entry(cache: Path, path: Path) -> Path:
    return cache / f"{hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()}.json"


def _remembered(cache: Path | None, path: Path, identity: FileIdentity) -> str | None:
    if cache is None:
        return None
    try:
        kept = json.loads(_entry(cache, path).read_bytes())
        return str(kept["sha256"]) if tuple(kept["identity"]) == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(cache: Path | None, path: Path, identity: FileIdentity, digest: str) -> None:
    if cache is None or time.time() - identity.ctime_ns / 1e9 < _CLOCK_STEP_SECONDS:
        return
    with suppress(UsageError), write_atomically(_entry(cache, path)) as partial:
        partial.write_text(json.dumps({"identity": identity, "sha256": digest}))


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
