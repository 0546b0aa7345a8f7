"""Measure what a report says: the data of its charts, which completions the reference prefers, duplicates (by comparing keys),
outliers (by rules that the report explains), and how the model compares with a second one, as DPO compares a policy with its
reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.tokenize import NO_LABEL
from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.versus import Versus

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


#: Absolute robust z-score above which a value is an outlier (Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers").
FAR = 3.5
#: A completion of at least ONE_TOKEN_OF tokens is an outlier if a single token contributes more than the fraction
#: ONE_TOKEN_SHARE of the completion's log-prob sum.
ONE_TOKEN_SHARE, ONE_TOKEN_OF = 0.5, 10
#: Minimum number of completions in a group of similar lengths.
_ENOUGH = 50
_SIMILAR = "among completions of similar length (lengths are grouped by powers of two)"
#: Median absolute deviation of a normal distribution, in standard deviations.
_NORMAL = 0.6745


@dataclass(frozen=True)
class OutlierKind:
    """A kind of outlier, the rule that defines it, and the examples that were found.

    Attributes:
        worst: (index of the example in `Collected`, value that the page shows) for the most extreme examples, most extreme
            first.
    """

    name: str
    rule: str
    unit: str
    count: int
    worst: list[tuple[int, float]]


def robust_z(values: Floats) -> Floats:
    """Return 0.6745 · (value − median) / median absolute deviation, or zeros if more than half of the values are equal."""
    if not len(values):
        return values
    middle = np.median(values)
    spread = np.median(np.abs(values - middle))
    return _NORMAL * (values - middle) / spread if spread > 0 else np.zeros_like(values)


def robust_z_by_length(values: Floats, tokens: npt.NDArray[np.int32]) -> Floats:
    """Compute `robust_z` separately for each group of similar lengths.

    Lengths are grouped by powers of two, because means over few tokens vary more than means over many. A group with fewer than
    _ENOUGH values is merged with the next group of greater lengths or, if there is no next group, with the previous one.

    `tokens` is the number of tokens that each value is based on, int32 (n,).
    """
    powers = np.floor(np.log2(np.maximum(tokens, 1))).astype(int)
    groups: list[list[int]] = [[]]
    for power in np.unique(powers):
        groups[-1].append(int(power))
        if np.isin(powers, groups[-1]).sum() >= _ENOUGH:
            groups.append([])
    if not groups[-1] or len(groups) > 1:
        last = groups.pop()
        groups[-1] += last
    z = np.zeros_like(values)
    for group in groups:
        these = np.isin(powers, group)
        z[these] = robust_z(values[these])
    return z


def find_outliers(collected: Collected, shown: int) -> list[OutlierKind]:
    good = np.flatnonzero(collected.usable)
    if not len(good):
        return []
    sides = list(collected.sides.values())
    means = np.stack([side.means()[good] for side in sides])
    tokens = np.stack([side.tokens[good] for side in sides])
    z = robust_z_by_length(means.ravel(), tokens.ravel()).reshape(means.shape)
    every = np.arange(len(good))
    kinds = [
        _kind(
            "very unlikely completions",
            f"mean log-prob per token with a robust z-score below −{FAR} {_SIMILAR}",
            "nats per token",
            good,
            -z.min(0) - FAR,
            means[z.argmin(0), every],
            shown,
        ),
        _kind(
            "very likely completions",
            f"mean log-prob per token with a robust z-score above {FAR} {_SIMILAR}",
            "nats per token",
            good,
            z.max(0) - FAR,
            means[z.argmax(0), every],
            shown,
        ),
    ]
    if collected.pairs:
        margins = means[0] - means[1]
        far = -robust_z_by_length(margins, tokens.min(0)) - FAR
        rule = f"negative margin per token (mean log-prob of chosen minus that of rejected) with a robust z-score below −{FAR} "
        rule += "compared with pairs whose shorter completion has a similar length (lengths are grouped by powers of two)"
        kinds.append(
            _kind("rejected far above chosen", rule, "nats per token", good, np.where(margins < 0, far, -1.0), margins, shown)
        )
    of_one = np.stack([side.lowest[good] / np.minimum(side.sums[good], -1e-9) for side in sides])
    shares = np.where(tokens >= ONE_TOKEN_OF, of_one, 0.0).max(0)
    rule = f"one token contributes more than {ONE_TOKEN_SHARE:.0%} of the log-prob sum, in a completion of at least "
    rule += f"{ONE_TOKEN_OF} tokens"
    kinds.append(_kind("one token decides", rule, "of the sum", good, shares - ONE_TOKEN_SHARE, shares, shown))
    return [kind for kind in kinds if kind.count]


def _kind(
    name: str, rule: str, unit: str, good: npt.NDArray[np.int64], beyond: Floats, values: Floats, shown: int
) -> OutlierKind:
    places = np.flatnonzero(beyond > 0)
    order = np.argsort(-beyond[places], kind="stable")
    worst = [(int(good[at]), float(values[at])) for at in places[order][:shown]]
    return OutlierKind(name, rule, unit, len(places), worst)


@dataclass(frozen=True)
class Comparison:
    """The log-ratios of the examples that have values of both models.

    Attributes:
        histogram: for pairs, the margins of the implicit rewards: the log-ratio of chosen minus that of rejected, in nats. For
            other examples, the log-ratios by label. None if no example can be compared.
        right: number of pairs with a positive margin; None if the examples are not pairs.
        lowest: (index of the pair in `Collected`, margin) of the pairs with the lowest margins, lowest first.
    """

    versus: Versus
    compared: int
    missing: int
    advice: tuple[str, str | None] | None
    histogram: Histograms | None
    right: int | None
    lowest: list[tuple[int, float]]

    @property
    def accuracy(self) -> float | None:
        return self.right / self.compared if self.right is not None and self.compared else None


def compare(collected: Collected, versus: Versus, tokenizer: PreTrainedTokenizerBase, shown: int) -> Comparison:
    ratios = [side.log_ratios for side in collected.sides.values()]
    values = ratios[0] - ratios[1] if collected.pairs else ratios[0]
    both = np.flatnonzero(~np.isnan(values))
    missing = int(collected.usable.sum()) - len(both)
    series = {"pairs": values[both]} if collected.labels is None else by_label(values[both], collected.labels[both])
    lowest = both[np.argsort(values[both], kind="stable")][: shown if collected.pairs else 0]
    return Comparison(
        versus,
        len(both),
        missing,
        versus.explain(missing, tokenizer) if missing else None,
        histograms(series, zero=True) if len(both) else None,
        int((values[both] > 0).sum()) if collected.pairs else None,
        [(int(place), float(values[place])) for place in lowest],
    )
