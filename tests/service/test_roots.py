"""Datasets by path: what is under the roots, and what only looks so."""

import os
import socket
from pathlib import Path

import pytest

from reflogp.service import confined_paths
from reflogp.service.problems import Problem
from reflogp.service.roots import resolve_path
from reflogp.service.settings import ServerSettings


@pytest.fixture
def place(tmp_path):
    """A root with good and bad things in it, and a secret beside it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "deep" / "er").mkdir(parents=True)
    (outside / "folder").mkdir(parents=True)
    (root / "a.jsonl").write_text("{}\n")
    (root / "deep" / "b.csv").write_text("x\n1\n")
    (root / "deep" / "er" / "c.parquet").write_text("PAR1")
    (root / "notes.txt").write_text("no dataset")
    (root / "noname").write_text("no dataset")
    (root / ".hidden.jsonl").write_text("{}\n")
    (root / ".folder").mkdir()
    (root / ".folder" / "d.jsonl").write_text("{}\n")
    (root / "empty").mkdir()
    (outside / "secret.jsonl").write_text("{}\n")
    links = {
        "inside.jsonl": "deep/b.csv",
        "absolute.jsonl": root / "a.jsonl",
        "up.jsonl": "deep/../a.jsonl",
        "out.jsonl": outside / "secret.jsonl",
        "out-missing.jsonl": outside / "not-there.jsonl",
        "out-relative.jsonl": "../outside/secret.jsonl",
        "out-and-in.jsonl": "../root/a.jsonl",
        "out-folder": outside / "folder",
        "etc": "/etc",
        "chain.jsonl": "out.jsonl",
        "to-hidden.jsonl": ".hidden.jsonl",
        "to-text.jsonl": "notes.txt",
        "to-nothing.jsonl": "nothing.jsonl",
        "proc.jsonl": "/proc/self/environ",
        "circle.jsonl": "circle.jsonl",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(root)  # a socket's path is at most 107 bytes
        try:
            listening.bind("socket.jsonl")
        finally:
            os.chdir(here)
    (tmp_path / "root-evil").mkdir()
    (tmp_path / "root-evil" / "a.jsonl").write_text("{}\n")
    return tmp_path


def settings_of(place, *names) -> ServerSettings:
    return ServerSettings(store=str(place / "store"), dataset_roots=[place / name for name in names])


def refused(path, settings) -> Problem:
    with pytest.raises(Problem) as caught:
        resolve_path(path, settings)
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize(
    "name, leads_to",
    [
        ("a.jsonl", "a.jsonl"),
        ("./a.jsonl", "a.jsonl"),
        ("deep//b.csv", "deep/b.csv"),
        ("inside.jsonl", "deep/b.csv"),
        ("absolute.jsonl", "a.jsonl"),
        ("up.jsonl", "a.jsonl"),
        ("out-and-in.jsonl", "a.jsonl"),
        ("deep", "deep"),
        ("deep/er/", "deep/er"),
    ],
)
def test_what_is_under_a_root_is_found_without_links(place, name, leads_to):
    found, digest = resolve_path(f"{place}/root/{name}", settings_of(place, "root"))
    assert found == place / "root" / leads_to
    assert len(digest) == 64


@pytest.mark.parametrize(
    "path, status",
    [
        ("{place}/outside/secret.jsonl", 403),
        ("{place}/outside/not-there.jsonl", 403),
        ("{place}/root-evil/a.jsonl", 403),
        ("/etc/passwd", 403),
        ("/", 403),
        ("//etc/passwd", 403),
        ("a.jsonl", 403),
        ("./a.jsonl", 403),
        ("~/a.jsonl", 403),
        ("", 403),
        ("file://{place}/root/a.jsonl", 403),
        ("{place}/root/../outside/secret.jsonl", 403),
        ("{place}/root/deep/../../outside/secret.jsonl", 403),
        ("{place}/root/..", 403),
        ("{place}/root/a.jsonl\0.txt", 422),
        ("{place}/root/a\n.jsonl", 422),
        ("{place}/root/\ud800.jsonl", 422),
        ("{place}/root/\udcff.jsonl", 422),
        ("{place}/root/out.jsonl", 403),
        ("{place}/root/out-missing.jsonl", 403),
        ("{place}/root/out-relative.jsonl", 403),
        ("{place}/root/out-folder", 403),
        ("{place}/root/out-folder/not-there.jsonl", 403),
        ("{place}/root/etc/passwd", 403),
        ("{place}/root/chain.jsonl", 403),
        ("{place}/root/proc.jsonl", 403),
        ("{place}/root/circle.jsonl", 404),
        ("{place}/root/.hidden.jsonl", 403),
        ("{place}/root/.folder/d.jsonl", 403),
        ("{place}/root/to-hidden.jsonl", 403),
        ("{place}/root/to-text.jsonl", 422),
        ("{place}/root/to-nothing.jsonl", 404),
        ("{place}/root/nothing.jsonl", 404),
        ("{place}/root/a.jsonl/b.jsonl", 404),
        ("{place}/root/{long}.jsonl", 404),
        ("{place}/root/notes.txt", 422),
        ("{place}/root/noname", 422),
        ("{place}/root/empty", 422),
        ("{place}/root/pipe.jsonl", 422),
        ("{place}/root/socket.jsonl", 422),
    ],
)
def test_hostile_paths_are_refused(place, path, status):
    problem = refused(path.format(place=place, long="x" * 3000), settings_of(place, "root"))
    assert problem.status == status, problem.detail
    assert "outside" not in problem.detail and "secret" not in problem.detail


def test_devices_are_refused():
    assert refused("/dev/null", ServerSettings(store="s", dataset_roots=["/dev"])).status == 422
    assert refused("/dev/zero", ServerSettings(store="s", dataset_roots=["/"])).status == 422


def test_the_answer_does_not_say_what_is_outside(place):
    settings = settings_of(place, "root")
    answers = set()
    for name in ("secret", "not-there"):
        (place / "root" / "probe.jsonl").unlink(missing_ok=True)
        (place / "root" / "probe.jsonl").symlink_to(place / "outside" / f"{name}.jsonl")
        for path in (f"{place}/outside/{name}.jsonl", f"{place}/root/probe.jsonl"):
            problem = refused(path, settings)
            answers.add((problem.status, problem.detail, problem.next_step))
    assert len(answers) == 1


def test_without_roots_there_are_no_paths(place):
    problem = refused(f"{place}/root/a.jsonl", settings_of(place))
    assert problem.status == 403 and "uploads" in problem.next_step


def test_a_root_may_be_a_link_and_there_may_be_several(place):
    (place / "alias").symlink_to(place / "root")
    settings = settings_of(place, "not-there", "outside", "alias")
    assert resolve_path(f"{place}/alias/a.jsonl", settings)[0] == place / "root" / "a.jsonl"
    assert resolve_path(f"{place}/root/a.jsonl", settings)[0] == place / "root" / "a.jsonl"
    assert resolve_path(f"{place}/outside/secret.jsonl", settings)[0].name == "secret.jsonl"
    assert refused(f"{place}/root/out.jsonl", settings).status == 403  # a link from one root to another leads out too


BAD_ENTRIES = [
    ("a link out", lambda path, place: path.symlink_to(place / "outside" / "secret.jsonl")),
    ("a link to nothing outside", lambda path, place: path.symlink_to(place / "outside" / "none")),
    ("a folder out", lambda path, place: path.symlink_to("/etc")),
    ("a pipe", lambda path, place: os.mkfifo(path)),
]


@pytest.mark.parametrize("name, make", BAD_ENTRIES)
@pytest.mark.parametrize("where", ["bad.jsonl", "er/bad.jsonl"])
def test_a_folder_that_holds_something_bad_is_refused(place, name, make, where):
    make(place / "root" / "deep" / where, place)
    assert refused(f"{place}/root/deep", settings_of(place, "root")).status in (403, 404, 422)


@pytest.mark.parametrize("name, make", [*BAD_ENTRIES, ("a lock", lambda path, place: path.symlink_to("me@host.1234:56"))])
@pytest.mark.parametrize("where", [".bad.jsonl", "er/.bad"])
def test_a_hidden_entry_is_skipped_unopened(place, name, make, where):
    before = resolve_path(f"{place}/root/deep", settings_of(place, "root"))
    make(place / "root" / "deep" / where, place)
    assert resolve_path(f"{place}/root/deep", settings_of(place, "root")) == before


def test_a_folder_of_too_many_files_is_refused(place, monkeypatch):
    monkeypatch.setattr(confined_paths, "MOST_ENTRIES", 20)
    folder = place / "root" / "many"
    folder.mkdir()
    for number in range(21):
        (folder / f"{number}.jsonl").touch()
    assert "more than 20 entries" in refused(str(folder), settings_of(place, "root")).detail


def test_a_digest_is_of_the_content(place):
    settings, deep = settings_of(place, "root"), place / "root" / "deep"

    def digest() -> str:
        return resolve_path(str(deep), settings)[1]

    first = digest()
    (deep / "README.md").write_text("no reader takes this")
    (deep / ".cache").write_text("nor this")
    assert digest() == first
    (deep / "b.csv").rename(deep / "b2.csv")
    renamed = digest()
    (deep / "b2.csv").write_text("x\n2\n")
    assert len({first, renamed, digest()}) == 3
    (deep / "round").symlink_to("../deep")  # a circle of folders ends
    digest()
