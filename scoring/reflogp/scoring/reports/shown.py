"""Read the examples that a report shows: their text (split into tokens), the tokens' log-probs, and small copies of images.

The page colors a token by its surprisal (negative log-prob), which is divided into seven levels. Symbols and code points are
shown instead of invisible characters, such as Unicode's bidirectional controls.
"""

from __future__ import annotations

import base64
import io
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.images import RowImage
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.data.tokenize import TokenizedRows
from reflogp.scoring.reports.collect import Collected
from reflogp.scoring.torch_engine.sequences import common_prefix
from reflogp.store import Snapshot
from reflogp.store.images import FIRST_IMAGE_ID
from reflogp.store.texts import counted
from reflogp.store.windows import TrainerSettings, windows

#: The page shows at most this many characters of a token. Vocabularies can contain longer tokens.
_LONGEST = 80
#: Maximum width and height of a shown image in pixels, and maximum number of images to show per example.
_THUMBNAIL, _MOST_IMAGES = (240, 240), 6
#: Maximum number of tokens that together encode one character (in UTF-8).
_MOST_PARTS = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: Symbols that replace whitespace. Line feeds and tabs are kept after their symbols.
_SIGNS = {"\n": "↵\n", "\r": "␍", "\t": "⇥\t"}
#: Zero-width non-joiner and joiner. They are harmless, and some scripts and emoji need them, so they are not replaced.
_LEFT_ALONE = "\u200c\u200d"
#: Unicode categories whose characters are shown as code points: control characters, format characters (including bidirectional
#: controls), line and paragraph separators, unassigned and private-use characters, and surrogates.
_NAMED = {"Cc", "Cf", "Zl", "Zp", "Cn", "Co", "Cs"}


@dataclass(frozen=True)
class TokenText:
    """The displayed text of one token, of the few tokens that together encode one character, or of adjacent image tokens.

    Attributes:
        special: True for a special token of the tokenizer, an id outside the vocabulary, an image, or a token without text.
    """

    text: str
    tokens: int
    special: bool


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[TokenText]:
    """Return the texts to display for token ids. Each id belongs to exactly one text."""
    special, size = set(tokenizer.all_special_ids), len(tokenizer)
    found: list[TokenText] = []
    at = 0
    while at < len(ids):
        if ids[at] >= FIRST_IMAGE_ID:
            end = next((after for after in range(at, len(ids)) if ids[after] < FIRST_IMAGE_ID), len(ids))
            found.append(TokenText(image_text(end - at), end - at, True))
            at = end
            continue
        if ids[at] >= size:
            found.append(TokenText(f"⟨id {ids[at]}⟩", 1, True))
            at += 1
            continue
        taken, text = 1, _after(ids, at, 1, tokenizer, size)
        for more in range(2, _MOST_PARTS + 1):
            if _BROKEN not in text or at + more > len(ids) or ids[at + more - 1] >= size:
                break
            longer = _after(ids, at, more, tokenizer, size)
            if _BROKEN not in longer:
                taken, text = more, longer
        shown = visible(text[:_LONGEST]) + ("…" if len(text) > _LONGEST else "")
        found.append(TokenText(shown or f"⟨id {ids[at]}⟩", taken, ids[at] in special or not shown))
        at += taken
    return found


def image_text(tokens: int) -> str:
    return f"⟨image, {counted(tokens, 'token')}⟩"


def visible(text: str) -> str:
    """Replace control characters, other invisible characters and unusual spaces with symbols or code points.

    If a text consists only of spaces, replace them with dots.
    """
    if text and not text.strip(" "):
        return "·" * len(text)
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind = unicodedata.category(character)
    odd = (kind in _NAMED and character not in _LEFT_ALONE) or (kind == "Zs" and character != " ")
    return f"⟨U+{ord(character):04X}⟩" if odd else character


