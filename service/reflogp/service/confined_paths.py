"""Dataset paths that may not lead out of a root folder: find a dataset's files, compute its digest, and keep its files open.

A user who can write below the root may swap files and links at any time. So a job reads open files: each is opened once, the
system says where it really is, its content is compared with the digest that the job was submitted with, and the process that
reads the dataset follows a link to this process's folder of open files in /proc. Where there is none, it reads files by path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.errors import DatasetError
from reflogp.store import ContentMismatchError
from reflogp.store.digests import FileIdentity, file_digests, require_unchanged
from reflogp.store.texts import shortened

#: Maximum number of entries in a dataset folder and its subfolders together. A folder with more entries is rejected.
MOST_ENTRIES = 10_000
#: Maximum number of characters in an image's path.
_LONGEST_PATH = 4096


def _open_files() -> Path:
    """Return the folder with this process's open files. The names in the folder are file descriptors."""
    return Path(f"/proc/{os.getpid()}/fd")


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


def digest_below(root: Path, path: Path, most_entries: int = MOST_ENTRIES) -> tuple[Path, str]:
    """Return (path with symbolic links resolved, digest of the content) for a dataset below a root folder.

    A file's digest is its sha256. A folder's digest is a blake2b digest of its dataset files' sha256 digests and of their paths
    relative to the folder. Hidden files and files without a supported suffix are ignored, because dataset readers skip them.

    Raises:
        PathError: the path leads outside the root, is hidden, does not exist, or is not a dataset. Also raised if the
            dataset's folders have more than `most_entries` entries in total.
        FileChangedError: a file is being written to.
    """
    real = _resolved(root, path)
    return real, _digest(real, dict(_files(root, real, most_entries)))


class OpenDataset:
    """A dataset below a root folder whose files are kept open, so that what is read is what was checked.

    Args:
        root: folder that the dataset's path must not lead out of; None for a dataset in a folder of the service's own, which is
            read by its path.
        path: the dataset's path.
        digest: expected digest of the content (see `digest_below`).

    Attributes:
        path: the dataset's path, with all symbolic links resolved.
        readable: the path to read the dataset from: a link to an open file, or a folder of such links.

    Raises:
        PathError: see `digest_below`.
        ContentMismatchError: the content does not have the expected digest.
        FileChangedError: a file is being written to.
    """

    def __init__(self, root: Path | None, path: Path, digest: str) -> None:
        self.path = self.readable = path
        self._identities: dict[Path, FileIdentity] = {}
        with ExitStack() as stack:
            if root is not None:
                self._open(root, digest, stack)
            self._close = stack.pop_all()

    def _open(self, root: Path, digest: str, stack: ExitStack) -> None:
        self.path = self.readable = _resolved(root, self.path)
        files = dict(_files(root, self.path, MOST_ENTRIES))
        if _open_files().is_dir():
            _allow_many_files()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reflogp-")))
            for name, file in files.items():
                descriptor = _open_below(root, file)
                stack.callback(os.close, descriptor)
                link = folder / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(_open_files() / str(descriptor))
                files[name] = link
            self.readable = folder if self.path.is_dir() else folder / self.path.name
        self._identities = {file: FileIdentity.at(file) for file in files.values()}
        if _digest(self.path, files) != digest:
            raise ContentMismatchError(f"{self.path} has changed since the job was submitted; submit the job again")

    def __enter__(self) -> OpenDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close.close()

    def check(self) -> None:
        """Raise FileChangedError if a file was written to after it was opened."""
        require_unchanged(self._identities)


