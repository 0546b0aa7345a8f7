"""Read a row's images, and identify each image by its pixels.

An image is given as bytes, as the path of a file, as a data URI, or in decoded form (a PIL.Image). An encoded image is read in
the same way as in `datasets` and TRL: only the first frame is used, the frame is rotated according to the image's EXIF
orientation, and the image's mode (such as RGB or L) is kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflogp.scoring.data.shape import RowError, RowLimitError
from reflogp.scoring.machine import usable_cores
from reflogp.store.images import DIGEST_BYTES, IMAGE_COLUMNS, Kind, kind_of_image, pixel_digest
from reflogp.store.texts import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats that are decoded if the installed version of Pillow supports them. Other formats are refused, because Pillow's
#: decoders for them start external programs or are rarely used.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
_MOST_THREADS = 8
#: A function that takes a path from a row, opens the file and returns its descriptor. It raises OSError, ValueError or RowError
#: if the file cannot be opened.
OpenFile = Callable[[str], int]


@dataclass(frozen=True, eq=False)
class RowImage:
    """An image of a row, identified by its pixels.

    Decoded pixels are kept in memory only if the dataset contains the image in decoded form.
    """

    digest: bytes
    kind: Kind
    source: bytes | ImageFile | Image

    @property
    def size(self) -> int:
        """Number of bytes that `encoded` returns; for a decoded image, the approximate size of its pixels, usually larger."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.size if isinstance(self.source, ImageFile) else _decoded_size(self.source)

    @property
    def held(self) -> int:
        return 0 if isinstance(self.source, ImageFile) else self.size

    def load(self) -> Image:
        source = self.source.read() if isinstance(self.source, ImageFile) else self.source
        return decoded(source) if isinstance(source, bytes) else source

    def encoded(self) -> bytes:
        """Return the image as encoded bytes that decode to exactly the same pixels.

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
    """A row's image file, with its size in bytes and the `content_digest` (key) that it had when it was read."""

    path: str
    key: bytes
    size: int
    open_file: OpenFile

    def read(self) -> bytes:
        data = _read("an image", self.path, self.open_file)
        if content_digest(data) != self.key:
            raise RowError(f"{self.path} was changed after it was read; run again")
        return data


def below(folder: Path | None) -> OpenFile:
    """Return a function that resolves relative paths against `folder`, or against the current folder."""
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    return lambda path: os.open((folder or Path()) / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def content_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_images(
    rows: Sequence[dict[str, Any]],
    open_file: OpenFile,
    begin: Callable[[int | None], None],
    alone: bool,
) -> list[tuple[RowImage, ...] | RowError]:
    """Return the images of each row, or the error of a row whose images cannot be used. Several threads decode images."""
    found: list[tuple[RowImage, ...] | RowError] = []
    if alone:
        for at, columns in enumerate(rows):
            begin(at)
            found.append(_of_row(columns, open_file))
        return found
    threads = ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), thread_name_prefix="reflogp-images")
    try:
        images = threads.map(_of_row, rows, repeat(open_file))
        for _ in rows:
            begin(None)
            found.append(next(images))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return found


def _of_row(columns: dict[str, Any], open_file: OpenFile) -> tuple[RowImage, ...] | RowError:
    try:
        return tuple(_image(name, value, open_file) for name, value in images_of(columns))
    except RowError as error:
        return error


def _image(name: str, value: Any, open_file: OpenFile) -> RowImage:
    if hasattr(value, "tobytes") and hasattr(value, "getpalette"):  # a decoded PIL.Image
        value.load()
        return RowImage(pixel_digest(value), kind_of_image(value), value)
    if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
        value = value["bytes"] if value.get("bytes") is not None else value["path"]
    if isinstance(value, str) and value.startswith("data:"):
        value = _data_uri(name, value)
    path: str | None = None
    if isinstance(value, str):
        if "://" in value:
            raise RowError(f"{name} is a URL ({value[:80]}); download the image and use its path or its bytes")
        path, value = value, _read(name, value, open_file)
    if not isinstance(value, bytes):
        raise RowError(f"{name} has type {type(value).__name__}; expected bytes, a path, a data URI or a PIL image")
    try:
        image = decoded(value)
    except RowError as error:
        raise type(error)(f"{name}: {error}") from None
    source = value if path is None else ImageFile(path, content_digest(value), len(value), open_file)
    return RowImage(pixel_digest(image), kind_of_image(image), source)


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image as pillow

    pillow.init()
    return tuple(form for form in FORMATS if form in pillow.OPEN)


def decoded(data: bytes) -> Image:
    """Decode the first frame of an image and rotate it according to its EXIF orientation.

    Raises RowError for data that is not an image, is damaged, or has no pixels or more than Pillow decodes, and RowLimitError
    if memory does not suffice.
    """
    from PIL import ExifTags, ImageOps, UnidentifiedImageError
    from PIL import Image as pillow

    try:
        image: Image = pillow.open(io.BytesIO(data), formats=_formats())
        if 0 in image.size:
            raise RowError(f"the image has no pixels ({image.size[0]} × {image.size[1]})")
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
    except RowError:
        raise
    except MemoryError:
        raise RowLimitError("decoding the image takes too much memory") from None
    except UnidentifiedImageError:
        formats = ", ".join(_formats())
        raise RowError(f"the image cannot be decoded: the data is not an image in one of the formats {formats}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        raise RowError(f"the image cannot be decoded: {first_line(error)[:200]}") from None
    return image


def _read(name: str, path: str, open_file: OpenFile) -> bytes:
    try:
        descriptor = open_file(path)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RowError(f"{name}: {path} cannot be read: the path is not a file")
        with os.fdopen(descriptor, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        path = getattr(error, "filename", None) or path
        raise RowError(f"{name}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def bytes_of_images(columns: dict[str, Any]) -> int:
    """Return the approximate number of bytes of memory that a row's images occupy, without the content of files."""
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

    Raises RowError if `images` is not a list.
    """
    if columns.get("image") is not None:
        return [("image", columns["image"])]
    images = columns.get("images")
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        raise RowError(f"the value of column images has type {type(images).__name__}; expected a list of images")
    return [(f"image {number}", value) for number, value in enumerate(images)]


def _data_uri(name: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError(f"{name} is a data URI without base64 data")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RowError(f"{name} is a data URI with invalid base64 data") from None
