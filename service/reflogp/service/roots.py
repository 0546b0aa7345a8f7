"""Resolve the dataset paths in requests, and reject paths outside the root folders that an administrator has allowed.

The functions block. A path outside the roots gets the same response whether it exists or not. A job opens the files once more
through `confined_paths`, and reads them only if their content has the digest that `resolve_path` returned.
"""

from __future__ import annotations

from pathlib import Path

from reflogp.service.confined_paths import PathError, digest_below, outside
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import FileChangedError


def resolve_path(path: str, settings: ServerSettings) -> tuple[Path, str]:
    """Return (path with symbolic links resolved, digest of the content) for a file or folder; see `digest_below`.

    Raises Problem: 403 if the path leads outside the roots or is hidden, 404 if nothing can be opened there, 409 if the dataset
    is being written to, 422 if the path is malformed or is not a dataset.
    """
    if not settings.dataset_roots:
        text = "this service does not accept dataset paths (its setting dataset_roots is empty)"
        raise Problem(403, text, "send the dataset as an upload: PUT /v1/uploads/NAME")
    if any(ord(ch) < 32 or ord(ch) == 127 or 0xD800 <= ord(ch) <= 0xDFFF for ch in path):
        raise Problem(422, "the path contains control characters", "send the path without control characters")
    try:
        for root, real_root in _roots(settings):
            for prefix in (root, real_root):
                if Path(path).is_relative_to(prefix):
                    return digest_below(real_root, real_root / Path(path).relative_to(prefix))
        raise outside()
    except PathError as error:
        raise Problem(error.status, str(error), error.next_step) from error
    except FileChangedError as error:
        raise Problem(409, f"{path} is being written to", "submit the job again when the dataset is complete") from error


def root_of(file: Path, settings: ServerSettings) -> Path:
    """Return the allowed root folder that contains `file`. Raises PathError if there is none any more."""
    for _, root in _roots(settings):
        if file.is_relative_to(root):
            return root
    raise outside()


def _roots(settings: ServerSettings) -> list[tuple[Path, Path]]:
    """Return each root as it is in the settings and without symbolic links, outer folders first."""
    roots = [root.expanduser() for root in settings.dataset_roots]
    return sorted(((root, root.resolve()) for root in roots), key=lambda pair: len(pair[1].parts))
