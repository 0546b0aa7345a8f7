"""Collect a few statistics for each example in one pass over a dataset, and count the examples without log-probs.

Rows are tokenized and truncated, and keys are computed, in the same way as in scoring and in the module `joining`. Text and
tokens are not kept, so an example takes only about 100 bytes of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.data.tokenize import RowCount, TokenizedRows, TokenizedWindows
from reflogp.scoring.reports.truncation import Lengths
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.runs.score import EMPTY_COMPLETION, NAMED_ROWS
from reflogp.scoring.torch_engine.sequences import common_prefix
from reflogp.scoring.versus import Versus
from reflogp.store import Join, Snapshot, UsageError
from reflogp.store.joins import UNUSABLE, answer, ask, join_found
from reflogp.store.keys import keys_as_words, list_lengths, token_lists
from reflogp.store.snapshot import Found
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import TrainerSettings

#: Minimum similarity of a pair's completions for the report to say that they hardly differ.
ALIKE = 0.9
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Side:
    """Statistics of n examples' completions on one side, such as the chosen completions.

    Attributes:
        lengths: number of tokens in the whole completion, int32 (n,).
        tokens: number of completion tokens whose log-probs the trainer uses, int32 (n,).
        sums: sum of the log-probs of these tokens, in nats, float64 (n,); NaN where `Collected.usable` is False.
        lowest: lowest log-prob among these tokens, float64 (n,); NaN where `Collected.usable` is False.
        keys: first half of each sequence's key, uint64 (n,).
        log_ratios: `sums` minus those of a second model, in nats, float64 (n,); NaN where one of the two is missing.
    """

    lengths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
    lowest: npt.NDArray[np.float64]
    keys: npt.NDArray[np.uint64]
    log_ratios: npt.NDArray[np.float64]

    def means(self) -> npt.NDArray[np.float64]:
        return self.sums / np.maximum(self.tokens, 1)


@dataclass
class ReportSummary:
    """The statistics and findings of a report.

    Attributes:
        rows: number of rows read.
        examples: number of tokenized examples. A row is one example, or two if pairs are split for KTO.
        with_values: number of examples with log-probs.
        missing: number of tokenized examples whose log-probs are not in the snapshot.
        missing_row_numbers: 0-based row numbers of the first hundred missing examples.
        bad_rows: number of rows that cannot be read or tokenized, have an empty completion, or have damaged values.
        bad_row_numbers: 0-based row numbers of the first hundred bad rows.
        dropped_rows: number of examples that TRL drops because of max_length. They are counted in `examples`, but not in
            `with_values` or `missing`.
        coverage: with_values / (with_values + missing + bad_rows).
        accuracy: fraction of pairs whose chosen completion has the higher sum of log-probs; None for KTO or if no pair has
            values.
        accuracy_per_token: fraction of pairs whose chosen completion has the higher mean log-prob per token; None for KTO or if
            no pair has values.
        versus_missing: number of examples with log-probs for which the second model (`versus`) has none.
        implicit_reward_accuracy: fraction of pairs with a positive margin of implicit rewards (`Comparison`); None for KTO, or
            if no pair has values of both models.
        exact_duplicates: number of examples that exactly repeat an earlier example (`Duplicates.exact`).
        contrary: number of examples that also occur with the opposite preference (`Duplicates.contrary`).
        identical: number of pairs whose completions are the same (`Duplicates.identical`).
        alike: number of pairs whose completions hardly differ but are not identical.
        outliers: dict from each kind of outlier, such as "very unlikely completions", to its number of examples. Kinds without
            examples are left out.
        truncation: one dict for each max_length that the report compares. Its keys are the fields of `truncation.Cut`.
        findings: the findings at the top of the page, as dicts with the keys `kind` ("fix", "check", "fact" or "good"), `text`
            and `command` (None if there is no command to run).
        seconds: number of seconds that it took to write the report.
        reference_id: id of the reference whose values are reported, 32 hexadecimal digits.
        versus_reference_id: id of the second model's reference; empty if there is none.
        snapshot: number of the snapshot that the values were read from.
        store: URI of the store.
        output: path of the page.
    """

    rows: int = 0
    examples: int = 0
    with_values: int = 0
    missing: int = 0
    missing_row_numbers: list[int] = field(default_factory=list)
    bad_rows: int = 0
    bad_row_numbers: list[int] = field(default_factory=list)
    dropped_rows: int = 0
    coverage: float = 0.0
    accuracy: float | None = None
    accuracy_per_token: float | None = None
    versus_missing: int = 0
    implicit_reward_accuracy: float | None = None
    exact_duplicates: int = 0
    contrary: int = 0
    identical: int = 0
    alike: int = 0
    outliers: dict[str, int] = field(default_factory=dict)
    truncation: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    reference_id: str = ""
    versus_reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    output: str = ""

    def __repr__(self) -> str:
        accuracy = f", accuracy {100 * self.accuracy:.1f}%" if self.accuracy is not None else ""
        return short_repr(
            "ReportSummary",
            f"{self.with_values:,} of {counted(self.examples, 'example')} with values{accuracy}",
            *(f"{finding['kind']}: {finding['text']}" for finding in self.findings if finding["kind"] in ("fix", "check")),
            f"reference {self.reference_id}, snapshot {self.snapshot} of {self.store}",
            f"{self.output}, written in {self.seconds:.1f} s",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Collected:
    """Statistics of n examples, in the dataset's order.

    Attributes:
        rows: each example's row number, int64 (n,).
        usable: True for the examples that `summary.with_values` counts, bool (n,).
        prompts: number of tokens in each prompt, int32 (n,).
        sides: dict from each side's name to the statistics of its completions. The names are "chosen" and "rejected" for pairs,
            and "completion" for other examples.
        shared: number of leading tokens that chosen and rejected have in common, int32 (n,); None if the examples are not
            pairs.
        similarity: similarity of chosen and rejected (see `similarities`), float32 (n,). A similarity below ALIKE is
            replaced by 0. None if the examples are not pairs.
        labels: 1 for desirable, 0 for undesirable, or NO_LABEL, int8 (n,); None for pairs.
        bare: number of examples without a prompt. In an example without a prompt, the first completion token is only context
            and has no value.
    """

    rows: npt.NDArray[np.int64]
    usable: Bools
    prompts: npt.NDArray[np.int32]
    sides: dict[str, Side]
    shared: npt.NDArray[np.int32] | None
    similarity: npt.NDArray[np.float32] | None
    labels: npt.NDArray[np.int8] | None
    summary: ReportSummary
    problems: list[tuple[int, str]]
    bare: int

    @property
    def pairs(self) -> bool:
        return "chosen" in self.sides

    def lengths(self) -> Lengths:
        return Lengths(self.prompts, [side.lengths for side in self.sides.values()], self.shared)


def collect(
    dataset: TokenizedWindows,
    name: str,
    snapshot: Snapshot,
    settings: TrainerSettings,
    watcher: ProgressCallbacks | None = None,
    versus: Versus | None = None,
) -> Collected:
    """Read a dataset once, and look up its log-probs. Raises UsageError, with the dataset's name, if no row can be used."""
    summary, watcher = ReportSummary(), watcher or ProgressCallbacks()
    all_problems: list[tuple[int, str]] = []
    parts: list[dict[str, npt.NDArray[Any]]] = []
    counting, begun = RowCount(dataset), False
    for window in dataset:
        if counting.rows and not begun:
            watcher.begin(counting.rows)
            begun = True
        problems = window.problems
        if len(window.table):
            asked = ask(window.table, max_length=settings.max_length, truncation_mode=settings.truncation_mode)
            found = snapshot.find(asked.all_keys())
            other = answer(asked, versus.snapshot, settings.ld_alpha) if versus else None
            join = join_found(asked, found, settings.ld_alpha)
            rows = window.table["row"].to_numpy()
            empty = np.logical_or.reduce([needed == 0 for needed in join.tokens.values()]) & ~join.dropped
            missing = join.missing & ~empty
            usable = ~(join.missing | join.unusable | join.dropped | empty)
            problems = problems | {int(row): UNUSABLE for row in rows[join.unusable & ~join.missing]}
            problems |= {int(row): EMPTY_COMPLETION for row in rows[empty]}
            summary.examples += len(rows)
            summary.with_values += int(usable.sum())
            summary.missing += int(missing.sum())
            summary.missing_row_numbers += rows[missing][: NAMED_ROWS - len(summary.missing_row_numbers)].tolist()
            summary.dropped_rows += int(join.dropped.sum())
            parts.append(_numbers(window, found, join, other, usable))
        summary.rows = window.last_row + 1
        summary.bad_rows += len(problems)
        all_problems += sorted(problems.items())[: NAMED_ROWS - len(all_problems)]
        watcher.advance(window.row_count(), 0)
        for row, problem in sorted(problems.items()):
            watcher.bad_row(row, problem)
    if not parts:
        row, problem = all_problems[0]
        raise UsageError(f"{name} has no row that can be used, so there is nothing to report. Row {row}: {problem}")
    summary.bad_row_numbers = [row for row, _ in all_problems]
    summary.coverage = summary.with_values / max(1, summary.with_values + summary.missing + summary.bad_rows)
    return _collected(parts, summary, all_problems)


