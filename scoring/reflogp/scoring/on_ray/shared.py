"""Whether a folder is the same one on another node: a file that is there for a moment, and that the node must see.

Knows local folders. Called where workers are given a store or a state folder.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reflogp.scoring.errors import EngineError


@contextmanager
def probe(folder: Path) -> Iterator[str]:
    """A file in the folder for the time of the block; its path. Raises EngineError when it cannot be written."""
    file = folder / f"probe-{uuid.uuid4()}"
    try:
        file.write_bytes(b"reflogp")
    except OSError as error:
        raise EngineError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


def require_seen(file: str) -> None:
    """Raise EngineError where a probe that lies in a folder elsewhere is not here."""
    if not Path(file).is_file():
        raise EngineError(f"{Path(file).parent} is not the same folder here: it must lie on a filesystem that all nodes share")
