"""Open the images of a row: bytes, files, data URIs or decoded pictures, within limits, and identify them by their pixels.

Images are read as `datasets` and TRL read them: the first frame, turned by its EXIF orientation, in the file's own mode. A
file's width and height are checked before its pixels are decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from reflogp.scoring.data.pixel_cache import PixelCache
from reflogp.scoring.data.shape import RowError
from reflogp.store.images import Size, pixel_digest

if TYPE_CHECKING:
    from PIL.Image import Image

#: Maximum images of a row, bytes of an encoded image, and pixels of a decoded one.
MAX_IMAGES, MAX_BYTES, MAX_PIXELS = 64, 64 << 20, 89_478_485
#: Formats that are decoded. Pillow knows others, whose decoders start programs or are seldom used.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO")
IMAGE_COLUMNS = ("image", "images")


@dataclass(frozen=True, eq=False)
class RowImage:
    """An image of a row, identified, but not held decoded.

    Attributes:
        digest: see `pixel_digest`.
        size: width and height in pixels.
        source: its encoded bytes, or the decoded picture that the dataset holds.
    """

    digest: bytes
    size: Size
    source: bytes | Image

    def load(self) -> Image:
        """Return the decoded image."""
        return _decoded(self.source) if isinstance(self.source, bytes) else self.source


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
        """Return the images of each row, or why they cannot be used."""
        with ThreadPoolExecutor(psutil.cpu_count() or 1, thread_name_prefix="reflogp-images") as threads:
            futures = [threads.submit(self._of_row, columns) for columns in rows]
            found: list[tuple[RowImage, ...] | RowError] = []
            try:
                for future in futures:
                    if check is not None:
                        check()
                    found.append(future.result())
            finally:
                threads.shutdown(cancel_futures=True)
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
            return RowImage(pixel_digest(value), value.size, value)
        data = self._bytes(name, value)
        key = self._cache.key(data)
        known = self._cache.get(key)
        if known is None:
            try:
                image = _decoded(data)
            except RowError as error:
                raise RowError(f"{name}: {error}") from None
            known = pixel_digest(image), image.size
            self._cache.put(key, *known)
        return RowImage(*known, data)

    def _bytes(self, name: str, value: Any) -> bytes:
        """Return an image's encoded bytes. Raises RowError for values and files that are no image."""
        if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
            value = value["bytes"] if value.get("bytes") is not None else value["path"]
        if isinstance(value, str) and value.startswith("data:"):
            value = _data_uri(name, value)
        if isinstance(value, str):
            if "://" in value:
                raise RowError(f"{name} is an address ({value[:80]}); download the image and give a file or its bytes")
            path = self._folder / value
            try:
                if path.stat().st_size > MAX_BYTES:
                    raise RowError(f"{name}: {value} has more than {MAX_BYTES >> 20} MiB")
                return path.read_bytes()
            except (OSError, ValueError) as error:
                raise RowError(f"{name}: {value} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(value, bytes):
            raise RowError(f"{name} is a {type(value).__name__}; expected bytes, a path, a data URI or a picture")
        if len(value) > MAX_BYTES:
            raise RowError(f"{name} has more than {MAX_BYTES >> 20} MiB")
        return value


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


def _decoded(data: bytes) -> Image:
    """Decode an image. Raises RowError for data that is no image, is damaged, or has too many pixels."""
    from PIL import ExifTags, ImageOps
    from PIL import Image as pillow

    try:
        image: Image = pillow.open(io.BytesIO(data), formats=_FORMATS)
        _require_pixels("it", image.size)
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
    except RowError:
        raise
    except pillow.DecompressionBombError:
        raise RowError(f"it has too many pixels; at most {MAX_PIXELS:,} are allowed") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        raise RowError(f"it cannot be decoded: {(str(error).splitlines() or [type(error).__name__])[0][:200]}") from None
    return image


def _require_pixels(name: str, size: Size) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise RowError(f"{name} has {width} × {height} pixels, and at most {MAX_PIXELS:,} are allowed")
    if width < 1 or height < 1:
        raise RowError(f"{name} has {width} × {height} pixels")
