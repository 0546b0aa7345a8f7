"""Provide stored reference log-probs to LLaMA-Factory's DPO and KTO training, so that no GPU holds a reference model.

`python -m reflogp.trainer.llamafactory.train` replaces `llamafactory-cli`.
"""
