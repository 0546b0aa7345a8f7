"""Resolve the dataset paths in requests, and reject paths outside the root folders that an administrator has allowed.

The functions in this module read files, so call them in a thread. A path is resolved when its job is submitted, and again when
the job starts. As a further check, the worker opens the dataset's files through `confined_paths`, and reads them only if their
content has the digest that `resolve_path` returned.

A path outside the roots gets the same response whether it exists or not.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from reflogp.service.confined_paths import MOST_ENTRIES, PathError, digest_below
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import FileChangedError

_UPLOAD = "send the dataset as an upload: PUT /v1/uploads/NAME"
_STATUS = {"outside": 403, "hidden": 403, "missing": 404, "unusable": 422}


def resolve_path(path: str, settings: ServerSettings) -> tuple[Path, str]:
    """Resolve symbolic links in the path of a file or folder. Return the resolved path and the digest of the content.

    The digest of a file is its sha256. The digest of a folder is a blake2b digest of the relative path and the sha256 of every
    dataset file in the folder. Hidden files, and files without the suffix of a dataset format, are ignored, because jobs do
    not read them.

    Raises:
        Problem: 403 if the path leads outside the allowed root folders or contains a hidden file or folder, 404 if the file or
            folder does not exist or cannot be opened, 409 if the dataset is being written to, 422 if the path is malformed or
            is not a dataset.
    """
    if not settings.dataset_roots:
        raise Problem(403, "this service does not accept dataset paths (its setting dataset_roots is empty)", _UPLOAD)
    named = _checked(path)
    for root in sorted(settings.dataset_roots, key=lambda root: len(root.parts)):
        real_root = root.expanduser().resolve()
        for prefix in (root.expanduser(), real_root):
            if named.is_relative_to(prefix):
                try:
                    return digest_below(real_root, real_root / named.relative_to(prefix), MOST_ENTRIES)
                except PathError as error:
                    raise Problem(_STATUS[error.kind], str(error), error.next_step) from error
                except FileChangedError as error:
                    next_step = "submit the job again when the dataset is complete"
                    raise Problem(409, f"{path} is being written to", next_step) from error
    raise _outside()


def root_of(file: Path, settings: ServerSettings) -> Path:
    """Return the allowed root folder that contains `file`, a path returned by `resolve_path`.

    Raise Problem if the path is no longer inside any allowed root folder.
    """
    for root in sorted((root.expanduser().resolve() for root in settings.dataset_roots), key=lambda root: len(root.parts)):
        if file.is_relative_to(root):
            return root
    raise _outside()


def _outside() -> Problem:
    return Problem(403, "the path is not under a folder that this service reads datasets from", _UPLOAD)


def _checked(path: str) -> PurePosixPath:
    """Validate a path from a request and return it.

    Raise Problem 422 if the path is not absolute, or contains `..` or control characters.
    """
    if any(ord(ch) < 32 or ord(ch) == 127 or 0xD800 <= ord(ch) <= 0xDFFF for ch in path):
        raise Problem(422, "the path contains control characters", "send the path without control characters")
    if not path.startswith("/") or path.startswith("//"):
        raise Problem(422, "the path does not start with a single slash", "send an absolute path such as /data/pairs.jsonl")
    parts = path.split("/")
    if ".." in parts:
        raise Problem(422, "the path contains '..'", "send the path without '..'")
    return PurePosixPath(path)
