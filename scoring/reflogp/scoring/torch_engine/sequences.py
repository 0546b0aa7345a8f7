"""Define what all engines share: the sequences to score, the checks of these sequences, and token counts.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reflogp.scoring.errors import InvalidSequencesError
from reflogp.store.images import FIRST_IMAGE_ID

if TYPE_CHECKING:
    from reflogp.scoring.vision import VisionProcessor

#: Token ids of a prompt or completion: a list, a numpy array, or the values of an Arrow scalar.
Ids = Any
#: The token_logps of a sequence: float32, one per completion token.
Logps = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TopLogps:
    """The values of a sequence of n completion tokens, from an engine that computes the k most probable tokens.

    Attributes:
        token_logps: log-probs of the completion's tokens, float32 (n,).
        logps, ids: log-probs, float32, and token ids, int32, of the k most probable tokens at each position, (n, k). More
            probable tokens come first, and of tokens with the same log-prob, the one with the lower id.
    """

    token_logps: Logps
    logps: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]


#: The values of a sequence.
Values = Logps | TopLogps
#: The values of a sequence, or a message that says why there are none.
Outcome = Values | str
NOT_FINITE = "log-probs are not finite: the model's weights or activations contain NaN or infinity"


def top_logps_of(values: npt.NDArray[np.float32]) -> TopLogps:
    """Return a sequence's values, given an array (n, 1 + 2k): for each token, its log-prob, k log-probs and their ids."""
    k = values.shape[1] // 2
    return TopLogps(values[:, 0].copy(), values[:, 1 : 1 + k].copy(), values[:, 1 + k :].astype(np.int32))


def token_logps_of(values: Values) -> Logps:
    return values.token_logps if isinstance(values, TopLogps) else values


def numbers_of(values: Values) -> int:
    return len(values) if not isinstance(values, TopLogps) else len(values.token_logps) + 2 * values.ids.size


class Picture(Protocol):
    """An image in a prompt. The image does not need to be in memory.

    Attributes:
        digest: the image's `pixel_digest` (see reflogp.store.images).
        size: approximate number of bytes that `encoded` returns.
        held: approximate number of bytes that this object keeps in memory for the image.
    """

    @property
    def digest(self) -> bytes: ...

    @property
    def size(self) -> int: ...

    @property
    def held(self) -> int: ...

    def load(self) -> Any:
        """Return the decoded image, a PIL.Image. Raise RowError if the image can no longer be read."""

    def encoded(self) -> bytes:
        """Return the image as the bytes of an image file. Raise RowError if the image can no longer be read."""


