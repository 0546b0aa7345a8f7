"""Load the engines of one device on demand, and unload the least recently used ones to make room.

Only the thread of the engine loop uses this module.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from reflogp.scoring.engines import PassEngine
from reflogp.scoring.errors import OutOfMemoryError


class Engines:
    """Engines by reference id.

    Args:
        make: loads the engine of a reference id; raises EngineError and the errors of describing a reference.
        capacity: maximum number of loaded engines.
        pinned: reference id that is never unloaded, or None.
        on_change: called with the loaded reference ids after each change.
        admit: raises if an engine cannot be loaded, before others are unloaded for it.
    """

    def __init__(
        self,
        make: Callable[[str], PassEngine],
        capacity: int,
        pinned: str | None,
        on_change: Callable[[list[str]], None],
        admit: Callable[[str], None],
    ) -> None:
        self._make = make
        self._admit = admit
        self._capacity = capacity
        self._pinned = pinned
        self._on_change = on_change
        self._loaded: dict[str, PassEngine] = {}  # least recently used first
        self._loaded_at: dict[str, float] = {}
        self._used_at: dict[str, float] = {}

    def get(self, reference_id: str) -> PassEngine:
        """Return the engine of a reference; load it if necessary.

        If memory runs out while loading, all other engines except the pinned one are unloaded, and loading is tried again.
        """
        engine = self._loaded.pop(reference_id, None)
        if engine is None:
            self._admit(reference_id)
            for victim in self.displaced_by(reference_id):
                self._unload(victim)
            engine = self._made_in_the_room(reference_id)
            if engine is None:
                for other in self._movable():
                    self._unload(other)
                engine = self._make(reference_id)
            self._loaded_at[reference_id] = time.monotonic()
            self._loaded[reference_id] = engine
            self._on_change(list(self._loaded))
        self._loaded[reference_id] = engine
        self._used_at[reference_id] = time.monotonic()
        return engine

    def peek(self, reference_id: str) -> PassEngine | None:
        """Return an engine if it is loaded, without counting this as a use."""
        return self._loaded.get(reference_id)

    def displaced_by(self, reference_id: str) -> list[str]:
        """Return the reference ids that would be unloaded to load this one."""
        if reference_id in self._loaded:
            return []
        too_many = len(self._loaded) + 1 - self._capacity
        return self._movable()[: max(0, too_many)]

    def settled(self, reference_id: str, resident_seconds: float, idle_seconds: float) -> bool:
        """Return whether an engine was loaded, or unused, for long enough to be unloaded for another one."""
        now = time.monotonic()
        resident = now - self._loaded_at.get(reference_id, 0.0)
        return resident >= resident_seconds or now - self._used_at.get(reference_id, 0.0) >= idle_seconds

    def _made_in_the_room(self, reference_id: str) -> PassEngine | None:
        """Load an engine in addition to the others; return None if memory ran out and others can be unloaded.

        The error does not leave this method, so that its traceback does not keep parts of the model that did not fit.
        """
        try:
            return self._make(reference_id)
        except OutOfMemoryError:
            if not self._movable():
                raise
            return None

    def _movable(self) -> list[str]:
        return [other for other in self._loaded if other != self._pinned]

    def _unload(self, reference_id: str) -> None:
        self._loaded.pop(reference_id).close()
        self._on_change(list(self._loaded))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
