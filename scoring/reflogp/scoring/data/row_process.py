"""Tokenize rows in child processes that can be killed.

A chat template is a program that runs on each row. It can run forever or build a string of several terabytes, and Python cannot
interrupt a single string operation or tokenizer call. Therefore, rows are rendered and encoded in forked child processes, which
inherit the loaded tokenizer. The operating system limits the processor time of each row (ITIMER_PROF) and, on Linux, the memory
of the child (RLIMIT_AS). A row that exceeds a limit or crashes its child process is reported as a bad row. If the child has
ended, a new child continues with the remaining rows. The caller's `check` is called many times a second and can stop the work.

The processes exchange JSON and raw token ids over a socket pair. A child closes every inherited file except the socket and
standard error. The child opens only /dev/null and, on Linux, two files in /proc/self that it needs to set its limits.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import psutil

from reflogp.scoring.data.confined_process import POLL_SECONDS, SOCKET, STILL, ConfinedProcess
from reflogp.scoring.data.encode import TOO_MUCH_MEMORY, Tokens, encode, render
from reflogp.scoring.data.image_rows import image_row_tokens, prepare_child
from reflogp.scoring.data.images import RowImage
from reflogp.scoring.data.shape import (
    TEXT_COLUMNS,
    Format,
    RowError,
    RowLimitError,
    examples_of,
    require_text,
    require_text_and_images,
)
from reflogp.scoring.errors import DatasetError, TokenizerError
from reflogp.scoring.machine import usable_cores
from reflogp.store.images import ImageTokens
from reflogp.store.texts import shortened

#: Processor time limit for one row, in seconds.
ROW_SECONDS = 10.0
#: A pass over a dataset fails after this many rows have timed out, because the chat template or the whole dataset is then
#: assumed to be the cause.
SLOW_ROWS = 20
#: Bytes of memory that a child may use in addition to the memory that it inherits. On a machine with less than twice this
#: amount of memory, the limit is half of the machine's memory.
_MEMORY = 8 << 30
#: Maximum number of child processes for one pass. On a machine with fewer cores, the maximum is the number of cores.
_CHILDREN = 4
#: Maximum number of rows, and maximum number of bytes of JSON, in a chunk that is sent to a child. A row with more bytes is
#: sent in a chunk of its own.
_CHUNK_ROWS, _CHUNK_BYTES = 128, 1 << 18
#: Rows whose rendered text has at most this many characters are encoded in one batch with other rows, which is faster.
_TOGETHER = 1 << 17
#: Header of a message between a child and its parent: (number of bytes of JSON, number of bytes of token ids).
_LENGTHS = struct.Struct("<QQ")
#: Format of a number in memory that a child shares with its parent. The number is the index, in the chunk, of the row that the
#: child is processing.
_MARK = struct.Struct("<q")
#: Values of this number if no row has been started (_NO_ROW) and while several rows are encoded together (_SEVERAL).
_NO_ROW, _SEVERAL = -1, -2

Ids = npt.NDArray[np.int64]
#: A prompt and its completions as token ids.
TokenArrays = tuple[Ids, tuple[Ids, ...]]


@dataclass(frozen=True)
class RowLimits:
    """Resource limits for tokenizing rows.

    Attributes:
        seconds: seconds of processor time for one row.
        memory: bytes of memory that a child process may use in addition to the memory that it inherits.
        children: maximum number of child processes that run in parallel.
    """

    seconds: float = ROW_SECONDS
    memory: int = field(default_factory=lambda: min(_MEMORY, psutil.virtual_memory().total // 2))
    children: int = field(default_factory=lambda: min(_CHILDREN, usable_cores()))


class RowTokenizer:
    """A pool of child processes that tokenize the rows of one dataset.

    Use it as a context manager: on exit, it kills the child processes.

    Args:
        tokenizer: the loaded tokenizer, or ImageTokens for pairs with images. Child processes inherit it.
        form: format of the rows, "preference" or "kto".
        limits: resource limits; None for the defaults.
        check: function that is called about ten times a second while rows are tokenized. It can stop the work by raising an
            error.
    """

    def __init__(
        self, tokenizer: Any, form: Format, limits: RowLimits | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._form: Format = form
        self._limits = limits or RowLimits()
        self._check = check or (lambda: None)
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._slow = 0

    def __enter__(self) -> RowTokenizer:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in list(self._children):
            self._end(child)
        self._selector.close()

    def tokenize(
        self, rows: Sequence[dict[str, Any]], images: Sequence[tuple[RowImage, ...] | RowError] | None = None
    ) -> list[list[TokenArrays | RowError]]:
        """Tokenize rows.

        Args:
            rows: the columns of each row.
            images: the images of each row, or the error that occurred while opening them. None for a text-only dataset.

        Returns:
            A list for each row, in order, with the token ids or the error of each example. For a row that cannot be used, the
            list contains only an error.

        Raises:
            TokenizerError: the tokenizer lacks a chat template or an EOS token that the rows need.
            DatasetError: SLOW_ROWS rows of the dataset exceeded the time limit.
        """
        found: list[list[TokenArrays | RowError]] = [[] for _ in rows]
        waiting = deque(self._chunks(rows, images, found))
        while waiting or any(child.chunk for child in self._children):
            self._check()
            self._hand_out(waiting)
            for key, events in self._selector.select(POLL_SECONDS):
                child: _Child = key.data
                if child.chunk is None:
                    self._end(child)  # another process killed the idle child
                    continue
                if child.pump(events):
                    self._selector.modify(child.socket, child.events(), child)
                if child.answer is not None:
                    self._take(child, found)
                elif child.ended:
                    self._lost(child, found, waiting)
            for child in self._children:
                if child.chunk is not None:
                    child.watch(STILL * self._limits.seconds, child.mark())
        return found

    def _chunks(
        self,
        rows: Sequence[dict[str, Any]],
        images: Sequence[tuple[RowImage, ...] | RowError] | None,
        found: list[list[TokenArrays | RowError]],
    ) -> Iterable[_Chunk]:
        chunk = _Chunk([], [])
        size = 0
        for at, columns in enumerate(rows):
            try:
                text = _as_json(columns, None if images is None else images[at])
            except RowError as error:
                found[at] = [error]
                continue
            if chunk.rows and (size + len(text) > _CHUNK_BYTES or len(chunk.rows) == _CHUNK_ROWS):
                yield chunk
                chunk, size = _Chunk([], []), 0
            chunk.rows.append(at)
            chunk.texts.append(text)
            size += len(text)
        if chunk.rows:
            yield chunk

    def _hand_out(self, waiting: deque[_Chunk]) -> None:
        idle = [child for child in self._children if child.chunk is None]
        while waiting and (idle or len(self._children) < self._limits.children):
            child = idle.pop() if idle else self._begin()
            child.give(waiting.popleft())
            self._selector.modify(child.socket, child.events(), child)

    def _begin(self) -> _Child:
        child = _Child(self._tokenizer, self._form, self._limits)
        self._children.append(child)
        self._selector.register(child.socket, child.events(), child)
        return child

    def _end(self, child: _Child) -> int:
        self._children.remove(child)
        with suppress(KeyError):  # Ctrl-C arrived before the socket was registered
            self._selector.unregister(child.socket)
        return child.end()

    def _take(self, child: _Child, found: list[list[TokenArrays | RowError]]) -> None:
        assert child.answer is not None and child.chunk is not None
        (head, ids), chunk = child.answer, child.chunk
        child.answer = child.chunk = None
        if "error" in head:
            raise TokenizerError(head["error"])
        for at, examples in zip(chunk.rows, _read_answer(head["rows"], ids), strict=True):
            found[at] = examples

    def _lost(self, child: _Child, found: list[list[TokenArrays | RowError]], waiting: deque[_Chunk]) -> None:
        """Handle the exit of a child that was processing a chunk.

        If it is certain which row caused the exit, report that row as a bad row. Otherwise, retry each row that may have caused
        the exit in a separate chunk. Put the chunk's other rows back into `waiting`.
        """
        chunk, place, still = child.chunk, child.mark(), child.still
        status = self._end(child)
        assert chunk is not None
        timed_out = status == -signal.SIGPROF or still
        if place in (_NO_ROW, _SEVERAL):
            if len(chunk.rows) > 1:  # retry each row alone, to find the row that crashes its child
                pairs = zip(reversed(chunk.rows), reversed(chunk.texts), strict=True)
                waiting.extendleft(_Chunk([at], [text], alone=True) for at, text in pairs)
                return
            place = 0
        at, text = chunk.rows[place], chunk.texts[place]
        rest = _Chunk(chunk.rows[:place] + chunk.rows[place + 1 :], chunk.texts[:place] + chunk.texts[place + 1 :])
        if not timed_out and not chunk.alone:
            waiting.appendleft(_Chunk([at], [text], alone=True))
        else:
            found[at] = [RowLimitError(self._why(status, still))]
        if rest.rows:
            waiting.appendleft(rest)
        if timed_out:
            self._slow += 1
            if self._slow >= SLOW_ROWS:
                raise DatasetError(
                    f"{self._slow} rows took more than {self._limits.seconds:g} s each to tokenize: "
                    "check the chat template first, then the content of the dataset's rows"
                )

    def _why(self, status: int, still: bool) -> str:
        if still:
            return f"tokenizing the row made no progress for {STILL * self._limits.seconds:g} s"
        if status == -signal.SIGPROF:
            return f"tokenizing the row took more than {self._limits.seconds:g} s of processor time"
        if status < 0:
            return f"the process crashed while tokenizing the row ({signal.Signals(-status).name}; perhaps out of memory)"
        return f"the process crashed while tokenizing the row (exit status {status})"


@dataclass
class _Chunk:
    """A batch of rows for one child.

    Attributes:
        rows: for each row, its index in the `rows` argument of `tokenize`.
        texts: the rows as JSON.
        alone: True for a retry of a single row.
    """

    rows: list[int]
    texts: list[bytes]
    alone: bool = False


class _Child(ConfinedProcess):
    """A forked child process, with buffers for the data that is sent to it and received from it.

    Attributes:
        chunk: the chunk that the child is processing; None for an idle child.
        answer: the child's complete answer, which consists of a JSON header and token ids; None until the answer has arrived.
        ended: True if the child's end of the socket is closed.
    """

    def __init__(self, tokenizer: Any, form: Format, limits: RowLimits) -> None:
        self.chunk: _Chunk | None = None
        self.answer: tuple[dict[str, Any], Ids] | None = None
        self.ended = False
        self._to_send = memoryview(b"")
        self._received = bytearray()
        self._place = mmap.mmap(-1, mmap.PAGESIZE)
        super().__init__(partial(_work, tokenizer, form, limits, self._place), limits.memory)
        self.socket.setblocking(False)

    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)

    def give(self, chunk: _Chunk) -> None:
        """Start sending a chunk to the child."""
        body = b"[" + b",".join(chunk.texts) + b"]"
        self.chunk = chunk
        self.stir()
        _MARK.pack_into(self._place, 0, _NO_ROW)
        self._to_send = memoryview(_LENGTHS.pack(len(body), 0) + body)

    def pump(self, events: int) -> bool:
        """Send data to the child and receive data from it, without blocking.

        Return True if `self.events()` now returns a different value.
        """
        waited_for = self.events()
        try:
            if events & selectors.EVENT_WRITE:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
            if events & selectors.EVENT_READ:
                received = self.socket.recv(1 << 20)
                self._received += received
                self.ended = not received
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        if len(self._received) >= _LENGTHS.size:
            head_size, body_size = _LENGTHS.unpack_from(self._received)
            end = _LENGTHS.size + head_size + body_size
            if len(self._received) >= end:
                head = json.loads(self._received[_LENGTHS.size : _LENGTHS.size + head_size])
                body = np.frombuffer(self._received, np.int64, body_size // 8, _LENGTHS.size + head_size).copy()
                self._received = bytearray()
                self.answer = (head, body)
        return self.events() != waited_for

    def mark(self) -> int:
        """Return the index, in the chunk, of the row that the child is processing.

        Return _NO_ROW if the child has not started a row, and _SEVERAL if it is encoding several rows together.
        """
        return int(_MARK.unpack_from(self._place)[0])

    def end(self) -> int:
        status = super().end()
        self._place.close()
        return status


def _as_json(columns: dict[str, Any], images: tuple[RowImage, ...] | RowError | None) -> bytes:
    """Return a JSON object with the columns that determine a row's tokens.

    Its field `images` contains the pixel digests, sizes and modes of the row's images, if any.

    Raises RowError if a value cannot be written as JSON, or if the row's images cannot be used.
    """
    if isinstance(images, RowError):
        raise images
    require = require_text if images is None else require_text_and_images
    require(columns)
    used: dict[str, Any] = {name: columns[name] for name in TEXT_COLUMNS if name in columns}
    for name, value in used.items():
        if not isinstance(value, str | int | float | list | dict | None):
            raise RowError(f"{name} has type {type(value).__name__}; expected text, a list or a JSON object")
    if images is not None:
        used["images"] = [(image.digest.hex(), image.kind) for image in images]
    try:
        return json.dumps(used, ensure_ascii=False, default=_placeholder).encode()
    except UnicodeEncodeError:
        raise RowError("the row contains an unpaired surrogate (such as \\ud800), which no tokenizer accepts") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise RowError(f"the row cannot be written as JSON: {error}") from error


def _placeholder(value: Any) -> str:
    """Return the text that replaces a value that JSON cannot represent.

    transformers replaces values such as bytes and dates with the same text before it passes a row to a chat template.
    """
    return f"<{type(value).__name__}>"


def _read_answer(rows: list[list[list[int] | str]], ids: Ids) -> Iterable[list[TokenArrays | RowError]]:
    """Yield each row's examples from a child's answer.

    `rows` contains, for each example of each row, the lengths of the prompt and the completions, or an error. `ids` contains
    the token ids of all examples, in the same order.
    """
    start = 0
    for examples in rows:
        found: list[TokenArrays | RowError] = []
        for lengths in examples:
            if isinstance(lengths, str):
                found.append(RowLimitError(lengths) if lengths == TOO_MUCH_MEMORY else RowError(lengths))
                continue
            parts = []
            for length in lengths:
                parts.append(ids[start : start + length])
                start += length
            found.append((parts[0], tuple(parts[1:])))
        yield found


# In the child


def _work(tokenizer: Any, form: Format, limits: RowLimits, place: mmap.mmap) -> None:
    """Tokenize the chunks that the parent sends, until the parent closes the socket."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parent's threads do not exist in a fork
    prepare_child()
    with os.fdopen(SOCKET, "rb", closefd=False) as reader:
        while (texts := _read_chunk(reader)) is not None:
            _send(*_answer(texts, tokenizer, form, limits, place))


