"""Check the size of untrusted images before decoding, and decode them in child processes with limits on memory and time.

A file of a few kilobytes can take gigabytes or minutes to decode, and a damaged file can crash a decoder. Therefore, each image
is first decoded in a forked child process, which returns a digest of the pixels. Later, the process that runs the model decodes
an image only if a child process has decoded the same bytes without errors, in this run or in an earlier run.
"""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from reflogp.scoring.data.confined_process import OUT_OF_MEMORY, POLL_SECONDS, SOCKET, STILL, ConfinedProcess
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.machine import free_memory, usable_cores
from reflogp.store.images import Kind, kind_of_image, pixel_digest
from reflogp.store.texts import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

#: Maximum number of pixels in an image.
MAX_PIXELS = 89_478_485
#: Formats that are decoded if the installed version of Pillow supports them. Other formats are refused, because Pillow's
#: decoders for them start external programs or are rarely used.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
#: Limits for a child process: seconds of processor time for one image, and bytes of memory. Decoding a progressive JPEG of
#: MAX_PIXELS pixels takes 1.1 GB.
SECONDS, _MEMORY = 10.0, 2 << 30
_TOO_MUCH_MEMORY = "decoding the image takes too much memory"
_LENGTH = struct.Struct("<Q")


class ImageDecoder:
    """A thread-safe pool of child processes that decode images and compute their pixel digests. Use it as a context manager.

    Attributes:
        children: maximum number of child processes. It is the number of CPU cores, or less if little memory is free.
    """

    def __init__(self) -> None:
        self.children = max(1, min(usable_cores(), free_memory() // (2 * _MEMORY)))
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(self.children):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._started: set[_Child] = set()
        self._closed = False

    def __enter__(self) -> ImageDecoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            for child in self._started:
                os.kill(child.pid, signal.SIGKILL)  # the thread that waits for this child's answer wakes up and calls `_end`
        with suppress(queue.Empty):
            while True:
                if (idle := self._idle.get_nowait()) is not None:
                    self._end(idle)
        for _ in range(self.children):
            self._idle.put(None)  # a thread that waits for an idle child wakes up and gets an error

    def identify(self, data: bytes) -> tuple[bytes, Kind, float]:
        """Return (pixel digest, (size, mode), seconds of processor time spent on decoding) for an encoded image.

        Raises RowError if the data is damaged or is not an image, if the image has too many pixels, or if decoding it takes too
        much memory or time, or crashes two child processes.
        """
        _formats()  # loads the decoders before the fork, so that children do not have to load them
        child, answer = self._idle.get(), None
        try:
            for last in (False, True):
                if child is None:
                    child = self._begin()
                try:
                    answer = child.ask(data)
                except BaseException:  # if this child were used again, its next answer would be about this image
                    self._end(child)
                    child = None
                    raise
                if answer is not None:
                    break
                status, still = self._end(child), child.still
                child = None
                if still:
                    raise RowError(f"decoding the image made no progress for {STILL * SECONDS:g} s")
                if status == -signal.SIGPROF:
                    raise RowError(f"decoding the image took more than {SECONDS:g} s of processor time")
                if status == OUT_OF_MEMORY:
                    raise RowError(_TOO_MUCH_MEMORY)
                if last or self._closed:
                    name = signal.Signals(-status).name if status < 0 else f"status {status}"
                    raise RowError(f"the process crashed while decoding the image ({name})")
        finally:
            self._idle.put(child)
        assert answer is not None
        found = json.loads(answer)
        if "error" in found:
            raise RowError(found["error"])
        width, height = found["size"]
        return bytes.fromhex(found["digest"]), ((width, height), found["mode"]), found["seconds"]

    def _begin(self) -> _Child:
        with self._lock:
            if self._closed:
                raise RowError("reading was stopped")
            child = _Child(_work, _MEMORY)
            self._started.add(child)
            return child

    def _end(self, child: _Child) -> int:
        with self._lock:
            self._started.discard(child)
            return child.end()


class _Child(ConfinedProcess):
    """A child process that decodes images, one at a time, and returns their digests."""

    def ask(self, data: bytes) -> bytes | None:
        """Send an encoded image to the child and return its answer, or None if the child has exited."""
        self.stir()
        self.socket.settimeout(POLL_SECONDS)
        try:
            self._send(_LENGTH.pack(len(data)))
            self._send(data)
            size = self._receive(_LENGTH.size)
            return None if size is None else self._receive(*_LENGTH.unpack(size))
        except ConnectionError:
            return None

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except TimeoutError:
                self.watch(STILL * SECONDS, len(left))

    def _receive(self, size: int) -> bytes | None:
        found = b""
        while len(found) < size:
            try:
                part = self.socket.recv(size - len(found))
            except TimeoutError:
                self.watch(STILL * SECONDS, len(found))
                continue
            if not part:
                return None
            found += part
        return found


# In the child


def _work() -> None:
    parent = socket.socket(fileno=SOCKET)  # never closed: the parent kills a child whose socket is closed
    stream = parent.makefile("rwb")
    while size := stream.read(_LENGTH.size):
        data = stream.read(*_LENGTH.unpack(size))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process even while library code runs
        answer = json.dumps(_identified(data)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(_LENGTH.pack(len(answer)) + answer)
        stream.flush()


def _identified(data: bytes) -> dict[str, object]:
    began = time.process_time()
    try:
        image = decoded(data)
        seconds = time.process_time() - began
        size, mode = kind_of_image(image)
        return {"digest": pixel_digest(image).hex(), "size": size, "mode": mode, "seconds": seconds}
    except RowError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": _TOO_MUCH_MEMORY}


# In the parent and in the child


@cache
def _formats() -> tuple[str, ...]:
    from PIL import ExifTags, ImageOps  # noqa: F401 (imported before children are forked)
    from PIL import Image as pillow

    pillow.init()
    return tuple(form for form in FORMATS if form in pillow.OPEN)


def decoded(data: bytes) -> Image:
    """Decode the first frame of an image and rotate it according to its EXIF orientation.

    Raises RowError for data that is not an image, is damaged, or has too many pixels.
    """
    from PIL import ExifTags, ImageOps, UnidentifiedImageError
    from PIL import Image as pillow

    try:
        image: Image = pillow.open(io.BytesIO(data), formats=_formats())
        require_pixels("the image", image.size)
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
    except (RowError, MemoryError):
        raise
    except UnidentifiedImageError:
        formats = ", ".join(_formats())
        raise RowError(f"the image cannot be decoded: the data is not an image in one of the formats {formats}") from None
    except pillow.DecompressionBombError:
        raise RowError(f"the image has too many pixels; at most {MAX_PIXELS:,} are allowed") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        raise RowError(f"the image cannot be decoded: {first_line(error)[:200]}") from None
    return image


def require_pixels(name: str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise RowError(f"{name} has {width} × {height} pixels, but at most {MAX_PIXELS:,} are allowed")
    if width < 1 or height < 1:
        raise RowError(f"{name} has no pixels ({width} × {height})")
