"""Train with axolotl's DPO and KTO trainers, using stored reference log-probs."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers import AxolotlKTOTrainer
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.integrations.base import PluginManager
from transformers import AutoConfig

from reflogp.store import UsageError, resolve_model
from reflogp.trainer import CachedReferenceMixin
from reflogp.trainer.axolotl.settings import has_plugin, settings_of


class StoredReferenceMixin(CachedReferenceMixin):
    """Mixin that reads the arguments of `CachedReferenceMixin` from axolotl's YAML file, because axolotl creates the trainer
    without these arguments.

    Raises UsageError if axolotl has not loaded the plugin, or if the settings do not name the reference and axolotl has resized
    the model's vocabulary. Also raises the errors of `CachedReferenceMixin`.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        cfg = PluginManager.get_instance().cfg
        if cfg is None or not has_plugin(cfg):
            raise UsageError(
                f"{type(self).__name__} needs the plugin: add `- reflogp.trainer.axolotl.plugin.StoredReferencePlugin` to "
                "`plugins:` in the YAML file; without the plugin, axolotl ignores the section `reflogp:`"
            )
        settings = settings_of(cfg)
        if not settings.names_reference:
            _require_same_vocabulary(model, cfg)
        super().__init__(model, *args, **{**settings.trainer_arguments(_base_model(cfg)), **kwargs})


class StoredDPOTrainer(StoredReferenceMixin, AxolotlDPOTrainer):
    """axolotl's DPO trainer, with reference log-probs from a store or a service."""


class StoredKTOTrainer(StoredReferenceMixin, AxolotlKTOTrainer):
    """axolotl's KTO trainer, with reference log-probs from a store or a service."""


def _base_model(cfg: Any) -> str:
    revision = cfg.revision_of_model
    return cfg.base_model if revision in (None, "main") else str(resolve_model(cfg.base_model, revision))


def _require_same_vocabulary(policy: Any, cfg: Any) -> None:
    """Raise UsageError if axolotl has resized the vocabulary of `base_model`, for example to add tokens. axolotl initialises
    the embeddings of new tokens at random, so the policy does not start from the weights of `base_model`, which is the
    reference."""
    base = AutoConfig.from_pretrained(_base_model(cfg), trust_remote_code=bool(cfg.trust_remote_code))
    before, now = (config.get_text_config().vocab_size for config in (base, policy.config))
    if before != now:
        raise UsageError(
            f"axolotl has resized the vocabulary of base_model from {before:,} to {now:,} tokens (for example because of "
            "`tokens`, `special_tokens` or `resize_token_embeddings_to_32x`), so the policy does not start from the weights of "
            "base_model: save the resized model once, and use it as base_model"
        )
