"""Detect rows that hold more than text: images, video or audio, as columns or as parts of a message's content.

A reference model's log-probs for such a row depend on the media. So a reader that scores or joins tokens alone must refuse the
row. The names are those of TRL (`image`, `images`), of transformers' chat templates and
processors, and of OpenAI's messages (`image_url`, `input_audio`, …).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

#: Columns from which TRL concludes that a dataset holds images; an `image` is one image, `images` are a list.
IMAGE_COLUMNS = ("image", "images")
#: Columns that hold media.
MEDIA_COLUMNS = (*IMAGE_COLUMNS, "video", "videos", "audio", "audios")
#: Columns that a processor makes from media, in rows with token ids.
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
#: Columns that hold messages.
MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
#: A content part whose type contains one of these words is not text. A part without a type is not text if it has a media key.
_WORDS = ("image", "video", "audio", "file")
_PART_KEYS = (*MEDIA_COLUMNS, "image_url", "video_url", "audio_url", "input_audio")


def media_of(columns: Mapping[str, Any]) -> str | None:
    """Return a description of the media in a row; None for a row of text or of token ids."""
    for name in (*MEDIA_COLUMNS, *PROCESSED_COLUMNS):
        if name in columns and _is_present(columns[name]):
            return f"column {name}"
    for name in MESSAGE_COLUMNS:
        for kind in _part_kinds(columns.get(name)):
            return f"a content part of type {kind[:40]} in {name}"
    return None


def _part_kinds(messages: Any) -> Iterator[str]:
    """Yield the types of the content parts that are not text."""
    if not isinstance(messages, list | tuple):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else [content]:
            if isinstance(part, Mapping):
                kind = _kind(part)
                if kind is not None:
                    yield kind


def _kind(part: Mapping[str, Any]) -> str | None:
    """Return the type of a content part that is not text, else the first media key that the part holds, else None."""
    kind = part.get("type")
    if isinstance(kind, str) and any(word in kind.lower() for word in _WORDS):
        return kind
    return next((key for key in _PART_KEYS if key in part and _is_present(part[key])), None)


def _is_present(value: Any) -> bool:
    """Return False for null, for NaN (pandas' null), and for a value that is empty or holds only nulls."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if isinstance(value, str | bytes):
        return bool(value)
    if isinstance(value, Mapping):  # an Arrow struct, such as {"bytes": None, "path": None}
        return any(_is_present(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(_is_present(entry) for entry in value)
    return True
