"""Examples that a dataset has more than once: exactly (by key), with the preference turned round, and nearly.

Knows keys and sketches. Does not know tokens. Called by `build`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.report.collect import NO_LABEL, Collected
from reflogp.scoring.report.sketches import NearPair

_MIX = np.uint64(0x9E3779B97F4A7C15)

Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Duplicates:
    """What occurs more than once.

    Attributes:
        exact: examples that repeat an earlier one token for token, its label included.
        contrary: examples that also occur with the opposite preference: chosen and rejected swapped, or the other label.
        identical: pairs whose chosen and rejected are the same sequence.
        near: examples that nearly repeat an earlier one and are no exact repeats, by estimate.
        near_pairs: the most alike of these, with the example that they nearly repeat.
        sketched: examples that were compared for near repeats, from the front.
    """

    exact: int
    contrary: int
    identical: int
    near: int
    near_pairs: list[NearPair]
    sketched: int


def find_duplicates(collected: Collected, shown: int) -> Duplicates:
    """Counts over all examples, and up to `shown` near pairs."""
    keys = [side.keys for side in collected.sides.values()]
    if collected.pairs:
        chosen, rejected = keys
        whole, identical = _mixed(chosen, rejected), chosen == rejected
        contrary = np.isin(_mixed(rejected, chosen), whole) & ~identical
    else:
        assert collected.labels is not None, "examples are pairs or have labels"
        whole, identical = _mixed(keys[0], collected.labels.astype(np.uint64)), np.zeros(len(keys[0]), bool)
        opposite = np.where(collected.labels == NO_LABEL, NO_LABEL, 1 - collected.labels)
        contrary = np.isin(_mixed(keys[0], opposite.astype(np.uint64)), whole) & (collected.labels != NO_LABEL)
    repeats = np.ones(len(whole), bool)
    repeats[np.unique(whole, return_index=True)[1]] = False
    near = collected.sketches.near(repeats)
    best = {pair.second: pair for pair in reversed(_with_different_sides(collected, near))}
    return Duplicates(
        int(repeats.sum()),
        int(contrary.sum()),
        int(identical.sum()),
        len(best),
        sorted(best.values(), key=lambda pair: -pair.least)[:shown],
        collected.sketches.count,
    )


def _with_different_sides(collected: Collected, near: list[NearPair]) -> list[NearPair]:
    """Without those of the same completions in another order or under another label, which `contrary` counts."""
    keys = [side.keys for side in collected.sides.values()]
    return [p for p in near if {int(k[p.first]) for k in keys} != {int(k[p.second]) for k in keys}]


def _mixed(first: Uint64s, second: Uint64s) -> Uint64s:
    """One number for two in order: equal for equal ones, and for others once in 2**64."""
    mixed = (first ^ (first >> np.uint64(31))) * _MIX + second
    result: Uint64s = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return result
