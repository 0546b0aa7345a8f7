"""Make untrusted text safe to show in a terminal, in a log or on a page.

`visible` writes control and invisible characters as escapes; `hide_secrets` removes credentials from URIs; `LineFormatter`
keeps quoted text in a log record from looking like a record of its own.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from functools import cache
from types import TracebackType

#: Controls, formats (bidi controls, zero-width characters, tags), lone surrogates, line and paragraph separators.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
#: Format characters with a visible shape, such as U+0600 ARABIC NUMBER SIGN (the property Prepended_Concatenation_Mark).
_HAVE_A_SHAPE = frozenset([*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD])
#: Unassigned code points that are invisible already (Default_Ignorable_Code_Point).
_RESERVED = ((0x2065, 0x2065), (0xFFF0, 0xFFF8), (0xE0000, 0xE00FF), (0xE01F0, 0xE0FFF))
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

#: A URI from its `://` on. Matching the scheme too would take quadratic time on a long word.
_URI = re.compile(r"://([^\s\"'<>]+)")
#: Parameters that hold a secret, in query strings without their URI.
_SECRET = re.compile(
    r"(?i)\b(x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig"
    r"|(?:access_|id_|auth_|sas_)?token|api_?key|client_secret|secret|password|passwd|pwd)=(?!…)[^&\s\"'<>]+"
)


def visible(text: str, keep: str = "") -> str:
    """Return `text` with every control or invisible character written as an escape, such as ``\\x1b`` or ``\\u202e``.

    In the result, nothing controls a terminal, reorders a line or stays invisible. Letters of every script are unchanged.

    Args:
        keep: characters to leave unchanged, such as "\\n" in text of several lines.
    """
    if text.isprintable():
        return text
    return text.translate(_escapes(keep))


def hide_secrets(text: str) -> str:
    """Return `text` with the user, query and fragment removed from every URI, since signed URIs hold secrets there.

    ``https://user:password@host/a.jsonl?sig=x`` becomes ``https://host/a.jsonl?…``. Known secret parameters are hidden outside
    of URIs too.
    """
    return _SECRET.sub(r"\1=…", _URI.sub(_without_secrets, text))


class _Escapes(dict[int, str | int]):
    """A table for `str.translate` from characters to escapes; remembers the first few thousand characters."""

    def __init__(self, keep: str) -> None:
        super().__init__({ord(character): character for character in keep})

    def __missing__(self, number: int) -> str | int:
        found = _escape(chr(number)) if _is_escaped(chr(number)) else number
        if len(self) < 5_000:
            self[number] = found
        return found


@cache
def _escapes(keep: str) -> _Escapes:
    return _Escapes(keep)


class LineFormatter(logging.Formatter):
    """A log formatter that writes a record as one line of plain text, with the lines of a traceback indented below it.

    So text that a message or an exception quotes cannot start a record of its own, cannot control a terminal, and shows no
    secret of a URI.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have set it, unformatted
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(hide_secrets(super().formatMessage(record)))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _is_escaped(character: str) -> bool:
    number, kind = ord(character), unicodedata.category(character)
    if kind == "Cn":
        return any(first <= number <= last for first, last in _RESERVED)
    return kind in _ESCAPED and number not in _HAVE_A_SHAPE


def _escape(character: str) -> str:
    number = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _without_secrets(found: re.Match[str]) -> str:
    rest = found[1]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        rest = rest[authority.rindex("@") + 1 :]
    elif "@" in rest and re.search(r":(?!\d*$)", authority) and not authority.startswith("["):
        rest = rest[rest.rindex("@") + 1 :]  # the password contains a slash or a question mark
    shown = re.match(r"[^?#]*", rest)
    assert shown is not None
    left = rest[shown.end() :]
    return f"://{shown[0]}{left[0]}…" if len(left) > 1 else f"://{rest}"


def _indented(text: str) -> str:
    return "\n".join(f"  {visible(hide_secrets(line))}" for line in text.split("\n"))
