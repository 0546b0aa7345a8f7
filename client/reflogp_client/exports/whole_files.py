"""Files that appear when they are complete: written under a temporary name beside them, then renamed.

Knows paths. Does not know what is in a file. Called by each format's writer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reflogp_store import UsageError


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """The temporary name to write; becomes `target` when the block ends well, and is removed when it does not.

    Raises UsageError where the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"the output {target} cannot be written: {error.strerror or error}") from error
    finally:
        if partial.exists():
            partial.unlink()
