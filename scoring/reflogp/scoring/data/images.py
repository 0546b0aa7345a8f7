"""Open the images of a row: bytes, files, data URIs or decoded pictures, within limits, and identify them by their pixels.

Images are read as `datasets` and TRL read them: the first frame, turned by its EXIF orientation, in the file's own mode. A
file's width and height are checked before its pixels are decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from reflogp.scoring.data.pixel_cache import PixelCache
from reflogp.scoring.data.shape import RowError
from reflogp.store.images import Kind, kind_of_image, pixel_digest
from reflogp.store.media import IMAGE_COLUMNS

if TYPE_CHECKING:
    from PIL.Image import Image

#: Maximum images of a row, bytes of an encoded image, and pixels of a decoded one.
MAX_IMAGES, MAX_BYTES, MAX_PIXELS = 64, 64 << 20, 89_478_485
#: Formats that are decoded where Pillow has them. It knows others, whose decoders start programs or are seldom used.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
#: Seconds between two calls of `check`.
_POLL_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class RowImage:
    """An image of a row, identified, but not held decoded.

    Attributes:
        digest: see `pixel_digest`.
        kind: its size and mode.
        source: its encoded bytes; its file, and the key of the file's content; or the decoded picture that the dataset holds.
    """

    digest: bytes
    kind: Kind
    source: bytes | tuple[Path, bytes] | Image

    def load(self) -> Image:
        """Return the decoded image. Raises RowError if its file has been changed."""
        if isinstance(self.source, bytes):
            return _decoded(self.source)
        if not isinstance(self.source, tuple):
            return self.source
        path, key = self.source
        data = _read(str(path), path)
        if PixelCache.key(data) != key:
            raise RowError(f"{path} was changed after it was read; run again")
        return _decoded(data)


class ImageReader:
    """Opens the images of rows in several threads.

    Args:
        folder: folder that relative paths in rows start from; None for the current folder.
        cache: remembers the pixel digests of encoded images.
    """

    def __init__(self, folder: Path | None, cache: PixelCache) -> None:
        self._folder = folder or Path()
        self._cache = cache

    def read(
        self, rows: Iterable[dict[str, Any]], check: Callable[[], None] | None = None
    ) -> list[tuple[RowImage, ...] | RowError]:
        """Return the images of each row, or why they cannot be used. `check` is called many times a second."""
        threads = ThreadPoolExecutor(psutil.cpu_count() or 1, thread_name_prefix="reflogp-images")
        try:
            found = [_waited(future, check) for future in [threads.submit(self._of_row, columns) for columns in rows]]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self._cache.write()
        return found

    def _of_row(self, columns: dict[str, Any]) -> tuple[RowImage, ...] | RowError:
        try:
            return tuple(self._image(name, value) for name, value in images_of(columns))
        except RowError as error:
            return error

    def _image(self, name: str, value: Any) -> RowImage:
        if hasattr(value, "tobytes") and hasattr(value, "getpalette"):  # a decoded PIL.Image
            _require_pixels(name, value.size)
            value.load()
            return RowImage(pixel_digest(value), kind_of_image(value), value)
        if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
            value = value["bytes"] if value.get("bytes") is not None else value["path"]
        if isinstance(value, str) and value.startswith("data:"):
            value = _data_uri(name, value)
        path: Path | None = None
        if isinstance(value, str):
            if "://" in value:
                raise RowError(f"{name} is an address ({value[:80]}); download the image and give a file or its bytes")
            path = self._folder / value
            value = _read(name, path)
        if not isinstance(value, bytes):
            raise RowError(f"{name} is a {type(value).__name__}; expected bytes, a path, a data URI or a picture")
        if len(value) > MAX_BYTES:
            raise RowError(f"{name} has more than {MAX_BYTES >> 20} MiB")
        key = self._cache.key(value)
        known = self._cache.get(key)
        if known is None:
            try:
                image = _decoded(value)
            except RowError as error:
                raise RowError(f"{name}: {error}") from None
            known = pixel_digest(image), kind_of_image(image)
            self._cache.put(key, *known)
        return RowImage(*known, value if path is None else (path, key))


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


def _read(name: str, path: Path) -> bytes:
    """Return a file's content. Raises RowError for what is no file, cannot be read, or is too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RowError(f"{name}: {path} cannot be read: it is no file")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"{name}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise RowError(f"{name}: {path} has more than {MAX_BYTES >> 20} MiB")
    return data


def bytes_of_images(columns: dict[str, Any]) -> int:
    """Return about how many bytes a row's images take in memory; 0 for a row of text or of paths."""
    size = 0
    for name in IMAGE_COLUMNS:
        value = columns.get(name)
        for image in value if isinstance(value, list | tuple) else (value,):
            held: Any = image.get("bytes") if isinstance(image, dict) else image
            if isinstance(held, bytes | str):
                size += len(held)
            elif hasattr(held, "getbands"):
                size += held.size[0] * held.size[1] * len(held.getbands())
    return size


def images_of(columns: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name for messages, value) of each image of a row, as TRL reads it: `image` holds one, `images` a list.

    Raises RowError for null, for something else than a list in `images`, and for more than MAX_IMAGES.
    """
    if "image" in columns:
        if columns["image"] is None:
            raise RowError("image is null; use a column images with an empty list for rows without an image")
        return [("image", columns["image"])]
    images = columns.get("images")
    if not isinstance(images, list | tuple):
        raise RowError(f"images is {'null' if images is None else type(images).__name__}, expected a list of images")
    if len(images) > MAX_IMAGES:
        raise RowError(f"it has {len(images)} images, and at most {MAX_IMAGES} are allowed")
    return [(f"image {number}", value) for number, value in enumerate(images)]


def _data_uri(name: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError(f"{name} is a data URI without base64 data")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise RowError(f"{name} has more than {MAX_BYTES >> 20} MiB")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RowError(f"{name} is a data URI whose base64 data is damaged") from None


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image as pillow

    pillow.init()
    return tuple(form for form in FORMATS if form in pillow.OPEN)


def _decoded(data: bytes) -> Image:
    """Decode an image. Raises RowError for data that is no image, is damaged, or has too many pixels."""
    from PIL import ExifTags, ImageOps, UnidentifiedImageError
    from PIL import Image as pillow

    try:
        image: Image = pillow.open(io.BytesIO(data), formats=_formats())
        _require_pixels("it", image.size)
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
    except RowError:
        raise
    except UnidentifiedImageError:
        raise RowError(f"it cannot be decoded: it is no image in one of the formats {', '.join(_formats())}") from None
    except pillow.DecompressionBombError:
        raise RowError(f"it has too many pixels; at most {MAX_PIXELS:,} are allowed") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        raise RowError(f"it cannot be decoded: {(str(error).splitlines() or [type(error).__name__])[0][:200]}") from None
    return image


def _require_pixels(name: str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise RowError(f"{name} has {width} × {height} pixels, and at most {MAX_PIXELS:,} are allowed")
    if width < 1 or height < 1:
        raise RowError(f"{name} has {width} × {height} pixels")
