"""Datasets by path: files and folders under the roots that an administrator allows, and nothing else.

Knows paths and links. Does not know file formats beyond their suffixes. Blocking. Called where a job is submitted.

A path outside the roots is answered the same whether it is there or not. Every link is followed by hand, and each step must
stay under the root, so that a link that leads out and back in says nothing about the outside either.

What is not prevented here: somebody who may write below a root can exchange a file after this answer. The digest then no longer
fits; resolving the path once more before reading tells (it costs a few stat calls where nothing changed).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from pathlib import Path, PurePosixPath

from reflogp_service.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp_service.server.problems import Problem
from reflogp_service.server.settings import ServerSettings
from reflogp_store.digests import file_digests

#: A dataset folder with more entries is refused.
MOST_ENTRIES = 10_000
#: Links in one path, as the kernel has it.
_MOST_LINKS = 40
_UPLOAD = "send the dataset as an upload: PUT /v1/uploads/NAME"
_SUFFIXES = f"files end in {SUFFIXES_IN_WORDS}"


def resolve_path(path: str, settings: ServerSettings) -> tuple[Path, str]:
    """The file or folder that a request names, without links, and a digest of its content (sha256; blake2b for a folder).

    A folder's digest is over the relative names and sha256 of its dataset files. Hidden ones and those of other suffixes are
    left out: no reader takes them.

    Raises:
        Problem: 403 for what is not under a root, 404 for what is not there, 422 for what no dataset can be.
    """
    if not settings.dataset_roots:
        raise Problem(403, "this service takes no paths (its setting dataset_roots is empty)", _UPLOAD)
    named = _checked(path)
    for root in sorted(settings.dataset_roots, key=lambda root: len(root.parts)):
        real_root = root.expanduser().resolve()
        for prefix in (root.expanduser(), real_root):
            if named.is_relative_to(prefix):
                found = _walk(real_root, named.relative_to(prefix).parts, real_root)
                return found, _digest(real_root, found)
    raise _outside()


def _outside() -> Problem:
    return Problem(403, "the path is not under a folder that this service reads datasets from", _UPLOAD)


def _checked(path: str) -> PurePosixPath:
    """A path as it may be written: absolute, without `..`, hidden parts and control characters."""
    if any(ord(ch) < 32 or ord(ch) == 127 or 0xD800 <= ord(ch) <= 0xDFFF for ch in path):
        raise Problem(422, "the path has control characters", "name the path as it is")
    if not path.startswith("/") or path.startswith("//"):
        raise Problem(422, "the path is not absolute", "begin it with one slash")
    parts = path.split("/")
    if ".." in parts:
        raise Problem(422, "the path has a part '..'", "name the path without it")
    return PurePosixPath(path)


def _walk(root: Path, parts: tuple[str, ...], start: Path) -> Path:
    """What a path leads to from `start`, which has no links; every step stays under `root`. Raises Problem."""
    at, pending, links = start, deque(parts), 0
    while pending:
        part = pending.popleft()
        if part == "..":  # of a link; what was requested has none
            if at == root:
                raise _outside()
            at = at.parent
            continue
        if part.startswith("."):
            raise Problem(403, "the path has a hidden part", "move the dataset to a folder and a name without a leading dot")
        step = at / part
        try:
            is_link = stat.S_ISLNK(step.lstat().st_mode)
            target = PurePosixPath(step.readlink()) if is_link else None
        except (OSError, ValueError) as error:
            raise Problem(404, "there is no such file or folder that can be read", "check the path") from error
        if target is None:
            at = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise Problem(422, "the path has too many links", "name the file that they lead to")
        if target.is_absolute():
            if not target.is_relative_to(root):
                raise _outside()
            at, target = root, target.relative_to(root)
        pending.extendleft(reversed(target.parts))
    return at


def _digest(root: Path, found: Path) -> str:
    try:
        mode = found.lstat().st_mode
        if stat.S_ISREG(mode):
            if dataset_suffix(found.name) is None:
                raise Problem(422, "the file is of no known type", _SUFFIXES)
            return file_digests([found])[found]
        if not stat.S_ISDIR(mode):
            raise Problem(422, "the path is neither a file nor a folder", "name a dataset file or a folder of such files")
        files = _files_of(root, found)
        if not files:
            raise Problem(422, "the folder has no dataset files", _SUFFIXES)
        digests = file_digests(files.values())
    except OSError as error:
        raise Problem(404, "there is no such file or folder that can be read", "check the path") from error
    content = hashlib.blake2b(digest_size=32, person=b"reflogp.folder")
    for name, file in sorted(files.items()):
        content.update(f"{name}\0{digests[file]}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


def _files_of(root: Path, folder: Path) -> dict[str, Path]:
    """Relative name -> file, without links, of every dataset file in a folder and those below it.

    Raises Problem when anything in it leads out of the root or is neither file nor folder, and for too many entries.
    """
    files: dict[str, Path] = {}
    pending, entries = [(folder, "")], 0
    seen = {folder}
    while pending:
        at, prefix = pending.pop()
        with os.scandir(at) as listing:
            for entry in listing:
                entries += 1
                if entries > MOST_ENTRIES:
                    raise Problem(422, f"the folder has more than {MOST_ENTRIES:,} entries", "write fewer and larger files")
                inside = Path(entry.path)
                if entry.is_symlink():
                    inside = _walk(root, (entry.name,), at)
                mode = inside.lstat().st_mode
                if stat.S_ISDIR(mode):
                    if inside not in seen and not entry.name.startswith("."):
                        seen.add(inside)
                        pending.append((inside, f"{prefix}{entry.name}/"))
                elif not stat.S_ISREG(mode):
                    raise Problem(422, "the folder holds something that is neither file nor folder", "remove it")
                elif not entry.name.startswith(".") and dataset_suffix(entry.name) is not None:
                    files[f"{prefix}{entry.name}"] = inside
    return files
