"""Offer scoring jobs, online scoring and lookups over HTTP; all clients share one store.

The main process does not import torch, because only the worker processes load models.
"""
