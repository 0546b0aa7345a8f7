"""Make axolotl train with stored reference log-probs instead of a reference model.

Add the plugin `reflogp.trainer.axolotl.StoredReferencePlugin` and a section `reflogp:` to axolotl's YAML file. axolotl loads a
reference model before it creates its trainer (axolotl/train.py, `setup_reference_model`); this module replaces the function
with one that loads no model if the run uses the plugin. The plugin also sets the trainer class. The rest of axolotl, including
its command and launchers, runs unchanged.
"""

from __future__ import annotations

from typing import Any

import axolotl.train
from axolotl.core.trainers import AxolotlKTOTrainer
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.import_helper import get_cls_from_module_str
from pydantic import BaseModel

from reflogp.store import UsageError, resolve_model
from reflogp.trainer.cached import CachedReferenceMixin
from reflogp.trainer.options import Options, warn_if_untested

_setup_reference_model = axolotl.train.setup_reference_model


class PluginSettings(BaseModel):
    """The key that the plugin adds to axolotl's YAML file."""

    reflogp: Options | None = None


class StoredReferenceMixin(CachedReferenceMixin):
    """Mixin that reads the arguments of `CachedReferenceMixin` from axolotl's YAML file, because axolotl creates the trainer
    without these arguments."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        cfg = PluginManager.get_instance().cfg
        if cfg is None or not _has_plugin(cfg):
            raise UsageError(
                f"{type(self).__name__} needs the plugin: add `- reflogp.trainer.axolotl.StoredReferencePlugin` to `plugins:` "
                "in the YAML file; without the plugin, axolotl ignores the section `reflogp:`"
            )
        options = _options_of(cfg)
        if not options.model:
            options = Options(**{**cfg.reflogp, "model": _base_model(cfg)})
        own = {"reference": options.reference(), "policy_starts_at_reference": not options.policy_starts_elsewhere}
        super().__init__(model, *args, **{**own, **kwargs})


class StoredDPOTrainer(StoredReferenceMixin, AxolotlDPOTrainer):
    """axolotl's DPO trainer, with reference log-probs from a store or a service."""


class StoredKTOTrainer(StoredReferenceMixin, AxolotlKTOTrainer):
    """axolotl's KTO trainer, with reference log-probs from a store or a service."""


_TRAINERS = {"dpo": StoredDPOTrainer, "ipo": StoredDPOTrainer, "kto": StoredKTOTrainer}


class StoredReferencePlugin(BasePlugin):
    """A plugin that makes axolotl train with stored reference log-probs. The section `reflogp:` of the YAML file says where the
    log-probs are stored."""

    def get_input_args(self) -> str:
        """Return the name of the class that defines the plugin's key in the YAML file."""
        return "reflogp.trainer.axolotl.PluginSettings"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Check the settings before axolotl loads datasets and models (but not in `axolotl preprocess`). Despite its name, this
        method loads no dataset."""
        if not preprocess:
            _prepare(cfg)


def _no_reference_model(cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Return None if the run uses the plugin; otherwise, load the reference model with axolotl's own function."""
    if not _has_plugin(cfg):
        return _setup_reference_model(cfg, *args, **kwargs)
    _prepare(cfg)
    return None


axolotl.train.setup_reference_model = _no_reference_model


def _prepare(cfg: Any) -> None:
    """Check the settings, and set `trainer_cls` if it is not set. Raises UsageError if a setting is not supported with stored
    values."""
    warn_if_untested("axolotl", "0.19", "0.21")
    _options_of(cfg)
    if cfg.rl not in _TRAINERS:
        raise UsageError(
            f"rl is {cfg.rl.value if cfg.rl else 'not set'}, but stored reference log-probs can be used only with dpo, ipo and "
            "kto: set rl to one of these, or remove the plugin StoredReferencePlugin"
        )
    if (cfg.context_parallel_size or 1) > 1:
        raise UsageError("context_parallel_size above 1 splits sequences across processes, which is not supported: set it to 1")
    trainer = _TRAINERS[cfg.rl]
    if not cfg.trainer_cls:
        cfg.trainer_cls = f"{trainer.__module__}.{trainer.__name__}"
    elif not issubclass(get_cls_from_module_str(cfg.trainer_cls), trainer):
        raise UsageError(
            f"trainer_cls {cfg.trainer_cls} does not use stored values: derive it from {trainer.__module__}."
            f"{trainer.__name__}, or omit trainer_cls"
        )


def _has_plugin(cfg: Any) -> bool:
    return any(str(plugin).startswith("reflogp.trainer.axolotl.") for plugin in cfg.plugins or ())


def _options_of(cfg: Any) -> Options:
    if not cfg.reflogp:
        raise UsageError(
            "the plugin StoredReferencePlugin needs a section `reflogp:` in the YAML file, for example with `store: ./logps`"
        )
    return Options(**cfg.reflogp)


def _base_model(cfg: Any) -> str:
    revision = cfg.revision_of_model
    return cfg.base_model if revision in (None, "main") else str(resolve_model(cfg.base_model, revision))
