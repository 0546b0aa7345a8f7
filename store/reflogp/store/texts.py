"""Shorten texts from rows, templates and files before they are kept or printed, and write the reprs of results.

A dataset can put a text of any length into an error message: a column name, a template's own message, a value. Every place that
keeps or prints such a text must pass it through `shortened`.
"""

from __future__ import annotations

from reflogp.store.safe_text import hide_secrets, visible

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


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 row" or "1,200 rows"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short_repr(name: str, *lines: str) -> str:
    """Return the repr of a result for people: the name of its class, and the lines that are not empty, safe to print."""
    shown = [visible(hide_secrets(shortened(line))) for line in lines if line]
    if len(shown) == 1:
        return f"{name}({shown[0]})"
    return "\n".join([f"{name}(", *(f"    {line}" for line in shown), ")"])
