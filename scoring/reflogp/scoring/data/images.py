"""Read a row's images, enforce limits on them, and identify each image by its pixels.

An image is given as bytes, as the path of a file, as a data URI, or in decoded form (a PIL.Image). An encoded image is read in
the same way as in `datasets` and TRL: only the first frame is used, the frame is rotated according to the image's EXIF
orientation, and the image's mode (such as RGB or L) is kept.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflogp.scoring.data.image_decoder import ImageDecoder, decoded, require_pixels
from reflogp.scoring.data.pixel_cache import PixelCache
from reflogp.scoring.data.shape import RowError
from reflogp.store.images import IMAGE_COLUMNS, Kind, kind_of_image, pixel_digest

if TYPE_CHECKING:
    from PIL.Image import Image

#: Maximum number of images in a row, and maximum number of bytes in an encoded image.
MAX_IMAGES, MAX_BYTES = 64, 64 << 20
#: Limits for all images of a row together: encoded bytes, pixels, and seconds of processor time for decoding.
MAX_ROW_BYTES, MAX_ROW_PIXELS, ROW_SECONDS = 256 << 20, 1 << 30, 30.0
#: Digests of images that take at least this many seconds to decode are not cached, so that a row with too many such images also
#: exceeds ROW_SECONDS in later runs.
_SLOW_SECONDS = 0.5
#: A function that takes a path from a row, opens the file and returns its descriptor. It raises OSError, ValueError or RowError
#: if the file cannot be opened.
OpenFile = Callable[[str], int]
#: Maximum number of seconds between two calls of the caller's `check`.
_POLL_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class RowImage:
    """An image of a row, identified by its pixels.

    Decoded pixels are kept in memory only if the dataset contains the image in decoded form.

    Attributes:
        digest: digest of the pixels; see `pixel_digest`.
        kind: size and mode of the image.
        source: the encoded bytes, the image's file, or the decoded image from the dataset.
    """

    digest: bytes
    kind: Kind
    source: bytes | ImageFile | Image

    @property
    def size(self) -> int:
        """Number of bytes that `encoded` returns. For a decoded image from the dataset, this is instead the approximate size of
        the pixels in bytes, which is usually larger."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.size if isinstance(self.source, ImageFile) else _decoded_size(self.source)

    @property
    def held(self) -> int:
        """Approximate number of bytes of memory that the image occupies."""
        return 0 if isinstance(self.source, ImageFile) else self.size

    def load(self) -> Image:
        """Return the decoded image. Raises RowError if the image's file has changed or cannot be read."""
        source = self.source.read() if isinstance(self.source, ImageFile) else self.source
        return decoded(source) if isinstance(source, bytes) else source

    def encoded(self) -> bytes:
        """Return the image as encoded bytes that decode to exactly the same pixels.

        A decoded image from the dataset is encoded as PNG, or as TIFF if PNG cannot store it without loss.

        Raises RowError if TIFF cannot store it without loss either, or if the image's file has changed or cannot be read.
        """
        source = self.source.read() if isinstance(self.source, ImageFile) else self.source
        if isinstance(source, bytes):
            return source
        for form in ("PNG", "TIFF"):
            sink = io.BytesIO()
            with suppress(OSError, ValueError, RowError):
                source.save(sink, form)
                if pixel_digest(decoded(sink.getvalue())) == self.digest:
                    return sink.getvalue()
        raise RowError(f"an image of mode {source.mode} cannot be stored without loss; convert it to RGB")


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image file whose pixel digest is known.

    Attributes:
        path: the file's path, as given in the row.
        key: key of the file's content in the pixel cache (see `PixelCache.key`).
        size: the file's size in bytes.
        open_file: function that opens the file at `path` (see `OpenFile`).
    """

    path: str
    key: bytes
    size: int
    open_file: OpenFile

    def read(self) -> bytes:
        """Return the file's content. Raises RowError if the content has changed or cannot be read."""
        data = _read("an image", self.path, self.open_file)
        if PixelCache.key(data) != self.key:
            raise RowError(f"{self.path} was changed after it was read; run again")
        return data


