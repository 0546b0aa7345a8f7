"""Convert token ids to text that shows every token separately, without invisible characters and without direction controls."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

#: Maximum characters shown of a token; a vocabulary can hold longer tokens.
_LONGEST = 80
#: Maximum tokens that together make one character (UTF-8).
_MOST_PARTS = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: Signs for whitespace; the sign for a line end keeps the line end.
_SIGNS = {"\n": "↵\n", "\r": "␍", "\t": "⇥\t"}
#: Joiners within words and emoji, which stay as they are: harmless, and needed.
_LEFT_ALONE = "\u200c\u200d"
#: Unicode categories shown by code point: controls (of direction too), separators, unassigned, private use, surrogate halves.
_NAMED = {"Cc", "Cf", "Zl", "Zp", "Cn", "Co", "Cs"}


@dataclass(frozen=True)
class TokenText:
    """The displayed text of one token, or of the few tokens that make one character.

    Attributes:
        text: visible text.
        tokens: number of tokens in it.
        special: True for one of the tokenizer's special tokens, an id outside the vocabulary, or a token without text.
    """

    text: str
    tokens: int
    special: bool


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[TokenText]:
    """Return the texts of token ids, in order; their `tokens` add up to len(ids)."""
    special, size = set(tokenizer.all_special_ids), len(tokenizer)
    found: list[TokenText] = []
    at = 0
    while at < len(ids):
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


def visible(text: str) -> str:
    """Return a text with signs for controls and unusual spaces; a text of spaces only becomes dots."""
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
    """Return the text of `count` tokens in their context: some tokenizers drop a leading space without a previous token."""
    wanted = list(ids[at : at + count])
    if at and ids[at - 1] < size:
        before, both = _decode([ids[at - 1]], tokenizer), _decode([ids[at - 1], *wanted], tokenizer)
        if both.startswith(before) and _BROKEN not in before:
            return both[len(before) :]
    return _decode(wanted, tokenizer)


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
