"""Pack several sequences into one row of tokens, so that a prefix that they share is computed only once.

The functions in this module turn token ids into numpy arrays of indices. They need neither a model nor torch tensors.

Sequences are sorted by their tokens, so that sequences with a common prefix are adjacent. Such a prefix can be a prompt, the
earlier turns of a dialogue, or the beginning of a completion. Each sequence adds to the pack only the tokens after the prefix
that it shares with the previous sequence. The added tokens are the sequence's branch. The sequence's path consists of all its
tokens in the pack, both shared and added. The tokens of a branch attend only to tokens of their path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.torch_engine.sequences import Sequence, common_prefix, prefix_order
from reflogp.store.images import FIRST_IMAGE_ID

Int64s = npt.NDArray[np.int64]

#: Minimum length of a shared prefix, in tokens. Shorter prefixes are computed again for each sequence. Sharing them would save
#: no time, because gathering a prefix's attention keys would take as long as computing the prefix again. Sharing them would
#: also join unrelated sequences (all chats begin with the same few template tokens) into large groups, which fill packs less
#: well than small groups.
MIN_SHARED = 16


@dataclass(frozen=True)
class Branch:
    """The tokens that one sequence adds to a pack, and the tokens that they can attend to.

    Attributes:
        start, stop: the added tokens have the indices start … stop - 1 in the pack.
        path: index in the pack of each token of the sequence, in the order of the sequence, int64 (length,). The added tokens
            come last. All other tokens of the path are shared with earlier branches.
        sequence: index of the sequence in the list that was packed.
    """

    start: int
    stop: int
    path: Int64s
    sequence: int

    @property
    def shared(self) -> int:
        """Number of tokens on the path that belong to earlier branches."""
        return len(self.path) - (self.stop - self.start)


@dataclass(frozen=True)
class Pack:
    """Sequences that are packed into one row of tokens, for one forward pass.

    Attributes:
        token_ids: the tokens' ids, int64 (tokens,).
        positions: each token's position in its own sequence, int64 (tokens,).
        branches: the branches, in the order of their tokens in the pack. Each token belongs to exactly one branch.
        predicted: indices of the tokens that need a log-prob, ascending, int64 (predictions,).
        parents: for each token in `predicted`, the index of the token whose hidden state predicts it, int64 (predictions,).
        members: one tuple for each sequence: (index of the sequence in the list that was packed, array that contains, for each
            completion token, its index in `predicted`).
    """

    token_ids: Int64s
    positions: Int64s
    branches: tuple[Branch, ...]
    predicted: Int64s
    parents: Int64s
    members: tuple[tuple[int, Int64s], ...]

    def __len__(self) -> int:
        return len(self.token_ids)


def packs(sequences: list[Sequence], token_budget: int, min_shared: int = MIN_SHARED) -> Iterator[Pack]:
    """Pack sequences, and yield the packs. Packs that contain the largest groups of sequences with shared prefixes come first.

    Args:
        sequences: any number of sequences. For a large dataset, call this function with a few thousand at a time.
        token_budget: maximum number of tokens in a pack. A sequence that is longer than the budget is alone in its pack.
    """
    ids = [sequence.ids() for sequence in sequences]
    groups = _groups(ids, prefix_order(ids), token_budget, min_shared)
    for chosen in _fill(groups, token_budget):
        yield _pack(sequences, ids, chosen)


@dataclass(frozen=True)
class _Group:
    """A group of sequences that share prefixes.

    Attributes:
        members: one tuple for each sequence: (index of the sequence, number of tokens that it shares with the previous sequence
            in the group).
        tokens: number of tokens that the group adds to a pack.
    """

    members: list[tuple[int, int]]
    tokens: int


def _groups(ids: list[Int64s], order: list[int], token_budget: int, min_shared: int) -> list[_Group]:
    groups: list[_Group] = []
    members: list[tuple[int, int]] = []
    tokens = 0
    for at, index in enumerate(order):
        shared = _shared_prefix(ids[order[at - 1]], ids[index]) if members else 0
        added = len(ids[index]) - shared
        if members and (shared < min_shared or tokens + added > token_budget):
            groups.append(_Group(members, tokens))
            members, tokens, shared, added = [], 0, 0, len(ids[index])
        members.append((index, shared))
        tokens += added
    if members:
        groups.append(_Group(members, tokens))
    return groups


def _fill(groups: list[_Group], token_budget: int) -> Iterator[list[_Group]]:
    """Choose the groups for each pack by first-fit decreasing: put each group, largest first, in the first pack with room.

    A pack is yielded as soon as none of the remaining groups fits into it, so the largest groups are computed first.
    """
    left = sorted(groups, key=lambda group: -group.tokens)
    sizes = np.array([group.tokens for group in left])
    taken = np.zeros(len(left), bool)
    for first in range(len(left)):
        if taken[first]:
            continue
        chosen, room = [first], token_budget - left[first].tokens
        taken[first] = True
        at = first + 1
        while True:
            # `sizes` is descending, so the first group that fits is at or after the insertion index of `room`
            at = max(at, int(np.searchsorted(-sizes, -room)))
            while at < len(left) and taken[at]:
                at += 1
            if at >= len(left):
                break
            chosen.append(at)
            taken[at] = True
            room -= left[at].tokens
        yield [left[i] for i in chosen]


def _pack(sequences: list[Sequence], ids: list[Int64s], groups: list[_Group]) -> Pack:
    tokens: list[Int64s] = []
    positions: list[Int64s] = []
    branches: list[Branch] = []
    wanted: list[tuple[int, Int64s, Int64s]] = []
    size = 0
    for group in groups:
        path: Int64s = np.zeros(0, np.int64)
        for index, shared in group.members:
            added = len(ids[index]) - shared
            path = np.concatenate([path[:shared], np.arange(size, size + added)])
            if added:
                branches.append(Branch(size, size + added, path, index))
                tokens.append(ids[index][shared:])
                positions.append(np.arange(shared, shared + added))
                size += added
            prompt = len(sequences[index].prompt_ids)
            wanted.append((index, path[prompt:], path[prompt - 1 : -1]))
    predicted, first = np.unique(np.concatenate([places for _, places, _ in wanted]), return_index=True)
    parents = np.concatenate([before for _, _, before in wanted])[first]
    return Pack(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        branches=tuple(branches),
        predicted=predicted,
        parents=parents,
        members=tuple((index, np.searchsorted(predicted, places)) for index, places, _ in wanted),
    )


def image_ends(ids: Int64s, both_ways: bool) -> Int64s:
    """For each token, return the index after the last token that it may attend to, int64 (n,).

    A text token may not attend to any later token, so its result is the index after the token itself. If `both_ways` is False,
    the same applies to image tokens. If `both_ways` is True, an image token may also attend to the image tokens that follow it
    without a text token in between.
    """
    ends = np.arange(1, len(ids) + 1)
    if not both_ways:
        return ends
    is_image = ids >= FIRST_IMAGE_ID
    last = is_image & ~np.append(is_image[1:], False)
    places = np.flatnonzero(last)
    ends[is_image] = places[np.searchsorted(places, np.flatnonzero(is_image))] + 1
    return ends


def _shared_prefix(left: Int64s, right: Int64s) -> int:
    """Return the number of leading tokens that two sequences may share in a pack.

    The prefix contains only whole images. If images follow each other without text between them, the prefix contains either
    all of these images or none.
    """
    shared = common_prefix(left, right)
    if any(len(side) > shared and side[shared] >= FIRST_IMAGE_ID for side in (left, right)):
        while shared and right[shared - 1] >= FIRST_IMAGE_ID:
            shared -= 1
    return shared
