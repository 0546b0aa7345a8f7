"""Test that control and invisible characters in data have no effect in a terminal, a log or a page."""

import io
import json
import logging
import sys
import unicodedata

import pytest

from reflogp.store.texts import LineFormatter, first_line, hide_secrets, visible
from tests.hostile_text import HOSTILE

HONEST = [
    "plain text",
    "Grüße, 你好, שלום, مرحبا, हिन्दी",
    "a ≤ b … “c”",
    "👍🏽 ❤️ café",
    "C:\\n\\x1b",
    "\xa0\u3000",
    "https://host/a/b@c.jsonl",
    "https://[::1]:8311/a.jsonl",
    "https://host:80/@user",
    "give ?reference=NAME",
    "5 tokens = 3 + 2",
    "s3://team/prefs/",
    "/data/a?b.jsonl",
]


def test_of_all_of_unicode_nothing_invisible_passes():
    for number in range(sys.maxunicode + 1):
        if (kind := unicodedata.category(chr(number))) in ("Cc", "Cs", "Zl", "Zp"):
            assert visible(chr(number)) != chr(number), hex(number)
        elif kind not in ("Cf", "Cn", "Co"):
            assert visible(chr(number)) == chr(number), hex(number)


@pytest.mark.parametrize("text", HONEST)
def test_honest_text_stays(text):
    assert visible(text) == hide_secrets(text) == text


SECRET = "s3cr3t"
SIGNED = [
    f"https://host/a.jsonl?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
    f"https://host/a.jsonl?sv=2024&sig={SECRET}%2B",
    f"https://host/a.jsonl?AWSAccessKeyId={SECRET}&Expires=1",
    f"https://host/a.jsonl?{SECRET}",
    f"https://host/a.jsonl#{SECRET}",
    f"https://host?{SECRET}",
    f"https://{SECRET}@host/a.jsonl",
    f"https://user:{SECRET}@host:8443/a.jsonl",
    f"https://user:{SECRET}/{SECRET}@host/a.jsonl",
    f"https://user:{SECRET}?{SECRET}@host/a.jsonl",
    f"s3://AKIA:{SECRET}@bucket/a.jsonl",
    f"az://container/a.jsonl?sig={SECRET}",
    f"HTTPS://host/a?token={SECRET}",
    f"/prefs/a.jsonl?token={SECRET}&x=1",
    f"api_key={SECRET}",
]


@pytest.mark.parametrize("uri", SIGNED)
@pytest.mark.parametrize("around", ["the dataset: {} was not fetched", '{{"uri": "{}", "n": 1}}'])
def test_no_secret_of_a_uri_is_shown(uri, around):
    shown = hide_secrets(around.format(uri, uri))
    assert SECRET not in shown
    assert hide_secrets(shown) == shown
    if around.startswith("{{"):
        assert json.loads(shown)["n"] == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["a", ":", "://", "a://", "://a:", "://@", "?", "://a?", "token", "token=", "sig=&", "\x1b", "x-amz-", "://1:1"]
)
def test_a_long_text_costs_no_more_than_its_length(piece):
    for text in (piece * (1_000_000 // len(piece)), "://" + piece * (1_000_000 // len(piece)) + "@"):
        assert hide_secrets(visible(text)) is not None


def logged(record_of, exception: BaseException | None = None) -> str:
    sink = io.StringIO()
    logger = logging.Logger("test")
    handler = logging.StreamHandler(sink)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.error(record_of, exc_info=exception)
    return sink.getvalue()


@pytest.mark.parametrize("character", HOSTILE, ids=lambda ch: f"U+{ord(ch):04X}")
def test_a_log_record_cannot_be_forged_and_hides_secrets(character):
    forged = f"https://u:{SECRET}@host/a?sig={SECRET} a{character}2026-01-01 00:00:00,000 ERROR test forged"
    [line] = logged(forged).removesuffix("\n").split("\n")
    assert line.isprintable() and line.count("ERROR test") == 2
    try:
        raise ValueError(forged)
    except ValueError as error:
        first, *rest = logged("it failed", error).removesuffix("\n").split("\n")
    assert first.endswith("it failed") and SECRET not in line and SECRET not in "".join(rest)
    assert len(rest) >= 3 and all(line.startswith("  ") and line.isprintable() for line in rest)


def test_the_first_line_of_a_message_is_the_first_with_words():
    assert (
        first_line(ImportError("\nThe processor requires torchvision.\nInstall it.")) == "The processor requires torchvision."
    )
    assert first_line(ValueError("")) == first_line(ValueError("\n")) == "ValueError"
