"""Write files that appear only when they are complete: under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reflogp.store.errors import UsageError


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `target` if the block succeeds, and is deleted if the block fails.

    A block that writes nothing leaves `target` unchanged. Missing parent folders are created.

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
            raise  # about another file, one that the block read
        raise UsageError(f"the output {target} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # the file, or its folder, does not exist
            partial.unlink()
