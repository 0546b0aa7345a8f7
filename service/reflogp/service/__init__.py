"""Serve scoring jobs, online scoring and lookups over HTTP, from one store for all clients.

The main process does not import torch, because only the worker processes load models.
"""
