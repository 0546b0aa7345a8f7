"""Load a tokenizer, and tokenize datasets exactly as TRL does, so that their rows have the keys that a TRL trainer computes.

Callers can choose a tokenizer other than the model's, and a chat template other than the tokenizer's. This module does not
import trl.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.encode import tokenize_rows
from reflogp.scoring.data.images import OpenFile, RowImage, read_images
from reflogp.scoring.data.read import Row, RowSource, batched
from reflogp.scoring.data.shape import (
    Format,
    RowError,
    RowLimitError,
    Tokens,
    dataset_notes,
    detect_format,
    output_columns,
    token_row,
)
from reflogp.scoring.data.tokenizer_files import read_tokenizer_files
from reflogp.scoring.errors import DatasetError, TokenizerError
from reflogp.scoring.vision import VisionProcessor, load_processor
from reflogp.store import UsageError, resolve_model
from reflogp.store.images import IMAGE_COLUMNS
from reflogp.store.texts import shortened, shortened_names

#: Dict from each accepted value of a row's `label`, as lowercase text, to 1 (desirable) or 0 (undesirable). Labels from CSV
#: files are text. Labels from pandas can be floats, because pandas converts a column of integers to floats if values are
#: missing.
_LABELS = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
NO_LABEL = -1


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of a dataset as token ids.

    Attributes:
        table: table with the columns `row` (row number in the dataset, int64) and `prompt_ids`, and one column for each
            completion: `chosen_ids` and `rejected_ids` for pairs that are not read as KTO data, otherwise `completion_ids` and,
            in some datasets, `KL_completion_ids`. Columns of token ids have the type list<int64>.
        rows: original columns of each row of the table; empty in a service's jobs.
        labels: for rows with `completion_ids`, the KTO label of each row of the table: 1, 0 or NO_LABEL.
        problems: dict from row number to the reason why the row, or one of its examples, is not in the table.
        last_row: number of the last row that was read, even if that row is not usable.
        images: the images of each row of the table; empty for a text-only dataset.
        notes: sentences about the dataset that a user should read; in the first window with a readable row.
    """

    table: pa.Table
    rows: list[dict[str, Any]]
    problems: dict[int, str] = field(default_factory=dict)
    last_row: int = -1
    limited: bool = False
    images: list[tuple[RowImage, ...]] = field(default_factory=list)
    vision: VisionProcessor | None = None
    notes: tuple[str, ...] = ()
    labels: list[int] = field(default_factory=list)

    def row_count(self) -> int:
        return len({*self.table["row"].to_pylist(), *self.problems})

    def tokens(self) -> int:
        return sum(pc.sum(pc.list_value_length(column)).as_py() or 0 for column in self.table.columns[1:])


