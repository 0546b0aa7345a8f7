"""Open each dataset file below a root folder once, and use the same open file for hashing and for reading.

Each component of a path is opened relative to its parent folder, and this module, not the operating system, follows symbolic
links. A user who can write below the root therefore cannot make a reader open files outside the root. Before the dataset is
read, its digest is compared with the expected digest. After the dataset has been read, each file is checked for changes.
Copying the dataset before it is hashed and read would be just as safe, but the copy would take disk space and time. Files are
hashed before they are read, not while they are read, because a format such as Parquet is not read from beginning to end.

Libraries read the open files through links to /proc/self/fd in a temporary folder. If the system has no /proc/self/fd, or no
temporary folder can be created, libraries open the dataset again by its path after it has been hashed. The check after reading
then also detects replaced files.
"""

from __future__ import annotations

import hashlib
import os
import resource
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.errors import DatasetError
from reflogp.store import ContentMismatchError, FileChangedError
from reflogp.store.digests import FileIdentity, OpenFile, digests_of, folder_of_open_files, wait_for_clock_tick
from reflogp.store.texts import shortened

#: Maximum number of entries in a dataset folder and its subfolders together. A folder with more entries is rejected.
MOST_ENTRIES = 10_000
#: Maximum number of symbolic links in one path; the kernel has the same limit.
_MOST_LINKS = 40
#: Maximum number of characters, and maximum number of components, in an image's path. While a path is resolved, all of its
#: folders are open at the same time.
_LONGEST_PATH, _MOST_PARTS = 4096, 256
#: Maximum number of files that `digest_below` keeps open at the same time.
_TOGETHER = 256
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class PathError(DatasetError):
    """The path of a dataset, of an entry in a dataset folder, or of an image cannot be used.

    Attributes:
        kind: "outside" if the path leads outside the root; "hidden" if a component of the path starts with a dot; "missing" if
            the file or folder does not exist or cannot be opened; "unusable" for any other reason, such as a folder without
            dataset files or too many symbolic links.
        next_step: advice for the caller.
    """

    def __init__(self, kind: Literal["outside", "hidden", "missing", "unusable"], text: str, next_step: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.next_step = next_step


@dataclass(frozen=True)
class Found:
    """An open file or folder below a root folder.

    Attributes:
        descriptor: file descriptor of the open file or folder.
        path: path of the file or folder, with all symbolic links resolved.
    """

    descriptor: int
    path: Path

    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.descriptor).st_mode)


