"""The model libraries' own progress bars and notices, kept out of a worker's log."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """Let transformers say errors only."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
