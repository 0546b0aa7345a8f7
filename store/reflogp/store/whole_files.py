"""Files that appear when they are complete: written under a temporary name beside them, then renamed.

Knows paths. Does not know what is in a file. Called by whoever writes a file that others read.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reflogp.store.errors import UsageError


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """The temporary name to write; becomes `target` when the block ends well, and is removed when it does not.

    A block that writes nothing leaves `target` as it is. Folders above it are made.

    Raises UsageError where the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.exists():
            partial.replace(target)
    except OSError as error:
        if error.filename is not None and Path(error.filename) not in {target, partial, *target.parents}:
            raise  # of another file, which the block read
        raise UsageError(f"the output {target} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it is not there, or neither is its folder
            partial.unlink()
