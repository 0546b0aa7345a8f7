"""Read and tokenize a job's dataset in a process with limits, because somebody else has written the dataset.

A file of a few kilobytes can expand to any size, a damaged file can crash a library, and a chat template is a program that can
run for ever. So one process reads, decodes and tokenizes the rows with the same code as `reflogp score`, and sends windows of
token ids. It may take a limited amount of memory, and a limited processor time for each row. If it is killed by a limit or
crashes, another one continues after the last window. It tokenizes one row at a time and says which; a row at which it ends is a
bad row, and the next process continues without it.

This process believes only the form of what it receives: messages of limited length that hold valid Arrow data.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - imported by the fork server, so that no process has to
import psutil
import pyarrow as pa

from reflogp.scoring.data.images import ImageFile, OpenFile, RowImage
from reflogp.scoring.data.read import Row, RowSource
from reflogp.scoring.data.shape import Format, RowError
from reflogp.scoring.data.tokenize import TokenizedRows, tokenize_dataset
from reflogp.scoring.data.tokenizer_files import read_tokenizer_files
from reflogp.scoring.errors import DatasetError, TokenizerError
from reflogp.scoring.machine import usable_cores
from reflogp.scoring.vision import VisionProcessor, load_processor
from reflogp.service.confined_paths import image_below
from reflogp.service.runner.limited import MOST_THREADS, ProcessEndedError, messages
from reflogp.store import FileChangedError, ReflogpError, UsageError
from reflogp.store.schema import stream_bytes
from reflogp.store.texts import shortened

#: Maximum number of rows that may reach the limit of processor time. After that the chat template or the whole dataset is the
#: cause.
SLOW_ROWS = 20
#: Seconds of processor time for reading a row, and for several rows that are tokenized together. The first row of a Parquet row
#: group takes as long as the whole group.
_MANY_SECONDS = 120.0
_ERRORS = {error.__name__: error for error in (DatasetError, TokenizerError, UsageError, FileChangedError)}
_IMAGES = pa.list_(
    pa.struct(
        [
            ("digest", pa.binary()),
            ("width", pa.int64()),
            ("height", pa.int64()),
            ("mode", pa.string()),
            ("content", pa.large_binary()),
            ("path", pa.string()),
            ("key", pa.binary()),
            ("size", pa.int64()),
        ]
    )
)


@dataclass(frozen=True)
class Reading:
    """What the process reads, and its limits."""

    file: str
    split: str
    form: Format | None  # None: it is detected
    root: str | None  # folder that the paths of images must not lead out of; None if rows may not name image files
    dataset: str  # path of the dataset, against whose folder the paths of images are resolved
    model: str  # folder of the model whose tokenizer and image processor are used
    trust_remote_code: bool
    tokenizer_digest: str
    row_seconds: float  # processor time for a row
    memory: int  # bytes, in addition to the memory that the libraries take
    folder: str | None = None  # for temporary files
    only: frozenset[int] | None = None  # numbers of the rows to read; None for all rows

    def open_image(self) -> OpenFile:
        """Return the function that opens the image files that rows name."""
        return _no_files if self.root is None else image_below(Path(self.root), Path(self.dataset))


def default_memory() -> int:
    """Return the default of `Reading.memory`: 8 GiB, or half of the machine's memory if that is less, but at least 2 GiB.

    `datasets` allocates 1.3 GB to find out that an Arrow file is no stream.
    """
    return max(2 << 30, min(8 << 30, int(psutil.virtual_memory().total) // 2))


def read_rows(
    reading: Reading,
    check: Callable[[], None],
    load_vision: Callable[[], VisionProcessor | None],
) -> Iterator[TokenizedRows]:
    """Yield a dataset's windows, as `tokenize_dataset` yields them, without the rows' original columns.

    Args:
        check: function that is called about ten times a second. It can stop the reading by raising an error.
        load_vision: loads the image processor in this process, once, if the dataset has images.

    Raises:
        DatasetError, TokenizerError: see `tokenize_dataset`; also if SLOW_ROWS rows took too long, or if a process ended twice
            at the same place where it was at no row.
        FileChangedError: the tokenizer's files have changed since their digest was computed.
    """
    with tempfile.TemporaryDirectory(prefix="reflogp-") as folder:  # a process that is killed cannot delete its files
        yield from _read_on(replace(reading, folder=folder), check, load_vision)


def _read_on(
    reading: Reading, check: Callable[[], None], load_vision: Callable[[], VisionProcessor | None]
) -> Iterator[TokenizedRows]:
    after, alone, bad, slow, ended_after = -1, False, dict[int, str](), 0, -2
    vision: VisionProcessor | None = None
    while True:
        row = None
        try:
            with closing(messages(_read, reading, after, alone, bad, memory=reading.memory, check=check)) as received:
                for message in received:
                    head, body = _parts(message)
                    if "row" in head:
                        row = head["row"]
                        continue
                    vision = vision or (load_vision() if head["has_images"] else None)
                    window = _window(head, body, vision, reading.open_image())
                    yield window
                    after, row = window.last_row, None
            return
        except ProcessEndedError as end:
            if row is not None and (alone or end.timed_out):
                bad[row] = _why(end, reading)
                slow += end.timed_out
            elif alone and after == ended_after:
                rows = f"the rows after row {after}" if after >= 0 else "its first rows"
                raise DatasetError(f"{reading.file}: reading {rows} {end}") from None
            else:
                alone = True
            ended_after = after
            if slow == SLOW_ROWS:
                raise DatasetError(
                    f"{slow} rows took more than {reading.row_seconds:g} s of processor time each: check the chat template "
                    "first, then the content of the dataset's rows"
                ) from None


def count_rows(reading: Reading, check: Callable[[], None]) -> int | None:
    """Return the number of rows (see RowSource.count_unless_in_memory). Raises DatasetError, or ProcessEndedError."""
    with tempfile.TemporaryDirectory(prefix="reflogp-") as folder:
        counted = replace(reading, folder=folder)
        with closing(messages(_count, counted, memory=reading.memory, check=check)) as received:
            head, _ = _parts(next(received))
    count: int | None = head["count"]
    return count


def _why(end: ProcessEndedError, reading: Reading) -> str:
    if end.timed_out:
        return f"tokenizing the row took more than {reading.row_seconds:g} s of processor time"
    return f"tokenizing the row {end}"


def _parts(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a message's header and body. Raises the error that the header names."""
    head, _, body = message.partition(b"\n")
    found = json.loads(head)
    if "error" in found:
        raise _ERRORS.get(found["error"], ReflogpError)(found["text"])
    return found, body


