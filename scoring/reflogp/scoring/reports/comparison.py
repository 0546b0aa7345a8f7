"""Compare a report's model with a second model, as DPO compares a policy with its reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.reports.collect import Collected
from reflogp.scoring.reports.figures import Histograms, by_label, histograms
from reflogp.scoring.versus import Versus


@dataclass(frozen=True)
class Comparison:
    """The log-ratios of the examples that have values of both models.

    Attributes:
        compared: number of these examples.
        missing: number of examples with values of the first model only.
        advice: if examples are missing, a sentence about them and the command that helps (`Versus.explain`).
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
