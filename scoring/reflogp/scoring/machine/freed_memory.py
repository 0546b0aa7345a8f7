"""Return freed memory to the system.

glibc and Arrow keep freed memory for later, in an arena for each of some dozen threads. Over many small jobs the arenas grow
although nothing is in use.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa


def return_freed_memory() -> None:
    """Return unused memory to the system, if the C library can do so (glibc); takes milliseconds."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
