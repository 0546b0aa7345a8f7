"""Memory that was freed goes back to the system.

glibc and Arrow keep what was freed for later, in an arena for each of some dozen threads. Over many small jobs those parts grow
although nothing is in use.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa


def give_freed_memory_back() -> None:
    """Return unused memory to the system, where the C library can (glibc); takes milliseconds."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
