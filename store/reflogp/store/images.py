"""Detect images and other media in dataset rows, and replace the image tokens in token sequences with image ids.

A reference model's log-probs depend on all media in a row. Code that scores or joins only tokens must therefore refuse rows
with media, in a column or in a part of a message's content (see `media_of`). The names come from TRL (`image`, `images`), from
transformers' chat templates and processors, and from OpenAI's messages (`image_url`, `input_audio`, …).

A processor represents an image by many copies of one placeholder token, so rows that differ only in their images would have the
same key. Each copy is therefore replaced with an image id, a number that is too large for any vocabulary, which is computed
from the image's decoded pixels, the image processor's settings, the number of copies and the copy's index. Everything that
works on token ids then works on rows with images too. Keys of text-only rows are not affected.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reflogp.store.errors import UsageError
from reflogp.store.texts import counted

#: Columns by which TRL recognizes a dataset with images. `image` contains one image, `images` a list of images.
IMAGE_COLUMNS = ("image", "images")
#: Columns that contain media.
MEDIA_COLUMNS = (*IMAGE_COLUMNS, "video", "videos", "audio", "audios")
#: Columns of tokenized rows that a processor computes from media.
PROCESSED_COLUMNS = (
    "pixel_values",
    "pixel_values_images",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "input_features",
    "audio_input_values",
)
#: Columns that contain messages.
MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
#: A content part is not text if its type contains one of these words, or if one of the keys in `_PART_KEYS` has a value.
_MEDIA_WORDS = ("image", "video", "audio", "file")
_PART_KEYS = (*MEDIA_COLUMNS, "image_url", "video_url", "audio_url", "input_audio")

#: The smallest image id. All token ids are smaller.
FIRST_IMAGE_ID = 1 << 31
DIGEST_BYTES = 16
#: Minimum number of image tokens for one image. An image with fewer tokens is refused: an image id contains only 31 bits of a
#: hash, so fewer ids do not identify the image reliably.
FEWEST_TOKENS = 4
#: Attributes of an image processor that affect neither the pixels nor the number of tokens.
_NOT_SETTINGS = frozenset(
    {"image_processor_type", "processor_class", "feature_extractor_type", "data_format", "input_data_format", "device",
     "return_tensors", "disable_grouping", "model_input_names", "auto_map", "do_convert_annotations"}
)  # fmt: skip
#: Maximum number of results that a cache keeps: numbers of image tokens, or outputs of an image processor.
_REMEMBERED = 4096

#: An image's size and mode: ((width, height) in pixels, PIL's mode). No other property of the image affects its number of
#: tokens.
Kind = tuple[tuple[int, int], str]
Int64s = npt.NDArray[np.int64]


def media_of(columns: Mapping[str, Any]) -> str | None:
    """Say where a row contains its first image, video or other media, or None."""
    for name in (*MEDIA_COLUMNS, *PROCESSED_COLUMNS):
        if name in columns and _is_present(columns[name]):
            return f"column {name}"
    for name in MESSAGE_COLUMNS:
        for found in media_types(columns.get(name)):
            return f"a content part of type {found[:40]} in {name}"
    return None


def media_types(messages: Any) -> Iterator[str]:
    """Yield the type of each content part that is not text in chat messages, and nothing for any other value."""
    if not isinstance(messages, list | tuple):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else [content]:
            if isinstance(part, Mapping):
                found = _media_type(part)
                if found is not None:
                    yield found


def _media_type(part: Mapping[str, Any]) -> str | None:
    """Return a content part's `type` if it names a medium, or else its first media key that has a value, or None."""
    found = part.get("type")
    if isinstance(found, str) and any(word in found.lower() for word in _MEDIA_WORDS):
        return found
    return next((key for key in _PART_KEYS if key in part and _is_present(part[key])), None)


def _is_present(value: Any) -> bool:
    """Return False for null, for NaN (pandas' null), and for a value that is empty or contains only nulls."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if isinstance(value, str | bytes):
        return bool(value)
    if isinstance(value, Mapping):  # an Arrow struct, such as {"bytes": None, "path": None}
        return any(_is_present(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(_is_present(entry) for entry in value)
    return True


def pixel_digest(image: Any) -> bytes:
    """Return 16 bytes that identify a decoded PIL.Image, whatever its file format: blake2b (person=b"reflogp.pixels.1") over
    mode, size, palette, transparency and pixels.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"reflogp.pixels.1")
    palette = [image.palette.mode, image.getpalette(None)] if image.mode in ("P", "PA") else None
    transparency = image.info.get("transparency")
    digest.update(
        json.dumps([image.mode, image.size, palette, repr(transparency) if transparency is not None else None]).encode()
    )
    digest.update(image.tobytes())
    return digest.digest()


def settings_digest(image_processor: Any) -> bytes:
    """Return 16 bytes that identify an image processor's settings, such as sizes, crops, means and pixel limits.

    PIL and torchvision resize images with results that differ only by rounding, so the library is not among them.
    """
    settings = {
        name: value
        for name, value in image_processor.to_dict().items()
        if name not in _NOT_SETTINGS and not name.startswith("_") and value is not None
    }
    name = type(image_processor).__name__.removesuffix("Fast").removesuffix("Pil")
    text = json.dumps([name, settings], sort_keys=True, default=_as_plain)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"reflogp.improc.1").digest()


def _as_plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else getattr(value, "value", None) or str(value)


def image_ids(image: bytes, settings: bytes, count: int) -> Int64s:
    """Return the `count` image ids that replace an image's tokens, int64 in [2**31, 2**32).

    `image` is the image's `pixel_digest`, and `settings` the image processor's `settings_digest`.
    """
    # The count is part of the hash: some processors give an image fewer tokens and different features if the row has more
    # images.
    stream = hashlib.shake_128(b"reflogp.image.v1" + image + settings + struct.pack("<I", count)).digest(4 * count)
    ids: Int64s = np.frombuffer(stream, "<u4").astype(np.int64) | FIRST_IMAGE_ID
    return ids


