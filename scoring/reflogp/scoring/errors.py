"""Define the errors of scoring. All are subclasses of the store's ReflogpError, except PictureError, which engines catch."""

from __future__ import annotations

from typing import Any

from reflogp.store.errors import ReflogpError, UsageError


class DatasetError(UsageError):
    """A dataset cannot be opened, or its columns match no known format."""


class TokenizerError(ReflogpError):
    """A tokenizer lacks an EOS token or a chat template that the data needs, or no tokenizer can be loaded."""


class NotScoredError(ReflogpError):
    """Some rows of a dataset have no stored values, or cannot be used.

    Attributes:
        summary: a JoinSummary, with counts and row numbers.
    """

    def __init__(self, message: str, summary: Any) -> None:
        super().__init__(message)
        self.summary = summary


class EngineError(ReflogpError):
    """The engine cannot load a model, or cannot score with it."""


class PictureError(Exception):
    """An image can no longer be read when its sequence is scored. Engines catch this error, and the sequence gets no values.

    Attributes:
        digest: the image's `pixel_digest` (see reflogp.store.images).
    """

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(reason)
        self.digest = digest


class OutOfMemoryError(EngineError):
    """A model does not fit in a device's memory, or the device ran out of memory.

    The message states how much memory is needed and what to change, or which step ran out of memory.
    """


class WorkerGoneError(EngineError):
    """One of a run's workers has exited. The other workers continue.

    Attributes:
        blamed: True if the sequences that the worker was processing may have caused its exit; False otherwise, for example
            if the worker was removed from the run.
    """

    def __init__(self, reason: str, blamed: bool = True) -> None:
        super().__init__(reason)
        self.blamed = blamed


class InvalidSequencesError(EngineError):
    """Some sequences cannot be scored.

    Attributes:
        problems: dict from index to reason, for the sequences that cannot be scored. The index is the sequence's position among
            the sequences passed to the engine, starting at 0.
        results: list with one entry for each sequence passed to the engine: the sequence's token_logps (float32), or None if
            its index is in `problems`.
    """

    def __init__(self, problems: dict[int, str], results: list[Any]) -> None:
        first = min(problems)
        super().__init__(
            f"{len(problems)} of {len(results)} sequences cannot be scored; the first, at index {first}: {problems[first]}"
        )
        self.problems = problems
        self.results = results
