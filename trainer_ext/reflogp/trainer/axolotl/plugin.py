"""Provide a plugin that makes axolotl train with stored reference log-probs instead of a reference model.

axolotl loads a reference model before it creates its trainer (axolotl/train.py, `setup_reference_model`). In full fine-tuning,
axolotl loads this model even if the trainer would not use it. This module replaces `setup_reference_model` with a function
that loads no model if the run uses the plugin. The plugin also sets the trainer class. The rest of axolotl, including its
command and launchers, runs unchanged.
"""

from __future__ import annotations

from typing import Any

import axolotl.train
from axolotl.integrations.base import BasePlugin
from axolotl.utils.import_helper import get_cls_from_module_str

from reflogp.store import UsageError
from reflogp.trainer.axolotl import trainers
from reflogp.trainer.axolotl.settings import StoredReferenceSettings, has_plugin, settings_of
from reflogp.trainer.batches.options import warn_if_untested

_TESTED = "0.19.0"
_TRAINERS = {"dpo": trainers.StoredDPOTrainer, "ipo": trainers.StoredDPOTrainer, "kto": trainers.StoredKTOTrainer}
#: Settings that may make the reference differ from the model in `base_model`, because they may change the model's config
#: or weights, or load a trained adapter.
_UNCLEAR = (
    "lora_model_dir",
    "load_in_8bit",
    "load_in_4bit",
    "model_quantization_config",
    "qat",
    "fp8",
    "use_onebitllms",
    "overrides_of_model_config",
    "overrides_of_model_kwargs",
    "reinit_weights",
    "shrink_embeddings",
    "peft_layer_replication",
)
#: Values of peft_init_lora_weights that leave the base weights unchanged.
_PLAIN_LORA = (None, True, False, "gaussian")

_setup_reference_model = axolotl.train.setup_reference_model


def _no_reference_model(cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Return None if the run uses the plugin; otherwise, load the reference model with axolotl's own function."""
    if not has_plugin(cfg):
        return _setup_reference_model(cfg, *args, **kwargs)
    _prepare(cfg)
    return None


axolotl.train.setup_reference_model = _no_reference_model


class StoredReferencePlugin(BasePlugin):
    """A plugin that makes axolotl train with stored reference log-probs. The section `reflogp:` of the YAML file says where the
    log-probs are stored."""

    def get_input_args(self) -> str:
        """Return the name of the class that defines the plugin's keys in the YAML file."""
        return "reflogp.trainer.axolotl.settings.PluginSettings"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Check the settings before axolotl loads datasets and models. Despite its name, this method loads no dataset.

        If `preprocess` is True (the command `axolotl preprocess`), check nothing.

        Raises UsageError if a setting is not supported with stored values.
        """
        if not preprocess:
            _prepare(cfg)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raise UsageError if the trainer does not use stored values."""
        if not isinstance(trainer, trainers.StoredReferenceMixin):
            raise UsageError(
                f"another plugin created the trainer ({type(trainer).__name__}), which does not use stored values: "
                "remove that plugin or StoredReferencePlugin"
            )


def _prepare(cfg: Any) -> None:
    """Check the settings, and set `trainer_cls` if it is not set. Raises UsageError if a setting is not supported with stored
    values."""
    warn_if_untested("axolotl", _TESTED)
    _require_supported(cfg, settings_of(cfg))
    trainer = _TRAINERS[cfg.rl]
    if not cfg.trainer_cls:
        cfg.trainer_cls = f"{trainer.__module__}.{trainer.__name__}"
    elif not issubclass(get_cls_from_module_str(cfg.trainer_cls), trainer):
        raise UsageError(
            f"trainer_cls {cfg.trainer_cls} does not use stored values: derive it from {trainer.__module__}."
            f"{trainer.__name__}, or omit trainer_cls"
        )


def _require_supported(cfg: Any, settings: StoredReferenceSettings) -> None:
    if cfg.rl not in _TRAINERS:
        raise UsageError(
            f"rl is {cfg.rl.value if cfg.rl else 'not set'}, but stored reference log-probs can be used only with dpo, ipo and "
            "kto: set rl to one of these, or remove the plugin StoredReferencePlugin"
        )
    if (cfg.context_parallel_size or 1) > 1:
        raise UsageError("context_parallel_size above 1 splits sequences across processes, which is not supported: set it to 1")
    if cfg.dpo_use_liger_kernel:
        raise UsageError(
            "with dpo_use_liger_kernel, Liger's kernel computes the reference log-probs and cannot use stored values: remove "
            "this setting"
        )
    if settings.names_reference:
        return
    unclear = [name for name in _UNCLEAR if cfg.get(name)]
    if cfg.base_model_config and cfg.base_model_config != cfg.base_model:
        unclear.append("base_model_config")
    if cfg.peft_init_lora_weights not in _PLAIN_LORA:
        unclear.append("peft_init_lora_weights")
    if (cfg.peft or {}).get("loftq_config"):
        unclear.append("loftq_config")
    if unclear:
        raise UsageError(
            f"with {unclear[0]}, the reference may differ from the model in base_model: name the reference with `model:`, "
            "`reference:` or `reference_id:` in the section `reflogp:`; if the policy does not start from the reference's "
            "weights, also set `policy_starts_elsewhere: true`"
        )