def image_token(config: Any) -> int | None:
    """Return the id of the token whose embeddings the model replaces with image features; None for a text-only model."""
    found = getattr(config, "image_token_id", None)
    found = getattr(config, "image_token_index", None) if found is None else found
    return found if isinstance(found, int) else None


class ImageTokens:
    """Tokenizes text with images, given only the sizes and modes of the images.

    The pixels of the images do not affect the tokens that a processor returns. The processor is therefore called with blank
    images, and its image processor runs once for each combination of sizes and modes.

    Args:
        processor: a transformers processor with a tokenizer and an image processor; it is not modified.
        image_token_id: see `image_token`.

    Attributes:
        processor: a copy of the processor, which must be called only with blank images.
        settings: the image processor's `settings_digest`.
    """

    def __init__(self, processor: Any, image_token_id: int) -> None:
        self.processor = copy.copy(processor)
        self.processor.image_processor = _ByKind(processor.image_processor)
        self.settings = settings_digest(processor.image_processor)
        self.image_token_id = image_token_id
        tokenizer = processor.tokenizer
        self._between = tokenizer.eos_token or tokenizer.pad_token
        self._counts: dict[tuple[Kind, ...], tuple[int, ...]] = {}

    def ids(self, text: str, kinds: Sequence[Kind]) -> list[int]:
        """Return the token ids of a text with such images, whose image tokens are not yet replaced.

        Raises the processor's errors, such as ValueError if the placeholders in the text do not match the images.
        """
        images = {"images": [blanks(kinds)]} if kinds else {}
        found = self.processor(text=[text], add_special_tokens=False, **images)["input_ids"][0]
        return [int(token) for token in found]

    def counts(self, kinds: Sequence[Kind]) -> tuple[int, ...]:
        """Return the number of image tokens for each image of a row, which may depend on the row's other images.

        To count each image's tokens, the tokenizer's EOS or padding token is put between the images. Raises UsageError if the
        tokenizer has neither, or if the processor adds or removes such tokens.
        """
        kinds = tuple(kinds)
        if kinds not in self._counts:
            if self._between is None:
                raise UsageError(
                    "the tokenizer has neither an EOS token nor a padding token, one of which is needed to separate the images"
                )
            end = self.processor.tokenizer.convert_tokens_to_ids(self._between)
            ids = np.array([*self.ids(self._between.join([self.processor.image_token] * len(kinds)), kinds), end])
            before = np.cumsum(ids == self.image_token_id)[ids == end]
            if len(before) != len(kinds):
                raise UsageError(
                    "the tokens of each image cannot be counted: the processor adds or removes EOS tokens or padding tokens"
                )
            self._counts[kinds] = tuple(np.diff(before, prepend=0).tolist())
            if len(self._counts) > _REMEMBERED:
                del self._counts[next(iter(self._counts))]
        return self._counts[kinds]

    def identified(self, ids: Sequence[int], images: Sequence[tuple[bytes, Kind]]) -> Int64s:
        """Return `ids`, from the method `ids`, as an int64 array in which image ids replace the image tokens.

        `images` are the (`pixel_digest`, kind) of each image, in the order of the images in the text.

        Raises UsageError if the number of image tokens is not the number that the images need, or if an image has fewer than
        FEWEST_TOKENS tokens.
        """
        counts = self.counts([kind for _, kind in images]) if images else ()
        found: Int64s = np.array(ids, np.int64)
        places = np.flatnonzero(found == self.image_token_id)
        if len(places) != sum(counts):
            raise UsageError(
                f"the row has {counted(len(places), 'image token')}; expected {sum(counts)} for {counted(len(images), 'image')}"
            )
        if counts and min(counts) < FEWEST_TOKENS:
            raise UsageError(
                f"an image has {counted(min(counts), 'token')}; at least {FEWEST_TOKENS} tokens are needed to identify an image"
            )
        at = 0
        for (digest, _), count in zip(images, counts, strict=True):
            found[places[at : at + count]] = image_ids(digest, self.settings, count)
            at += count
        return found


def kind_of_image(image: Any) -> Kind:
    return (int(image.size[0]), int(image.size[1])), str(image.mode)


def blanks(kinds: Sequence[Kind]) -> list[Any]:
    """Return black PIL.Images with these sizes and modes."""
    from PIL import Image

    return [Image.new(mode, size) for size, mode in kinds]


class _ByKind:
    """Runs an image processor once per combination of image sizes and modes, and caches its output without the pixels."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor
        self._answers: OrderedDict[str, Any] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up such names before the object has attributes
            raise AttributeError(name)
        return getattr(self._image_processor, name)

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        asked = repr((_kinds(images), sorted((name, repr(value)) for name, value in kwargs.items())))
        if asked not in self._answers:
            answer = self._image_processor(images, *args, **kwargs)
            for name in list(answer):
                answer[name] = _without_memory(answer[name])
            self._answers[asked] = answer
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        return copy.copy(self._answers[asked])


def _kinds(images: Any) -> Any:
    return [_kinds(entry) for entry in images] if isinstance(images, list | tuple) else kind_of_image(images)


def _without_memory(value: Any) -> Any:
    """Replace each floating-point array or tensor, such as the pixels, with one of the same shape that stores a single zero."""
    if isinstance(value, list | tuple):
        return type(value)(_without_memory(entry) for entry in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    if hasattr(value, "expand") and value.is_floating_point():  # a torch tensor
        return value.new_zeros(()).expand(value.shape)
    return value
