"""The HTTP service: one place that scores and answers for everybody.

Needs fastapi and uvicorn, not torch: what it answers from the store alone needs no model.
"""
