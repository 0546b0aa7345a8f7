"""Commit values of online requests to the store in the background, so that no response waits for a commit.

If the worker is killed before the commit, the values are lost. They are computed again when they are next requested.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from reflogp.scoring.runs.pipeline import Committer
from reflogp.scoring.torch_engine.sequences import Sequence, Values, numbers_of
from reflogp.store import ReflogpError, sequence_keys
from reflogp.store.texts import counted
from reflogp.store.top import ValuesTable

logger = logging.getLogger(__name__)

#: Seconds that the thread waits for more values before a commit, so that they are committed together.
_SECONDS = 2.0
#: Maximum total number of token ids and log-probs of the sequences that are waiting or being committed, of 4 bytes each. If
#: values arrive faster than they are committed, the newest values are dropped.
_MOST_NUMBERS = 16 << 20


def _copied(scored: tuple[Sequence, Values]) -> tuple[Sequence, Values]:
    """Copy the sequence, which is a view that keeps its whole request in memory."""
    sequence, values = scored
    return Sequence(np.array(sequence.prompt_ids, np.int32), np.array(sequence.completion_ids, np.int32)), values


def _numbers_of(scored: list[tuple[Sequence, Values]]) -> int:
    return sum(len(sequence) + numbers_of(values) for sequence, values in scored)


class WriteBack:
    """A queue of computed values, and the thread that commits them. `table_of` returns the table of a reference id."""

    def __init__(self, table_of: Callable[[str], ValuesTable]) -> None:
        self._table_of = table_of
        self._commits: dict[str, Committer] = {}
        self._waiting: dict[str, tuple[dict[str, Any], list[tuple[Sequence, Values]]]] = {}
        self._changed = threading.Condition()
        self._numbers = 0  # of the sequences that are waiting or being committed
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
        self._thread.start()

    def put(self, reference_id: str, provenance: dict[str, Any], scored: list[tuple[Sequence, Values]]) -> None:
        """Queue values, computed at temperature 1, for the next commit. If too many earlier values wait, drop them."""
        with self._changed:
            numbers = _numbers_of(scored)
            if self._numbers and self._numbers + numbers > _MOST_NUMBERS:
                logger.warning(
                    "did not store %s, because too many earlier values are still waiting to be committed",
                    counted(len(scored), "scored sequence"),
                )
                return
            self._numbers += numbers
            self._waiting.setdefault(reference_id, (provenance, []))[1].extend(map(_copied, scored))
            self._changed.notify_all()

    def close(self) -> None:
        """Commit the waiting values, but give up after 10 seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                self._changed.wait_for(lambda: self._closing, _SECONDS)
                waiting, self._waiting = self._waiting, {}
                if self._closing and not waiting:
                    return
            for reference_id, (provenance, scored) in waiting.items():
                try:
                    self._commit(reference_id, provenance, scored)
                except Exception as error:  # the thread must go on, because later values may be stored without an error
                    is_bug, count = not isinstance(error, ReflogpError), counted(len(scored), "scored sequence")
                    logger.warning("could not store %s: %s", count, error, exc_info=is_bug)
                finally:
                    with self._changed:
                        self._numbers -= _numbers_of(scored)

    def _commit(self, reference_id: str, provenance: dict[str, Any], scored: list[tuple[Sequence, Values]]) -> None:
        if reference_id not in self._commits:
            self._commits[reference_id] = Committer(self._table_of(reference_id))
        sequences = [sequence for sequence, _ in scored]
        completions = [sequence.completion_ids for sequence in sequences]
        lengths = np.array([len(completion) for completion in completions], np.int32)
        keys = sequence_keys([sequence.prompt_ids for sequence in sequences], completions)
        self._commits[reference_id].commit(keys, sequences, lengths, [values for _, values in scored], provenance)
