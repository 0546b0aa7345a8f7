"""Shorten, mask and format text for error messages, logs, pages and reports.

An error message can quote text of any length from a chat template or a dataset. Code that stores or prints a message must
therefore first pass it through `shortened`.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from datetime import UTC, datetime
from types import TracebackType

#: Maximum number of characters in an error message.
MOST_CHARACTERS = 500
_BETWEEN = " … "


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cut out the middle of a text longer than `most` characters: its end often says what the user can do.

    Lone surrogates are written as escapes, so that the result can always be encoded.
    """
    if len(text) > most:
        tail = (most - len(_BETWEEN)) // 4
        text = text[: most - len(_BETWEEN) - tail] + _BETWEEN + text[-tail:]
    if any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode("utf-8", "backslashreplace").decode()
        return shortened(text, most)
    return text


def shortened_names(names: list[str]) -> str:
    """Join shortened names with commas, and count those that do not fit into half of MOST_CHARACTERS."""
    shown: list[str] = []
    room = MOST_CHARACTERS // 2
    for name in names:
        short = shortened(str(name), MOST_CHARACTERS // 8)
        room -= len(short) + 2
        if room < 0:
            return ", ".join(shown) + f" and {len(names) - len(shown)} more"
        shown.append(short)
    return ", ".join(shown)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short_repr(name: str, *lines: str) -> str:
    """Return a repr of the class name and the non-empty `lines`, which are made safe to print."""
    shown = [visible(shortened_without_secrets(line)) for line in lines if line]
    if len(shown) == 1:
        return f"{name}({shown[0]})"
    return "\n".join([f"{name}(", *(f"    {line}" for line in shown), ")"])


#: Pairs of a factor and its suffix, largest factor first.
_DECIMAL = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")]
_BINARY = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]


def number(value: float) -> str:
    """Format a number, for example as 12,345, or as 12.3 if it is between -100 and 100 and no integer."""
    if isinstance(value, float) and (not math.isfinite(value) or (abs(value) < 100 and not value.is_integer())):
        return f"{value:.3g}".replace("-", "−")
    return f"{round(value):,}".replace("-", "−")


def short_number(value: float) -> str:
    """Format a number for a chart's axis, for example as 12.3k."""
    for size, suffix in _DECIMAL:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def percent(part: float, whole: float) -> str:
    """Format part / whole as a percentage, such as 31.4%, "<0.1%", or "–" if `whole` is 0. It is 100% only for the whole."""
    if whole <= 0:
        return "–"
    if 0 < part / whole < 0.001:
        return "<0.1%"
    share = 100 * part / whole
    return f"{min(share, 99.9) if part < whole else share:.1f}".removesuffix(".0") + "%"


def byte_count(value: int) -> str:
    """Format a number of bytes, for example as 12.3 MiB."""
    for size, suffix in _BINARY:
        if value >= size:
            return f"{value / size:.1f} {suffix}"
    return f"{value:,} B"


def duration(seconds: float) -> str:
    """Format a duration, for example as 0.4 s, 12 s, 3 min 5 s, 2 h 10 min or 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            count, rest = whole // size, whole % size // smaller
            return f"{count} {unit} {rest} {small_unit}" if rest else f"{count} {unit}"
    raise AssertionError("unreachable: every duration of 60 seconds or more matches an entry")


def moment(when: datetime) -> str:
    """Format a time, for example as 2026-11-20 21:55:13 UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def machine_moment(when: datetime) -> str:
    """Format a time for an HTML `datetime` attribute, for example as 2026-11-20T21:55:13Z."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


#: A URI, starting at its `://`. Matching the scheme too would take quadratic time on a long word.
_URI = re.compile(r"://([^\s\"'<>]+)")
#: Parameters that contain a secret, in query strings that are quoted without their URI.
_SECRET = re.compile(
    r"(?i)\b(x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig"
    r"|(?:access_|id_|auth_|sas_)?token|api_?key|client_secret|secret|password|passwd|pwd)=(?!…)[^&\s\"'<>]+"
)


def visible(text: str, keep: str = "") -> str:
    """Write every character that is neither printable nor a space nor in `keep` as an escape, such as ``\\x1b`` or ``\\u202e``.

    When the result is printed, it cannot control the terminal or change the order of the characters in a line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def hide_secrets(text: str) -> str:
    """Remove the user name, password, query and fragment from every URI, and the values of parameters such as `token`.

    ``https://user:password@host/a.jsonl?sig=x`` becomes ``https://host/a.jsonl?…``.
    """
    return _SECRET.sub(r"\1=…", _URI.sub(_without_secrets, text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank, or the name of the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shortened_without_secrets(text: str) -> str:
    """Hide secrets in a text first, because a secret that has been cut might not be recognized; then shorten it."""
    return shortened(hide_secrets(text))


class LineFormatter(logging.Formatter):
    """Writes a record as one line of plain text without secrets, with the lines of a traceback indented below it.

    Quoted text therefore cannot look like a new record or control a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another formatter may have cached a traceback here, without indentation
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(hide_secrets(super().formatMessage(record)))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


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