def load_tokenizer(model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. If an adapter's folder has no tokenizer, load the base model's tokenizer."""
    return read_tokenizer_files(model, trust_remote_code).load()


def tokenize_dataset(
    source: RowSource,
    tokenizer: PreTrainedTokenizerBase | None,
    form: Format | None = None,
    window: int = 1024,
    *,
    begin: Callable[[int | None], None] = lambda row: None,
    alone: bool = False,
    after: int = -1,
    load_vision: Callable[[], VisionProcessor | None] | None = None,
) -> Iterator[TokenizedRows]:
    """Tokenize a dataset, `window` rows at a time, in bounded memory.

    Args:
        tokenizer: the reference model's tokenizer; may be None for the tokens format.
        form: "preference", "kto", "sft" or "tokens"; None to detect the format from the first row whose columns match a format.
        begin: function that is called with a row's number before work on this row alone begins, and with None before work on
            several rows begins. It can stop the work by raising an error.
        alone: tokenize every row by itself, so that `begin` always names the row; slower.
        after: number of the last row of a window. This window and earlier ones are read, but not tokenized and not yielded.
        load_vision: function that loads the model's image processor, for pairs with a column `image` or `images`. If the first
            rows have such a column, all rows are treated as pairs with images. If load_vision is None or returns None, rows
            that contain images are listed in TokenizedRows.problems.

    Raises:
        DatasetError: no row is readable; no row has columns that match the format (only the first window that contains readable
            rows is examined); or a column of images first appears in a later window of a stream.
        TokenizerError: the rows are text and `tokenizer` is None, or the tokenizer lacks a chat template or an EOS token that
            the rows need.
    """
    outputs: tuple[str, ...] | None = None
    why = "the dataset is empty"
    vision: VisionProcessor | None = None
    may_come = False
    notes: tuple[str, ...] = ()
    for rows in batched(source, window):
        if outputs is None and any(row.columns is not None for row in rows):
            form, outputs = _settle(form, [row.columns for row in rows if row.columns is not None])
            if form != "tokens":
                notes = dataset_notes([row.columns for row in rows if row.columns is not None], tokenizer)
                may_come = form == "preference" and not _have_images(rows)
                vision = load_vision() if form == "preference" and load_vision and not may_come else None
                if tokenizer is None and vision is None:
                    raise TokenizerError("text rows need a tokenizer")
        if outputs is None and rows[0].number == 0:
            why = f"row 0: {shortened(rows[0].problem or 'unreadable')}"
        if rows[-1].number <= after:
            notes = ()
            continue
        if form is None or outputs is None:
            problems = {row.number: shortened(row.problem or "") for row in rows}
            yield TokenizedRows(_table([], [], ()), [], problems, rows[-1].number)
            continue
        if may_come and _have_images(rows) and not (load_vision and load_vision()):
            may_come = False  # a model that reads text only
        if may_come and _have_images(rows):
            first = next(row.number for row in rows if _have_images([row]))
            raise DatasetError(
                f"row {first} is the first row of the stream with a column of images, but the rows before it were read as "
                "text; add a column named images, with an empty list, to the stream's first row"
            )
        done = _tokenize_window(rows, form, outputs, tokenizer, vision, source.open_image, begin, alone)
        yield replace(done, notes=notes)
        notes = ()
    if outputs is None:
        raise DatasetError(f"{source.name} has no readable row; {why}")


def _settle(form: Format | None, rows: list[dict[str, Any]]) -> tuple[Format, tuple[str, ...]]:
    """Return the dataset's format, and the names of the completion columns.

    They are determined by the first row whose columns match `form` (any format if `form` is None). If
    `form` is "kto", pairs match it too; if it is "sft", rows with a prompt and a completion do. If no row matches, raises
    DatasetError with the problem of the first row.
    """
    error: DatasetError | None = None
    for columns in rows:
        try:
            found = detect_format(columns)
            if form is not None and form != found and (form, found) not in (("kto", "preference"), ("sft", "kto")):
                raise DatasetError(
                    f"expected rows in the format {form!r}, but the columns {shortened_names(list(columns))} match {found!r}"
                )
            return form or found, output_columns(form or found, columns)
        except DatasetError as this:
            error = error or this
    assert error is not None
    raise error


def _have_images(rows: list[Row]) -> bool:
    return any(name in (row.columns or {}) for row in rows for name in IMAGE_COLUMNS)


def _tokenize_window(
    rows: list[Row],
    form: Format,
    outputs: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase | None,
    vision: VisionProcessor | None,
    open_image: OpenFile,
    begin: Callable[[int | None], None],
    alone: bool,
) -> TokenizedRows:
    problems: dict[int, str] = {}
    readable: list[Row] = []
    for row in rows:
        if row.columns is None:
            problems[row.number] = shortened(row.problem or "unreadable")
        else:
            readable.append(row)
    columns = [row.columns or {} for row in readable]

    def begin_at(at: int | None) -> None:
        begin(None if at is None else readable[at].number)

    opened = None if vision is None else read_images(columns, open_image, begin_at, alone)
    if form == "tokens":
        found = _token_rows(columns, outputs, begin_at)
    else:
        made_by: Any = tokenizer if vision is None else vision.tokens
        found = tokenize_rows(columns, form, made_by, opened, begin_at, alone)
    kept_images: list[tuple[RowImage, ...]] = []
    numbers: list[int] = []
    kept: list[dict[str, Any]] = []
    ids: list[Tokens] = []
    limited = False
    for at, (row, examples) in enumerate(zip(readable, found, strict=True)):
        for example in examples:
            if isinstance(example, RowError):
                problems[row.number] = shortened(str(example))
                limited |= isinstance(example, RowLimitError)
                continue
            numbers.append(row.number)
            kept.append(row.columns or {})
            ids.append(example)
            if opened is not None:
                of_row = opened[at]
                assert not isinstance(of_row, RowError)
                kept_images.append(of_row)
    table, sorted_problems = _table(numbers, ids, outputs), dict(sorted(problems.items()))
    labels = _labels(kept, numbers) if "completion_ids" in outputs else []
    return TokenizedRows(table, kept, sorted_problems, rows[-1].number, limited, kept_images, vision, labels=labels)


def _labels(rows: Sequence[dict[str, Any]], numbers: list[int]) -> list[int]:
    """Return the KTO labels of examples: 1, 0 or NO_LABEL.

    When pairs are split, the two examples of a pair are adjacent, and the example with the chosen completion comes first.
    """
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
            found.append(NO_LABEL)  # the pair's other example is missing, so this one may be chosen or rejected
    return found


def _token_rows(
    rows: list[dict[str, Any]], outputs: tuple[str, ...], begin: Callable[[int | None], None]
) -> list[list[Tokens | RowError]]:
    found: list[list[Tokens | RowError]] = []
    for at, columns in enumerate(rows):
        begin(at)
        try:
            found.append([token_row(columns, outputs)])
        except RowError as error:
            found.append([error])
    return found


def _table(numbers: list[int], ids: list[Tokens], outputs: tuple[str, ...]) -> pa.Table:
    columns = {"row": pa.array(numbers, pa.int64()), "prompt_ids": _lists([prompt for prompt, _ in ids])}
    columns |= {name: _lists([completions[i] for _, completions in ids]) for i, name in enumerate(outputs)}
    return pa.table(columns)


def _lists(parts: list[list[int]]) -> pa.ListArray:
    """Convert lists of token ids to an array of type list<int64>; several times faster than `pa.array`."""
    arrays = [np.zeros(0, np.int64), *(np.array(part, np.int64) for part in parts)]
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, parts)]), pa.int32()), pa.array(np.concatenate(arrays)))


def chosen_tokenizer(
    model: str, tokenizer: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer for a reference model."""
    folder = model if tokenizer is None else str(resolve_model(tokenizer, None, weights=False))
    template = None if chat_template is None else _text_of(chat_template)
    loaded = load_tokenizer(folder, trust_remote_code)
    if template is not None:
        loaded.chat_template = template
    return loaded


def chosen_processor(
    model: str, tokenizer: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> VisionProcessor | None:
    """Load the processor for pairs with images, or return None if the model accepts only text, or has no processor files."""
    folder = model if tokenizer is None else str(resolve_model(tokenizer, None, weights=False))
    template = None if chat_template is None else _text_of(chat_template)
    return load_processor(folder, model, template, trust_remote_code)


def _text_of(file: str) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise UsageError(f"--chat-template {file} is empty")
    return text


class StoppedError(Exception):
    """The iteration was stopped by the dataset's method `stop`."""


class TokenizedWindows(Protocol):
    """A dataset that a run scores: a TokenizedDataset, or one whose rows another process reads."""

    def __iter__(self) -> Iterator[TokenizedRows]: ...

    def count(self) -> int | None:
        """Return the number of rows, including unreadable rows, or None if it is not counted."""

    def only(self, numbers: Iterable[int]) -> Iterable[TokenizedRows]: ...

    def stop(self) -> None:
        """Stop all iterations, in any thread: they raise StoppedError."""


class TokenizedDataset:
    """The rows of a dataset as token ids. The object can be iterated over any number of times."""

    def __init__(
        self,
        source: RowSource,
        load: Callable[[], PreTrainedTokenizerBase],
        form: Format | None = None,
        *,
        load_vision: Callable[[], VisionProcessor | None] | None = None,
    ) -> None:
        self._load_vision = load_vision
        self.source = source
        self._load = load
        self._form = form
        self._stopped = threading.Event()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load()

    def only(self, numbers: Iterable[int]) -> TokenizedDataset:
        """Return a view of the rows with these numbers, whose iterations `stop` of this object does not stop."""
        return TokenizedDataset(self.source.only(numbers), lambda: self.tokenizer, self._form, load_vision=self._load_vision)

    def stop(self) -> None:
        self._stopped.set()

    def count(self) -> int | None:
        return self.source.count_unless_in_memory()

    def __iter__(self) -> Iterator[TokenizedRows]:
        return tokenize_dataset(
            self.source, self.tokenizer, self._form, begin=lambda row: self._check(), load_vision=self._load_vision
        )

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError


class RowCount:
    """The number of a dataset's rows, which is counted in another thread, because text files must be read to their end for it.

    `rows` is None while the number is not known, and for a JSON array, because the whole array would be in memory twice.
    """

    def __init__(self, dataset: TokenizedWindows) -> None:
        self.rows: int | None = None
        self._dataset = dataset
        threading.Thread(target=self._count, name="reflogp-count", daemon=True).start()

    def _count(self) -> None:
        with suppress(Exception):  # the thread that reads the rows raises the error
            self.rows = self._dataset.count()
