"""Dataset files below a root, opened once: what was found, what is hashed and what is read are the same open files.

Every part of a path is opened relative to the folder before it, and links are followed by hand. So nobody who may write below
the root can lead a reader out of it, at no moment. Content is read through the open files, and compared with its digest before
and with the files' identity after. A copy would be as safe, but costs the dataset's size on the disk and the time to write it;
hashing what is read is not possible for formats that are read in places, like Parquet.
"""

from __future__ import annotations

import hashlib
import os
import resource
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.store import FileChangedError, OtherContentError
from reflogp.store.digests import FileIdentity, OpenFile, digests_of, folder_of_open_files, let_clocks_pass

#: A dataset folder with more entries is refused.
MOST_ENTRIES = 10_000
#: Links in one path, as the kernel has it.
_MOST_LINKS = 40
#: Files that are open at a time where they are only hashed.
_TOGETHER = 256
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class PathError(DatasetError):
    """A path that cannot be a dataset.

    Attributes:
        kind: it leads outside the root, there is nothing that can be read, or what is there is no dataset.
        next_step: what the caller can do.
    """

    def __init__(self, kind: Literal["outside", "hidden", "missing", "unusable"], text: str, next_step: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.next_step = next_step


@dataclass(frozen=True)
class Found:
    """A file or folder below a root.

    Attributes:
        descriptor: of the open file or folder.
        path: where it lies, without links.
    """

    descriptor: int
    path: Path

    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.descriptor).st_mode)


def digest_below(root: Path, parts: Sequence[str], most_entries: int = MOST_ENTRIES) -> tuple[Path, str]:
    """(path without links, digest of the content) of a dataset below a root.

    A file's digest is its sha256. A folder's is over the relative names and sha256 of its dataset files. Hidden ones and those
    of other suffixes are left out: no reader takes them.

    Raises:
        PathError: it leaves the root, is not there, or is no dataset.
        FileChangedError: it is being written to.
    """
    with _opened(root, parts) as found:
        digests: dict[str, str] = {}
        files = _files(root, found, most_entries)
        while True:
            with ExitStack() as stack:
                some = {name: _entered(stack, file) for name, file in islice(files, _TOGETHER)}
                digests |= _digests(some)
            if not some:
                return found.path, _digest(found, digests)


class OpenDataset:
    """A dataset's files, open and checked against a digest. Use it as a context manager.

    Args:
        root: folder that must not be left.
        parts: of the dataset's path below it.
        digest: what the content must be.
        may_change: others may write below the root. Files of a service's own folder are only replaced by equal ones.

    Attributes:
        path: where the dataset lies, without links.

    Raises:
        PathError: as `digest_below`.
        OtherContentError: the content is another one.
        FileChangedError: it is being written to.
    """

    def __init__(self, root: Path, parts: Sequence[str], digest: str, may_change: bool) -> None:
        self._may_change = may_change
        self._close = ExitStack()
        try:
            found = self._close.enter_context(_opened(root, parts))
            self.path = found.path
            _allow_many_files()
            self._files = {name: _entered(self._close, file) for name, file in _files(root, found, MOST_ENTRIES)}
            # A service's own file gets new times whenever it is sent or named again; its content is all that counts.
            read = _digests if may_change else _content_digests
            if _digest(found, read(self._files)) != digest:
                raise OtherContentError(f"{self.path} has changed since the job was submitted; submit it again")
            self._by_path = False
            place = self._close.enter_context(folder_of_open_files(self._files, "dataset"))
            self._by_path = place is None
            only = None if found.is_folder() else next(iter(self._files))
            #: The path to read it by.
            self.readable = self.path if place is None else place if only is None else place / only
        except BaseException:
            self._close.close()
            raise

    def __enter__(self) -> OpenDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close.close()

    def check(self) -> None:
        """Raise FileChangedError when a file was written to since it was hashed."""
        for file in self._files.values():
            if self._may_change:
                file.check(by_path=self._by_path)
            elif os.fstat(file.descriptor).st_size != file.identity.size:
                raise FileChangedError(f"{file.path} was written to while it was read; submit it again")


def _digests(files: dict[str, OpenFile]) -> dict[str, str]:
    let_clocks_pass(files.values())
    for file in files.values():
        file.check()
    found = digests_of(files.values())
    return {name: found[file.path] for name, file in files.items()}


