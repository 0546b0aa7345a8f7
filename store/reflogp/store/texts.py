"""Shorten texts from rows, templates and files before they are kept or printed.

A dataset can put a text of any length into an error message: a column name, a template's own message, a value. Every place that
keeps or prints such a text must pass it through `shortened`.
"""

from __future__ import annotations

#: Characters to which an error text is shortened.
MOST_CHARACTERS = 500
_BETWEEN = " … "


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text with at most `most` characters; a longer text loses its middle, since its end often says what to do.

    Half of a surrogate pair is written as an escape, so that the result can always be encoded.
    """
    if len(text) > most:
        tail = (most - len(_BETWEEN)) // 4
        text = text[: most - len(_BETWEEN) - tail] + _BETWEEN + text[-tail:]
    if any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode("utf-8", "backslashreplace").decode()
        return shortened(text, most)
    return text


def shortened_names(names: list[str], most: int = MOST_CHARACTERS // 2) -> str:
    """Return names separated by commas: only the first names if the list would be longer than `most` characters."""
    shown: list[str] = []
    room = most
    for name in names:
        short = shortened(str(name), most // 4)
        room -= len(short) + 2
        if room < 0:
            return ", ".join(shown) + f" and {len(names) - len(shown)} more"
        shown.append(short)
    return ", ".join(shown)
