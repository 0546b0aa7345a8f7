"""Texts that come from rows, templates and files, made short enough to keep.

A dataset can put a text of any length into an error message: a column name, a template's own message, a value. Every place that
keeps or prints such a text passes it through `shortened`.
"""

from __future__ import annotations

#: Characters of an error text that are kept.
MOST_CHARACTERS = 500
_BETWEEN = " … "


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text with at most `most` characters; a longer one loses its middle, since its end often says what to do.

    Half of a surrogate pair is written as an escape, so that the result can be encoded everywhere.
    """
    if len(text) > most:
        tail = (most - len(_BETWEEN)) // 4
        text = text[: most - len(_BETWEEN) - tail] + _BETWEEN + text[-tail:]
    if any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode("utf-8", "backslashreplace").decode()
        return shortened(text, most)
    return text


def shortened_names(names: list[str], most: int = MOST_CHARACTERS // 2) -> str:
    """Names separated by commas, the first ones only where all would be longer than `most`."""
    shown: list[str] = []
    room = most
    for name in names:
        short = shortened(str(name), most // 4)
        room -= len(short) + 2
        if room < 0:
            return ", ".join(shown) + f" and {len(names) - len(shown)} more"
        shown.append(short)
    return ", ".join(shown)
