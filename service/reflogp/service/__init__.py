"""Serve scoring jobs, online scoring and lookups over HTTP, from one store for all clients.

Needs fastapi and uvicorn, but not torch: responses that come from the store alone need no model.
"""
