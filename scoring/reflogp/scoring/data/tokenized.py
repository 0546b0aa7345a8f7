"""Tokenize a dataset in windows of rows, and optionally keep the token ids in a file for later passes.

A file of token ids is named after a digest of the dataset's content, the tokenizer's files, the format, the split and the
library versions. If all of these are the same in a later job, the service reads the file instead of tokenizing again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.row_process import RowLimits
from reflogp.scoring.data.shape import Format
from reflogp.scoring.data.tokenize import TokenizedRows, tokenize_dataset
from reflogp.scoring.vision import VisionProcessor


class StoppedError(Exception):
    """The iteration was stopped by TokenizedDataset.stop."""


class TokenizedDataset:
    """The rows of a dataset as token ids. The object can be iterated over any number of times.

    Args:
        source: the dataset.
        load: function that returns the tokenizer. It is called at most once, before the first row is tokenized.
        form: the dataset's format; None to detect it.
        kept: path of a file for the token ids; None for no file. If the file exists, token ids are read from it; otherwise, the
            first complete pass writes the file. The file's name must come from `cache_name`, so that the file cannot belong to
            a different dataset. The file does not contain the rows' original columns. The file is not written if a row reached
            a time or memory limit, because the row may be usable with a different limit. It is also not written if rows have
            images, because the file's name does not depend on the content of image files.
        unchanged: function that must raise an error if the dataset's content may have changed since its digest was computed
            (see `cache_name`). It is called after each pass over `source`. If it raises an error, the iteration raises this
            error, and the file is not kept.
        limits: limits for tokenizing a row; None for the defaults.
        check: function that is called while rows are tokenized (see `tokenize_dataset`). It can stop the work by raising an
            error.
        load_vision: function that loads the model's image processor, for pairs with images; see `tokenize_dataset`.

    Attributes:
        source: the argument `source`.
    """

    def __init__(
        self,
        source: RowSource,
        load: Callable[[], PreTrainedTokenizerBase],
        form: Format | None = None,
        kept: Path | None = None,
        *,
        unchanged: Callable[[], None] = lambda: None,
        limits: RowLimits | None = None,
        check: Callable[[], None] | None = None,
        load_vision: Callable[[], VisionProcessor | None] | None = None,
    ) -> None:
        self._load_vision = load_vision
        self._unchanged = unchanged
        self.source = source
        self._load = load
        self._form = form
        self._kept = kept
        self._limits = limits
        self._check_given = check
        self._stopped = threading.Event()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The dataset's tokenizer, which is loaded on first use."""
        return self._load()

    def only(self, numbers: Iterable[int]) -> TokenizedDataset:
        """Return a view that contains only the rows with these numbers (see RowSource.only).

        The view does not use a file of token ids. The method `stop` of this object does not stop the view's iterations.
        """
        return TokenizedDataset(
            self.source.only(numbers),
            lambda: self.tokenizer,
            self._form,
            unchanged=self._unchanged,
            limits=self._limits,
            check=self._check_given,
            load_vision=self._load_vision,
        )

    def stop(self) -> None:
        """Stop all iterations that tokenize rows, in any thread: the current iterations and all later ones raise StoppedError.

        Iterations that read token ids from a file are not stopped.
        """
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError
        if self._check_given is not None:
            self._check_given()

    def count(self) -> int:
        """Return the number of rows, including unreadable rows."""
        if self._kept is not None and self._kept.is_file():
            with pa.memory_map(str(self._kept)) as file:
                reader = pa.ipc.open_file(file)
                last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
                return int(last.custom_metadata[b"last_row"]) + 1
        return self.source.count()

    def __iter__(self) -> Iterator[TokenizedRows]:
        if self._kept is None:
            return self._tokenized()
        if not self._kept.is_file():
            return self._tokenized_and_kept(self._kept)
        return _read(self._kept)

    def _tokenized(self) -> Iterator[TokenizedRows]:
        yield from tokenize_dataset(
            self.source, self.tokenizer, self._form, limits=self._limits, check=self._check, load_vision=self._load_vision
        )
        self._unchanged()

    def _tokenized_and_kept(self, kept: Path) -> Iterator[TokenizedRows]:
        kept.parent.mkdir(parents=True, exist_ok=True)
        delete_abandoned(kept.parent)
        with _partial(kept) as partial:
            yield from self._written(partial, kept)

    def _written(self, partial: Path, kept: Path) -> Iterator[TokenizedRows]:
        writer: pa.RecordBatchFileWriter | None = None
        problems: dict[int, str] = {}
        complete = True
        try:
            for window in self._tokenized():
                problems |= window.problems
                complete &= not window.limited and window.vision is None
                if window.table.num_columns > 2:  # a window before the first readable row has no completion columns
                    if writer is None:
                        options = pa.ipc.IpcWriteOptions(compression="lz4")
                        writer = pa.ipc.new_file(str(partial), window.table.schema, options=options)
                    [batch] = window.table.combine_chunks().to_batches() or [_empty_batch(window.table.schema)]
                    note = {
                        "problems": json.dumps(problems),
                        "last_row": str(window.last_row),
                        "notes": json.dumps(window.notes),
                    }
                    writer.write_batch(batch, custom_metadata=note)
                    problems = {}
                yield window
            if writer is not None:
                writer.close()
                if complete:
                    partial.replace(kept)
        finally:
            if writer is not None:
                writer.close()