@dataclass(frozen=True, eq=False, slots=True)
class SequenceImages:
    """The images of a prompt, in the order in which they appear.

    Attributes:
        counts: number of image tokens of each image.
        independent: True if an image's features do not depend on the prompt's other images.
    """

    pictures: tuple[Picture, ...]
    counts: tuple[int, ...]
    vision: VisionProcessor
    independent: bool

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(picture.digest for picture in self.pictures)

    def parts(self) -> list[SequenceImages]:
        """Split the images into groups to process separately: one group per image if `independent`, otherwise one group."""
        if not self.independent:
            return [self]
        return [
            SequenceImages((picture,), (count,), self.vision, True)
            for picture, count in zip(self.pictures, self.counts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and a completion. The tokens of the completion are scored.

    Attributes:
        prompt_ids: token ids of the prompt. At least one is needed, because a token without any context has no log-prob.
        completion_ids: token ids of the completion, at least one.
        attention_mask: for a row of a padded batch, a value for each token: 0 for padding tokens and 1 for other tokens. None
            for a sequence without padding. A row with a mask is passed, together with the mask, to the model's forward method,
            which chooses the position ids. Padding tokens in the row's completion get log-probs too. If the model's positions
            are absolute, padding on the left changes all log-probs.
        images: the images of the prompt; None for a text-only sequence. In prompt_ids, each image token is represented by an
            image id (see reflogp.store.images).

    Examples:
        >>> from reflogp.scoring import Sequence
        >>> sequence = Sequence(prompt_ids=[1, 5, 9], completion_ids=[7, 2])
        >>> len(sequence)
        5
        >>> sequence.ids()
        array([1, 5, 9, 7, 2])
    """

    prompt_ids: Ids
    completion_ids: Ids
    attention_mask: Ids | None = None
    images: SequenceImages | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return () if self.images is None else self.images.pictures

    def ids(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.asarray(self.prompt_ids, np.int64), np.asarray(self.completion_ids, np.int64)])

    def model_ids(self) -> npt.NDArray[np.int64]:
        """Return `ids` as the model gets them: with each image id replaced by the id of the model's image token."""
        ids = self.ids()
        return ids if self.images is None else np.where(ids >= FIRST_IMAGE_ID, self.images.vision.image_token_id, ids)


def picture_files(sequences: Iterable[Sequence]) -> tuple[dict[bytes, bytes], dict[int, str]]:
    """Read the image files of sequences, each distinct image once.

    Returns:
        A dict from each image's digest to the bytes of its file, and a dict from the index of each sequence of which an image
        cannot be read to the reason.
    """
    files: dict[bytes, bytes] = {}
    unreadable: dict[bytes, str] = {}
    problems: dict[int, str] = {}
    for index, sequence in enumerate(sequences):
        for picture in sequence.pictures:
            if picture.digest not in files and picture.digest not in unreadable:
                try:
                    files[picture.digest] = picture.encoded()
                except ValueError as error:
                    unreadable[picture.digest] = str(error)
            if picture.digest in unreadable:
                problems[index] = unreadable[picture.digest]
    return files, problems


def prefix_order(ids: list[npt.NDArray[np.int64]]) -> list[int]:
    # Big-endian bytes sort in the same order as the numbers.
    return sorted(range(len(ids)), key=lambda index: ids[index].astype(">u4").tobytes())


def common_prefix(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> int:
    shorter = min(len(left), len(right))
    differ: Any = left[:shorter] != right[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def problem_of(sequence: Sequence, vocab_size: int, max_positions: int | None) -> str | None:
    if not len(sequence.prompt_ids):
        return "the prompt is empty: the first token would have no context; begin the prompt with the BOS token"
    if not len(sequence.completion_ids):
        return "the completion is empty"
    if max_positions is not None and len(sequence) > max_positions:
        return (
            f"the sequence has {len(sequence)} tokens, but the model has {max_positions} positions; "
            f"set max_length to at most {max_positions}"
        )
    if sequence.attention_mask is not None and (problem := _problem_of_mask(sequence)):
        return problem
    ids = sequence.ids()
    if sequence.images is not None:
        is_image = ids >= FIRST_IMAGE_ID
        if is_image.sum() != sum(sequence.images.counts) or is_image[len(sequence.prompt_ids) :].any():
            return "max_length cuts off image tokens; set a larger max_length"
        ids = ids[~is_image]
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        return f"token id {bad} is outside the model's vocabulary of {vocab_size} tokens"
    return None


def _problem_of_mask(sequence: Sequence) -> str | None:
    mask = np.asarray(sequence.attention_mask)
    if len(mask) != len(sequence):
        return f"the attention_mask has {len(mask)} entries for {len(sequence)} tokens"
    if not np.isin(mask, (0, 1)).all():
        return "the attention_mask has entries other than 0 and 1"
    if not mask.any():
        return "the attention_mask hides every token"
    return None


def in_order(count: int, problems: dict[int, str], outcomes: Iterable[tuple[int, Outcome]]) -> list[Logps]:
    """Return a list with the values of `count` sequences, in the order of their indices."""
    results: list[Any] = [None] * count
    for index, outcome in outcomes:
        if isinstance(outcome, str):
            problems[index] = outcome
        else:
            results[index] = outcome
    if problems:
        raise InvalidSequencesError(problems, results)
    return results


def passes_over(
    sequences: list[Sequence],
    skip: Collection[int],
    size: int,
    flow: Callable[[Iterable[list[Sequence]]], Iterable[list[tuple[int, Outcome]]]],
) -> Iterator[list[tuple[int, Outcome]]]:
    """Score a list of sequences with an engine's `flow`; for each pass, yield a list of (index in `sequences`, outcome)."""
    wanted = [index for index in range(len(sequences)) if index not in skip]
    groups = ([sequences[index] for index in wanted[start : start + size]] for start in range(0, len(wanted), size))
    for landed in flow(groups):
        yield [(wanted[number], outcome) for number, outcome in landed]


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of tokens of scored sequences; both are 0 if the engine cannot count them.

    Attributes:
        scored: number of tokens in the sequences, including prompts.
        computed: number of tokens that the passes computed: tokens that several sequences of a pass share count once, and
            padding that the engine adds does not count.
    """

    scored: int = 0
    computed: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.scored + other.scored, self.computed + other.computed)

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.scored - other.scored, self.computed - other.computed)

    @property
    def sharing_gain(self) -> float | None:
        """The ratio of `scored` to `computed`, at least 1; None if no tokens were counted."""
        return self.scored / self.computed if self.computed else None
