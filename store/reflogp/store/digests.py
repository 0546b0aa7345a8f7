"""Compute sha256 digests of files, and keep the files open, so that later reads return the content that was hashed.

A cached digest is reused only if the file still has the same path, inode, size, modification time and change time. The change
time is compared because a program that rewrites a file in place can restore all the other properties.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from reflogp.store.errors import FileChangedError
from reflogp.store.files import check_own, open_own_folder

logger = logging.getLogger(__name__)

#: A callback that receives (done, total). Both numbers count bytes, rows or files. The docstrings of the functions that
#: take a callback say which.
Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
#: A file that changed less than this many seconds ago may change again without getting a new change time. The value includes a
#: margin for inaccurate clocks.
_RECENT_SECONDS = 120.0
#: Waiting times, in seconds, that are longer than one step of a file system's clock. On most file systems, a step is one tick
#: of the kernel's clock. On file systems whose times are whole seconds, a step can be as long as two seconds.
_TICK_SECONDS, _COARSE_TICK_SECONDS = 0.03, 2.1
#: The folder in which a process finds its own open files. The names in the folder are file descriptors.
_OPEN_FILES = Path("/proc/self/fd")
#: Maximum number of attempts to open a set of files. An attempt fails if a file is replaced while the others are opened.
_OPEN_ATTEMPTS = 5


def cache_dir() -> Path:
    """Return reflogp's cache folder: $REFLOGP_CACHE_DIR, else $XDG_CACHE_HOME/reflogp, else ~/.cache/reflogp, or a temporary
    folder for a user without a home, as in some containers."""
    if explicit := os.environ.get("REFLOGP_CACHE_DIR"):
        return Path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "reflogp"
    try:
        return Path.home() / ".cache" / "reflogp"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"reflogp-cache-{os.getuid()}"


@dataclass(frozen=True)
class FileIdentity:
    """The file properties that reveal whether a file was replaced or written to. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, about: os.stat_result) -> FileIdentity:
        return cls(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)

    @classmethod
    def at(cls, path: Path) -> FileIdentity:
        """Return the identity of the file at `path`. Raises OSError if the file does not exist."""
        return cls.of(path.stat())


@dataclass(frozen=True)
class OpenFile:
    """A file that is open for reading.

    Attributes:
        path: path that was used to open the file.
        descriptor: file descriptor.
        identity: identity of the file when it was opened.
        link: identity of the symbolic link at `path`, or of the file if `path` is not a link; None if the file was not opened
            by its path.
    """

    path: Path
    descriptor: int
    identity: FileIdentity
    link: FileIdentity | None

    @classmethod
    def open(cls, path: Path) -> OpenFile:
        """Open the file at `path`. Raises OSError if the file does not exist or cannot be opened."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(path, descriptor, FileIdentity.of(os.fstat(descriptor)), FileIdentity.of(path.lstat()))
        except BaseException:
            os.close(descriptor)
            raise

    def read(self) -> bytes:
        """Return the whole content of the file."""
        parts = []
        at = 0
        while part := os.pread(self.descriptor, _CHUNK, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def check(self, by_path: bool = False) -> None:
        """Raise FileChangedError if the file has changed since it was opened.

        With `by_path`, also raise the error if the path now leads to a different file.
        """
        try:
            same = FileIdentity.of(os.fstat(self.descriptor)) == self.identity
            if by_path and same:
                links = (None, FileIdentity.of(self.path.lstat()))
                same = FileIdentity.at(self.path) == self.identity and self.link in links
        except OSError:
            same = False
        if not same:
            raise FileChangedError(f"{self.path} was changed, replaced or deleted while it was being read; run again")


class OpenFiles:
    """A set of files that are opened together and stay readable, even if they are renamed or deleted.

    If another file is moved to the path of an open file, reads still return the content of the open file. If a program writes
    to an open file, `check` detects the change. Use the set as a context manager to close the files on exit.

    Args:
        paths: existing files. If one of them is changed or replaced while the others are being opened, the constructor opens
            all of them again.

    Raises:
        FileChangedError: during every attempt to open the set, a file was changed or replaced.
        OSError: a file cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files: dict[Path, OpenFile] = {}
        wanted = list(dict.fromkeys(paths))
        for attempt in range(_OPEN_ATTEMPTS):
            try:
                for path in wanted:
                    self.files[path] = OpenFile.open(path)
                wait_for_clock_tick(self.files.values())
                self.check(by_path=True)
                return
            except FileChangedError:
                self.close()
                if attempt == _OPEN_ATTEMPTS - 1:
                    raise
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        files, self.files = self.files, {}
        for file in files.values():
            os.close(file.descriptor)

    def check(self, by_path: bool = False) -> None:
        """Raise FileChangedError for the first file that has changed since it was opened; see `OpenFile.check`."""
        for file in self.files.values():
            file.check(by_path)

    def digests(self, paths: Iterable[Path] | None = None, progress: Progress | None = None) -> dict[Path, str]:
        """Return a dict from path to sha256 (hex) for the files at `paths`, or for all files in the set if `paths` is None.

        For `progress`, see `file_digests`.
        """
        return digests_of([self.files[path] for path in (self.files if paths is None else paths)], progress)


