"""Logs: lines for people, or one JSON object a line for programs; a job's id goes with what is about a job.

Knows formats. Installed once by `run`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _ForPeople(logging.Formatter):
    """A line, with the job's id before what is about a job."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        job = getattr(record, "job", None)
        return line if job is None else f"{line} [job {job}]"


def install_logging(form: Literal["text", "json"]) -> None:
    """Send this process's log to stderr in that format."""
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler.setFormatter(JsonFormatter(_FIELDS, rename_fields=renamed) if form == "json" else _ForPeople(_FIELDS))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
