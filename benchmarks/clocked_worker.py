"""Define a Ray worker with pipeline.py's simulated engine, in its own module, so that the worker's process can import it."""

from __future__ import annotations

from typing import Any

from pipeline import clocked

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.on_ray.workers import NodeWorker
from reflogp.store import Reference


class ClockedWorker(NodeWorker):
    """A NodeWorker that loads the simulated engine instead of a model."""

    def prepare(self) -> dict[str, Any]:
        self.choice = _Clock("torch", "cpu")
        return super().prepare()


class _Clock(EngineChoice):
    def make(self, model: str, reference: Reference) -> Any:
        return clocked(model)