@contextmanager
def folder_of_open_files(files: dict[str, OpenFile], name: str, others: dict[str, Path] | None = None) -> Iterator[Path | None]:
    """Create a temporary folder through which libraries can read files that are already open.

    The folder contains links to the open files themselves (/proc/self/fd/…), so that reads return the same content even if
    other files are moved to the original paths. Only this process can use the folder.

    Args:
        files: dict from the relative path of each link in the temporary folder to the open file that it leads to.
        name: name of the folder. If transformers loads Python modules from the folder, the names of the modules contain this
            name.
        others: dict from the name of each additional link in the temporary folder to the path of a file that is not open.

    Yields the folder, or None if the system has no /proc/self/fd or cannot create a temporary folder.
    """
    if not _OPEN_FILES.is_dir():
        yield None
        return
    try:
        scratch = tempfile.TemporaryDirectory(prefix="reflogp-")
    except OSError:
        yield None
        return
    with scratch:
        folder = Path(scratch.name) / name
        folder.mkdir()
        for relative, file in files.items():
            link = folder / relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_OPEN_FILES / str(file.descriptor))
        for relative, path in (others or {}).items():
            (folder / relative).symlink_to(path.absolute())
        yield folder


def file_digests(paths: Iterable[Path], progress: Progress | None = None) -> dict[Path, str]:
    """Return a dict from each file's path to its sha256 (hex).

    Args:
        paths: existing files.
        progress: called with (bytes hashed, total bytes); never called if all digests are already known.

    Raises FileChangedError if a file is written to while it is read.
    """
    with OpenFiles(paths) as files:
        return files.digests(progress=progress)


