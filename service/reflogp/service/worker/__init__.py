"""The worker process, which loads models and computes log-probs.

A worker runs jobs and scores sequences for the service that started it.

Only worker processes import torch; the main process of the service does not.
"""