def below(folder: Path | None) -> OpenFile:
    """Return a function that opens a file by its path.

    Relative paths are resolved against `folder`, or against the current folder if `folder` is None.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    return lambda path: os.open((folder or Path()) / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class ImageReader:
    """A reader that opens images and computes their pixel digests, in several threads.

    Args:
        open_file: function that opens the file at a path from a row.
        cache: cache of the pixel digests of encoded images.
        decoder: decoder for the images whose digests are not in the cache.
    """

    def __init__(self, open_file: OpenFile, cache: PixelCache, decoder: ImageDecoder) -> None:
        self._open_file = open_file
        self._cache = cache
        self._decoder = decoder

    def read(
        self, rows: Iterable[dict[str, Any]], check: Callable[[], None] | None = None
    ) -> list[tuple[RowImage, ...] | RowError]:
        """Return the images of each row, or an error for a row whose images cannot be used.

        `check` is called many times a second and can cancel the call to `read` by raising an error.
        """
        threads = ThreadPoolExecutor(self._decoder.children, thread_name_prefix="reflogp-images")
        try:
            found = [_waited(future, check) for future in [threads.submit(self._of_row, columns) for columns in rows]]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self._cache.write()
        return found

    def _of_row(self, columns: dict[str, Any]) -> tuple[RowImage, ...] | RowError:
        try:
            found: list[RowImage] = []
            size, pixels, seconds = 0, 0, 0.0
            for name, value in images_of(columns):
                image, took = self._image(name, value)
                found.append(image)
                size += 0 if hasattr(image.source, "getbands") else image.size
                pixels += image.kind[0][0] * image.kind[0][1]
                seconds += took
                if size > MAX_ROW_BYTES:
                    raise RowError(f"the row's images are larger than {MAX_ROW_BYTES >> 20} MiB in total")
                if pixels > MAX_ROW_PIXELS:
                    raise RowError(f"the row's images have more than {MAX_ROW_PIXELS:,} pixels in total")
                if seconds > ROW_SECONDS:
                    raise RowError(f"decoding the row's images took more than {ROW_SECONDS:g} s of processor time in total")
            return tuple(found)
        except RowError as error:
            return error

    def _image(self, name: str, value: Any) -> tuple[RowImage, float]:
        """Return (image, seconds of processor time spent on decoding it).

        The time is 0 if the image's digest is in the cache, or if the dataset contains the image in decoded form.
        """
        if hasattr(value, "tobytes") and hasattr(value, "getpalette"):  # a decoded PIL.Image
            require_pixels(name, value.size)
            value.load()
            return RowImage(pixel_digest(value), kind_of_image(value), value), 0.0
        if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
            value = value["bytes"] if value.get("bytes") is not None else value["path"]
        if isinstance(value, str) and value.startswith("data:"):
            value = _data_uri(name, value)
        path: str | None = None
        if isinstance(value, str):
            if "://" in value:
                raise RowError(f"{name} is a URL ({value[:80]}); download the image and use its path or its bytes")
            path, value = value, _read(name, value, self._open_file)
        if not isinstance(value, bytes):
            raise RowError(f"{name} has type {type(value).__name__}; expected bytes, a path, a data URI or a PIL image")
        if len(value) > MAX_BYTES:
            raise RowError(f"{name} is larger than {MAX_BYTES >> 20} MiB")
        key = self._cache.key(value)
        known, seconds = self._cache.get(key), 0.0
        if known is None:
            try:
                digest, kind, seconds = self._decoder.identify(value)
            except RowError as error:
                raise RowError(f"{name}: {error}") from None
            known = digest, kind
            if seconds < _SLOW_SECONDS:
                self._cache.put(key, *known)
        return RowImage(*known, value if path is None else ImageFile(path, key, len(value), self._open_file)), seconds


def _waited(
    future: Future[tuple[RowImage, ...] | RowError], check: Callable[[], None] | None
) -> tuple[RowImage, ...] | RowError:
    while True:
        if check is not None:
            check()
        try:
            return future.result(_POLL_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()


def _read(name: str, path: str, open_file: OpenFile) -> bytes:
    """Return a file's content. Raises RowError if the path is not a file, or if the file cannot be read or is too large."""
    try:
        descriptor = open_file(path)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RowError(f"{name}: {path} cannot be read: the path is not a file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        path = getattr(error, "filename", None) or path
        raise RowError(f"{name}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise RowError(f"{name}: {path} is larger than {MAX_BYTES >> 20} MiB")
    return data


def bytes_of_images(columns: dict[str, Any]) -> int:
    """Return the approximate number of bytes of memory that a row's images occupy.

    For an image that is given as a path, the file's content is not counted.
    """
    size = 0
    for name in IMAGE_COLUMNS:
        value = columns.get(name)
        for image in value if isinstance(value, list | tuple) else (value,):
            held: Any = image.get("bytes") if isinstance(image, dict) else image
            if isinstance(held, bytes | str):
                size += len(held)
            elif hasattr(held, "getbands"):
                size += _decoded_size(held)
    return size


def _decoded_size(image: Any) -> int:
    return int(image.size[0] * image.size[1] * len(image.getbands()))


def images_of(columns: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name for error messages, value in the row) for each image of a row.

    The column `image` contains one image, and the column `images` contains a list of images. If both columns have a value, only
    `image` is used, as in TRL. If both columns are null or missing, the row has no image.

    Raises RowError if `images` is not a list or has more than MAX_IMAGES images.
    """
    if columns.get("image") is not None:
        return [("image", columns["image"])]
    images = columns.get("images")
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        raise RowError(f"the value of column images has type {type(images).__name__}; expected a list of images")
    if len(images) > MAX_IMAGES:
        raise RowError(f"the row has {len(images)} images, but at most {MAX_IMAGES} are allowed")
    return [(f"image {number}", value) for number, value in enumerate(images)]


def _data_uri(name: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError(f"{name} is a data URI without base64 data")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise RowError(f"{name} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RowError(f"{name} is a data URI with invalid base64 data") from None
