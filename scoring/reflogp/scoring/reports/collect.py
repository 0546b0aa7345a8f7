"""One pass over a dataset: a few numbers of each example, and what has no values.

The read side of `scoring`, as `joining` is: the same rows, tokens, windows and keys. Keeps no text and no tokens: about 100
bytes an example, and 256 for its sketch. Called by `build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.data.tokenize import TokenizedRows
from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.report.similarity import shared_starts, similarities
from reflogp.scoring.report.sketches import Sketches
from reflogp.scoring.report.truncation import Lengths
from reflogp.scoring.runs.score import NAMED_ROWS, ProgressCallbacks
from reflogp.store import Join, Snapshot, join_logps
from reflogp.store.keys import keys_as_words, list_lengths, token_lists
from reflogp.store.snapshot import Found

#: Completions of a pair that are more alike than this hardly differ.
ALIKE = 0.9
#: What a row's `label` may be, beside 0 and 1 and their likes; CSV has text only.
_LABELS = {"true": 1, "1": 1, "false": 0, "0": 0}
NO_LABEL = -1
_EMPTY = "a completion is empty: it has no token to score"
_UNREADABLE = "its stored values cannot be read; run `reflogp store verify`"

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Side:
    """One completion of each of n examples.

    Attributes:
        lengths: tokens of the whole completion, int32 (n,).
        tokens: of these, ones whose values the trainer's settings sum, int32 (n,).
        sums: sum of these values in nats, float64 (n,); NaN for an example that is not usable.
        lowest: the least of them, float64 (n,); NaN as well.
        keys: first half of each sequence's key, uint64 (n,).
    """

    lengths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
    lowest: npt.NDArray[np.float64]
    keys: npt.NDArray[np.uint64]

    def means(self) -> npt.NDArray[np.float64]:
        """Mean log-prob per token."""
        return self.sums / np.maximum(self.tokens, 1)


@dataclass
class Coverage:
    """How much of a dataset has values. `examples` is with_values + missing + dropped + the bad ones that could be tokenised.

    Attributes:
        rows: rows read. An example is a row; a pair that is unpaired for KTO is two.
        missing: examples whose values the snapshot has not; the rows of the first hundred are named.
        bad_rows: rows that cannot be read or tokenised, have an empty completion or damaged values; `problems` has the first.
        dropped: examples that TRL drops under max_length.
        bare: examples without a prompt, whose first token is context and has no value.
    """

    rows: int = 0
    examples: int = 0
    with_values: int = 0
    missing: int = 0
    missing_row_numbers: list[int] = field(default_factory=list)
    bad_rows: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    dropped: int = 0
    bare: int = 0

    def share(self) -> float:
        """Of what a trainer keeps, how much has values."""
        wanted = self.with_values + self.missing + self.bad_rows
        return self.with_values / wanted if wanted else 0.0


@dataclass(frozen=True)
class Collected:
    """Numbers of n examples, in the dataset's order.

    Attributes:
        rows: each example's row, int64 (n,).
        usable: examples that have values, bool (n,).
        prompts: tokens of each prompt, int32 (n,).
        sides: "chosen" and "rejected", or "completion".
        shared: leading tokens that chosen and rejected share, int32 (n,); None without pairs.
        similarity: of chosen and rejected, float32 (n,), 0 below ALIKE; None without pairs.
        labels: 1 desirable, 0 not, NO_LABEL, int8 (n,); None for pairs.
        sketches: for near repeats.
        coverage: what has values.
    """

    rows: npt.NDArray[np.int64]
    usable: Bools
    prompts: npt.NDArray[np.int32]
    sides: dict[str, Side]
    shared: npt.NDArray[np.int32] | None
    similarity: npt.NDArray[np.float32] | None
    labels: npt.NDArray[np.int8] | None
    sketches: Sketches
    coverage: Coverage

    @property
    def pairs(self) -> bool:
        return "chosen" in self.sides

    def lengths(self) -> Lengths:
        return Lengths(self.prompts, [side.lengths for side in self.sides.values()], self.shared)


def collect(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    *,
    max_length: int | None,
    truncation_mode: str,
    watcher: ProgressCallbacks | None = None,
) -> Collected:
    """Read a dataset once and look its values up.

    Raises UsageError and its kin for settings or data that cannot be used.
    """
    coverage, sketches = Coverage(), Sketches()
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for window in dataset:
        if watcher and not coverage.rows:
            watcher.begin(dataset.count())
        coverage.rows = window.last_row + 1
        problems = dict(window.problems)
        if len(window.table):
            parts.append(_numbers(window, snapshot, max_length, truncation_mode, coverage, problems, sketches))
        coverage.bad_rows += len(problems)
        coverage.problems += sorted(problems.items())[: NAMED_ROWS - len(coverage.problems)]
        if watcher:
            watcher.advance(len({*window.table["row"].to_pylist(), *window.problems}), 0)
            for row, problem in sorted(problems.items()):
                watcher.bad_row(row, problem)
    numbers = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}
    if not numbers:
        none = np.zeros(0)
        return Collected(none.astype(np.int64), none > 0, none.astype(np.int32), {}, None, None, None, sketches, coverage)
    names = [name.removesuffix(".keys") for name in numbers if name.endswith(".keys")]
    return Collected(
        numbers["row"],
        numbers["usable"],
        numbers["prompts"],
        {
            name: Side(*(numbers[f"{name}.{what}"] for what in ("lengths", "tokens", "sums", "lowest", "keys")))
            for name in names
        },
        numbers.get("shared"),
        numbers.get("similarity"),
        numbers.get("labels"),
        sketches,
        coverage,
    )


class _Remembers:
    """A lookup that keeps what it found, so that token values are read of the places that were looked up for the sums."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def find(self, keys: pa.Array) -> Found:
        self.found = self._snapshot.find(keys)
        return self.found


