"""The engines of one device: loaded when they are asked for, the least recently used unloaded to make room.

Knows how many may be loaded and which one stays. Does not know jobs or requests. Used by one thread, the engine loop's.
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
        make: loads the engine of a reference id; raises EngineError and what describing a reference raises.
        capacity: engines that may be loaded at a time.
        pinned: reference id that is never unloaded, or None.
        on_change: told the loaded reference ids after each change.
        admit: raises for an engine that cannot be loaded, before others are unloaded for it.
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
        self._loaded: dict[str, PassEngine] = {}  # the least recently used first
        self._loaded_at: dict[str, float] = {}
        self._used_at: dict[str, float] = {}

    def get(self, reference_id: str) -> PassEngine:
        """The engine of a reference, loaded if it is not yet. When memory runs out while loading, others make room."""
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
        """An engine where it is loaded; that is no use of it."""
        return self._loaded.get(reference_id)

    def displaced_by(self, reference_id: str) -> list[str]:
        """Reference ids that loading this one would unload."""
        if reference_id in self._loaded:
            return []
        too_many = len(self._loaded) + 1 - self._capacity
        return self._movable()[: max(0, too_many)]

    def settled(self, reference_id: str, resident_seconds: float, idle_seconds: float) -> bool:
        """Whether an engine has been here, or unused, for long enough to be unloaded for another one."""
        now = time.monotonic()
        resident = now - self._loaded_at.get(reference_id, 0.0)
        return resident >= resident_seconds or now - self._used_at.get(reference_id, 0.0) >= idle_seconds

    def _made_in_the_room(self, reference_id: str) -> PassEngine | None:
        """An engine beside the others; None where memory ran out and some of them can make room.

        The error ends with this call, and with it what its traceback holds of the model that did not fit.
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
