"""The command line prints what data, files and services say, and the terminal obeys none of it."""

import io
import json
import logging
import re
import time
import warnings

import pytest

from reflogp.cli import console, jobs, store
from reflogp.cli.console import SafeConsole, progress_bar
from reflogp.client.models import job_from
from reflogp.store import ReflogpError, Store
from tests.hostile_text import HOSTILE
from tests.store.rows import REFERENCE, some_rows

#: All at once, between markers; rich's markup and emoji codes as well.
ALL = f"<{''.join(HOSTILE)}>"
MARKUP = "[red]not red[/red] [link=https://evil.example]x[/link] [/nothing] :smile:"
#: A file's name holds no NUL and at most 255 bytes; bytes that are not UTF-8 come as lone surrogates.
IN_NAMES = [ch for ch in HOSTILE if ch != "\0" and (not 0xD800 <= ord(ch) <= 0xDFFF or 0xDC80 <= ord(ch) <= 0xDCFF)]
NAMES = ["".join(IN_NAMES[at : at + 60]) for at in range(0, len(IN_NAMES), 60)]


def harmless(text: str) -> bool:
    """No control, no invisible character; lines are the command's own."""
    return not any(character in text for character in HOSTILE if character != "\n")


def test_a_bar_shows_its_label_as_text(monkeypatch):
    """As on a terminal, in colours."""
    sink = io.StringIO()
    terminal = SafeConsole(file=sink, force_terminal=True, color_system="truecolor", width=120)
    monkeypatch.setattr(console, "err", terminal)
    with progress_bar(f"{MARKUP} {ALL}") as bar:
        bar.begin(10)
        bar.advance(1, 1)
        bar.bad_row(3, f"columns {ALL}")
    written = sink.getvalue()
    assert "\\u202e" in written and "[red]not red" in written and "evil.example" in written
    assert not any(character in written for character in ("\x1b]", "\x07", "\x9b", "\u202e"))
    assert [line for line in written.split("\n") if "row 3: columns <" in line and "\\n" in line]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_files(reflogp, tmp_path, name):
    name = f"{tmp_path}/{name}"
    for arguments in (
        ("score", name, name, "--store", tmp_path / "store"),
        ("store", "ls", name),
        ("export", name, "--as", "open-instruct", "--hash", name, "--loss-type", "dpo", "-o", name),
        ("jobs", "ls", name),
        ("serve", "--store", name, "--config", name),
        ("score", name, "--max-length", name),
        ("score", name, name, name, name, name),
        ("doctor", "--model", name),
        (name,),
        (f"--{name}",),
    ):
        code, out, err = reflogp(*arguments)
        assert code != 0 and harmless(out) and harmless(err), (arguments[0], out, err)


def test_the_name_of_a_model_in_a_store(reflogp, tmp_path):
    """As whoever wrote the store wrote it."""
    table = Store(tmp_path / "store").create_table(REFERENCE)
    table.append(some_rows(0, 20)[1])
    file = next((tmp_path / "store").rglob("reference.json"))
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"name": ALL + MARKUP}))
    for arguments in (("store", "ls"), ("store", "verify"), ("store", "compact"), ("doctor", "--store")):
        code, out, err = reflogp(*arguments, tmp_path / "store")
        assert code == 0 or arguments[0] == "doctor"
        assert harmless(out) and harmless(err), (arguments, out, err)
    assert "[red]not red" in reflogp("store", "ls", tmp_path / "store")[1]


def test_what_a_service_says_of_a_job(capsys):
    text = ALL + MARKUP
    entry = {
        **dict.fromkeys(("id", "state", "reference_id", "submitted_by", "note", "error"), text),
        "settings": {"reference": text, "title": text, "format": text},
        "dataset": {"upload": text, "split": text},
        "progress": {"sequences": 4, "done": 1},
        "created_at": "2026-01-01T00:00:00+00:00",
        "summary": None,
    }
    bad = {"rows": 2, "examples": [0], "reason": text}
    summary = {"snapshot": text, "rows": 1, "sequences": 1, "bad_row_reasons": [bad]}
    for fields in ({}, {"state": "failed"}, {"state": "queued"}, {"state": "done", "summary": summary}):
        job = job_from(entry | fields)
        console.print_result({}, False, *jobs._described(job), "  ".join(jobs._cells(job).values()), *jobs.outcome(job))
    out, err = capsys.readouterr()
    assert harmless(out) and harmless(err) and "[red]not red" in out


def test_progress_without_a_terminal_is_lines(monkeypatch):
    sink = io.StringIO()
    monkeypatch.setattr(console, "err", SafeConsole(file=sink))
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.05)
    with progress_bar("scoring") as bar:
        bar.begin(5000)
        bar.advance(1234, 5678)
        while "1,234" not in sink.getvalue():
            time.sleep(0.01)
    assert re.search(r"scoring: 1,234 of 5,000, [\d,]+ tokens/s, 0:00:00\n", sink.getvalue())
    written = sink.getvalue()
    time.sleep(0.1)
    assert sink.getvalue() == written, "the lines end with the block"


def test_warnings_and_logs_of_libraries(reflogp, monkeypatch, tmp_path):
    def noisy(*_):
        warnings.warn(ALL, stacklevel=1)
        # pytest-xdist sends what was logged to another process, as UTF-8.
        logging.getLogger("some.library").warning(ALL.encode("utf-8", "ignore").decode())
        raise ReflogpError(ALL)

    monkeypatch.setattr(store, "Store", noisy)
    code, out, err = reflogp("store", "ls", tmp_path)
    assert code == 1 and harmless(out)
    assert harmless(err) and err.count("\\u202e") >= 2, err
