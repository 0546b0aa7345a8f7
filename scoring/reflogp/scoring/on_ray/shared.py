"""Check that a folder is shared with another node: write a temporary file that the node must see."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reflogp.scoring.errors import EngineError


@contextmanager
def probe(folder: Path) -> Iterator[str]:
    """Write a file into the folder for the block; give its path. Raises EngineError if it cannot be written."""
    file = folder / f"probe-{uuid.uuid4()}"
    try:
        file.write_bytes(b"reflogp")
    except OSError as error:
        raise EngineError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


def require_visible(file: str) -> None:
    """Raise EngineError if a probe that another node wrote is not visible on this node."""
    if not Path(file).is_file():
        raise EngineError(f"{Path(file).parent} is not the same folder here: it must lie on a filesystem that all nodes share")