def _collected(parts: list[dict[str, npt.NDArray[Any]]], summary: ReportSummary, problems: list[tuple[int, str]]) -> Collected:
    numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    names = [name.removesuffix(".keys") for name in numbers if name.endswith(".keys")]
    return Collected(
        numbers["row"],
        numbers["usable"],
        numbers["prompts"],
        {name: Side(*(numbers[f"{name}.{part.name}"] for part in fields(Side))) for name in names},
        numbers.get("shared"),
        numbers.get("similarity"),
        numbers.get("labels"),
        summary,
        problems,
        int(numbers["bare"].sum()),
    )


def _numbers(window: TokenizedRows, found: Found, join: Join, other: Join | None, usable: Bools) -> dict[str, npt.NDArray[Any]]:
    """Return the statistics of a window's examples, as a dict from names, such as "row" or "chosen.sums", to arrays."""
    table = window.table
    prompts = token_lists(table["prompt_ids"])
    completions = {name: token_lists(table[name]) for name in join.keys if name != "KL_completion_ids"}
    columns = {"row": table["row"].to_numpy(), "usable": usable, "prompts": list_lengths(prompts)}
    columns["bare"] = (columns["prompts"] == 0) & ~join.dropped
    lowest = _lowest(join, found)
    both = usable & ~(other.missing | other.unusable) if other else np.zeros(len(table), bool)
    for (name, lists), (column, logps) in zip(completions.items(), join.logps.items(), strict=False):
        side = name.removesuffix("_ids")
        theirs = other.logps[column] if other else logps
        columns |= {
            f"{side}.lengths": list_lengths(lists),
            f"{side}.tokens": join.tokens[name].astype(np.int32),
            f"{side}.sums": np.where(usable, logps.astype(np.float64), np.nan),
            f"{side}.lowest": np.where(usable, lowest[name], np.nan),
            f"{side}.keys": keys_as_words(join.keys[name])[0],
            f"{side}.log_ratios": np.where(both, logps.astype(np.float64) - theirs, np.nan),
        }
    if "chosen_ids" in completions:
        chosen, rejected = completions.values()
        columns["shared"] = shared_starts(chosen, rejected)
        columns["similarity"] = similarities(chosen, rejected, ALIKE)
    else:
        columns["labels"] = np.array(window.labels, np.int8)
    return columns


