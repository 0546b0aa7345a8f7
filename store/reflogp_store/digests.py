"""sha256 of files, remembered.

A hub cache already names a weight file's blob by its sha256; any other file is hashed once and remembered by path,
size, modification time and inode. Knows files only. Called by `reference`.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

#: progress(done so far, in all): bytes where files are hashed, rows or files elsewhere, as the function says
Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def cache_dir() -> Path:
    """Where reflogp remembers things: $REFLOGP_CACHE_DIR, else $XDG_CACHE_HOME/reflogp, else ~/.cache/reflogp."""
    if explicit := os.environ.get("REFLOGP_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reflogp"


def file_digests(paths: Iterable[Path], progress: Progress | None = None) -> dict[Path, str]:
    """sha256 (hex) of each file.

    Args:
        paths: existing files. A link into a hub cache (`…/blobs/<sha256>`) costs nothing.
        progress: called while bytes are really read; never called when every digest is known.
    """
    digests: dict[Path, str] = {}
    pending: list[Path] = []
    with _Memory() as memory:
        for path in paths:
            known = _hub_blob_digest(path) or memory.get(path)
            if known:
                digests[path] = known
            else:
                pending.append(path)
        total, done = sum(path.stat().st_size for path in pending), 0
        for path in pending:
            before = _identity(path)
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
            digests[path] = digest.hexdigest()
            if before == _identity(path):  # a file that changed under our hands is not remembered
                memory.put(path, digests[path])
    return digests


def _hub_blob_digest(path: Path) -> str | None:
    """The name of the blob behind a hub cache's link, when that name is a sha256 (large files; small ones use sha1)."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _SHA256_NAME.fullmatch(target.name):
        return target.name
    return None


def _identity(path: Path) -> tuple[str, int, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


class _Memory:
    """Digests of earlier runs in one SQLite file. A cache folder that cannot be written costs a rehash, no more."""

    def __enter__(self) -> _Memory:
        self._db: sqlite3.Connection | None = None
        try:
            folder = cache_dir()
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(folder / "file-digests.sqlite", timeout=30)
            with self._db:
                self._db.execute(
                    "create table if not exists digest"
                    " (path text primary key, size integer, mtime_ns integer, inode integer, sha256 text)"
                )
        except (OSError, sqlite3.Error):
            self._db = None
        return self

    def __exit__(self, *exc: object) -> None:
        if self._db is not None:
            self._db.close()

    def get(self, path: Path) -> str | None:
        if self._db is None:
            return None
        query = "select sha256 from digest where path = ? and size = ? and mtime_ns = ? and inode = ?"
        try:
            with closing(self._db.execute(query, _identity(path))) as cursor:
                row = cursor.fetchone()
        except sqlite3.Error:
            return None
        return str(row[0]) if row else None

    def put(self, path: Path, digest: str) -> None:
        if self._db is None:
            return
        try:
            with self._db:
                self._db.execute("insert or replace into digest values (?, ?, ?, ?, ?)", (*_identity(path), digest))
        except sqlite3.Error:
            return