def digest_below(root: Path, parts: Sequence[str], most_entries: int = MOST_ENTRIES) -> tuple[Path, str]:
    """Return (path with symbolic links resolved, digest of the content) for a dataset below a root folder.

    A file's digest is its sha256. A folder's digest is a blake2b digest of its dataset files' sha256 digests and of their paths
    relative to the folder. Hidden files and files without a supported suffix are ignored, because dataset readers skip them.

    Raises:
        PathError: the path leads outside the root, is hidden, does not exist, or is not a dataset. Also raised if the
            dataset's folders have more than `most_entries` entries in total.
        FileChangedError: a file is being written to.
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
    """A dataset's open files.

    The constructor opens the files and compares their content with the expected digest. Use a `with` block to close the files
    on exit.

    Args:
        root: folder that the dataset's path must not lead out of.
        parts: components of the dataset's path below the root.
        digest: expected digest of the content (see `digest_below`).
        may_change: True if other users can write below the root. False for the service's folder of uploaded and fetched
            datasets, where a file can be replaced only by a file with the same content.

    Attributes:
        path: the dataset's path, with all symbolic links resolved.

    Raises:
        PathError: see `digest_below`.
        ContentMismatchError: the content does not have the expected digest.
        FileChangedError: a file is being written to.
    """

    def __init__(self, root: Path, parts: Sequence[str], digest: str, may_change: bool) -> None:
        self._may_change = may_change
        self._close = ExitStack()
        try:
            found = self._close.enter_context(_opened(root, parts))
            self.path = found.path
            _allow_many_files()
            self._files = {name: _entered(self._close, file) for name, file in _files(root, found, MOST_ENTRIES)}
            # The service sets new timestamps on a file in its own folder when the same content is uploaded again or another job
            # uses the file. Therefore, only the content of such a file is compared.
            read = _digests if may_change else _content_digests
            if _digest(found, read(self._files)) != digest:
                raise ContentMismatchError(f"{self.path} has changed since the job was submitted; submit the job again")
            self._by_path = False
            place = self._close.enter_context(folder_of_open_files(self._files, "dataset"))
            self._by_path = place is None
            only = None if found.is_folder() else next(iter(self._files))
            #: The path to read the dataset from: a link to an open file, a folder of such links, or `path` if the system does
            #: not support such links.
            self.readable = self.path if place is None else place if only is None else place / only
        except BaseException:
            self._close.close()
            raise

    def __enter__(self) -> OpenDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close.close()

    def check(self) -> None:
        """Raise FileChangedError if a file was written to after it was hashed.

        If `may_change` is False, only changes in size are detected.
        """
        for file in self._files.values():
            if self._may_change:
                file.check(by_path=self._by_path)
            elif os.fstat(file.descriptor).st_size != file.identity.size:
                raise FileChangedError(f"{file.path} was written to while it was being read; submit the job again")


def image_below(root: Path, dataset: Path) -> Callable[[str], int]:
    """Return a function that takes an image's path from a dataset row, opens the file and returns its descriptor.

    Relative paths are resolved against the dataset's folder. The function raises RowError if a path leads outside the root or
    through a hidden folder, if a path is too long, or if the file is hidden or cannot be opened.

    Args:
        root: folder that images' paths must not lead out of.
        dataset: path of the dataset (a file or a folder), with all symbolic links resolved.
    """
    start = (dataset if dataset.is_dir() else dataset.parent).relative_to(root).parts

    def open_image(path: str) -> int:
        asked = PurePosixPath(path[: _LONGEST_PATH + 1])
        if len(path) > _LONGEST_PATH or len(asked.parts) > _MOST_PARTS:
            limits = f"more than {_LONGEST_PATH:,} characters or {_MOST_PARTS} components"
            raise RowError(f"image {shortened(path)} cannot be read: the path is too long ({limits})")
        try:
            if not asked.is_absolute():
                return _walk(root, start, asked.parts).descriptor
            if not asked.is_relative_to(root):
                raise _outside()
            return _walk(root, (), asked.relative_to(root).parts).descriptor
        except PathError as error:
            raise RowError(f"image {shortened(path)} cannot be read: {error}") from None

    return open_image


def _digests(files: dict[str, OpenFile]) -> dict[str, str]:
    wait_for_clock_tick(files.values())
    for file in files.values():
        file.check()
    found = digests_of(files.values())
    return {name: found[file.path] for name, file in files.items()}


def _content_digests(files: dict[str, OpenFile]) -> dict[str, str]:
    """Return the sha256 of each file's current content, without checking whether the file's modification time has changed."""
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
        raise PathError("unusable", "the folder has no dataset files", f"dataset files end in {SUFFIXES_IN_WORDS}")
    return folder_digest(digests)


def folder_digest(digests: dict[str, str]) -> str:
    """Return a folder's digest, given the sha256 digest of each dataset file by its path relative to the folder."""
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
    """Open the file or folder whose path below `root` has the components in `start`, then those in `parts`.

    Raises PathError.
    """
    try:
        opened = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    except OSError as error:
        raise _missing() from error
    names: list[str] = []
    pending, links = deque([*start, *parts]), 0
    try:
        while pending:
            part = pending.popleft()
            if part == "..":  # from a link or an image's path; a dataset's path has no ".."
                if not names:
                    raise _outside()
                names.pop()
                os.close(opened.pop())
                continue
            if part.startswith("."):
                text = "the path contains a hidden file or folder"
                raise PathError("hidden", text, "move the dataset to a path in which no name starts with a dot")
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
                    raise PathError("unusable", "the path has too many symbolic links", "use the path that the links lead to")
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
                raise PathError("unusable", text, "use the path of a dataset file or of a folder with dataset files")
        return Found(opened.pop(), root.joinpath(*names))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _files(root: Path, found: Found, most_entries: int) -> Iterator[tuple[str, OpenFile]]:
    """Yield (relative name, open file) for every dataset file. The caller must close the files.

    Raises PathError if an entry of a folder is a link that leads outside the root, or is neither a file nor a folder. Also
    raises PathError if the dataset's folders have more than `most_entries` entries in total, or if the dataset is a single file
    with an unknown suffix.
    """
    if not found.is_folder():
        if dataset_suffix(found.path.name) is None:
            raise PathError("unusable", "the file type is unknown", f"dataset files end in {SUFFIXES_IN_WORDS}")
        yield found.path.name, _open_file(Found(os.dup(found.descriptor), found.path))
        return
    seen, entries = {found.path}, 0
    pending = [(found.path, "")]
    while pending:
        folder, prefix = pending.pop()
        inside = folder.relative_to(root).parts
        at = _walk(root, inside, ())
        try:
            names = os.listdir(at.descriptor)  # noqa: PTH208 (the folder's path may lead to a different folder by now)
        except OSError as error:
            raise _missing() from error
        finally:
            os.close(at.descriptor)
        for name in sorted(names):
            entries += 1
            if entries > most_entries:
                text = f"the folder and its subfolders have more than {most_entries:,} entries in total"
                raise PathError("unusable", text, "use fewer, larger files")
            if name.startswith("."):  # dataset readers skip hidden entries too
                continue
            entry = _entry(root, inside, name)
            if entry.is_folder():
                os.close(entry.descriptor)
                if entry.path not in seen:
                    seen.add(entry.path)
                    pending.append((entry.path, f"{prefix}{name}/"))
            elif dataset_suffix(name) is not None:
                yield f"{prefix}{name}", _open_file(entry)
            else:
                os.close(entry.descriptor)


def _entry(root: Path, folder: Sequence[str], name: str) -> Found:
    """Open an entry of a folder."""
    at = _walk(root, folder, ())
    try:
        mode = os.stat(name, dir_fd=at.descriptor, follow_symlinks=False).st_mode
    except OSError as error:
        raise _missing() from error
    finally:
        os.close(at.descriptor)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
        text = f"the folder contains an entry that is neither a file nor a folder: {shortened(name)}"
        raise PathError("unusable", text, "remove that entry")
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
    return PathError("missing", "no such file or folder, or the service cannot open it", "check the path and the permissions")


def _allow_many_files() -> None:
    """Raise the soft limit on open files to the hard limit, because all files of a dataset are open at the same time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