class RowCount:
    """The number of a dataset's rows, which is counted in another thread, because text files must be read to their end for it.

    Attributes:
        rows: number of rows, including unreadable rows; None while it is not known.
    """

    def __init__(self, dataset: TokenizedDataset) -> None:
        self.rows: int | None = None
        self._dataset = dataset
        threading.Thread(target=self._count, name="reflogp-count", daemon=True).start()

    def _count(self) -> None:
        with suppress(Exception):  # the thread that reads the rows raises the error
            self.rows = self._dataset.count()


def cache_name(dataset_digest: str, tokenizer_digest: str, form: Format | None, split: str) -> str:
    """Return the name of the file for token ids: a digest of everything that the token ids depend on."""
    content = {
        "dataset": dataset_digest,
        "tokenizer": tokenizer_digest,
        "form": form,
        "split": split,
        "versions": {name: version(name) for name in ("reflogp", "transformers", "tokenizers")},
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16, person=b"reflogp.tok.v3")
    return f"{digest.hexdigest()}.arrow"


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used files of token ids until the remaining files use at most `max_bytes`."""
    files = sorted(folder.glob("*.arrow"), key=lambda file: file.stat().st_mtime, reverse=True)
    kept = 0
    for file in files:
        kept += file.stat().st_size
        if kept > max_bytes:
            file.unlink(missing_ok=True)


def delete_abandoned(folder: Path) -> None:
    """Delete the incomplete files of token ids that killed processes have left in a folder.

    A file that a running process is still writing is locked, and is not deleted.
    """
    for partial in folder.glob(".*.partial"):
        with suppress(OSError):  # the file is locked, or was renamed a moment ago
            descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def _partial(kept: Path) -> Iterator[Path]:
    """Yield the path of a new file next to `kept`.

    The file is locked during the `with` block. After the block, the file is deleted unless the block has renamed it.
    """
    while True:
        partial = kept.with_name(f".{kept.name}.{uuid.uuid4().hex[:8]}.partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not partial.exists():  # another process deleted the file before it was locked
                continue
            yield partial
            return
        finally:
            partial.unlink(missing_ok=True)
            os.close(descriptor)


def _read(kept: Path) -> Iterator[TokenizedRows]:
    os.utime(kept)
    with pa.memory_map(str(kept)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch_with_custom_metadata(number)
            note = batch.custom_metadata
            problems = {int(row): problem for row, problem in json.loads(note[b"problems"]).items()}
            notes = tuple(json.loads(note[b"notes"]))
            yield TokenizedRows(pa.Table.from_batches([batch.batch]), [], problems, int(note[b"last_row"]), notes=notes)


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
