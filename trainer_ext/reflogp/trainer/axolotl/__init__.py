"""Provide stored reference log-probs to axolotl's DPO and KTO training, so that no GPU holds a reference model.

In axolotl's YAML file, the plugin `reflogp.trainer.axolotl.plugin.StoredReferencePlugin` and a section `reflogp:` make axolotl
use the stored log-probs.
"""
