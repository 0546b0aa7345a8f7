"""Write a report's findings: plain sentences that state what was counted or measured and, where needed, what to do next.

A sentence must not claim more than its numbers show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.reports.measures import Comparison, Duplicates, LabelPreference, OutlierKind, PairPreference
from reflogp.scoring.reports.truncation import TRL_MAX_LENGTH, Cut
from reflogp.store.texts import counted, percent
from reflogp.store.windows import PROMPT_FILLS

#: Kinds of findings. "fix": something is wrong or missing. "check": the user should check this before training. "good": this
#: was checked, and no problem was found. "fact": a number without a judgment.
Kind = Literal["fix", "check", "good", "fact"]

#: Thresholds for fractions. The user should check a dataset if the fraction of examples that are cut or dropped is at least
#: _MUCH_CUT, if the fraction of pairs whose completions hardly differ is at least _MUCH_ALIKE, or if the fraction of pairs in
#: which chosen is longer is at least _MUCH_LONGER. If both accuracies are below _SWAPPED, chosen and rejected may be swapped.
_MUCH_CUT, _MUCH_ALIKE, _MUCH_LONGER, _SWAPPED = 0.05, 0.05, 0.65, 0.2
#: Range that TRL's KTOTrainer recommends for desirable_weight · D / U if undesirable_weight is 1 (trl/trainer/kto_trainer.py).
#: D and U are the numbers of desirable and undesirable examples.
_KTO_RANGE = (1.0, 1.33)


@dataclass(frozen=True)
class Finding:
    kind: Kind
    text: str
    command: str | None = None


def coverage_findings(collected: Collected, score: str) -> Iterator[Finding]:
    coverage = collected.summary
    if coverage.missing:
        of = f"{_of(coverage.missing, coverage.examples, 'row')} {_have(coverage.missing)} no values in this snapshot."
        others = "The log-probs below are for the other rows."
        rest = others if coverage.with_values else "The rest of this report uses no log-probs."
        yield Finding("fix", f"{of} {rest} Score the missing rows:", score)
    elif coverage.with_values:
        dropped = f"; TRL drops {counted(coverage.dropped_rows, 'row')} because of max_length" if coverage.dropped_rows else ""
        text = (
            f"No values are missing: {_of(coverage.with_values, coverage.examples, 'row')} {_have(coverage.with_values)} values"
        )
        yield Finding("good", f"{text}{dropped}.")
    if coverage.bad_rows:
        row, problem = collected.problems[0]
        yield Finding(
            "fix",
            f"{_of(coverage.bad_rows, coverage.rows, 'row')} cannot be used. The first problem is in row {row:,}: "
            f"{problem}. Fix or remove each bad row; up to a hundred bad rows are listed under Coverage.",
        )
    if collected.bare:
        yield Finding(
            "check",
            f"{_of(collected.bare, coverage.examples, 'row')} {_have(collected.bare)} an empty prompt. Without a prompt, "
            "the first completion token is only context: it has no value, and TRL's loss does not use it either.",
        )


def value_findings(collected: Collected, vocabulary: int) -> list[Finding]:
    if not collected.usable.any():
        return []
    means = np.concatenate([side.means()[collected.usable] for side in collected.sides.values()])
    middle, even = float(np.median(means)), -math.log(vocabulary)
    said = f"The median completion has a log-prob of {_nats(middle)} nats per token (perplexity {_perplexity(middle)})"
    if middle < even:
        return [
            Finding(
                "fix",
                f"{said}. That is worse than uniform guessing among the vocabulary's {vocabulary:,} tokens ({_nats(even)}). "
                "Check that this is the intended model and that it uses its own chat template.",
            )
        ]
    return [Finding("fact", f"{said}. Uniform guessing among the vocabulary's {vocabulary:,} tokens would give {_nats(even)}.")]


def pair_findings(preference: PairPreference | None, collected: Collected) -> Iterator[Finding]:
    if preference is not None:
        low, high = preference.interval()
        text = (
            f"The reference gives chosen a higher log-prob than rejected in {percent(preference.right, preference.pairs)} of "
            f"{preference.pairs:,} pairs (95% confidence interval {low:.1%} to {high:.1%}), and in "
            f"{percent(preference.per_token_right, preference.pairs)} if means per token are compared. "
        )
        if max(preference.accuracy, preference.accuracy_per_token) < _SWAPPED:
            text += "Both percentages are far below 50%. Check whether chosen and rejected are swapped."
            yield Finding("fix", text)
        else:
            text += "50% is chance. These percentages say nothing about the quality of the data: DPO's loss compares policy "
            text += "and reference."
            yield Finding("fact", text)
        if preference.shorter_higher is not None:
            shorter = percent(preference.shorter_higher, 1)
            yield Finding(
                "fact",
                f"The shorter completion has the higher sum of log-probs in {shorter} of the pairs whose completions "
                "differ in length. The closer this percentage is to 100%, the more the sums depend on length.",
            )
        longer = preference.chosen_longer
        median = _signed(preference.median_longer)
        said = f"Chosen is longer than rejected in {percent(longer, 1)} of pairs; the median difference is {median} tokens"
        if longer >= _MUCH_LONGER:
            yield Finding(
                "check",
                f"{said}. Length alone predicts much of the preference: watch the length of the policy's outputs.",
            )
        else:
            yield Finding("fact", f"{said}.")
    assert collected.similarity is not None, "pairs are compared"
    alike = int((collected.similarity >= ALIKE).sum())
    if alike:
        yield Finding(
            "check" if alike >= _MUCH_ALIKE * len(collected.rows) else "fact",
            f"In {_of(alike, len(collected.rows), 'pair')}, chosen and rejected hardly differ: at least {ALIKE:.0%} of "
            "their tokens are the same and in the same order.",
        )


def comparison_findings(comparison: Comparison | None) -> Iterator[Finding]:
    if comparison is None:
        return
    if comparison.advice:
        said, command = comparison.advice
        yield Finding("fix", f"{said}{'. Score them:' if command else '.'}", command)
    if comparison.right is not None and comparison.compared:
        share = percent(comparison.right, comparison.compared)
        yield Finding(
            "fact",
            f"As a policy of DPO with {comparison.versus.model} as its reference, the model gives chosen the higher "
            f"implicit reward in {share} of {counted(comparison.compared, 'pair')}. 50% is chance.",
        )


def label_findings(preference: LabelPreference) -> Iterator[Finding]:
    if not (preference.desirable or preference.undesirable):
        yield Finding("fact", "No row has a label, which only KTO needs.")
        return
    if preference.without:
        yield Finding(
            "fix",
            f"{counted(preference.without, 'row')} {_have(preference.without)} no valid label. KTO needs a label of true "
            "or false in each row.",
        )
    desirable, undesirable = preference.desirable, preference.undesirable
    said = f"Desirable completions: {desirable:,}. Undesirable completions: {undesirable:,}."
    if desirable and undesirable:
        low, high = (bound * undesirable / desirable for bound in _KTO_RANGE)
        if low <= 1.0 <= high:
            yield Finding(
                "good",
                f"{said} If undesirable_weight is 1, a desirable_weight of 1 is in the range that TRL's KTOTrainer recommends.",
            )
        else:
            yield Finding(
                "check",
                f"{said} TRL's KTOTrainer recommends a desirable_weight from {low:.2f} to {high:.2f} if "
                "undesirable_weight is 1.",
            )
    elif desirable or undesirable:
        yield Finding("fix", f"{said} KTO needs both desirable and undesirable completions.")
    if preference.desirable_higher is not None:
        yield Finding(
            "fact",
            f"In {percent(preference.desirable_higher, 1)} of all combinations of a desirable and an undesirable "
            "completion, the desirable one has the higher mean log-prob per token. 50% is chance.",
        )


def truncation_findings(at: Cut, asked: bool, enough: int, noun: str) -> list[Finding]:
    which = f"max_length {at.max_length:,}," + ("" if asked or at.max_length != TRL_MAX_LENGTH else " TRL's default,")
    if not at.touched and not at.dropped:
        return [Finding("good", f"At {which} nothing is cut.")]
    lost = at.lost + at.dropped_tokens
    parts = []
    if at.touched:
        parts.append(f"{_of(at.touched, at.examples, noun)} {'is' if at.touched == 1 else 'are'} cut")
    if at.dropped:
        dropped = f"{_of(at.dropped, at.examples, noun)} {'is' if at.dropped == 1 else 'are'} dropped"
        parts.append(f"{dropped} ({PROMPT_FILLS})")
    text = f"At {which} {' and '.join(parts)}; {percent(lost, at.tokens)} of the completion tokens are lost. "
    if at.same:
        text += f"In {at.same:,} of the cut pairs, no difference is left between chosen and rejected. "
    text += f"A max_length of {enough:,} would leave 99% of the {noun}s uncut."
    much = (at.touched + at.dropped) / at.examples >= _MUCH_CUT or at.same
    return [Finding("check" if much else "fact", text)]


def duplicate_findings(duplicates: Duplicates, examples: int, noun: str) -> Iterator[Finding]:
    if duplicates.identical:
        yield Finding(
            "fix",
            f"In {_of(duplicates.identical, examples, 'pair')}, chosen and rejected are identical. Training can learn "
            "nothing from such pairs: remove them.",
        )
    if duplicates.contrary:
        kind = "with chosen and rejected swapped" if noun == "pair" else "with the opposite label"
        yield Finding(
            "fix",
            f"{_of(duplicates.contrary, examples, noun)} also {_occur(duplicates.contrary)} {kind}. Keep only one version "
            "of each.",
        )
    if duplicates.exact:
        yield Finding(
            "check",
            f"{_of(duplicates.exact, examples, noun)} {_repeat(duplicates.exact)} an earlier {noun} token for token.",
        )
    if not (duplicates.identical or duplicates.contrary or duplicates.exact):
        yield Finding("good", f"No duplicate {noun}s were found.")


def outlier_findings(kinds: list[OutlierKind], with_values: int) -> list[Finding]:
    if not with_values:
        return []
    if not kinds:
        return [Finding("good", "No outliers were found.")]
    said = ", ".join(f"{kind.count:,} of the kind “{kind.name}”" for kind in kinds)
    return [Finding("check", f"Outliers were found: {said}. The section Outliers shows the most extreme rows of each kind.")]


def verdict(findings: list[Finding]) -> str:
    """Return a line with the numbers of "fix" and "check" findings, such as "1 to fix · 2 to check"."""
    fix, check = (sum(finding.kind == kind for finding in findings) for kind in ("fix", "check"))
    parts = [f"{fix} to fix"] if fix else []
    parts += [f"{check} to check"] if check else []
    return " · ".join(parts) or "No problems found"


def _of(part: int, whole: int, noun: str) -> str:
    """Return a phrase with a count and a percentage, such as "7 of 1,000 rows (0.7%)"."""
    return f"{part:,} of {whole:,} {noun}{'' if whole == 1 else 's'} ({percent(part, whole)})"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _repeat(count: int) -> str:
    return "repeats" if count == 1 else "repeat"


def _occur(count: int) -> str:
    return "occurs" if count == 1 else "occur"


def _nats(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _perplexity(mean: float) -> str:
    return f"{math.exp(-mean):,.1f}" if mean > -14 else f"{math.exp(min(-mean, 700)):.1e}"


def _signed(value: float) -> str:
    return f"{value:+,.0f}".replace("-", "−")
