"""Provide stored reference log-probs to ms-swift's DPO and KTO training, so that no GPU holds a reference model.

`python -m reflogp.trainer.swift.rlhf` replaces `swift rlhf`.
"""
