"""Datasets by path: what is under the roots, and what only looks so."""

import os

import pytest

from reflogp.service import confined_paths
from reflogp.service.problems import Problem
from reflogp.service.roots import resolve_path
from reflogp.service.settings import ServerSettings


@pytest.fixture
def place(tmp_path):
    """A root with good and bad things in it, and a secret beside it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    names = ["root/a.jsonl", "root/deep/b.csv", "root/deep/er/c.parquet", "root/notes.txt", "root/empty/notes.txt"]
    names += [
        "root/.hidden.jsonl",
        "root/.folder/d.jsonl",
        "outside/secret.jsonl",
        "outside/folder/a.jsonl",
        "root-evil/a.jsonl",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    links = {
        "inside.jsonl": "deep/b.csv",
        "absolute.jsonl": root / "a.jsonl",
        "out.jsonl": outside / "secret.jsonl",
        "out-and-in.jsonl": "../root/a.jsonl",
        "out-folder": outside / "folder",
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
        ("deep//b.csv", "deep/b.csv"),
        ("inside.jsonl", "deep/b.csv"),
        ("absolute.jsonl", "a.jsonl"),
        ("out-and-in.jsonl", "a.jsonl"),
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
        ("{place}/root-evil/a.jsonl", 403),
        ("//etc/passwd", 403),
        ("a.jsonl", 403),
        ("file://{place}/root/a.jsonl", 403),
        ("{place}/root/../outside/secret.jsonl", 403),
        ("{place}/root/..", 403),
        ("{place}/root/a.jsonl\0.txt", 422),
        ("{place}/root/a\n.jsonl", 422),
        ("{place}/root/\udcff.jsonl", 422),
        ("{place}/root/out.jsonl", 403),
        ("{place}/root/out-folder/not-there.jsonl", 403),
        ("{place}/root/chain.jsonl", 403),
        ("{place}/root/proc.jsonl", 403),
        ("{place}/root/circle.jsonl", 404),
        ("{place}/root/.folder/d.jsonl", 403),
        ("{place}/root/to-hidden.jsonl", 403),
        ("{place}/root/to-text.jsonl", 422),
        ("{place}/root/to-nothing.jsonl", 404),
        ("{place}/root/a.jsonl/b.jsonl", 404),
        ("{place}/root/{long}.jsonl", 404),
        ("{place}/root/empty", 422),
        ("{place}/root/pipe.jsonl", 422),
    ],
)
def test_hostile_paths_are_refused(place, path, status):
    problem = refused(path.format(place=place, long="x" * 3000), settings_of(place, "root"))
    assert problem.status == status, problem.detail
    assert "outside" not in problem.detail and "secret" not in problem.detail


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


def test_a_device_is_refused():
    assert refused("/dev/zero", ServerSettings(store="s", dataset_roots=["/dev"])).status == 422


def test_a_root_may_be_a_link_and_there_may_be_several(place):
    (place / "alias").symlink_to(place / "root")
    settings = settings_of(place, "not-there", "outside", "alias")
    assert resolve_path(f"{place}/alias/a.jsonl", settings)[0] == place / "root" / "a.jsonl"
    assert resolve_path(f"{place}/root/a.jsonl", settings)[0] == place / "root" / "a.jsonl"
    assert resolve_path(f"{place}/outside/secret.jsonl", settings)[0].name == "secret.jsonl"
    assert refused(f"{place}/root/out.jsonl", settings).status == 403  # a link from one root to another leads out too


BAD_ENTRIES = [
    ("a link out", lambda path, place: path.symlink_to(place / "outside" / "secret.jsonl")),
    ("a folder out", lambda path, place: path.symlink_to("/etc")),
    ("a link to nothing", lambda path, place: path.symlink_to("me@host.1234:56")),
    ("a pipe", lambda path, place: os.mkfifo(path)),
]


@pytest.mark.parametrize("name, make", BAD_ENTRIES)
@pytest.mark.parametrize("where", ["", "er"])
def test_a_folder_that_holds_something_bad_is_refused_unless_it_is_hidden(place, name, make, where):
    folder, settings = place / "root" / "deep", settings_of(place, "root")
    before = resolve_path(str(folder), settings)
    make(folder / where / ".bad.jsonl", place)
    assert resolve_path(str(folder), settings) == before
    make(folder / where / "bad.jsonl", place)
    assert refused(str(folder), settings).status in (403, 404, 422)


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