def _read_chunk(reader: BinaryIO) -> list[dict[str, Any]] | None:
    lengths = reader.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    body = reader.read(_LENGTHS.unpack(lengths)[0])
    texts: list[dict[str, Any]] = json.loads(body)
    return texts


def _answer(
    rows: list[dict[str, Any]], tokenizer: Any, form: Format, limits: RowLimits, place: mmap.mmap
) -> tuple[dict[str, Any], array[int]]:
    """Tokenize the rows of a chunk. Return the header and the token ids of the answer (see `_Child.answer`).

    Each row is rendered alone. Then the rows are encoded in one batch where possible.
    """

    def begin(row: int) -> None:
        _MARK.pack_into(place, 0, row)
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)

    #: The examples of each row, as rendered texts, token ids or errors.
    found: list[list[Any]] = []
    rendered: list[tuple[int, int]] = []  # (row index, example index) of each example to encode together with others
    try:
        for at, columns in enumerate(rows):
            begin(at)
            if isinstance(tokenizer, ImageTokens):
                found.append(_of_row(partial(_with_images, columns, tokenizer)))
                continue
            examples = _of_row(partial(_rendered, columns, form, tokenizer))
            if not tokenizer.is_fast or sum(len(t) for e in examples if isinstance(e, list) for t in e) > _TOGETHER:
                examples = _of_row(partial(encode, examples, tokenizer))
            rendered += [(at, number) for number, example in enumerate(examples) if isinstance(example, list)]
            found.append(examples)
        begin(_SEVERAL)
        try:
            for (at, number), tokens in zip(rendered, encode([found[at][n] for at, n in rendered], tokenizer), strict=True):
                found[at][number] = tokens
        except Exception:  # at least one row cannot be encoded; encode each row alone
            for at in dict.fromkeys(at for at, _ in rendered):
                begin(at)
                found[at] = _of_row(partial(encode, found[at], tokenizer))
    except TokenizerError as error:
        return {"error": shortened(str(error))}, array("q")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    ids = array("q")
    return {"rows": [[_add(example, ids) for example in examples] for examples in found]}, ids


