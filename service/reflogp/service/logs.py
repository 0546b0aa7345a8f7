"""Set up logging: lines for people, or one JSON object per line for programs. Records about a job carry the job's id."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from reflogp.store.safe_text import LineFormatter, hide_secrets

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _ForPeople(LineFormatter):
    """Formats a record as a line, with the job's id at the end if the record is about a job."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        job = getattr(record, "job", None)
        return line if job is None else f"{line} [job {job}]"


class _ForPrograms(JsonFormatter):
    """Formats a record as a JSON object in ASCII, so that no text can end the object or control a terminal."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.update({name: hide_secrets(value) for name, value in log_data.items() if isinstance(value, str)})


def install_logging(form: Literal["text", "json"]) -> None:
    """Send this process's log to stderr in the given format."""
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler.setFormatter(_ForPrograms(_FIELDS, rename_fields=renamed) if form == "json" else _ForPeople(_FIELDS))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)  # warnings may quote secrets too, which the formatters hide
