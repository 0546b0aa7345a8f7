"""Write files that appear only when they are complete, and check that a cache folder belongs to the current user."""

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
    """Yield a temporary path in the folder of `target`, which becomes `target` if the `with` block succeeds and wrote it.

    Raises UsageError if the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.exists():
            partial.replace(target)
    except OSError as error:
        if error.errno is None or (
            error.filename is not None and Path(error.filename) not in {target, partial, *target.parents}
        ):
            raise  # the error is about another file, for example one that the block reads
        raise UsageError(f"the output {target} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # the temporary file does not exist: it was renamed or never created
            partial.unlink()


def own_folder(parent: Path, name: str) -> Path:
    """Return the current user's folder `<name>-<user id>` in `parent`, which is created with mode 0700 if it does not exist.

    Later runs trust what is in it: file digests, and compiled kernels, which they execute.

    Raises OSError if the folder cannot be created, and PermissionError if it is a link, or if another user owns it or can write
    to it.
    """
    folder = parent / f"{name}-{os.getuid()}"
    parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise PermissionError(f"{folder} is not a folder")
    if about.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is writable by other users; to change this, run `chmod go-w {folder}`")
    return folder
