"""Dataset paths that may not lead out of a root folder: find a dataset's files, compute its digest, and keep its files open.

A user who can write below the root may swap files and links at any time. So a job reads open files: each is opened once, the
system says where it really is, its content is compared with the digest that the job was submitted with, and the process that
reads the dataset follows a link to this process's folder of open files in /proc. Where there is none, it reads files by path.
"""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

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

    The HTTP status is 403 if the path leads outside the root or is hidden, 404 if nothing can be opened there, else 422.
    """

    def __init__(self, status: int, text: str, next_step: str) -> None:
        super().__init__(text)
        self.status, self.next_step = status, next_step


def digest_below(root: Path, path: Path) -> tuple[Path, str]:
    """Return (path with symbolic links resolved, digest of the content) for a dataset below a root folder.

    A file's digest is its sha256. For a folder's digest, see `folder_digest`. Hidden files and files without a supported suffix
    are ignored, because dataset readers skip them.

    Raises:
        PathError: the path leads outside the root, is hidden, does not exist, or is not a dataset.
        FileChangedError: a file is being written to.
    """
    real = _resolved(root, path)
    return real, _digest(real, _files(root, real))


def folder_digest(digests: dict[str, str]) -> str:
    """Return a folder's digest, given the sha256 digest of each dataset file by its path relative to the folder."""
    content = hashlib.blake2b(digest_size=32, person=b"reflogp.folder")
    for name, digest in sorted(digests.items()):
        content.update(f"{name}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


class OpenDataset:
    """A dataset below a root folder whose files are kept open, so that what is read is what was checked.

    Args:
        root: folder that the dataset's path must not lead out of; None for a dataset in the service's own folder.
        digest: expected digest of the content (see `digest_below`).

    Raises ContentMismatchError if the content has another digest, and the errors of `digest_below`.
    """

    def __init__(self, root: Path | None, path: Path, digest: str) -> None:
        self.path = path  # with all symbolic links resolved
        self.readable = path  # what to read: a link to an open file, or a folder of such links
        self._identities: dict[Path, FileIdentity] = {}
        with ExitStack() as stack:
            if root is not None:
                self._open(root, digest, stack)
            self._close = stack.pop_all()

    def _open(self, root: Path, digest: str, stack: ExitStack) -> None:
        self.path = self.readable = _resolved(root, self.path)
        files = _files(root, self.path)
        if _open_files().is_dir():
            with suppress(OSError, ValueError):  # all files of the dataset are open at the same time
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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
    """Return a function that opens an image by its path in a row of `dataset`, and returns the file's descriptor.

    Relative paths are resolved against the dataset's folder. The function raises RowError for a path that is too long, leads
    outside the root, is hidden or cannot be opened.
    """
    folder = dataset if dataset.is_dir() else dataset.parent

    def open_image(path: str) -> int:
        if len(path) > _LONGEST_PATH:
            raise RowError(f"image {shortened(path)} cannot be read: the path is too long ({len(path):,} characters)")
        try:
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
    return folder_digest({name: digests[file] for name, file in files.items()})


def _resolved(root: Path, path: Path) -> Path:
    """Return `path` without symbolic links.

    Raises PathError if it is not below `root`, whether it exists or not, or if it is hidden.
    """
    try:
        real = Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise _missing() from error
    if not real.is_relative_to(root):
        raise outside()
    if any(part.startswith(".") for part in real.relative_to(root).parts):
        text = "the path contains a hidden file or folder"
        raise PathError(403, text, "move the dataset to a path in which no name starts with a dot")
    return real


def _open_below(root: Path, path: Path) -> int:
    """Open a file, and return its descriptor if the file is really below `root`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: do not wait for a FIFO's writer
    except OSError as error:
        raise _missing() from error
    if _open_files().is_dir() and not (_open_files() / str(descriptor)).readlink().is_relative_to(root):
        os.close(descriptor)
        raise outside()
    return descriptor


def _files(root: Path, dataset: Path) -> dict[str, Path]:
    """Return the path without symbolic links of each dataset file, by its name relative to the dataset.

    Raises PathError if a dataset file or folder is a link that leads outside the root, or if there are no dataset files.
    """
    if not _is_folder(dataset):
        if dataset_suffix(dataset.name) is None:
            raise PathError(422, "the file type is unknown", f"dataset files end in {SUFFIXES_IN_WORDS}")
        return {dataset.name: dataset}
    found, seen, entries = dict[str, Path](), {dataset}, 0
    for folder, folders, names in os.walk(dataset, onerror=_raise_missing, followlinks=True):
        entries += len(folders) + len(names)
        if entries > MOST_ENTRIES:
            text = f"the folder and its subfolders have more than {MOST_ENTRIES:,} entries in total"
            raise PathError(422, text, "use fewer, larger files")
        inner, folders[:] = sorted(folders), []
        for name in inner:
            if (
                not name.startswith(".") and (real := _resolved(root, Path(folder, name))) not in seen
            ):  # links can form a circle
                seen.add(real)
                folders.append(name)
        for name in names:
            if not name.startswith(".") and dataset_suffix(name) is not None:
                real = _resolved(root, Path(folder, name))
                _is_folder(real)
                found[str(Path(folder, name).relative_to(dataset))] = real
    if not found:
        raise PathError(422, "the folder has no dataset files", f"dataset files end in {SUFFIXES_IN_WORDS}")
    return found


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder. Raises PathError if it is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _missing() from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        text = f"{shortened(path.name)} is neither a file nor a folder"
        raise PathError(422, text, "use the path of a dataset file or of a folder with dataset files")
    return stat.S_ISDIR(mode)


def _raise_missing(error: OSError) -> None:
    raise _missing() from error


def outside() -> PathError:  # whether the path exists or not
    return PathError(
        403,
        "the path is not under a folder that this service reads datasets from",
        "send the dataset as an upload: PUT /v1/uploads/NAME",
    )


def _missing() -> PathError:
    return PathError(404, "no such file or folder, or the service cannot open it", "check the path and the permissions")
