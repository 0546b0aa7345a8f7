"""A dataset as token ids, window by window; tokenised once and kept, where a folder for that is given.

Knows when two tokenisations are the same: by the dataset's content, the tokenizer's files and the format, never by names.
Called by the command line (nothing kept) and by the service's workers (kept, so that a second job or a restarted one tokenises
nothing).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.row_process import RowLimits
from reflogp.scoring.data.shape import Format
from reflogp.scoring.data.tokenize import TokenizedRows, tokenize_dataset


class StoppedError(Exception):
    """Nobody wants the rows any more."""


class TokenizedDataset:
    """Rows of a dataset as token ids, any number of times.

    Args:
        source: the rows.
        load: gives the tokenizer; called when something must be tokenised.
        form: the dataset's format; None finds it.
        kept: a file that holds the token ids when it is there, and is written on the first complete pass when it is not.
            Name it by `kept_name`, so that it cannot be another dataset's. Rows as they were read are not kept. Nothing is
            kept when a row reached a limit of time or memory, because the row may be usable under another limit.
        unchanged: called behind each pass over `source`, before its tokens are kept; raises when what was read may be something
            else than what `kept` is named by.
        limits: what tokenising a row may take; None for the defaults.
        check: called many times a second while rows are read and tokenised; raises to stop.
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
    ) -> None:
        self._unchanged = unchanged
        self._source = source
        self._load = load
        self._form = form
        self._kept = kept
        self._limits = limits
        self._check_given = check
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End iterations, of other threads, with StoppedError: at once where they tokenise."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError
        if self._check_given is not None:
            self._check_given()

    def count(self) -> int:
        """Rows in all, readable or not."""
        if self._kept is not None and self._kept.is_file():
            with pa.memory_map(str(self._kept)) as file:
                return int(pa.ipc.open_file(file).schema.metadata[b"rows"])
        return self._source.count()

    def __iter__(self) -> Iterator[TokenizedRows]:
        if self._kept is None:
            return self._tokenized()
        return _read(self._kept) if self._kept.is_file() else self._tokenized_and_kept(self._kept)

    def _tokenized(self) -> Iterator[TokenizedRows]:
        yield from tokenize_dataset(self._source, self._load(), self._form, limits=self._limits, check=self._check)
        self._unchanged()

    def _tokenized_and_kept(self, kept: Path) -> Iterator[TokenizedRows]:
        kept.parent.mkdir(parents=True, exist_ok=True)
        forget_abandoned(kept.parent)
        with _partial(kept) as partial:
            yield from self._written(partial, kept)

    def _written(self, partial: Path, kept: Path) -> Iterator[TokenizedRows]:
        rows = self._source.count()
        writer: pa.RecordBatchFileWriter | None = None
        problems: dict[int, str] = {}
        limited = False
        try:
            for window in self._tokenized():
                problems |= window.problems
                limited |= window.limited
                if window.table.num_columns > 2:  # a window before the first readable row has no completions yet
                    if writer is None:
                        schema = window.table.schema.with_metadata({"rows": str(rows)})
                        writer = pa.ipc.new_file(str(partial), schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
                    [batch] = window.table.combine_chunks().to_batches() or [_empty_batch(window.table.schema)]
                    note = {"problems": json.dumps(problems), "last_row": str(window.last_row)}
                    writer.write_batch(batch, custom_metadata=note)
                    problems = {}
                yield window
            if writer is not None:
                writer.close()
                if not limited:
                    partial.replace(kept)
        finally:
            if writer is not None:
                writer.close()


def kept_name(dataset_digest: str, tokenizer_digest: str, form: Format | None, split: str) -> str:
    """The file name of a tokenisation: a digest of all that it depends on."""
    content = {
        "dataset": dataset_digest,
        "tokenizer": tokenizer_digest,
        "form": form,
        "split": split,
        "versions": {name: version(name) for name in ("reflogp", "transformers", "tokenizers")},
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16, person=b"reflogp.tok.v2")
    return f"{digest.hexdigest()}.arrow"


def forget_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the tokenisations that were least recently used until the rest is within a size."""
    files = sorted(folder.glob("*.arrow"), key=lambda file: file.stat().st_mtime, reverse=True)
    kept = 0
    for file in files:
        kept += file.stat().st_size
        if kept > max_bytes:
            file.unlink(missing_ok=True)


def forget_abandoned(folder: Path) -> None:
    """Delete what killed processes left half written. A process holds a lock on the file that it writes, until it ends."""
    for partial in folder.glob(".*.partial"):
        with suppress(OSError):  # it is locked, or became whole just now
            descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def _partial(kept: Path) -> Iterator[Path]:
    """A new file beside `kept`, locked while the block writes it, and deleted at its end unless it was renamed."""
    while True:
        partial = kept.with_name(f".{kept.name}.{uuid.uuid4().hex[:8]}.partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not partial.exists():  # taken for an abandoned one before it was locked
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
            yield TokenizedRows(pa.Table.from_batches([batch.batch]), [], problems, int(note[b"last_row"]))


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
