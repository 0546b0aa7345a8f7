"""Runs on several workers beside a run on one engine, and what has to be the same."""

from pathlib import Path

import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.runs.pipeline import EngineScheduler
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.vision import load_processor
from reflogp.store import Store, describe_reference
from tests.scoring.stored_rows import rows_of, same_rows
from tests.service.serving import token_rows

_COUNTS = ("rows", "sequences", "duplicates", "scored", "failed", "tokens", "hits", "bad_rows")


class Runs:
    """runs(path or source of rows, store) -> summary; a token budget small enough that a run takes a while.

    Args:
        workers: of (folder of the model, reference, engine choice) the workers.
    """

    def __init__(self, reference_folder, folder, workers):
        self._reference_folder, self._folder, self._workers, self.scorer = str(reference_folder), folder, workers, None

    def __call__(self, rows, store="store", *, alone=False, model=None, watcher=None, code=False):
        folder = str(model or self._reference_folder)
        reference, choice = describe_reference(folder, "float32"), EngineChoice("torch", "cpu", 256, trust_remote_code=code)
        dataset = TokenizedDataset(
            RowSource(str(rows)) if isinstance(rows, Path) else rows,
            lambda: load_tokenizer(folder),
            load_vision=lambda: load_processor(folder, folder),
        )
        if alone:
            self.scorer = EngineScheduler(lambda: choice.make(folder, reference))
        else:
            self.scorer = Scheduler(workers=self._workers(folder, reference, choice))
        try:
            return score_dataset(dataset, Store(self._folder / store).values_table(reference), self.scorer, watcher=watcher)
        finally:
            self.scorer.close()

    def assert_nothing_is_lost(self, rows, watcher, model=None, warning="was lost"):
        """Workers are lost in a run with this watcher, and it stores what one engine stores."""
        with pytest.warns(UserWarning, match=warning):
            there = self(rows, "there", model=model, watcher=watcher)
        here = self(rows, "here", alone=True, model=model)
        assert (there.scored, there.failed, there.bad_rows) == (here.scored, 0, 0)
        self.assert_same_rows(here.reference_id)

    def assert_same_rows(self, reference_id):
        same_rows(rows_of(self._folder / "here", reference_id), rows_of(self._folder / "there", reference_id))

    def assert_same_runs(self, file, watching):
        """Of `odd_rows`: one engine's run, and one of two workers, which is watched; then nothing is left to score."""
        here, there = self(file, "here", alone=True), self(file, "there", watcher=watching)
        assert [getattr(here, name) for name in _COUNTS] == [getattr(there, name) for name in _COUNTS]
        assert set(here.bad_row_numbers) == set(there.bad_row_numbers) == set(watching.bad) == {1, 2, 60, 241, 242}
        assert "empty" in watching.bad[1] and "vocabulary" in watching.bad[60]
        assert there.workers == 2
        assert there.tokens_per_second > 0
        assert there.sharing_gain > 1
        assert there.provenance == here.provenance
        assert (watching.done, watching.found) == (there.sequences, 0) and there.duplicates and watching.commits > 1
        self.assert_same_rows(here.reference_id)
        again = self(file, "there")
        assert (again.scored, again.failed, again.bad_rows) == (0, 1, 5)


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
