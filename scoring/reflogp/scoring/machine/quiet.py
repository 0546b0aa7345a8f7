"""Keep progress bars and notices of the model libraries out of a worker's log."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """Make transformers log only errors and show no progress bars."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