def _numbers(
    window: TokenizedRows,
    snapshot: Snapshot,
    max_length: int | None,
    truncation_mode: str,
    coverage: Coverage,
    problems: dict[int, str],
    sketches: Sketches,
) -> dict[str, npt.NDArray[Any]]:
    """A window's columns; counts its examples, and adds to `problems` what has no usable values."""
    table, lookup = window.table, _Remembers(snapshot)
    join = join_logps(table, lookup, max_length=max_length, truncation_mode=truncation_mode)
    rows = table["row"].to_numpy()
    empty = np.logical_or.reduce([needed == 0 for needed in join.tokens.values()]) & ~join.dropped
    missing = join.missing & ~empty
    usable = ~(join.missing | join.unusable | join.dropped | empty)
    problems |= {int(row): _UNREADABLE for row in rows[join.unusable & ~join.missing]}
    problems |= {int(row): _EMPTY for row in rows[empty]}
    coverage.examples += len(table)
    coverage.with_values += int(usable.sum())
    coverage.missing += int(missing.sum())
    coverage.missing_row_numbers += rows[missing][: NAMED_ROWS - len(coverage.missing_row_numbers)].tolist()
    coverage.dropped += int(join.dropped.sum())

    prompts = token_lists(table["prompt_ids"])
    completions = {name: token_lists(table[name]) for name in join.keys if name != "KL_completion_ids"}
    coverage.bare += int(((list_lengths(prompts) == 0) & ~join.dropped).sum())
    sketches.add(prompts, list(completions.values()))
    columns = {"row": rows, "usable": usable, "prompts": list_lengths(prompts)}
    lowest = _lowest(join, lookup.found)
    for (name, lists), logps in zip(completions.items(), join.logps.values(), strict=False):
        side = name.removesuffix("_ids")
        columns |= {
            f"{side}.lengths": list_lengths(lists),
            f"{side}.tokens": join.tokens[name].astype(np.int32),
            f"{side}.sums": np.where(usable, logps.astype(np.float64), np.nan),
            f"{side}.lowest": np.where(usable, lowest[name], np.nan),
            f"{side}.keys": keys_as_words(join.keys[name])[0],
        }
    if "chosen_ids" in completions:
        chosen, rejected = completions.values()
        columns["shared"] = shared_starts(chosen, rejected)
        columns["similarity"] = similarities(chosen, rejected, ALIKE)
    else:
        columns["labels"] = np.array(_labels(window.rows, rows.tolist()), np.int8)
    return columns


def _lowest(join: Join, found: Found) -> dict[str, npt.NDArray[np.float64]]:
    """Token column -> the least of the values that are summed, float64 (n,); 0 where there are none."""
    lists = found.token_lists()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = np.append(lists.values.to_numpy(zero_copy_only=False).astype(np.float64), 0.0)
    starts = offsets[:-1]
    stops = np.minimum(starts + np.concatenate(list(join.tokens.values())), offsets[1:])
    least = np.minimum.reduceat(values, np.stack([starts, stops], 1).ravel())[::2]
    return dict(zip(join.tokens, np.where(stops > starts, least, 0.0).reshape(len(join.tokens), -1), strict=True))


def _labels(rows: Iterable[dict[str, Any]], numbers: list[int]) -> list[int]:
    """KTO labels. Of a pair that is unpaired the chosen completion comes first."""
    found = []
    for at, columns in enumerate(rows):
        if "completion" in columns or "chosen" not in columns:
            label = columns.get("label")
            found.append(_LABELS.get(str(label).strip().lower(), NO_LABEL))
        elif at + 1 < len(numbers) and numbers[at + 1] == numbers[at]:
            found.append(1)
        elif at and numbers[at - 1] == numbers[at]:
            found.append(0)
        else:
            found.append(NO_LABEL)  # the other one could not be tokenised, and either can be that
    return found
