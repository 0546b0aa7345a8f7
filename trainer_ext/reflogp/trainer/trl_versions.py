"""Handle differences between versions of TRL: whether the hook exists, and the default config of a trainer."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from packaging.version import Version

from reflogp.store import UsageError

#: TRL calls this with each tokenised dataset, and uses the returned dataset with reference columns.
HOOK = "_precompute_ref_logps"
#: The first TRL whose DPOTrainer has the hook. With older ones, columns are added after construction.
_FIRST_WITH_HOOK = Version("0.29.0.dev0")
_FIRST_WITHOUT_LIGER_LOSS = Version("1.14.0.dev0")
TESTED = (
    "reflogp's trainers are tested with TRL 1.2, 1.8, 1.9 and 1.12 to 1.16, DPO also with 0.24 and 1.1: install one of these "
    '(`pip install "trl==1.16.0"`), or a newer reflogp'
)


def trl_version() -> str:
    return importlib.metadata.version("trl")


def require_hook(trainer_class: type) -> None:
    """Raise ImportError if TRL is new enough to have the hook but the trainer lacks it.

    The trainer would otherwise be treated like one of an older TRL, whose columns and losses differ.
    """
    has_hook = any(HOOK in vars(parent) for parent in trainer_class.__mro__ if not parent.__module__.startswith("reflogp."))
    if not has_hook and Version(trl_version()) >= _FIRST_WITH_HOOK:
        raise ImportError(f"{trainer_class.__name__}: its trainer in TRL {trl_version()} has no `{HOOK}`. {TESTED}")


def refuse_liger_loss(args: Any) -> None:
    """Raise UsageError if TRL would compute the reference inside of Liger's loss, which takes no stored values.

    TRL 1.14 and newer have no such loss: there, use_liger_kernel only replaces layers of the policy.
    """
    name = next((name for name in ("use_liger_kernel", "use_liger_loss") if getattr(args, name, False)), None)
    if name is not None and Version(trl_version()) < _FIRST_WITHOUT_LIGER_LOSS:
        raise UsageError(
            f"{name}: TRL {trl_version()} computes the reference inside of Liger's loss, which takes no stored values; use TRL "
            "1.14 or newer, or leave it False"
        )


def default_config(trainer_class: type, model: Any) -> Any:
    """Return the config that TRL makes for a trainer without one: DPOConfig("<model>-DPO") for a DPOTrainer.

    Raises UsageError if TRL has no config of that name.
    """
    for parent in trainer_class.__mro__:
        module = sys.modules[parent.__module__]
        config = getattr(module, parent.__name__.replace("Trainer", "Config"), None)
        if parent.__module__.startswith("trl.") and config is not None and parent.__name__ != "Trainer":
            name = model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
            return config(f"{name.split('/')[-1]}-{parent.__name__.removesuffix('Trainer')}")
    raise UsageError(f"{trainer_class.__name__} needs args=: TRL has no default config for it")


def with_own_tag(trainer_class: type) -> list[str]:
    """Return a trainer class's tags for models and model cards, with reflogp's tag added."""
    return list(dict.fromkeys([*getattr(trainer_class, "_tag_names", ()), "reflogp"]))
