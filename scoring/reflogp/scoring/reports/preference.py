"""Measure what the reference prefers: chosen or rejected, desirable or undesirable, shorter or longer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reflogp.scoring.reports.collect import NO_LABEL, Collected
from reflogp.scoring.reports.figures import mean_ranks

#: Quantile of the normal distribution for a 95 % interval.
_Z = 1.96


@dataclass(frozen=True)
class PairPreference:
    """The reference's preference over the pairs with values.

    Attributes:
        pairs: number of pairs with values.
        right: pairs whose chosen has the higher sum; `accuracy` is their share.
        per_token_right: pairs whose chosen has the higher mean per token.
        ties: pairs with equal sums, which do not count as right.
        shorter_higher: among pairs of unequal lengths and sums, the share whose shorter side has the higher sum; None without
            such pairs.
        chosen_longer: share of these pairs whose chosen has more tokens.
        median_longer: median of chosen's tokens minus rejected's.
    """

    pairs: int
    right: int
    per_token_right: int
    ties: int
    shorter_higher: float | None
    chosen_longer: float
    median_longer: float

    @property
    def accuracy(self) -> float:
        return self.right / self.pairs

    @property
    def accuracy_per_token(self) -> float:
        return self.per_token_right / self.pairs

    def interval(self) -> tuple[float, float]:
        share, count = self.accuracy, self.pairs
        middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True)
class LabelPreference:
    """The reference's preference over KTO examples.

    Attributes:
        desirable, undesirable, without: number of examples by label (without: no label), with values or not.
        desirable_higher: share of all comparisons between a desirable and an undesirable completion with values in which the
            desirable one has the higher mean log-prob per token (the area under the ROC curve; a tie counts one half); None
            when one kind is missing.
    """

    desirable: int
    undesirable: int
    without: int
    desirable_higher: float | None


def pair_preference(collected: Collected) -> PairPreference | None:
    """Measure the preference over pairs; return None if no pair has values."""
    good = collected.usable
    if not good.any():
        return None
    chosen, rejected = collected.sides.values()
    margins = (chosen.sums - rejected.sums)[good]
    longer = (chosen.tokens.astype(np.int64) - rejected.tokens)[good]
    decided = (longer != 0) & (margins != 0)
    shorter_higher = float(((margins > 0) == (longer < 0))[decided].mean()) if decided.any() else None
    return PairPreference(
        len(margins),
        int((margins > 0).sum()),
        int(((chosen.means() - rejected.means())[good] > 0).sum()),
        int((margins == 0).sum()),
        shorter_higher,
        float((longer > 0).mean()),
        float(np.median(longer)),
    )


def label_preference(collected: Collected) -> LabelPreference:
    """Measure the preference over a dataset with labels."""
    assert collected.labels is not None, "the caller asks of KTO examples"
    labels = collected.labels
    good = collected.usable & (labels != NO_LABEL)
    [side] = collected.sides.values()
    first = labels[good] == 1
    higher = None
    if first.any() and not first.all():
        wins = mean_ranks(side.means()[good])[first].sum() - first.sum() * (first.sum() - 1) / 2
        higher = float(wins / (first.sum() * (~first).sum()))
    return LabelPreference(int((labels == 1).sum()), int((labels == 0).sum()), int((labels == NO_LABEL).sum()), higher)
