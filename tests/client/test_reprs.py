"""Test the reprs of a service's answers: a few readable lines."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from reflogp.client import Job, JobProgress, Lookup, Scores

WHEN = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
JOB = Job(
    "4f1c9a02d77be310",
    "running",
    "ab" * 16,
    {"reference": "sft"},
    {"upload": "pairs.jsonl", "split": "train"},
    JobProgress(rows=1_000, sequences=2_388, done=1_200, hits=1_000, scored=200, tokens=90_000, tokens_per_second=41_650.4),
    WHEN,
)


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (
            JOB,
            "Job(\n    4f1c9a02d77be310: running, pairs.jsonl with sft\n"
            f"    1,200 of 2,388 sequences: 1,000 hits, 200 scored; 41,650 tokens/s\n    reference {'ab' * 16}\n)",
        ),
        (
            Lookup(np.array([3, -1], np.int32), np.array([-1.5, np.nan]), None, "ab" * 16, 7),
            f"Lookup(1 of 2 keys found in snapshot 7 of reference {'ab' * 16})",
        ),
        (
            Scores([np.zeros(1_500, np.float32)], "ab" * 16, 0, 0.25, 0.0),
            "Scores(\n    1 sequence, 1,500 log-probs: 0 hits\n"
            f"    0.25 s computing, 0.00 s in the queue\n    reference {'ab' * 16}\n)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_result_is_shown_in_a_few_readable_lines(made, shown):
    assert repr(made) == shown


def test_a_job_that_has_ended_shows_no_rate():
    assert "200 scored\n" in repr(replace(JOB, state="cancelled")) and "tokens/s" not in repr(replace(JOB, state="done"))


def test_what_a_service_says_cannot_control_a_terminal():
    shown = repr(replace(JOB, dataset={"uri": "https://user:secret@host/a.jsonl"}, error="\x1b[31mred\n"))
    assert "error: \\x1b[31mred\\n" in shown and "secret" not in shown
