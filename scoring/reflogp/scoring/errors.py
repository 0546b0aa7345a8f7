"""Errors of scoring; all are subclasses of the store's ReflogpError.

ReflogpError (reflogp.store.errors)
├── DatasetError             a dataset cannot be opened or has columns that fit no format
├── TokenizerError           a tokenizer lacks what the data needs
├── NotScoredError           rows of a dataset have no values to join
├── OtherEngineError         a store has values of another engine than the one required
└── EngineError              the engine cannot load a model or score with it
    ├── OutOfMemoryError     the device's memory is too small for the model or a pass
    ├── WorkerGoneError      one of a run's workers is gone
    └── InvalidSequencesError   some sequences cannot be scored; the others were scored
"""

from __future__ import annotations

from typing import Any

from reflogp.store.errors import ReflogpError, UsageError


class DatasetError(UsageError):
    """A dataset cannot be opened, or its columns fit no known format."""


class TokenizerError(ReflogpError):
    """A tokenizer lacks what the data needs: an EOS token, a chat template."""


class NotScoredError(ReflogpError):
    """Rows of a dataset have no values to join.

    Attributes:
        summary: a JoinSummary, with counts and row numbers.
    """

    def __init__(self, message: str, summary: Any) -> None:
        super().__init__(message)
        self.summary = summary


class OtherEngineError(ReflogpError):
    """A store has values of another engine than the one that `strict_engine` allows."""


class EngineError(ReflogpError):
    """The engine cannot load a model, or cannot score with it."""


class PictureError(Exception):
    """An image can no longer be read when its sequence is scored. Engines catch this error: the sequence gets no values.

    Attributes:
        digest: `pixel_digest` of the image.
    """

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(reason)
        self.digest = digest


class OutOfMemoryError(EngineError):
    """A model does not fit a device's memory, or the memory ran out.

    The message says how much memory is needed and what would help, or in which step the memory ran out.
    """


class WorkerGoneError(EngineError):
    """One of a run's workers is gone; the others continue.

    Attributes:
        blamed: True if the sequences that it was processing may be the reason; False if it was withdrawn from
            the run, or was gone before.
    """

    def __init__(self, reason: str, blamed: bool = True) -> None:
        super().__init__(reason)
        self.blamed = blamed


class InvalidSequencesError(EngineError):
    """Some sequences cannot be scored.

    Attributes:
        problems: index in the call -> what is wrong.
        results: one entry per sequence of the call: its float32 token_logps, or None where `problems` names it.
    """

    def __init__(self, problems: dict[int, str], results: list[Any]) -> None:
        first = min(problems)
        super().__init__(f"{len(problems)} of {len(results)} sequences cannot be scored; sequence {first}: {problems[first]}")
        self.problems = problems
        self.results = results