def _of_row(work: Callable[[], list[Any]]) -> list[Any]:
    """Return the result of `work`. If `work` raises an exception other than TokenizerError, return a list with one RowError."""
    try:
        return work()
    except TokenizerError:
        raise
    except RowError as error:
        return [error]
    except MemoryError:
        return [RowError(TOO_MUCH_MEMORY)]
    except Exception as error:
        return [RowError(f"the row cannot be tokenized: {type(error).__name__}: {_first_line(error)}")]


def _with_images(columns: dict[str, Any], tokens: ImageTokens) -> list[Tokens]:
    images = [(digest, ((width, height), mode)) for digest, ((width, height), mode) in columns.pop("images")]
    return [image_row_tokens(columns, images, tokens)]


def _rendered(columns: dict[str, Any], form: Format, tokenizer: Any) -> list[list[Any] | RowError]:
    found: list[list[Any] | RowError] = []
    for example in examples_of(columns, form):
        try:
            found.append(render(example, tokenizer))
        except RowError as error:
            found.append(error)
    return found


def _add(example: Tokens | RowError, ids: array[int]) -> list[int] | str:
    """Append an example's token ids to `ids` and return the lengths of the prompt and completions.

    If `example` is an error, append nothing and return the error's text.
    """
    if isinstance(example, RowError):
        return shortened(str(example))
    prompt, completions = example
    for part in (prompt, *completions):
        ids.extend(part)
    return [len(prompt), *map(len, completions)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _send(head: dict[str, Any], ids: array[int]) -> None:
    text = json.dumps(head).encode()
    view = memoryview(_LENGTHS.pack(len(text), len(ids) * ids.itemsize) + text + ids.tobytes())
    while view:
        view = view[os.write(SOCKET, view) :]
