"""Tokenize a dataset in windows of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import Format
from reflogp.scoring.data.tokenize import TokenizedRows, tokenize_dataset
from reflogp.scoring.vision import VisionProcessor


class StoppedError(Exception):
    """The iteration was stopped by the dataset's method `stop`."""


class TokenizedWindows(Protocol):
    """A dataset that a run scores: a TokenizedDataset, or one whose rows another process reads."""

    def __iter__(self) -> Iterator[TokenizedRows]: ...

    def count(self) -> int | None:
        """Return the number of rows, including unreadable rows, or None if it is not counted."""

    def only(self, numbers: Iterable[int]) -> Iterable[TokenizedRows]: ...

    def stop(self) -> None:
        """Stop all iterations, in any thread: they raise StoppedError."""


class TokenizedDataset:
    """The rows of a dataset as token ids. The object can be iterated over any number of times.

    Args:
        load: function that returns the tokenizer. It is called at most once, before the first row is tokenized.
        form: the dataset's format; None to detect it.
        load_vision: function that loads the model's image processor, for pairs with images; see `tokenize_dataset`.
    """

    def __init__(
        self,
        source: RowSource,
        load: Callable[[], PreTrainedTokenizerBase],
        form: Format | None = None,
        *,
        load_vision: Callable[[], VisionProcessor | None] | None = None,
    ) -> None:
        self._load_vision = load_vision
        self.source = source
        self._load = load
        self._form = form
        self._stopped = threading.Event()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load()

    def only(self, numbers: Iterable[int]) -> TokenizedDataset:
        """Return a view of the rows with these numbers, whose iterations `stop` of this object does not stop."""
        return TokenizedDataset(self.source.only(numbers), lambda: self.tokenizer, self._form, load_vision=self._load_vision)

    def stop(self) -> None:
        self._stopped.set()

    def count(self) -> int | None:
        return self.source.count_unless_in_memory()

    def __iter__(self) -> Iterator[TokenizedRows]:
        return tokenize_dataset(
            self.source, self.tokenizer, self._form, begin=lambda row: self._check(), load_vision=self._load_vision
        )

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError


class RowCount:
    """The number of a dataset's rows, which is counted in another thread, because text files must be read to their end for it.

    `rows` is None while the number is not known, and for a JSON array, because the whole array would be in memory twice.
    """

    def __init__(self, dataset: TokenizedWindows) -> None:
        self.rows: int | None = None
        self._dataset = dataset
        threading.Thread(target=self._count, name="reflogp-count", daemon=True).start()

    def _count(self) -> None:
        with suppress(Exception):  # the thread that reads the rows raises the error
            self.rows = self._dataset.count()
