"""Find outliers in a dataset, by rules that the report explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.scoring.reports.collect import Collected

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

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OutlierKind:
    """A kind of outlier, the rule that defines it, and the examples that were found.

    Attributes:
        unit: unit of the values in `worst`.
        count: number of examples that match the rule.
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
