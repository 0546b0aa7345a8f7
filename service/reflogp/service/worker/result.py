"""Write a job's result (a Parquet file with the values in dataset order) and its report (histograms and outliers).

At the end of a job, the dataset is read again, one group of rows at a time. The values of all rows are looked up in the same
snapshot, which is opened when the job has committed its values.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.images import RowImage
from reflogp.scoring.data.tokenize import TokenizedRows
from reflogp.scoring.data.tokenized import TokenizedWindows
from reflogp.scoring.joining import join_note
from reflogp.scoring.reports.figures import histograms
from reflogp.scoring.reports.shown import image_text, thumbnail
from reflogp.store import Snapshot, join_logps
from reflogp.store.files import write_atomically
from reflogp.store.images import FIRST_IMAGE_ID
from reflogp.store.joins import Join, completion_columns, tokens_column
from reflogp.store.keys import KEY_TYPE
from reflogp.store.schema import one_array
from reflogp.store.windows import TrainerSettings

#: Limits of the report: number of outliers of each kind, characters in each text, and images per outlier.
_OUTLIERS, _TEXT, _IMAGES = 4, 4_000, 2
#: Maximum number of bad rows that the report lists.
_NAMED = 100
_REJECTED, _CHOSEN = "rejected far more likely than chosen", "chosen far more likely than rejected"
_NO_VALUE = "at least one of the row's values is missing from the store or cannot be used"
_DROPPED = "dropped because the prompt alone fills max_length; the trainer drops the row too"


@dataclass(order=True)
class _Candidate:
    """A row that may be an outlier. The larger its `rank`, the stronger the outlier."""

    rank: float
    row: int
    value: float = field(compare=False)
    prompt_ids: list[int] = field(compare=False)
    completions: dict[str, list[int]] = field(compare=False)
    images: tuple[RowImage, ...] = field(compare=False)


class _Means:
    """The margins and per-token mean log-probs of the rows added so far, and the strongest outliers of each kind."""

    def __init__(self) -> None:
        self._values: dict[str, list[npt.NDArray[np.float64]]] = {}
        self._outliers: dict[str, list[_Candidate]] = {}

    def add(self, rows: TokenizedRows, join: Join, usable: npt.NDArray[np.bool_]) -> None:
        good = np.flatnonzero(usable & np.logical_and.reduce([count > 0 for count in join.tokens.values()]))
        if not len(good):
            return
        sums = {}
        for (column, tokens), logps in zip(join.tokens.items(), join.logps.values(), strict=True):
            name = column.removesuffix("_ids")
            sums[name] = logps[good].astype(np.float64)
            means = sums[name] / tokens[good]
            self._values.setdefault(name, []).append(means)
            self._offer(f"lowest mean log-prob of {name}", means, -means, rows, good)
        if "chosen" in sums:
            margins = sums["chosen"] - sums["rejected"]
            self._values.setdefault("margin", []).append(margins)
            self._offer(_REJECTED, margins, -margins, rows, good)
            self._offer(_CHOSEN, margins, margins, rows, good)

    def histograms(self) -> dict[str, dict[str, list[Any]]]:
        found: dict[str, dict[str, list[Any]]] = {}
        for name, parts in self._values.items():
            bars = histograms({name: np.concatenate(parts)}, zero=name == "margin")
            found[name] = {"edges": bars.edges, "counts": bars.counts[name]}
        return found

    def outliers(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        return [
            {
                "row": found.row,
                "why": why,
                "value": found.value,
                "prompt": _text(found.prompt_ids, tokenizer),
                "completions": {name: _text(ids, tokenizer) for name, ids in found.completions.items()},
                "images": [small for image in found.images if (small := thumbnail(image))],
            }
            for why, best in self._outliers.items()
            for found in best
        ]

    def _offer(
        self,
        why: str,
        values: npt.NDArray[np.float64],
        ranks: npt.NDArray[np.float64],
        rows: TokenizedRows,
        good: npt.NDArray[np.int64],
    ) -> None:
        """Keep the rows with the highest positive ranks of those added so far."""
        best = self._outliers.setdefault(why, [])
        least = best[-1].rank if len(best) == _OUTLIERS else 0.0
        for place in np.argsort(-ranks)[:_OUTLIERS]:
            if ranks[place] > least:
                at = int(good[place])
                row = rows.table.slice(at, 1).to_pylist()[0]
                completions = {n.removesuffix("_ids"): ids for n, ids in row.items() if n not in ("row", "prompt_ids")}
                images = rows.images[at][:_IMAGES] if rows.images else ()
                rank, value = float(ranks[place]), float(values[place])
                best.append(_Candidate(rank, row["row"], value, row["prompt_ids"], completions, images))
        self._outliers[why] = heapq.nlargest(_OUTLIERS, best)


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode token ids to text: at most _TEXT // 2 text tokens, and at most _TEXT characters.

    Each run of consecutive image token ids is replaced with one short placeholder.
    """
    found, left = "", _TEXT // 2
    for is_image, run in groupby(ids, key=lambda token: token >= FIRST_IMAGE_ID):
        tokens = list(run)
        found += image_text(len(tokens)) if is_image else str(tokenizer.decode(tokens[:left]))
        left -= 0 if is_image else len(tokens[:left])
    return found[:_TEXT]


