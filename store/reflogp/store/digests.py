"""sha256 of files, and files that are opened once, hashed, and read as they were hashed.

A digest is remembered for a file's identity: device, inode, size, modification time and change time. The change time is in it
because a program can restore every other part after it has rewritten a file in place. Nothing here knows what a file means.
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
from reflogp.store.own_folder import check_own, open_own_folder

logger = logging.getLogger(__name__)

#: progress(done so far, in all): bytes where files are hashed, rows or files elsewhere, as the function says
Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
#: A file that changed within these seconds, by any clock that is about right, may change again without a new change time.
_RECENT_SECONDS = 120.0
#: The longest step of a file system's clock: one tick of the kernel's, or two seconds where times are whole seconds.
_TICK_SECONDS, _COARSE_TICK_SECONDS = 0.03, 2.1
#: Where a process finds its own open files by number.
_OPEN_FILES = Path("/proc/self/fd")
#: How often a set of files is opened again because one was replaced while the others were opened.
_OPEN_ATTEMPTS = 5


def cache_dir() -> Path:
    """Where reflogp remembers things: $REFLOGP_CACHE_DIR, else $XDG_CACHE_HOME/reflogp, else ~/.cache/reflogp."""
    if explicit := os.environ.get("REFLOGP_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reflogp"


@dataclass(frozen=True)
class FileIdentity:
    """What changes when a file is replaced or written to. Times are nanoseconds."""

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
        """Raises OSError where there is no such file."""
        return cls.of(path.stat())


@dataclass(frozen=True)
class OpenFile:
    """A file that is open for reading.

    Attributes:
        path: by which it was opened.
        descriptor: of the open file.
        identity: when it was opened.
        link: identity of what lies at the path itself, a link or the file; None for a file that was not opened by its path.
    """

    path: Path
    descriptor: int
    identity: FileIdentity
    link: FileIdentity | None

    @classmethod
    def open(cls, path: Path) -> OpenFile:
        """Raises OSError where the path is not a file that can be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(path, descriptor, FileIdentity.of(os.fstat(descriptor)), FileIdentity.of(path.lstat()))
        except BaseException:
            os.close(descriptor)
            raise

    def read(self) -> bytes:
        """The whole content."""
        parts = []
        at = 0
        while part := os.pread(self.descriptor, _CHUNK, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def check(self, by_path: bool = False) -> None:
        """Raise FileChangedError when the file is not as it was opened; `by_path`: or when its path leads to another one."""
        try:
            same = FileIdentity.of(os.fstat(self.descriptor)) == self.identity
            if by_path and same:
                links = (None, FileIdentity.of(self.path.lstat()))
                same = FileIdentity.at(self.path) == self.identity and self.link in links
        except OSError:
            same = False
        if not same:
            raise FileChangedError(f"{self.path} was changed or replaced while it was read; run again")


class OpenFiles:
    """Files that are opened together and stay the same ones, whatever happens to their paths.

    Renaming a file over another one does not disturb a reader of the old one. Writing to an open file does, and `check` finds
    that. Use it as a context manager, which closes the files.

    Args:
        paths: files that are there. All of them were in place at one moment, or the constructor fails.

    Raises:
        FileChangedError: they are replaced again and again while they are opened.
        OSError: one cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files: dict[Path, OpenFile] = {}
        wanted = list(dict.fromkeys(paths))
        for attempt in range(_OPEN_ATTEMPTS):
            try:
                for path in wanted:
                    self.files[path] = OpenFile.open(path)
                let_clocks_pass(self.files.values())
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
        """Raise FileChangedError, which names the file, when one changed since it was opened (see OpenFile.check)."""
        for file in self.files.values():
            file.check(by_path)

    def digests(self, paths: Iterable[Path] | None = None, progress: Progress | None = None) -> dict[Path, str]:
        """sha256 (hex) of these files, or of all; as `file_digests`."""
        return digests_of([self.files[path] for path in (self.files if paths is None else paths)], progress)


@contextmanager
def folder_of_open_files(files: dict[str, OpenFile], name: str, others: dict[str, Path] | None = None) -> Iterator[Path | None]:
    """A temporary folder through which libraries that want paths read files that are open here.

    Each name in it is a link to the open file itself (/proc/self/fd/…), so that nothing that happens to the original paths
    changes what is read. Only this process can use it.

    Args:
        files: relative name -> file.
        name: of the folder; transformers names modules after it.
        others: relative name -> path of what may be read as well, but is not open here.

    Yields the folder; None where the system has no such links, or no room for a temporary folder.
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
    """sha256 (hex) of each file.

    Args:
        paths: existing files.
        progress: called while bytes are really read; never called when every digest is known.

    Raises FileChangedError when a file is written to while it is read.
    """
    with OpenFiles(paths) as files:
        return files.digests(progress=progress)


def digests_of(files: Iterable[OpenFile], progress: Progress | None = None) -> dict[Path, str]:
    """sha256 (hex) of open files, by their paths; remembered digests and safe names of a hub cache's blobs are used.

    Args:
        files: for which `let_clocks_pass` was called since they were opened.
        progress: as in `file_digests`.

    Raises FileChangedError when a file is written to while it is read.
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


def let_clocks_pass(files: Iterable[OpenFile]) -> None:
    """Wait until a further change of these files must give them another change time. Call it before they are read.

    Two changes within one step of a file system's clock have the same time, and the second one would not be seen (git's
    "racy" index entries). A program that writes through a memory map changes the time only at its first write after the
    page was flushed, so recently changed files are flushed as well.
    """
    now = time.time()
    recent = [file for file in files if now - file.identity.ctime_ns / 1e9 < _RECENT_SECONDS]
    for file in recent:
        with suppress(OSError):  # a file system that is read only has nothing to flush
            os.fsync(file.descriptor)
    if recent:
        coarse = any(file.identity.ctime_ns % 1_000_000_000 == 0 for file in recent)
        time.sleep(_COARSE_TICK_SECONDS if coarse else _TICK_SECONDS)


def _hub_blob_digest(file: OpenFile) -> str | None:
    """The name of the blob behind a hub cache's link, when it is a sha256 and nobody can have changed the bytes under it.

    The hub's client names a large file by its sha256 when it has downloaded it, and links to it from a snapshot then. The name
    is believed when the blob was never written after the oldest link to it, and no other user may write to the blob or to
    the folders that hold blob and link. Otherwise the file is hashed as any other.
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
    """Digests of earlier runs, one small file for each path. Without a folder for them, files are hashed again.

    The folder and every file in it must be this user's own and not writable by others: whoever can write a digest chooses the
    reference id of somebody else's model. All access goes through the folder's descriptor.
    """

    def __enter__(self) -> _Memory:
        self._folder: int | None = None
        folder = cache_dir() / f"digests-{os.getuid()}"
        try:
            self._folder = open_own_folder(folder)
        except OSError as error:
            _say_once(f"digests of files are not remembered, so they are computed again each time: {error}")
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
                _say_once(f"a remembered digest is not used: {error}")
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
    """The identity without the device, whose number may be another one after the machine was started again."""
    return [identity.inode, identity.size, identity.mtime_ns, identity.ctime_ns]


def _entry_name(path: str) -> str:
    return f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
