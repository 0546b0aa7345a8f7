"""Find duplicates and opposite preferences by comparing keys, and pairs whose completions hardly differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.data.tokenize import NO_LABEL
from reflogp.scoring.reports.collect import ALIKE, Collected

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
        alike: number of pairs whose completions hardly differ but are not identical.
        alike_pairs: the most similar of these pairs, as (index, similarity).
    """

    exact: int
    contrary: int
    identical: int
    alike: int
    alike_pairs: list[tuple[int, float]]


def find_duplicates(collected: Collected, shown: int) -> Duplicates:
    """Count duplicates. At most `shown` pairs whose completions hardly differ are returned."""
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
    return Duplicates(
        int(repeats.sum()),
        int(contrary.sum()),
        int(identical.sum()),
        len(alike),
        [(int(place), float(similarity[place])) for place in alike[:shown]],
    )


def _mixed(first: Uint64s, second: Uint64s) -> Uint64s:
    """Hash an ordered pair of numbers to one number. Two different pairs have equal hashes with probability 2**-64."""
    mixed = (first ^ (first >> np.uint64(31))) * _MIX + second
    result: Uint64s = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return result