def write_result(
    dataset: TokenizedWindows,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
    snapshot: Snapshot,
    settings: TrainerSettings,
    problems: dict[int, str],
    result: Path,
    report: Path,
    check: Callable[[], None],
) -> None:
    """Write a job's result and report. Each file appears under its final name only when it is complete.

    The result has one row for each row of the dataset, in dataset order. If the job's format is kto, each tokenized
    preference pair has two rows with the same row number. The result's columns are:

    - `row`: row number in the dataset, starting at 0 (int64).
    - For each completion: the key (16-byte binary), the sum of its log-probs (float32, nats) and the number of log-probs in
      this sum (int64).
    - `error`: reason why the row has no values (string), or null if it has values.

    The file's metadata has two entries, as in files written by `reflogp join`. `reflogp` contains the reference, the snapshot
    and the job's settings. `reflogp.coverage` contains the number of rows, the number of rows with values, and the coverage:
    the share of rows with values among all rows that are not dropped.

    Args:
        load_tokenizer: returns the tokenizer that turns the outliers' token ids into text.
        problems: dict from row number to the reason why the row has no values.
        check: called for each group of rows; raises an error to stop the job.
    """
    means, dropped, named = _Means(), 0, []
    rows_in_all, written = 0, 0
    writer: pq.ParquetWriter | None = None
    with write_atomically(result) as partial:
        try:
            for window, unread in _windows(dataset):
                check()
                table = window.table
                join = join_logps(table, snapshot, **asdict(settings))
                rows = table["row"].to_numpy()
                bad = join.missing | join.unusable | np.fromiter((int(row) in problems for row in rows), bool, len(rows))
                means.add(window, join, ~bad & ~join.dropped)
                dropped += int(join.dropped.sum())
                errors: list[str | None] = [None] * len(table)
                for at in np.flatnonzero(bad | join.dropped):
                    errors[at] = _DROPPED if join.dropped[at] else problems.get(int(rows[at]), _NO_VALUE)
                named += [{"row": int(rows[at]), "error": errors[at]} for at in np.flatnonzero(bad)[:_NAMED]]
                named += [{"row": row, "error": problem} for row, problem in list(unread.items())[:_NAMED]]
                named = sorted(named, key=lambda entry: entry["row"])[:_NAMED]
                part = _result_rows(table, join, bad | join.dropped, errors, unread)
                if writer is None:
                    schema = part.schema.with_metadata({"reflogp": json.dumps(join_note(snapshot, settings))})
                    writer = pq.ParquetWriter(partial, schema, compression="zstd")
                writer.write_table(part)
                rows_in_all += len(part)
                written += part["error"].null_count
            if writer is not None:
                counts = {"rows": rows_in_all, "written": written, "coverage": written / max(1, rows_in_all - dropped)}
                writer.add_key_value_metadata({"reflogp.coverage": json.dumps(counts)})
                writer.close()
        finally:
            if writer is not None:
                writer.close()
    outliers = means.outliers(load_tokenizer())
    found = {"histograms": means.histograms(), "outliers": outliers, "bad_rows": named, "dropped_rows": dropped}
    with write_atomically(report) as partial:
        partial.write_text(json.dumps(found), encoding="utf-8")


def _windows(dataset: TokenizedWindows) -> Iterator[tuple[TokenizedRows, dict[int, str]]]:
    """Yield each group of tokenized rows, with a dict from row number to problem for rows that are not in the group.

    Groups before the dataset's first readable row have no completion columns. These groups are not yielded, but their problems
    are yielded with the first group that has these columns.
    """
    unread: dict[int, str] = {}
    for window in dataset:
        unread |= window.problems
        if window.table.num_columns > 2:
            yield window, unread
            unread = {}


def _result_rows(
    table: pa.Table,
    join: Join,
    without: npt.NDArray[np.bool_],
    errors: list[str | None],
    unread: dict[int, str],
) -> pa.Table:
    references = completion_columns(table.column_names)
    more = len(unread)
    columns: dict[str, pa.Array] = {"row": pa.concat_arrays([one_array(table["row"]), pa.array(list(unread), pa.int64())])}
    for name, keys in join.keys.items():
        columns[name.replace("_ids", "_key")] = pa.concat_arrays([keys, pa.nulls(more, KEY_TYPE)])
    for name, reference in references.items():
        values = pa.array(join.logps[reference], pa.float32(), mask=without)
        tokens = pa.array(join.tokens[name], pa.int64(), mask=without)
        columns[reference] = pa.concat_arrays([values, pa.nulls(more, pa.float32())])
        columns[tokens_column(reference)] = pa.concat_arrays([tokens, pa.nulls(more, pa.int64())])
    columns["error"] = pa.array([*errors, *unread.values()], pa.string())
    rows = pa.table(columns)
    return rows if not more else rows.take(pc.sort_indices(rows, [("row", "ascending")]))