def image_below(root: Path, dataset: Path) -> Callable[[str], int]:
    """Return a function that takes an image's path from a dataset row, opens the file and returns its descriptor.

    Relative paths are resolved against the dataset's folder. The function raises RowError if a path leads outside the root or
    through a hidden folder, if a path is too long, or if the file is hidden or cannot be opened.

    Args:
        root: folder that images' paths must not lead out of.
        dataset: path of the dataset (a file or a folder), with all symbolic links resolved.
    """
    folder = dataset if dataset.is_dir() else dataset.parent

    def open_image(path: str) -> int:
        try:
            if len(path) > _LONGEST_PATH:
                raise PathError(
                    "unusable", f"the path is too long (more than {_LONGEST_PATH:,} characters)", "use shorter paths"
                )
            return _open_below(root, _resolved(root, folder / path))
        except PathError as error:
            raise RowError(f"image {shortened(path)} cannot be read: {error}") from None

    return open_image


def _digest(dataset: Path, files: dict[str, Path]) -> str:
    try:
        digests = file_digests(files.values())
    except OSError as error:
        raise _missing() from error
    if not dataset.is_dir():
        return next(iter(digests.values()))
    if not digests:
        raise PathError("unusable", "the folder has no dataset files", f"dataset files end in {SUFFIXES_IN_WORDS}")
    return folder_digest({name: digests[file] for name, file in files.items()})


def folder_digest(digests: dict[str, str]) -> str:
    """Return a folder's digest, given the sha256 digest of each dataset file by its path relative to the folder."""
    content = hashlib.blake2b(digest_size=32, person=b"reflogp.folder")
    for name, digest in sorted(digests.items()):
        content.update(f"{name}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


def _resolved(root: Path, path: Path) -> Path:
    """Return `path` without symbolic links.

    Raises PathError if the path is hidden, or if it is not below `root`, whether it exists or not.
    """
    try:
        real = Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise _missing() from error
    if not real.is_relative_to(root):
        raise _outside()
    given = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if any(part.startswith(".") and part != ".." for part in (*given, *real.relative_to(root).parts)):
        text = "the path contains a hidden file or folder"
        raise PathError("hidden", text, "move the dataset to a path in which no name starts with a dot")
    return real


def _open_below(root: Path, path: Path) -> int:
    """Open a file, and return its descriptor if the file is really below `root`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: do not wait for a FIFO's writer
    except OSError as error:
        raise _missing() from error
    if _open_files().is_dir() and not (_open_files() / str(descriptor)).readlink().is_relative_to(root):
        os.close(descriptor)
        raise _outside()
    return descriptor


def _files(root: Path, real: Path, most_entries: int) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path without symbolic links) for every dataset file.

    Raises PathError if an entry of a folder is a link that leads outside the root, or is neither a file nor a folder. Also
    raises PathError if the dataset's folders have more than `most_entries` entries in total, or if the dataset is a single file
    with an unknown suffix.
    """
    if not _is_folder(real, "the path is neither a file nor a folder", "use the path of a dataset file or folder"):
        if dataset_suffix(real.name) is None:
            raise PathError("unusable", "the file type is unknown", f"dataset files end in {SUFFIXES_IN_WORDS}")
        yield real.name, real
        return
    seen, entries, pending = {real}, 0, [(real, "")]
    while pending:
        folder, prefix = pending.pop()
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - only names are needed
        except OSError as error:
            raise _missing() from error
        for name in names:
            entries += 1
            if entries > most_entries:
                text = f"the folder and its subfolders have more than {most_entries:,} entries in total"
                raise PathError("unusable", text, "use fewer, larger files")
            if name.startswith("."):  # dataset readers skip hidden entries too
                continue
            entry = _resolved(root, folder / name)
            text = f"the folder contains an entry that is neither a file nor a folder: {shortened(name)}"
            if _is_folder(entry, text, "remove that entry"):
                if entry not in seen:
                    seen.add(entry)
                    pending.append((entry, f"{prefix}{name}/"))
            elif dataset_suffix(name) is not None:
                yield f"{prefix}{name}", entry


def _is_folder(path: Path, problem: str, next_step: str) -> bool:
    """Return whether a path is a folder; raise PathError with this text if it is neither a folder nor a file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PathError("unusable", "the path's symbolic links form a circle", "use the path of a file") from error
        raise _missing() from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise PathError("unusable", problem, next_step)
    return stat.S_ISDIR(mode)


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