def digests_of(files: Iterable[OpenFile], progress: Progress | None = None) -> dict[Path, str]:
    """Return a dict from each open file's path to its sha256 (hex). Reuse digests that an earlier run or a hub cache recorded.

    Args:
        files: open files for which `wait_for_clock_tick` was called after they were opened.
        progress: called with (bytes hashed, total bytes); never called if all digests are already known.

    Raises FileChangedError if a file is written to while it is read.
    """
    digests: dict[Path, str] = {}
    pending: list[OpenFile] = []
    with _Memory() as memory:
        for file in files:
            known = _hub_blob_digest(file) or memory.get(file)
            if known:
                digests[file.path] = known
            else:
                pending.append(file)
        total, done = sum(file.identity.size for file in pending), 0
        for file in pending:
            digest = hashlib.sha256()
            at = 0
            while chunk := os.pread(file.descriptor, _CHUNK, at):
                digest.update(chunk)
                at += len(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
            file.check()
            digests[file.path] = digest.hexdigest()
            memory.put(file, digests[file.path])
    return digests


def wait_for_clock_tick(files: Iterable[OpenFile]) -> None:
    """Wait until any later change to these files is certain to result in a new change time.

    Call this function before you read the files. Two changes within one step of a file system's clock get the same time, so the
    second change would not be detected. Git has the same problem with "racy" index entries. When a program writes through a
    memory map, only its first write after a flush updates the time. This function therefore also flushes recently changed
    files.
    """
    now = time.time()
    recent = [file for file in files if now - file.identity.ctime_ns / 1e9 < _RECENT_SECONDS]
    for file in recent:
        with suppress(OSError):  # a read-only file system has nothing to flush
            os.fsync(file.descriptor)
    if recent:
        coarse = any(file.identity.ctime_ns % 1_000_000_000 == 0 for file in recent)
        time.sleep(_COARSE_TICK_SECONDS if coarse else _TICK_SECONDS)


def _hub_blob_digest(file: OpenFile) -> str | None:
    """Return the sha256 that a hub cache uses as the file's blob name, or None if the file has no such name or the name
    cannot be trusted.

    huggingface_hub stores a large file as a "blob" that is named after its sha256, and then links to it from a snapshot. The
    name is trusted only if the blob was not written to after the oldest link to it was created, and if no other user can write
    to the blob, to the blob's folder or to the link's folder. If the result is None, the caller hashes the file.
    """
    try:
        if file.link is None or not file.path.is_symlink():
            return None
        target = file.path.resolve()
        if target.parent.name != "blobs" or not _SHA256_NAME.fullmatch(target.name):
            return None
        links = [link for link in target.parent.parent.glob(f"snapshots/*/{file.path.name}") if link.resolve() == target]
        linked_at = min(link.lstat().st_mtime_ns for link in [file.path, *links])
        if max(file.identity.mtime_ns, file.identity.ctime_ns) > linked_at:
            return None
        for part in (target, target.parent, file.path.parent):
            if part.stat().st_uid not in (os.getuid(), 0) or part.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        return target.name if FileIdentity.at(target) == file.identity else None
    except OSError:
        return None


class _Memory:
    """A cache of digests from earlier runs, with one small cache file for each file that was hashed.

    If the cache folder cannot be used, every run hashes the files again. The folder and every file in it must belong to the
    current user and must not be writable by anyone else. Otherwise, another user could write a false digest to the cache, and
    thereby change the reference id of the current user's model. The cache folder is opened and checked once. The cache files
    are then opened relative to the folder's descriptor, so they come from the checked folder even if somebody renames the
    folders above it.
    """

    def __enter__(self) -> _Memory:
        self._folder: int | None = None
        folder = cache_dir() / f"digests-{os.getuid()}"
        try:
            self._folder = open_own_folder(folder)
        except OSError as error:
            _say_once(f"file digests cannot be cached, so every run computes them again: {error}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None:
            os.close(self._folder)

    def get(self, file: OpenFile) -> str | None:
        if self._folder is None:
            return None
        path = _place(file)
        name = _entry_name(path)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._folder)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as entry:
            try:
                about = os.fstat(descriptor)
                check_own(about, cache_dir() / f"digests-{os.getuid()}" / name)
                kept = json.loads(entry.read(_CHUNK)) if stat.S_ISREG(about.st_mode) else {}
            except PermissionError as error:
                _say_once(f"ignoring the cached digest of a file and computing the digest again: {error}")
                return None
            except (OSError, ValueError, RecursionError):
                return None
        same = isinstance(kept, dict) and (kept.get("path"), kept.get("identity")) == (path, _remembered(file.identity))
        digest = str(kept.get("sha256")) if same else ""
        return digest if _SHA256_NAME.fullmatch(digest) else None

    def put(self, file: OpenFile, digest: str) -> None:
        if self._folder is None:
            return
        path = _place(file)
        content = json.dumps({"path": path, "identity": _remembered(file.identity), "sha256": digest})
        name = _entry_name(path)
        partial = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o600, dir_fd=self._folder), "w", encoding="ascii") as entry:
                entry.write(content)
            os.replace(partial, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(partial, dir_fd=self._folder)


def _place(file: OpenFile) -> str:
    return os.path.realpath(file.path)


def _remembered(identity: FileIdentity) -> list[int]:
    """Return a file's identity as the cache stores it: without the device number, which may change when the machine
    restarts."""
    return [identity.inode, identity.size, identity.mtime_ns, identity.ctime_ns]


def _entry_name(path: str) -> str:
    return f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
