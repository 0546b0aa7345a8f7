"""Find exact duplicates and opposite preferences by comparing keys, and near duplicates by comparing MinHash sketches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.data.tokenize import NO_LABEL
from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.reports.sketches import NearPairs

_MIX = np.uint64(0x9E3779B97F4A7C15)

Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Duplicates:
    """Counts of duplicate examples.

    `exact`, `contrary` and `identical` are found by comparing keys. With keep_end and a max_length, keys do not depend on the
    tokens that are cut.

    Attributes:
        exact: number of examples that repeat an earlier example token for token, with the same label.
        contrary: number of examples that also occur with the opposite preference, that is, with chosen and rejected swapped or
            with the opposite label.
        identical: number of pairs whose chosen and rejected sequences are the same.
        near: estimated number of examples that nearly repeat an earlier example, not counting exact duplicates.
        near_pairs: the most similar near duplicates, each with the earlier example that it nearly repeats.
        alike: number of pairs whose completions hardly differ but are not identical.
        alike_pairs: the most similar of these pairs, as (index, similarity).
        sketched: number of examples at the beginning of the dataset that were searched for near duplicates. Later examples were
            not searched.
    """

    exact: int
    contrary: int
    identical: int
    near: int
    near_pairs: NearPairs
    alike: int
    alike_pairs: list[tuple[int, float]]
    sketched: int


def find_duplicates(collected: Collected, shown: int) -> Duplicates:
    """Count duplicates. At most `shown` near duplicates and `shown` pairs whose completions hardly differ are returned."""
    keys = [side.keys for side in collected.sides.values()]
    if collected.pairs:
        chosen, rejected = keys
        whole, identical = _mixed(chosen, rejected), chosen == rejected
        contrary = np.isin(_mixed(rejected, chosen), whole) & ~identical
    else:
        assert collected.labels is not None, "examples that are not pairs must have labels"
        whole, identical = _mixed(keys[0], collected.labels.astype(np.uint64)), np.zeros(len(keys[0]), bool)
        opposite = np.where(collected.labels == NO_LABEL, NO_LABEL, 1 - collected.labels)
        contrary = np.isin(_mixed(keys[0], opposite.astype(np.uint64)), whole) & (collected.labels != NO_LABEL)
    similarity = np.zeros(len(whole)) if collected.similarity is None else collected.similarity
    alike = np.flatnonzero((similarity >= ALIKE) & ~identical)
    alike = alike[np.argsort(-similarity[alike], kind="stable")]
    repeats = np.ones(len(whole), bool)
    repeats[np.unique(whole, return_index=True)[1]] = False
    near = _with_different_sides(collected, collected.sketches.near(repeats))
    best = np.unique(near.second, return_index=True)[1]  # the most similar earlier example of each
    return Duplicates(
        int(repeats.sum()),
        int(contrary.sum()),
        int(identical.sum()),
        len(best),
        near[np.sort(best)[:shown]],
        len(alike),
        [(int(place), float(similarity[place])) for place in alike[:shown]],
        collected.sketches.count,
    )


def _with_different_sides(collected: Collected, near: NearPairs) -> NearPairs:
    """Drop each pair whose two examples have the same sequences, with chosen and rejected swapped or with different labels.

    Opposite preferences are counted in `Duplicates.contrary`.
    """
    keys = [side.keys for side in collected.sides.values()]
    sides = np.sort(np.stack(keys), 0)
    return near[(sides[:, near.first] != sides[:, near.second]).any(0)]


def _mixed(first: Uint64s, second: Uint64s) -> Uint64s:
    """Hash an ordered pair of numbers to one number. Two different pairs have equal hashes with probability 2**-64."""
    mixed = (first ^ (first >> np.uint64(31))) * _MIX + second
    result: Uint64s = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return result
