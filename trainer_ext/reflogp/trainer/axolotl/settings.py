"""Define the section `reflogp:` of axolotl's YAML file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reflogp.store import UsageError
from reflogp.store.reference import Dtype
from reflogp.trainer.audit import ReferenceAudit
from reflogp.trainer.source import OnMiss, ReferenceSource


class StoredReferenceSettings(BaseModel):
    """The settings in the section `reflogp:`: where the reference log-probs are stored, which model computed them, and what to
    check.

    If the section has an unknown key, axolotl raises an error before it reads any data.
    """

    model_config = ConfigDict(extra="forbid")

    store: str = Field(description="a store (folder, s3://…) or a running service (http://…)")
    model: str | None = Field(None, description="the reference model; default: base_model")
    dtype: Dtype | None = Field(
        None,
        description="the reference's dtype; default: if the store has the model's values in only one dtype, that dtype; "
        "otherwise the policy's dtype",
    )
    reference: str | None = Field(None, description="the reference's name in a service; can be given instead of `model`")
    reference_id: str | None = Field(None, description="the reference's id; can be given instead of `model`")
    snapshot: int | None = Field(None, description="number of the snapshot to read; default: the latest")
    on_miss: OnMiss = Field(
        "error",
        description="what to do about rows without values: stop and show the command that scores them (error), have the "
        "service score them (score), or compute the values with the policy before training (compute)",
    )
    policy_starts_elsewhere: bool = Field(False, description="true if the policy does not start from the reference's weights")
    step_zero_tolerance: float | None = Field(
        None,
        description="allowed difference between the policy's and the reference's log-probs in the first batch, summed over a "
        "completion, in nats/√tokens; by default, it depends on the dtype, and the policy and the reference must have the same "
        "dtype",
    )
    on_finding: Literal["fail", "warn"] = Field(
        "fail",
        description="what to do if the audit finds wrong reference values or an unexpected forward pass: stop the run (fail) "
        "or log a warning (warn)",
    )

    @property
    def names_reference(self) -> bool:
        """Return True if the settings name the reference. If they do not, axolotl's settings determine which model is the
        reference.
        """
        return not (self.model is None and self.reference is None and self.reference_id is None)

    def trainer_arguments(self, base_model: str) -> dict[str, Any]:
        """Return the arguments for `CachedReferenceMixin` that these settings specify.

        Args:
            base_model: the model to use as the reference if the settings do not name a reference.

        Raises UsageError if settings contradict each other.
        """
        source = ReferenceSource(
            self.store,
            model=self.model if self.names_reference else base_model,
            dtype=self.dtype or "auto",
            reference_id=self.reference_id,
            snapshot=self.snapshot,
            on_miss=self.on_miss,
            reference=self.reference,
        )
        return {
            "reference": source,
            "policy_starts_at_reference": not self.policy_starts_elsewhere,
            "step_zero_tolerance": self.step_zero_tolerance,
            "audit": ReferenceAudit(on_finding=self.on_finding),
        }


class PluginSettings(BaseModel):
    """The keys that the plugin adds to axolotl's YAML file."""

    reflogp: StoredReferenceSettings | None = None


def has_plugin(cfg: Any) -> bool:
    """Return True if axolotl's settings list the plugin."""
    return any(str(plugin).startswith("reflogp.trainer.axolotl.") for plugin in cfg.plugins or ())


def settings_of(cfg: Any) -> StoredReferenceSettings:
    """Return the section `reflogp:` of axolotl's settings. Raises UsageError if the section is missing."""
    if not cfg.reflogp:
        raise UsageError(
            "the plugin StoredReferencePlugin needs a section `reflogp:` in the YAML file, for example with `store: ./logps`"
        )
    return StoredReferenceSettings(**cfg.reflogp)