def _lowest(join: Join, found: Found) -> dict[str, npt.NDArray[np.float64]]:
    """Return the lowest log-prob of each completion after truncation, float64 (n,) for each column of completion ids; 0 for a
    completion without log-probs."""
    lists = found.token_lists()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = np.append(lists.values.to_numpy(zero_copy_only=False).astype(np.float64), 0.0)
    starts = offsets[:-1]
    stops = np.minimum(starts + np.concatenate(list(join.tokens.values())), offsets[1:])
    least = np.minimum.reduceat(values, np.stack([starts, stops], 1).ravel())[::2]
    return dict(zip(join.tokens, np.where(stops > starts, least, 0.0).reshape(len(join.tokens), -1), strict=True))


#: Maximum number of tokens in a completion that is compared with the pair's other one; the time grows with the square.
MOST_COMPARED = 8192


def shared_starts(left: pa.LargeListArray, right: pa.LargeListArray) -> npt.NDArray[np.int32]:
    """Return the number of leading tokens that left[i] and right[i] have in common, int32 (n,)."""
    pairs = zip(*(np.split(lists.values.to_numpy(), lists.offsets.to_numpy())[1:-1] for lists in (left, right)), strict=True)
    return np.array([common_prefix(one, other) for one, other in pairs], np.int32)


def similarities(left: pa.LargeListArray, right: pa.LargeListArray, at_least: float) -> npt.NDArray[np.float32]:
    """Return the `similarity` of left[i] and right[i] for each i, or 0 where it is below `at_least`: float32 (n,)."""
    left_at, right_at = left.offsets.to_numpy(), right.offsets.to_numpy()
    lengths = np.diff(left_at), np.diff(right_at)
    most = 2 * np.minimum(*lengths) / np.maximum(lengths[0] + lengths[1], 1)
    most[np.maximum(*lengths) > MOST_COMPARED] = 0.0
    found = np.zeros(len(left), np.float32)
    left_ids, right_ids = left.values.to_numpy(), right.values.to_numpy()
    for i in np.flatnonzero(most >= at_least):
        value = similarity(
            left_ids[left_at[i] : left_at[i + 1]].tolist(), right_ids[right_at[i] : right_at[i + 1]].tolist(), at_least
        )
        found[i] = value if value >= at_least else 0.0
    return found


def similarity(left: Sequence[int], right: Sequence[int], at_least: float = 0.0) -> float:
    """Return the fraction of the two lists' tokens that are in their longest common subsequence.

    If an upper bound, from tokens regardless of their order, is below `at_least`, the bound is returned instead.
    """
    both = len(left) + len(right)
    if not both:
        return 1.0
    bound = 2 * (Counter(left) & Counter(right)).total() / both
    return bound if bound < at_least else 2 * _common_subsequence(left, right) / both


def _common_subsequence(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common subsequence (bit-parallel algorithm; Hyyrö, 2004)."""
    shorter, longer = sorted((left, right), key=len)
    places: dict[int, int] = {}
    for at, token in enumerate(shorter):
        places[token] = places.get(token, 0) | 1 << at
    every = (1 << len(shorter)) - 1
    row = every
    for token in longer:
        matches = row & places.get(token, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(shorter) - row.bit_count()
