"""Compute the data for a report's charts, and measure which completions the reference prefers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.data.tokenize import NO_LABEL
from reflogp.scoring.reports.collect import Collected

_BINS = 40
#: Bars extend at most this many standard deviations (estimated from the median absolute deviation) to each side of the median.
#: Values farther away are counted in the first and last bars. Charts of margins always include zero, even if it is farther.
_FARTHEST = 6.0
_MAD_TO_DEVIATION = 1.4826

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Histograms:
    """Histograms of several series with the same bar edges.

    Attributes:
        beyond: number of values below the first edge or above the last edge. The first and last bars include these values.
        zero: True to draw a line at zero. In the charts of margins, the reference prefers chosen in the pairs to the right of
            this line.
    """

    edges: list[float]
    counts: dict[str, list[int]]
    medians: dict[str, float]
    beyond: int
    zero: bool = False


@dataclass(frozen=True)
class Figures:
    """The data for all charts. For KTO, `margins` and `margins_per_token` are None."""

    logps: Histograms
    margins: Histograms | None
    margins_per_token: Histograms | None


def make_figures(collected: Collected) -> Figures | None:
    good = collected.usable
    if not good.any():
        return None
    series = {name: side.means()[good] for name, side in collected.sides.items()}
    if collected.labels is not None:
        [means] = series.values()
        series = by_label(means, collected.labels[good])
    logps = histograms(series)
    if not collected.pairs:
        return Figures(logps, None, None)
    chosen, rejected = collected.sides.values()
    margins = histograms({"pairs": (chosen.sums - rejected.sums)[good]}, zero=True)
    per_token = histograms({"pairs": (chosen.means() - rejected.means())[good]}, zero=True)
    return Figures(logps, margins, per_token)


def by_label(values: Floats, labels: npt.NDArray[np.int8]) -> dict[str, Floats]:
    names = {1: "desirable", 0: "undesirable", NO_LABEL: "without label"}
    return {name: values[labels == label] for label, name in names.items() if (labels == label).any()}


def histograms(series: dict[str, Floats], zero: bool = False) -> Histograms:
    """Count the values of several series in bars of the same width. `zero` is True for margins (see Histograms)."""
    values = np.concatenate(list(series.values()))
    low, high = _bounds(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    edges = _edges(low, high, _BINS)
    counts = {name: np.histogram(np.clip(part, low, high), edges)[0].tolist() for name, part in series.items()}
    medians = {name: float(np.median(part)) for name, part in series.items()}
    beyond = int(((values < low) | (values > high)).sum())
    return Histograms(edges.tolist(), counts, medians, beyond, zero)


def _bounds(values: Floats) -> tuple[float, float]:
    """Return the lowest and the highest value, but at most _FARTHEST standard deviations from the median."""
    middle = float(np.median(values))
    reach = _FARTHEST * _MAD_TO_DEVIATION * float(np.median(np.abs(values - middle))) or math.inf
    return max(float(values.min()), middle - reach), min(float(values.max()), middle + reach)


def _edges(low: float, high: float, count: int) -> Floats:
    return np.linspace(low, high, count + 1) if high > low else np.linspace(low - 0.5, high + 0.5, count + 1)


def mean_ranks(values: npt.NDArray[np.int32] | Floats) -> Floats:
    """Return the ranks of values, starting at 0; equal values get the mean of their ranks."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") - 1) / 2


#: Quantile of the normal distribution for a 95% interval.
_Z = 1.96


@dataclass(frozen=True)
class PairPreference:
    """How often the reference prefers the chosen completion, in the pairs that have values.

    Attributes:
        right: number of pairs whose chosen completion has the higher sum of log-probs.
        per_token_right: number of pairs whose chosen completion has the higher mean log-prob per token.
        ties: number of pairs with equal sums, which are not counted in `right`.
        shorter_higher: among pairs whose two completions differ in length and in sum, the fraction in which the shorter
            completion has the higher sum; None if there are no such pairs.
        chosen_longer: among pairs with values, the fraction in which chosen has more tokens than rejected.
        median_longer: median difference in length (tokens in chosen minus tokens in rejected).
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
        """Return the bounds of the 95% confidence interval of `accuracy` (Wilson score interval)."""
        share, count = self.accuracy, self.pairs
        middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True)
class LabelPreference:
    """How often the reference prefers desirable to undesirable completions, in KTO examples.

    Attributes:
        desirable, undesirable, without: numbers of examples by label. Examples without log-probs are also counted.
        desirable_higher: among all combinations of a desirable and an undesirable completion, the fraction in which the
            desirable one has the higher mean log-prob per token. Ties count as one half, as in the area under the ROC curve.
            The fraction is None unless at least one completion of each label has log-probs.
    """

    desirable: int
    undesirable: int
    without: int
    desirable_higher: float | None


def pair_preference(collected: Collected) -> PairPreference | None:
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
    assert collected.labels is not None, "only KTO examples have labels"
    labels = collected.labels
    good = collected.usable & (labels != NO_LABEL)
    [side] = collected.sides.values()
    first = labels[good] == 1
    higher = None
    if first.any() and not first.all():
        wins = mean_ranks(side.means()[good])[first].sum() - first.sum() * (first.sum() - 1) / 2
        higher = float(wins / (first.sum() * (~first).sum()))
    return LabelPreference(int((labels == 1).sum()), int((labels == 0).sum()), int((labels == NO_LABEL).sum()), higher)
