"""Write files that appear only when they are complete, and check that a cache folder belongs to the current user.

A file is written under a temporary name in the same folder and then renamed. Later runs trust the data in a cache folder,
such as file digests, and execute the compiled kernels in it. Nobody but the current user may therefore write to the folder.
If several users share the parent folder, each of them has a separate cache folder.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reflogp.store.errors import UsageError


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write to.

    The file is renamed to `target` if the `with` block succeeds, and deleted if it fails. If the block writes nothing,
    `target` stays unchanged. Missing parent folders are created.

    Raises UsageError if the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.exists():
            partial.replace(target)
    except OSError as error:
        if error.filename is not None and Path(error.filename) not in {target, partial, *target.parents}:
            raise  # the error is about another file, for example one that the block reads
        raise UsageError(f"the output {target} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # the temporary file does not exist: it was renamed or never created
            partial.unlink()


#: The mode bits that allow users other than the owner to write.
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(parent: Path, name: str) -> Path:
    """Return the path of the current user's folder in `parent`. The folder is named `<name>-<user id>`.

    The folder is created with mode 0700 if it does not exist.

    Raises OSError if the folder cannot be created, and PermissionError if another user owns the folder or can write to it.
    """
    folder = parent / f"{name}-{os.getuid()}"
    os.close(open_own_folder(folder))
    return folder


def open_own_folder(folder: Path) -> int:
    """Open a folder, check that only the current user can write to it, and return its file descriptor.

    The folder is created with mode 0700 if it does not exist. The descriptor refers to the checked folder even if somebody
    renames the folders above it.

    Raises OSError if the folder cannot be created or is a symbolic link, and PermissionError if another user owns the folder or
    can write to it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_own(os.fstat(descriptor), folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_own(about: os.stat_result, path: Path) -> None:
    """Raise PermissionError if a file or folder belongs to another user, or if other users can write to it."""
    if about.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if about.st_mode & _OTHERS_MAY_WRITE:
        raise PermissionError(f"{path} is writable by other users; to change this, run `chmod go-w {path}`")