def _window(head: dict[str, Any], body: bytes, vision: VisionProcessor | None, open_file: OpenFile) -> TokenizedRows:
    table = pa.ipc.open_stream(body).read_all()
    table.validate(full=True)  # invalid offsets would expose other memory of this process
    images: list[tuple[RowImage, ...]] = []
    if head["has_images"]:
        images = [tuple(_image(image, open_file) for image in of_row) for of_row in table["images"].to_pylist()]
        table = table.drop_columns("images")
    problems = {int(row): shortened(problem) for row, problem in head["problems"].items()}
    return TokenizedRows(
        table,
        [],
        problems,
        head["last_row"],
        head["limited"],
        images,
        vision if head["has_images"] else None,
        tuple(head["notes"]),
        head["labels"],
    )


def _image(image: dict[str, Any], open_file: OpenFile) -> RowImage:
    source = image["content"] or ImageFile(image["path"], image["key"], image["size"], open_file)
    return RowImage(image["digest"], ((image["width"], image["height"]), image["mode"]), source)


# In the process


def _read(connection: Connection, reading: Reading, after: int, alone: bool, bad: dict[int, str]) -> None:
    """Send the windows after row `after`, and the number of each row before it is tokenized. Rows in `bad` are left out."""
    os.environ["RAYON_NUM_THREADS"] = str(min(usable_cores(), MOST_THREADS))

    def begin(row: int | None) -> None:
        _send(connection, {"row": row})
        signal.setitimer(signal.ITIMER_PROF, _MANY_SECONDS if row is None else reading.row_seconds)

    with _errors_sent(connection):
        source = _Rows(reading, bad)
        tokenizer = read_tokenizer_files(reading.model, reading.trust_remote_code)
        if tokenizer.digest != reading.tokenizer_digest:
            raise FileChangedError(f"the tokenizer's files in {tokenizer.folder} changed during the run; run again")
        windows = tokenize_dataset(
            source,
            tokenizer.load(),
            reading.form,
            begin=begin,
            alone=alone,
            after=after,
            load_vision=lambda: load_processor(reading.model, reading.model, None, reading.trust_remote_code),
        )
        for window in windows:
            table = window.table
            if window.vision is not None:
                table = table.append_column("images", pa.array([list(map(_fields, row)) for row in window.images], _IMAGES))
            head = {
                "problems": window.problems,
                "last_row": window.last_row,
                "limited": window.limited or bool(bad),
                "has_images": window.vision is not None,
                "notes": window.notes,
                "labels": window.labels,
            }
            _send(connection, head, stream_bytes(table))


def _count(connection: Connection, reading: Reading) -> None:
    with _errors_sent(connection):
        _send(connection, {"count": _Rows(reading, {}).count_unless_in_memory()})


class _Rows(RowSource):
    """The dataset's rows. A row in `bad` is unreadable."""

    def __init__(self, reading: Reading, bad: dict[int, str]) -> None:
        def check() -> None:
            signal.setitimer(signal.ITIMER_PROF, _MANY_SECONDS)

        check()
        tempfile.tempdir = reading.folder
        super().__init__(
            reading.file,
            reading.split,
            confined=True,
            check=check,
            open_image=reading.open_image(),
            is_fetched=reading.root is None,
        )
        self._bad, self._numbers = bad, reading.only

    def __iter__(self) -> Iterator[Row]:
        for row in super().__iter__():
            yield Row(row.number, None, self._bad[row.number]) if row.number in self._bad else row


@contextmanager
def _errors_sent(connection: Connection) -> Iterator[None]:
    """Send an error to the other process instead of raising it."""
    try:
        yield
    except tuple(_ERRORS.values()) as error:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        _send(connection, {"error": kind, "text": shortened(str(error))})


def _send(connection: Connection, head: dict[str, Any], body: bytes = b"") -> None:
    connection.send_bytes(json.dumps(head).encode() + b"\n" + body)


def _fields(image: RowImage) -> dict[str, Any]:
    (width, height), mode = image.kind
    found = {"digest": image.digest, "width": width, "height": height, "mode": mode}
    if isinstance(image.source, ImageFile):
        return found | {"path": image.source.path, "key": image.source.key, "size": image.source.size}
    return found | {"content": image.encoded()}


def _no_files(path: str) -> int:
    raise RowError(
        "the row names an image file, but an uploaded or fetched dataset must contain its images as bytes or data URIs"
    )
