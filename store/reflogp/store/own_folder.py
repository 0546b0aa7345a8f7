"""Folders that hold what a later run believes or executes: only their own user may have written it.

Used for digests of files and for compiled kernels, which lie in the cache folder that a team may share.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

#: Write permission of anybody but the owner.
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(parent: Path, name: str) -> Path:
    """Return the folder `name`-<user's number> below `parent`, made with mode 0700 where it is missing.

    Raises OSError where it cannot be made, and PermissionError where another user owns it or may write to it.
    """
    folder = parent / f"{name}-{os.getuid()}"
    os.close(open_own_folder(folder))
    return folder


def open_own_folder(folder: Path) -> int:
    """Open a folder, made with mode 0700 where it is missing, and return its file descriptor.

    What was checked is what the descriptor stands for, even where somebody renames folders above it.

    Raises OSError and PermissionError as `own_folder`. A symbolic link in its place is refused.
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
    """Raise PermissionError for a file or folder of another user, and for one that others may write to."""
    if about.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if about.st_mode & _OTHERS_MAY_WRITE:
        raise PermissionError(f"{path} can be written by other users (chmod go-w {path})")
