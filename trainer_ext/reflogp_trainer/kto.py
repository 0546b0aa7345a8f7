"""CachedKTOTrainer: TRL's KTOTrainer on stored reference log-probs.

TRL pairs each prompt with another row's completion to estimate its KL term, by batch size and order; those sequences have
values of their own, so they are looked up in the rows that TRL prepared.
"""

from __future__ import annotations

import importlib
from typing import Any

from reflogp_trainer.cached import CachedReferenceMixin


def _kto_trainer() -> Any:
    """TRL's KTOTrainer that reads reference columns: stable since 1.8, in trl.experimental from 1.2."""
    for module in ("trl.trainer.kto_trainer", "trl.experimental.kto.kto_trainer"):
        try:
            found = importlib.import_module(module).KTOTrainer
        except ImportError:
            continue
        if hasattr(found, "_precompute_ref_logps") and found.__module__ == module:
            return found
    return None


_found = _kto_trainer()
_Trainer: Any = _found or object


class CachedKTOTrainer(CachedReferenceMixin, _Trainer):
    """KTO without a reference model: its log-probs come from a store. Arguments are `CachedReferenceMixin`'s and TRL's.

    Raises ImportError, when it is made, with a TRL before 1.2, whose KTOTrainer has no such columns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _found is None:
            raise ImportError("CachedKTOTrainer needs TRL 1.2 or newer: earlier KTOTrainers have no reference columns")
        super().__init__(*args, **kwargs)
