"""A job's dataset: its rows as token ids, which are kept in a file for later passes and later jobs.

A file of token ids is named after a digest of the dataset's content, the tokenizer's files, the format, the split and the
library versions. If all of these are the same in a later job, the file is read instead of the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from reflogp.scoring.data.images import ImageFile
from reflogp.scoring.data.shape import Format
from reflogp.scoring.data.tokenize import StoppedError, TokenizedRows
from reflogp.scoring.vision import VisionProcessor
from reflogp.service.runner.reader import Reading, count_rows, read_rows

#: Versions of the libraries that token ids depend on; read by the fork server, once for all jobs.
_VERSIONS = {name: version(name) for name in ("reflogp", "transformers", "tokenizers")}


@dataclass(eq=False)
class JobDataset:
    """The rows of a job's dataset as token ids, as another process reads them; see TokenizedWindows."""

    reading: Reading
    #: File for the token ids, named by `cache_name`. If it exists, it is read; otherwise, the first complete pass writes it. It
    #: is not written if a row reached a limit, because the row may be usable with another limit, and if rows have images,
    #: because the file's name does not depend on the content of image files.
    kept: Path
    #: Raises an error if the content may have changed since its digest was computed. Called after each pass over the dataset.
    unchanged: Callable[[], None]
    load_vision: Callable[[], VisionProcessor | None]  # loads the model's image processor
    check: Callable[[], None]  # called while rows are read; raises an error to stop the reading
    names_image_files: bool = False  # whether a row that was read so far names an image file
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Stop all iterations that read the dataset, in any thread."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError
        self.check()

    def count(self) -> int | None:
        if not self.kept.is_file():
            return count_rows(self.reading, self._check)
        with pa.memory_map(str(self.kept)) as file:
            reader = pa.ipc.open_file(file)
            last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
            last_row: int = json.loads(last.custom_metadata[b"window"])["last_row"]
            return last_row + 1

    def __iter__(self) -> Iterator[TokenizedRows]:
        return _read(self.kept) if self.kept.is_file() else self._tokenized_and_kept()

    def only(self, numbers: Iterable[int]) -> Iterator[TokenizedRows]:
        """Yield the windows of the rows with these numbers."""
        rows = frozenset(numbers)
        if not self.kept.is_file():
            yield from read_rows(replace(self.reading, only=rows), self._check, self.load_vision)
            self.unchanged()
            return
        for window in _read(self.kept):
            wanted = pc.is_in(window.table["row"], pa.array(rows, pa.int64()))
            yield replace(window, table=window.table.filter(wanted))

    def _tokenized_and_kept(self) -> Iterator[TokenizedRows]:
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        partial = self.kept.with_name(f".{self.kept.name}.{uuid.uuid4().hex[:8]}.partial")
        writer: pa.RecordBatchFileWriter | None = None
        problems: dict[int, str] = {}
        complete = True
        try:
            for window in read_rows(self.reading, self._check, self.load_vision):
                problems |= window.problems
                complete &= not window.limited and window.vision is None
                files = (isinstance(image.source, ImageFile) for of_row in window.images for image in of_row)
                self.names_image_files = self.names_image_files or any(files)
                if window.table.num_columns > 2:  # a window before the first readable row has no completion columns
                    if writer is None:
                        options = pa.ipc.IpcWriteOptions(compression="lz4")
                        writer = pa.ipc.new_file(str(partial), window.table.schema, options=options)
                    empty = pa.RecordBatch.from_pylist([], schema=window.table.schema)
                    [batch] = window.table.combine_chunks().to_batches() or [empty]
                    head = {"last_row": window.last_row, "notes": window.notes, "labels": window.labels}
                    writer.write_batch(batch, custom_metadata={"window": json.dumps({**head, "problems": problems})})
                    problems = {}
                yield window
            self.unchanged()
            if writer is not None:
                writer.close()
                if complete:
                    partial.replace(self.kept)
        finally:
            if writer is not None:
                writer.close()
            partial.unlink(missing_ok=True)


def cache_name(dataset_digest: str, tokenizer_digest: str, form: Format | None, split: str) -> str:
    """Return the name of the file for token ids: a digest of everything that the token ids depend on."""
    content = {
        "dataset": dataset_digest,
        "tokenizer": tokenizer_digest,
        "form": form,
        "split": split,
        "versions": _VERSIONS,
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16, person=b"reflogp.tok.v5")
    return f"{digest.hexdigest()}.arrow"


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used files of token ids until the remaining files use at most `max_bytes`."""
    found = []
    for file in folder.glob("*.arrow"):
        with suppress(FileNotFoundError):  # another worker has just deleted the file
            about = file.stat()
            found.append((about.st_mtime, about.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > max_bytes:
            file.unlink(missing_ok=True)


def _read(kept: Path) -> Iterator[TokenizedRows]:
    os.utime(kept)
    with pa.memory_map(str(kept)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch_with_custom_metadata(number)
            head, table = json.loads(batch.custom_metadata[b"window"]), pa.Table.from_batches([batch.batch])
            problems = {int(row): problem for row, problem in head["problems"].items()}
            yield TokenizedRows(table, [], problems, head["last_row"], notes=tuple(head["notes"]), labels=head["labels"])
