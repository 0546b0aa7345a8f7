"""Define the sequences that engines score, and count the operations of scoring them. Needs no torch.

`Operations` counts floating point operations, two per multiply-add.
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

#: Token ids of a prompt or a completion: a list, a numpy array or an Arrow scalar's values.
Ids = Any
#: token_logps: float32, one per completion token.
Logps = npt.NDArray[np.float32]
#: The token_logps of a sequence, or a text that says why there are none.
Outcome = Logps | str
NOT_FINITE = "log-probs are not finite: the model's weights or activations hold NaN or infinity"


class Picture(Protocol):
    """An image of a prompt, which need not be in memory.

    Attributes:
        digest: `pixel_digest` of the image (reflogp.store.images).
        size: approximate number of bytes that `encoded` returns.
        held: approximate number of bytes that the image takes in memory.
    """

    @property
    def digest(self) -> bytes: ...

    @property
    def size(self) -> int: ...

    @property
    def held(self) -> int: ...

    def load(self) -> Any:
        """Return the decoded image, a PIL.Image. Raises RowError if the image can no longer be read."""

    def encoded(self) -> bytes:
        """Return the image as the content of an image file. Raises RowError if the image can no longer be read."""


@dataclass(frozen=True, eq=False, slots=True)
class SequenceImages:
    """The images of a prompt, in order.

    Attributes:
        pictures: the images.
        counts: number of tokens of each image.
        vision: the model's processor.
        independent: True if an image's features do not depend on the prompt's other images.
    """

    pictures: tuple[Picture, ...]
    counts: tuple[int, ...]
    vision: VisionProcessor
    independent: bool

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The digests of the images."""
        return tuple(picture.digest for picture in self.pictures)

    def parts(self) -> list[SequenceImages]:
        """Return the groups of images that are processed separately: one for each image, or one group of all images."""
        if not self.independent:
            return [self]
        return [
            SequenceImages((picture,), (count,), self.vision, True)
            for picture, count in zip(self.pictures, self.counts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt, and a completion whose tokens get log-probs.

    Attributes:
        prompt_ids: token ids, at least one: a first token has no context and so no log-prob.
        completion_ids: token ids, at least one.
        attention_mask: None for a sequence without padding. For a row of a padded batch: 0 for padding tokens and 1 for other
            tokens. The row is then scored by the model's own forward with this mask and the model's default positions, and
            padding tokens in the completion have values too. If positions are absolute, padding on the left changes all values.
        images: the images of the prompt, whose tokens are image ids (reflogp.store.images); None for a sequence of text.

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

    def ids(self) -> npt.NDArray[np.int64]:
        """Return prompt_ids + completion_ids, int64."""
        return np.concatenate([np.asarray(self.prompt_ids, np.int64), np.asarray(self.completion_ids, np.int64)])

    def model_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids that the model reads, int64: `ids` with the model's image token in place of image ids."""
        ids = self.ids()
        return ids if self.images is None else np.where(ids >= FIRST_IMAGE_ID, self.images.vision.image_token_id, ids)


def problem_of(sequence: Sequence, vocab_size: int, max_positions: int | None) -> str | None:
    """Return why a model cannot score this sequence, or None."""
    if not len(sequence.prompt_ids):
        return "the prompt is empty: the first token would have no context; begin the prompt with the BOS token"
    if not len(sequence.completion_ids):
        return "the completion is empty"
    if max_positions is not None and len(sequence) > max_positions:
        return f"the sequence has {len(sequence)} tokens, but the model has {max_positions} positions; set a max_length"
    if sequence.attention_mask is not None and (problem := _problem_of_mask(sequence)):
        return problem
    ids = sequence.ids()
    if sequence.images is not None:
        is_image = ids >= FIRST_IMAGE_ID
        if is_image.sum() != sum(sequence.images.counts) or is_image[len(sequence.prompt_ids) :].any():
            return "max_length cuts tokens of the images; set a larger max_length"
        ids = ids[~is_image]
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        return f"token id {bad} is outside the model's vocabulary of {vocab_size}"
    return None


def _problem_of_mask(sequence: Sequence) -> str | None:
    mask = np.asarray(sequence.attention_mask)
    if len(mask) != len(sequence):
        return f"the attention_mask has {len(mask)} entries for {len(sequence)} tokens"
    if not np.isin(mask, (0, 1)).all():
        return "the attention_mask has other entries than 0 and 1"
    if not mask.any():
        return "the attention_mask hides every token"
    return None


def in_order(count: int, problems: dict[int, str], outcomes: Iterable[tuple[int, Outcome]]) -> list[Logps]:
    """Return the values of `count` sequences in their order.

    Args:
        count: number of sequences.
        problems: index -> problem of each sequence that was not tried; problems among `outcomes` are added.
        outcomes: (index, outcome) of the other sequences, in any order.

    Raises:
        InvalidSequencesError: some sequences have no values; the error's `results` hold the values of the other sequences.
    """
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
    before: Callable[[list[int]], None] | None,
    flow: Callable[[Iterable[list[Sequence]], Callable[[list[int]], None] | None], Iterable[list[tuple[int, Outcome]]]],
) -> Iterator[list[tuple[int, Outcome]]]:
    """Run an engine's flow over a list of sequences; yield outcomes with indices in the list instead of the flow's numbers.

    Args:
        sequences: sequences that the engine can score.
        skip: indices to leave out.
        size: maximum number of sequences of a group.
        before: called with the indices of each pass before the engine begins it.
        flow: called with the groups, and with a callback for the numbers of each pass.
    """
    wanted = [index for index in range(len(sequences)) if index not in skip]
    groups = ([sequences[index] for index in wanted[start : start + size]] for start in range(0, len(wanted), size))
    told = None if before is None else lambda numbers: before([wanted[number] for number in numbers])
    for landed in flow(groups, told):
        yield [(wanted[number], outcome) for number, outcome in landed]


@dataclass(frozen=True)
class Operations:
    """Operations of scored sequences. Both counts are 0 if an engine cannot count them.

    Attributes:
        plain: operations of one forward pass over each sequence on its own.
        computed: operations of the passes that ran; tokens that sequences share count once. Only operations that values depend
            on count. Padding, pairs of tokens that a mask hides, and passes that ran out of memory do not count, so the device
            computed at least this many operations.
    """

    plain: float = 0.0
    computed: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.plain + other.plain, self.computed + other.computed)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.plain - other.plain, self.computed - other.computed)

    @property
    def sharing_gain(self) -> float | None:
        """`plain` divided by `computed`, at least 1; None if nothing was counted."""
        return self.plain / self.computed if self.computed else None
