"""Scores preference data with a reference model: dataset reading, TRL-exact tokens, engines, jobs.

Needs torch and transformers. Never imports trl, a client or a trainer.
"""
