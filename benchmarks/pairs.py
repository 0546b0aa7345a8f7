"""Define preference pairs as token ids, and draw pairs of random tokens with UltraFeedback's lengths. Needs no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf

import numpy as np

from reflogp.scoring.torch_engine import Sequence

#: Percentiles of tokens (characters divided by 4.2) in 994 rows of UltraFeedback (OpenBMB): prompts, completions of both sides.
PERCENTILES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
PROMPT_TOKENS = (4, 10, 13, 21, 32, 52, 86, 116, 159, 237, 419, 605, 1040, 1502)
COMPLETION_TOKENS = (1, 7, 17, 43, 81, 134, 208, 296, 405, 521, 660, 781, 997, 1306)
#: Correlation of the two completions' lengths in these rows; the correlation with the prompt's length is negligible (-0.1).
COMPLETIONS_CORRELATION = 0.63


@dataclass(frozen=True)
class Pairs:
    """Preference pairs as token ids: rows of (prompt, chosen, rejected)."""

    name: str
    rows: list[tuple[list[int], list[int], list[int]]]

    @property
    def tokens(self) -> int:
        """Number of tokens of both sequences of every pair; the prompt counts twice."""
        return sum(2 * len(p) + len(c) + len(r) for p, c, r in self.rows)

    def sequences(self) -> list[Sequence]:
        return [Sequence(p, side) for p, c, r in self.rows for side in (c, r)]

    def spread(self, count: int) -> Pairs:
        """Return `count` evenly spaced rows, whose lengths are distributed like those of all rows."""
        step = max(1, len(self.rows) // count)
        return Pairs(self.name, self.rows[::step][:count])


def drawn_pairs(tokens: int, vocab_size: int, seed: int = 0) -> Pairs:
    """Draw pairs of random tokens with UltraFeedback's lengths until they have `tokens` tokens; both sides share the prompt."""
    random = np.random.default_rng(seed)
    rows, left = [], tokens
    while left > 0:
        first, second = random.standard_normal(2)
        other = COMPLETIONS_CORRELATION * first + (1 - COMPLETIONS_CORRELATION**2) ** 0.5 * second
        prompt = _length(random.random(), PROMPT_TOKENS)
        chosen, rejected = (_length(_share_below(number), COMPLETION_TOKENS) for number in (first, other))
        rows.append(tuple(random.integers(2, vocab_size, count).tolist() for count in (prompt, chosen, rejected)))
        left -= 2 * prompt + chosen + rejected
    return Pairs("random tokens, UltraFeedback's lengths", rows)


def _length(share: float, percentiles: tuple[int, ...]) -> int:
    return round(float(np.interp(100 * share, PERCENTILES, percentiles)))


def _share_below(number: float) -> float:
    """Return the share of a standard normal distribution below `number`."""
    return 0.5 * (1 + erf(number / 2**0.5))