def _after(ids: Sequence[int], at: int, count: int, tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """Return the text of the `count` tokens that start at the index `at`.

    The tokens are decoded together with the token before them, because some tokenizers drop a space at the beginning of a text.
    """
    wanted = list(ids[at : at + count])
    if at and ids[at - 1] < size:
        before, both = _decode([ids[at - 1]], tokenizer), _decode([ids[at - 1], *wanted], tokenizer)
        if both.startswith(before) and _BROKEN not in before:
            return both[len(before) :]
    return _decode(wanted, tokenizer)


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


#: Upper bounds of the levels of a token's surprisal (its negative log-prob), in nats. The highest level has no upper bound.
LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Numbers of tokens to show. _HEAD: at the beginning of a completion. _AROUND: on each side of a completion's least likely
#: token and, if a pair's completions are compared, of the first token that differs from the other completion. _PROMPT_END: at
#: each end of a long prompt.
_HEAD, _AROUND, _PROMPT_END = 220, 30, 110


@dataclass(frozen=True)
class Piece:
    """What is displayed for one TokenText, or for tokens that are left out.

    Attributes:
        level: level of surprisal, from 0 (lowest) to len(LEVELS); None if there is no log-prob.
        note: the log-prob as text, or the sum of the log-probs if the text stands for several tokens; empty if there is no
            log-prob.
        differs: True if the pair's two completions are compared and the token is between the first and the last difference.
    """

    text: str
    level: int | None
    note: str = ""
    special: bool = False
    differs: bool = False


@dataclass(frozen=True)
class ShownSide:
    """What is displayed for a completion.

    Attributes:
        mean, sum: mean and sum of the log-probs, in nats; None if there are no log-probs.
    """

    name: str
    tokens: int
    values: int
    mean: float | None
    sum: float | None
    pieces: list[Piece]


@dataclass(frozen=True)
class Shown:
    """What is displayed for an example.

    Attributes:
        images: the example's first images, as data URIs of small PNG images without the original's metadata; "" for an image
            that can no longer be decoded.
    """

    row: int
    label: int | None
    prompt: list[Piece]
    prompt_tokens: int
    sides: list[ShownSide]
    images: list[str]
    more_images: int


def read_shown(
    places: Iterable[int],
    compared: Iterable[int],
    collected: Collected,
    only: Callable[[set[int]], Iterable[TokenizedRows]],
    tokenizer: PreTrainedTokenizerBase,
    snapshot: Snapshot,
    settings: TrainerSettings,
) -> dict[int, Shown]:
    """Return what to display for the examples at the indices `places` in `collected`. Of the pairs at the indices `compared`,
    the tokens that differ are marked. `only` reads the dataset's rows with the given numbers."""
    asked, compared = sorted(set(places)), set(compared)
    if not asked:
        return {}
    rows = {int(collected.rows[place]) for place in asked}
    first = int(collected.rows[0])  # this row is also read, so that the format is detected from the same row as in `collect`
    found: dict[int, Shown] = {}
    for window in only({*rows, first}):
        numbers = window.table["row"].to_numpy()
        for at, row in enumerate(numbers):
            place = int(np.searchsorted(collected.rows, row)) + int((numbers[:at] == row).sum())
            if place in asked:
                found[place] = _shown(
                    window.table.slice(at, 1),
                    None if collected.labels is None or collected.labels[place] < 0 else int(collected.labels[place]),
                    tokenizer,
                    snapshot,
                    settings,
                    place in compared,
                    window.images[at] if window.images else (),
                )
    return found


def _shown(
    example: pa.Table,
    label: int | None,
    tokenizer: PreTrainedTokenizerBase,
    snapshot: Snapshot,
    settings: TrainerSettings,
    compared: bool,
    images: Sequence[RowImage],
) -> Shown:
    ids = {
        name: [int(i) for i in example[name].to_pylist()[0]]
        for name in example.column_names
        if name not in ("row", "KL_completion_ids")
    }
    prompt = ids.pop("prompt_ids")
    differs = _differing(*ids.values()) if compared else [range(0)] * len(ids)
    sides = []
    for number, (name, completion) in enumerate(ids.items()):
        view = windows(example["prompt_ids"], example[name], settings.max_length, settings.truncation_mode)
        [values] = snapshot.token_logps(view.keys())
        logps = None if values is None else values[: int(view.needed[0])].astype(np.float64)
        # `begin` is the index of the first token with a value. It is above 0 if keep_end cuts the completion's first tokens, or
        # if no prompt token is left, because the completion's first remaining token is then only context.
        begin = len(completion) - len(view.completion_ids[0])
        sides.append(_side(name.removesuffix("_ids"), completion, begin, logps, differs[number], tokenizer))
    ends = [(0, len(prompt))]
    if len(prompt) > 2 * _PROMPT_END:
        ends = [(0, _PROMPT_END), (len(prompt) - _PROMPT_END, len(prompt))]
    pieces = _pieces(prompt, ends, tokenizer, None, 0, range(0))
    small = [thumbnail(image) for image in images[:_MOST_IMAGES]]
    return Shown(int(example["row"][0].as_py()), label, pieces, len(prompt), sides, small, len(images) - len(small))


def thumbnail(image: RowImage) -> str:
    try:
        copy = image.load().convert("RGB")
    except (RowError, OSError):
        return ""
    copy.thumbnail(_THUMBNAIL)
    sink = io.BytesIO()
    copy.info.clear()
    copy.save(sink, "PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


def _side(
    name: str,
    ids: list[int],
    begin: int,
    logps: npt.NDArray[np.float64] | None,
    differs: range,
    tokenizer: PreTrainedTokenizerBase,
) -> ShownSide:
    matter = list(differs[:1])
    if logps is not None and len(logps):
        matter.append(begin + int(np.argmin(logps)))
    pieces = _pieces(ids, _parts(len(ids), matter), tokenizer, logps, begin, differs)
    if logps is None or not len(logps):
        return ShownSide(name, len(ids), 0, None, None, pieces)
    return ShownSide(name, len(ids), len(logps), float(logps.mean()), float(logps.sum()), pieces)


def _parts(count: int, matter: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of a completion's tokens to show: the beginning, and a window around each index in `matter`."""
    parts = [(0, min(count, _HEAD))]
    for place in sorted(matter):
        if place + _AROUND <= parts[-1][1]:
            continue
        begin, end = max(0, place - _AROUND), min(count, place + _AROUND)
        if begin <= parts[-1][1] + _AROUND:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((begin, end))
    if count - parts[-1][1] <= _AROUND:  # show a short remainder instead of a gap
        parts[-1] = (parts[-1][0], count)
    return parts


def _pieces(
    ids: list[int],
    parts: list[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    logps: npt.NDArray[np.float64] | None,
    begin: int,
    differs: range,
) -> list[Piece]:
    pieces: list[Piece] = []
    shown_to = 0
    for start, end in [*parts, (len(ids), len(ids))]:
        if start > shown_to:
            pieces.append(Piece(f" … {start - shown_to:,} tokens … ", None, special=True))
        at = start
        for text in token_texts(ids[start:end], tokenizer):
            these = range(at, at + text.tokens)
            values = [] if logps is None else [float(logps[i - begin]) for i in these if 0 <= i - begin < len(logps)]
            level = int(np.searchsorted(LEVELS, -sum(values))) if values else None
            note = f"{sum(values):.2f} nats".replace("-", "−") if values else ""
            pieces.append(Piece(text.text, level, note, text.special, any(i in differs for i in these)))
            at += text.tokens
        shown_to = end
    return pieces


def _differing(left: list[int], right: list[int]) -> list[range]:
    """Return the indices of the tokens of each list from the first to the last difference."""
    one, other = np.array(left), np.array(right)
    begin = common_prefix(one, other)
    end = common_prefix(one[begin:][::-1], other[begin:][::-1])
    return [range(begin, len(ids) - end) for ids in (left, right)]
