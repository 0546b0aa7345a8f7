"""Define a Ray worker with pipeline.py's simulated engine, in its own module, so that the worker's process can import it."""

from __future__ import annotations

from typing import Any

from pipeline import clocked

from reflogp.scoring.on_ray.workers import NodeWorker


class ClockedWorker(NodeWorker):
    """A NodeWorker that loads the simulated engine instead of a model."""

    def prepare(self) -> dict[str, Any]:
        self._choice = _Clock()  # type: ignore[assignment]
        return super().prepare()


class _Clock:
    def gpus(self) -> int:
        return 0

    def make(self, model: str, reference: Any) -> Any:
        return clocked(model)