def _content_digests(files: dict[str, OpenFile]) -> dict[str, str]:
    """sha256 of files as they are read now, whatever their times are."""
    found = {}
    for name, file in files.items():
        with os.fdopen(os.dup(file.descriptor), "rb") as opened:
            opened.seek(0)
            found[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def _digest(found: Found, digests: dict[str, str]) -> str:
    if not found.is_folder():
        return next(iter(digests.values()))
    if not digests:
        raise PathError("unusable", "the folder has no dataset files", f"files end in {SUFFIXES_IN_WORDS}")
    content = hashlib.blake2b(digest_size=32, person=b"reflogp.folder")
    for name, digest in sorted(digests.items()):
        content.update(f"{name}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


@contextmanager
def _opened(root: Path, parts: Sequence[str]) -> Iterator[Found]:
    found = _walk(root, (), parts)
    try:
        yield found
    finally:
        os.close(found.descriptor)


def _entered(stack: ExitStack, file: OpenFile) -> OpenFile:
    stack.callback(os.close, file.descriptor)
    return file


def _walk(root: Path, start: Sequence[str], parts: Sequence[str]) -> Found:
    """Open what a path leads to from the folder `start` below `root`. Raises PathError."""
    try:
        opened = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    except OSError as error:
        raise _missing() from error
    names: list[str] = []
    pending, links = deque([*start, *parts]), 0
    try:
        while pending:
            part = pending.popleft()
            if part == "..":  # of a link; what was requested has none
                if not names:
                    raise _outside()
                names.pop()
                os.close(opened.pop())
                continue
            if part.startswith("."):
                text = "the path has a hidden part"
                raise PathError("hidden", text, "move the dataset to a folder and a name without a leading dot")
            try:
                mode = os.stat(part, dir_fd=opened[-1], follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    target = PurePosixPath(os.readlink(part, dir_fd=opened[-1]))
                elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                    opened.append(os.open(part, _FLAGS, dir_fd=opened[-1]))
                    names.append(part)
                    mode = os.fstat(opened[-1]).st_mode
            except (OSError, ValueError) as error:
                raise _missing() from error
            if stat.S_ISLNK(mode):
                links += 1
                if links > _MOST_LINKS:
                    raise PathError("unusable", "the path has too many links", "name the file that they lead to")
                if target.is_absolute():
                    if not target.is_relative_to(root):
                        raise _outside()
                    while names:
                        names.pop()
                        os.close(opened.pop())
                    target = target.relative_to(root)
                pending.extendleft(reversed(target.parts))
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                if pending:
                    raise _missing()
                text = "the path is neither a file nor a folder"
                raise PathError("unusable", text, "name a dataset file or a folder of such files")
        return Found(opened.pop(), root.joinpath(*names))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _files(root: Path, found: Found, most_entries: int) -> Iterator[tuple[str, OpenFile]]:
    """(relative name, open file) of every dataset file; of a single one its name. Whoever takes a file closes it.

    Raises PathError when anything in a folder leads out of the root or is neither file nor folder, and for too many entries.
    """
    if not found.is_folder():
        if dataset_suffix(found.path.name) is None:
            raise PathError("unusable", "the file is of no known type", f"files end in {SUFFIXES_IN_WORDS}")
        yield found.path.name, _open_file(Found(os.dup(found.descriptor), found.path))
        return
    seen, entries = {found.path}, 0
    pending = [(found.path, "")]
    while pending:
        folder, prefix = pending.pop()
        inside = folder.relative_to(root).parts
        at = _walk(root, inside, ())
        try:
            names = os.listdir(at.descriptor)  # noqa: PTH208 (a path could lead elsewhere by now)
        except OSError as error:
            raise _missing() from error
        finally:
            os.close(at.descriptor)
        for name in sorted(names):
            entries += 1
            if entries > most_entries:
                text = f"the folder has more than {most_entries:,} entries"
                raise PathError("unusable", text, "write fewer and larger files")
            entry = _entry(root, inside, name)
            if entry is None:
                continue
            if entry.is_folder():
                os.close(entry.descriptor)
                if entry.path not in seen and not name.startswith("."):
                    seen.add(entry.path)
                    pending.append((entry.path, f"{prefix}{name}/"))
            elif not name.startswith(".") and dataset_suffix(name) is not None:
                yield f"{prefix}{name}", _open_file(entry)
            else:
                os.close(entry.descriptor)


def _entry(root: Path, folder: Sequence[str], name: str) -> Found | None:
    """An entry of a folder; None for a hidden one that is a plain file or folder, which no reader takes."""
    at = _walk(root, folder, ())
    try:
        mode = os.stat(name, dir_fd=at.descriptor, follow_symlinks=False).st_mode
    except OSError as error:
        raise _missing() from error
    finally:
        os.close(at.descriptor)
    if name.startswith(".") and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
        raise PathError("unusable", "the folder holds something that is neither file nor folder", "remove it")
    return _walk(root, folder, (name,))


def _open_file(found: Found) -> OpenFile:
    return OpenFile(found.path, found.descriptor, FileIdentity.of(os.fstat(found.descriptor)), None)


def _outside() -> PathError:
    return PathError(
        "outside",
        "the path is not under a folder that this service reads datasets from",
        "send the dataset as an upload: PUT /v1/uploads/NAME",
    )


def _missing() -> PathError:
    return PathError("missing", "there is no such file or folder that can be read", "check the path")


def _allow_many_files() -> None:
    """Let this process open as many files as it may: a dataset's files are all open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
