"""Handle differences between TRL versions, and the copies of TRL's trainers that unsloth generates.

unsloth writes a modified copy of each TRL trainer to a separate module. For example, the module UnslothDPOTrainer has two
classes: the modified class _UnslothDPOTrainer, and its subclass UnslothDPOTrainer, which replaces TRL's class in TRL's modules.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

from packaging.version import Version

from reflogp.store import UsageError

#: Method that TRL calls with each tokenized dataset, and that returns the dataset with reference columns.
HOOK = "_precompute_ref_logps"
#: The first version of TRL whose DPOTrainer has the hook. With older versions, reference columns are added after the trainer is
#: constructed.
_FIRST_WITH_HOOK = Version("0.29.0.dev0")
#: The first version of TRL in which no Liger loss computes reference log-probs (see `refuse_liger_loss`).
_FIRST_WITHOUT_LIGER_LOSS = Version("1.14.0.dev0")
TESTED = (
    "reflogp's trainers are tested with TRL 1.2, 1.8, 1.9 and 1.12 to 1.16 (DPO also with 0.24 and 1.1); install one of these "
    'versions (`pip install "trl==1.16.0"`), or a newer reflogp'
)


_UNSLOTH = "Unsloth"


def trl_version() -> str:
    return importlib.metadata.version("trl")


def is_of_trl(trainer_class: type) -> bool:
    """Return True if a class is defined in TRL or is unsloth's copy of a TRL class. Return False for third-party
    subclasses."""
    module = trainer_class.__module__
    return module.startswith("trl.") or _is_of_unsloth(trainer_class)


def _is_of_unsloth(trainer_class: type) -> bool:
    module = trainer_class.__module__
    return module.startswith(_UNSLOTH) and module == trainer_class.__name__.removeprefix("_")


def trl_modules(trainer_class: type) -> list[ModuleType]:
    """Return the modules in which a trainer's TRL base classes (or unsloth's copies of these classes) are defined."""
    names = dict.fromkeys(parent.__module__ for parent in trainer_class.__mro__ if is_of_trl(parent))
    return [sys.modules[name] for name in names]


def refuse_late_unsloth(trainer_class: type) -> None:
    """Raise ImportError if unsloth was imported only after a trainer class was derived from TRL's class. The trainer class
    would then lack unsloth's changes."""
    for parent in trainer_class.__mro__:
        if parent.__module__.startswith("trl."):
            now = getattr(sys.modules[parent.__module__], parent.__name__, parent)
            if isinstance(now, type) and _is_of_unsloth(now):
                raise ImportError(
                    f"unsloth was imported after {trainer_class.__name__}, so this class is derived from TRL's "
                    f"{parent.__name__} without unsloth's changes: put `import unsloth` before all imports of trl and reflogp"
                )


def require_hook(trainer_class: type) -> None:
    """Raise ImportError if TRL is new enough to have the hook `_precompute_ref_logps`, but the trainer lacks this method.

    Without this check, the trainer would be handled as if TRL were an older version, with different columns and losses.
    """
    has_hook = any(HOOK in vars(parent) for parent in trainer_class.__mro__ if not parent.__module__.startswith("reflogp."))
    if not has_hook and Version(trl_version()) >= _FIRST_WITH_HOOK:
        raise ImportError(
            f"{trainer_class.__name__} needs the method `{HOOK}`, which the trainer in TRL {trl_version()} lacks; {TESTED}"
        )


def refuse_liger_loss(args: Any) -> None:
    """Raise UsageError if TRL would compute reference log-probs inside Liger's loss, which cannot use stored values.

    In TRL 1.14 and newer, no Liger loss computes reference log-probs, and use_liger_kernel only replaces layers of the policy.
    """
    name = next((name for name in ("use_liger_kernel", "use_liger_loss") if getattr(args, name, False)), None)
    if name is not None and Version(trl_version()) < _FIRST_WITHOUT_LIGER_LOSS:
        raise UsageError(
            f"{name}=True: TRL {trl_version()} computes reference log-probs inside Liger's loss, which cannot use stored "
            f"values; use TRL 1.14 or newer, or set {name}=False"
        )


def default_config(trainer_class: type, model: Any) -> Any:
    """Return the config that TRL creates if a trainer gets no args=, such as DPOConfig("<model>-DPO") for a DPOTrainer.

    Raises UsageError if TRL has no config class for the trainer.
    """
    for parent in trainer_class.__mro__:
        module = sys.modules[parent.__module__]
        config = getattr(module, parent.__name__.replace("Trainer", "Config"), None)
        if is_of_trl(parent) and config is not None:
            name = model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
            return config(f"{name.split('/')[-1]}-{parent.__name__.removeprefix(_UNSLOTH).removesuffix('Trainer')}")
    raise UsageError(f"{trainer_class.__name__} needs args=: TRL has no default config for it")


def with_own_tag(trainer_class: type) -> list[str]:
    """Return a trainer class's tags for models and model cards, plus reflogp's tag."""
    return list(dict.fromkeys([*getattr(trainer_class, "_tag_names", ()), "reflogp"]))
