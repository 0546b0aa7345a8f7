"""Provide stored reference log-probs to axolotl's DPO and KTO training, so that no GPU holds a reference model.

To use stored log-probs, add the plugin `reflogp.trainer.axolotl.plugin.StoredReferencePlugin` and a section `reflogp:` to
axolotl's YAML file.
"""
