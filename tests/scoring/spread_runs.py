"""A dataset with most that a run may meet, and what has to be the same however many engines score it."""

from tests.scoring.stored_rows import rows_of, same_rows
from tests.service.serving import token_rows

_COUNTS = ("rows", "sequences", "duplicates", "scored", "failed", "tokens", "hits", "bad_rows")


def odd_rows():
    """250 rows with shared prompts, rows that come twice, an empty completion and token ids outside the vocabulary."""
    rows = token_rows(250, seed=1)
    for at, row in enumerate(rows):
        row["prompt_ids"] = rows[at % 40]["prompt_ids"] * 2
    rows[1]["chosen_ids"] = []
    rows[2]["rejected_ids"] = rows[60]["rejected_ids"] = [1, 100_000]
    rows[2]["prompt_ids"] = rows[60]["prompt_ids"]
    rows[240:] = rows[:10]
    return rows


def assert_same_runs(here, there, watching, folder):
    """Of `odd_rows`: one engine's run into folder/here, and one of two workers into folder/there, which was watched."""
    assert [getattr(here, name) for name in _COUNTS] == [getattr(there, name) for name in _COUNTS]
    assert set(here.bad_row_numbers) == set(there.bad_row_numbers) == set(watching.bad) == {1, 2, 60, 241, 242}
    assert "empty" in watching.bad[1] and "vocabulary" in watching.bad[60]
    assert there.workers == 2 and there.tokens_per_second > 0 and there.sharing_gain > 1
    assert there.provenance == here.provenance
    assert watching.done == there.sequences and watching.commits > 1
    same_rows(rows_of(folder / "here", here.reference_id), rows_of(folder / "there", there.reference_id))
