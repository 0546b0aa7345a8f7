"""Datasets by URI, from an object store and a server of the Hub's API: what is allowed arrives whole, all else is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.client import Client, NotAllowedError, RequestRefusedError, ServiceUri
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
from reflogp.service import fetch as fetching
from reflogp.service.dataset_files import DatasetFiles, Incoming
from reflogp.service.fetch import FetchCancelledError, check_uri, fetch
from reflogp.service.ledger import Ledger
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import UsageError, sequence_keys
from reflogp.store.storage import open_filesystem
from tests.service.serving import float32, running, settings_file, token_rows
from tests.store.hub_server import TOKEN, Hub, HubFaults, hub
from tests.store.s3 import environment_of, s3_server

PREFIXES = (
    "s3://team/prefs/",
    "az://plain/prefs",
    "hf://datasets/team/prefs/",
    "hf://datasets/pinned/prefs@v1/",
    "hf://datasets/deep/prefs/data/",
)


def allowing(*prefixes: str, **settings) -> ServerSettings:
    return ServerSettings(store="store", dataset_uris=list(prefixes), **{"max_upload_bytes": 1_000_000, **settings})


TEAM = allowing("hf://datasets/team/")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "uploads"


def fetched(uri: str, folder: Path, settings: ServerSettings = TEAM, **more) -> tuple[Path, str]:
    with closing(Ledger(folder.with_name("ledger.sqlite"))) as ledger:
        datasets = DatasetFiles(folder, ledger, settings)
        try:
            return fetch(uri, Incoming(datasets), settings, more.pop("cancelled", lambda: False), **more)
        finally:
            assert datasets.used == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def left(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


# What may be fetched


@pytest.mark.parametrize(
    "uri",
    [
        "az://plain/prefs/a.csv",
        "s3://team/prefs/a.jsonl",
        "hf://datasets/team/prefs/a.jsonl",
        "hf://datasets/team/prefs@v1/deep/a.jsonl.gz",
        "HF://datasets/team/prefs@refs/convert/parquet/default/train/0000.parquet",
        "hf://datasets/pinned/prefs@v1/a.jsonl",
        "hf://datasets/deep/prefs@main/data/a.jsonl",
        "hf://datasets/team/prefs/",
        "HF://datasets/team/prefs@refs/convert/parquet",
        "hf://datasets/pinned/prefs@v1",
    ],
)
def test_what_a_prefix_allows_passes(uri):
    check_uri(uri, allowing(*PREFIXES))


@pytest.mark.parametrize(
    "uri",
    [
        "az://plain/prefs-secret/a.jsonl",
        "s3://team/a.jsonl",
        "s3://team.evil/prefs/a.jsonl",
        "gs://team/prefs/a.jsonl",
        "hf://datasets/team/prefs-secret/a.jsonl",
        "hf://datasets/pinned/prefs/a.jsonl",
        "hf://datasets/pinned/prefs@v2/a.jsonl",
        "hf://datasets/deep/prefs/a.jsonl",
        "hf://datasets/team/prefs-secret",
        "hf://datasets/pinned/prefs@v12",
        "hf://datasets/deep/prefs",
    ],
)
def test_what_no_prefix_allows_is_forbidden(uri):
    for prefixes in (PREFIXES, ()):
        with pytest.raises(Problem) as caught:
            check_uri(uri, allowing(*prefixes))
        assert caught.value.status == 403 and "uploads" in caught.value.next_step


@pytest.mark.parametrize(
    "uri",
    [
        "https://data.example.org/prefs/a.jsonl",
        "/etc/passwd",
        "s3a://team/prefs/a.jsonl",
        "hf://datasets/me/a.jsonl",
        "hf://datasets/a.jsonl",
        "hf://datasets/team/files@refs/pr/1/a.jsonl@b.jsonl",
        "s3://team/prefs/a.jsonl\r\nHost: evil.com",
        "s3://tеam/prefs/a.jsonl",  # a Cyrillic letter
        "s3://team/prefs/../a.jsonl",
        "s3://team/prefs/%2e%2e/a.jsonl",
        "s3://team/prefs//a.jsonl",
        "s3://me@team/prefs/a.jsonl",
        "s3:///prefs/a.jsonl",
        "s3://team/prefs/",
        "s3://team/prefs/a.parquet.gz",
        "s3://team/prefs/" + "a" * 5000 + ".jsonl",
    ],
)
def test_uris_of_hostile_forms_are_refused(uri):
    with pytest.raises(Problem) as caught:
        check_uri(uri, allowing(*PREFIXES, "s3://", "hf://"))
    assert caught.value.status == 422


@pytest.mark.parametrize("prefix", ["ftp://x/", "s3:/x", "s3:///x", "s3://x/?a", "s3://x/../y"])
def test_a_prefix_that_is_none_is_named(prefix):
    with pytest.raises(UsageError, match="dataset_uris"):
        check_uri("s3://team/a.jsonl", allowing(prefix))


# Object stores


@pytest.fixture(scope="module")
def bucket():
    rows = jsonl(numbered(0, 1000))
    objects = {"prefs/a.jsonl": rows, "secret/a.jsonl": rows, "prefs/a-b_c.csv.gz": gzip.compress(rows)}
    with s3_server("team") as environment, environment_of(environment):
        filesystem = open_filesystem("s3://team")
        for key, content in {**objects, "prefs/large.jsonl": b"x" * 3_000_000}.items():
            with filesystem.open_output_stream(key, compression=None, buffer_size=1 << 23) as sink:
                sink.write(content)
        yield rows


def test_objects_are_fetched(bucket, folder):
    file, digest = fetched("s3://team/prefs/a.jsonl", folder, allowing("s3://team/prefs/"))
    assert (file.name, digest, file.read_bytes()) == (f"{digest}.jsonl", hashlib.sha256(bucket).hexdigest(), bucket)
    packed, _ = fetched("s3://team/prefs/a-b_c.csv.gz", folder, allowing("s3://"))
    assert packed.name.endswith(".csv.gz") and gzip.decompress(packed.read_bytes()) == bucket  # as it lies there, not unpacked


@pytest.mark.parametrize(
    "uri, says",
    [
        ("s3://team/prefs/none.jsonl", "object does not exist"),
        ("s3://team/prefs/large.jsonl", "larger than 1,000,000"),
        ("s3://team/secret/a.jsonl", "do not allow fetching from this location"),
    ],
)
def test_objects_that_are_not_there_or_not_allowed(bucket, folder, uri, says):
    with pytest.raises(DatasetError, match=says):
        fetched(uri, folder, allowing("s3://team/prefs/"))
    assert left(folder) == []


def test_a_cancelled_object_leaves_nothing(bucket, folder):
    with pytest.raises(FetchCancelledError):
        fetched("s3://team/prefs/a.jsonl", folder, allowing("s3://team/"), cancelled=lambda: True)
    assert left(folder) == []


# Files of the Hub

CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/part-*.parquet
  - split: test
    path: [main/test.parquet]
- config_name: extra
  data_files: extra/*.parquet
---
# Pairs
"""
SEMICOLONS = b"---\nconfigs:\n- config_name: x\n  data_files: a.csv\n  sep: ';'\n---\n"


def numbered(first: int, count: int) -> list[dict]:
    return [{"prompt": f"{number}", "chosen": "yes", "rejected": "no"} for number in range(first, first + count)]


def parquet(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def jsonl(rows: list[dict]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Hub]:
    """A Hub that this process and the readers that it starts from now on use."""
    home = str(tmp_path_factory.mktemp("home"))
    with hub() as found, pytest.MonkeyPatch.context() as monkeypatch:
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": found.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        for name, value in {"HF_ENDPOINT": found.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": home}.items():
            monkeypatch.setenv(name, value)
        forkserver._forkserver._stop()
        parts = {f"main/part-{part}.parquet": parquet(numbered(10 * part, 10)) for part in range(12)}  # 10 sorts before 2
        more = {"main/test.parquet": parquet(numbered(900, 4)), "extra/a.parquet": parquet(numbered(700, 3))}
        found.make("team/prefs", {"README.md": CARD.encode(), **parts, **more})
        split = {f"data/train-{part:05}-of-00002.jsonl.gz": gzip.compress(jsonl(numbered(part, 1))) for part in range(2)}
        found.make("team/plain", {**split, "data/test-00000-of-00001.jsonl.gz": gzip.compress(jsonl(numbered(50, 2)))})
        found.make("team/secret", {"a.jsonl": jsonl(numbered(0, 5))})
        files = {"deep/a.jsonl": jsonl(numbered(0, 900)), "deep/large.jsonl": b"x" * 3_000_000}
        found.make("team/files", files)
        found.make("team/files", {**files, "deep/a.jsonl": jsonl(numbered(0, 901))})  # another commit
        yield found
        forkserver._forkserver._stop()


def test_files_of_the_hub_are_fetched(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_CHUNK", 10_000)  # several requests
    server.downloaded.clear()
    first = server.repositories["team/files"].commits[0][0]
    for number, (revision, count) in enumerate({f"@{first}": 900, "": 901, "@main": 901}.items()):
        content = jsonl(numbered(0, count))
        file, digest = fetched(f"hf://datasets/team/files{revision}/deep/a.jsonl", tmp_path / str(number))
        assert (file.name, file.read_bytes()) == (f"{digest}.jsonl", content)
    assert server.downloaded.count("deep/a.jsonl") > 10


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("files/none.jsonl", {}, "has no file none.jsonl"),
        ("files@none/deep/a.jsonl", {}, "the token has no permission to read it"),
        ("files/deep/large.jsonl", {}, "larger than 1,000,000"),
        ("files/deep", {}, "does not end in"),
        ("nothing", {}, "the token has no permission to read it"),
        ("prefs", {"split": "validation"}, "the dataset has no split 'validation'; choose from train, test"),
        ("prefs", {"config": "none"}, "cannot load the dataset: .*'none' not found.*main"),
    ],
)
def test_what_is_not_there_is_named(server, folder, name, more, says):
    with pytest.raises(DatasetError, match=says):
        fetched(f"hf://datasets/team/{name}", folder, **more)
    assert left(folder) == []


@pytest.mark.parametrize(
    "fault, says",
    [({"status": 403}, "has no permission"), ({"most_bytes": 100}, "hf://"), ({"downloads_left": 0}, "broken off")],
)
def test_a_hub_that_fails_leaves_nothing(server, folder, fault, says, monkeypatch):
    monkeypatch.setattr(server, "faults", HubFaults(**fault))
    with pytest.raises(DatasetError, match=says):
        fetched("hf://datasets/team/files/deep/a.jsonl", folder)
    assert left(folder) == []


def test_a_file_of_the_hub_is_a_dataset_where_no_service_is_asked(server, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert len(list(RowSource("hf://datasets/team/files/deep/a.jsonl"))) == 901
    with pytest.raises(DatasetError, match=r"has no file none\.jsonl"):
        RowSource("hf://datasets/team/files/none.jsonl")
    with pytest.raises(DatasetError, match="does not end in"):
        RowSource("hf://datasets/team/files/none.txt")
    with pytest.raises(DatasetError, match="no such file"):  # a service's workers open files only
        RowSource("hf://datasets/team/files/deep/a.jsonl", confined=True)


# Whole datasets

SPLITS = {
    ("team/prefs", None, "train"): 120,
    ("team/prefs", "main", "test"): 4,
    ("team/prefs", "extra", "train"): 3,
    ("team/plain", None, "train"): 2,
    ("team/plain", None, "test"): 2,
}
LOAD = """
import datasets, json, sys
for name, config, split in json.loads(sys.argv[1]):
    print(json.dumps(list(datasets.load_dataset(name, config, split=split))))
"""


def test_a_split_has_the_rows_that_datasets_gives_in_their_order(server, tmp_path):
    command = [sys.executable, "-c", LOAD, json.dumps(list(SPLITS))]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for ((name, config, split), rows), expected in zip(SPLITS.items(), done.stdout.splitlines(), strict=True):
        folder = tmp_path / f"{name}-{config}-{split}" / "uploads"
        folder.parent.mkdir(parents=True)
        path, digest = fetched(f"hf://datasets/{name}", folder, config=config, split=split)
        assert path.name.partition(".")[0] == digest
        found = [row.columns for row in RowSource(str(path), confined=True, is_fetched=True)]
        assert len(found) == rows and found == json.loads(expected)


def test_a_revision_names_a_commit(server, folder):
    first = server.repositories["team/secret"].commits[0][0]
    server.make("team/secret", {"a.jsonl": jsonl(numbered(100, 7))})
    counts = [RowSource(str(fetched(f"hf://datasets/team/secret{at}", folder)[0])).count() for at in ("", f"@{first}", "@main")]
    assert counts == [7, 5, 7]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "place",
    [
        "data_files: http://127.0.0.1:PORT/prefs/a.jsonl",
        "data_files: {train: ['a.jsonl', 'http://127.0.0.1:PORT/prefs/a.jsonl']}",
        "data_files: [{split: train, path: 'zip://a.jsonl::http://127.0.0.1:PORT/a.zip'}]",
        "data_files: hf://datasets/team/secret/a.jsonl",
        "data_files: FILE",
        "data_files: ../secret@main/a.jsonl",
        "data_dir: ../secret",
    ],
)
def test_a_card_leads_nowhere_else(server, folder, listener, place, end, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(numbered(0, 1)))
    place = place.replace("PORT", str(listener.getsockname()[1])).replace("FILE", str(tmp_path / "a.jsonl"))
    card = f"---\nconfigs:\n- config_name: x\n  {place}\n---\n".strip().replace("\n", end)
    server.make("team/odd", {"README.md": card.encode(), "a.jsonl": jsonl(numbered(0, 1))})
    server.downloaded.clear()
    with pytest.raises(DatasetError, match="names files outside of the repository"):
        fetched("hf://datasets/team/odd", folder)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert set(server.downloaded) == {"README.md"} and left(folder) == []


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"README.md": SEMICOLONS, "a.csv": b"a;b\n1;2\n"}, "sets sep"),
        ({"README.md": b"---\nconfigs: [\n---\n", "a.jsonl": b"{}\n"}, "metadata in README.md cannot be read"),
        ({".huggingface.yaml": b"configs: []\n", "a.jsonl": b"{}\n"}, r"metadata in \.huggingface\.yaml is not supported"),
        ({"a.txt": b"text\n"}, r"a\.txt does not end in"),
        ({"a@b.jsonl": b"{}\n"}, "is not the URI of a file on the Hub"),
        ({"odd.py": b"print()\n"}, "cannot load the dataset"),
    ],
)
def test_what_is_read_in_another_way_is_refused(server, folder, files, says):
    server.make("team/odd", files)
    with pytest.raises(DatasetError, match=says):
        fetched("hf://datasets/team/odd", folder)
    assert left(folder) == []


def test_the_limits_are_for_all_files_together(server, folder):
    server.make("team/large", {f"train-{part}.jsonl": b"x" * 600_000 for part in range(2)})
    with pytest.raises(DatasetError, match=r"larger than 1,000,000"):
        fetched("hf://datasets/team/large", folder)
    assert left(folder) == []
    with pytest.raises(DatasetError, match=r"at most .* \(max_uploads_bytes\)"):
        fetched("hf://datasets/team/large", folder, allowing("hf://", max_upload_bytes=1_200_000, max_uploads_bytes=1_000_000))
    assert left(folder) == []
    for _ in range(2):
        path, _ = fetched("hf://datasets/team/large", folder, allowing("hf://", max_upload_bytes=1_200_000))
        assert left(folder) == [path]


def test_a_cancelled_fetch_leaves_nothing(server, folder):
    """While the process that finds its files runs."""
    polls = iter([False])
    with pytest.raises(FetchCancelledError):
        fetched("hf://datasets/team/prefs", folder, cancelled=lambda: next(polls, True))
    assert left(folder) == []


@pytest.mark.slow
def test_a_job_scores_a_dataset_by_its_name(server, tmp_path, reference_folder, reflogp, monkeypatch):
    """A folder of that name in the service's own folder is not read; in the caller's, it is what the name means."""
    train, extra, local = (token_rows(count, seed=seed) for count, seed in ((9, 50), (5, 51), (3, 52)))
    parts = {"main/part-0.parquet": parquet(train[:4]), "main/part-1.parquet": parquet(train[4:])}
    others = {"main/test.parquet": parquet(local), "extra/a.parquet": parquet(extra)}
    server.make("team/prefs", {"README.md": CARD.encode(), **parts, **others})
    here = tmp_path / "team" / "prefs"
    here.mkdir(parents=True)
    (here / "rows.jsonl").write_bytes(jsonl(local))
    settings = {"dataset_uris": ["hf://datasets/team/prefs"], "devices": ["cpu"]}
    file = settings_file(tmp_path, tmp_path / "store", {"ref": float32(reference_folder)}, **settings)
    monkeypatch.chdir(tmp_path)
    with environment_of({"HF_HOME": str(tmp_path / "hf")}), running("--config", file) as service, Client(service.url) as client:
        with pytest.raises(UsageError, match="use hf://datasets/ORGANISATION/NAME"):
            client.submit("team/prefs", "ref")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        for dataset, more, rows in (
            ("team/prefs", {}, train),
            (ServiceUri("hf://datasets/team/prefs", "extra"), {}, extra),
            (ServiceUri("hf://datasets/team/prefs@main"), {"split": "test"}, local),
        ):
            job = client.watch(client.submit(dataset, "ref", **more).id)
            assert (job.state, job.summary["rows"], job.summary["bad_rows"]) == ("done", len(rows), 0), job.error
            keys = pq.read_table(client.result(job.id, tmp_path / "result.parquet"))["chosen_key"].to_pylist()
            expected = sequence_keys([row["prompt_ids"] for row in rows], [row["chosen_ids"] for row in rows])
            assert keys == expected.to_pylist()
        words = ("team/prefs", "--reference", "ref", "--dataset-config", "extra", "--watch", "--json")
        code, out, err = reflogp("submit", service.url, *words)
        assert code == 0, err
        job = json.loads(out)
        assert (job["dataset"]["config"], job["summary"]["hits"], job["summary"]["scored"]) == ("extra", 10, 0)
        with pytest.raises(NotAllowedError, match="settings do not allow fetching from this location"):
            client.submit(ServiceUri("hf://datasets/team/secret"), "ref")
        with pytest.raises(RequestRefusedError, match="a config can be specified only"):
            client.submit(ServiceUri("hf://datasets/team/prefs/extra/a.parquet", "extra"), "ref")
        failed = client.watch(client.submit(ServiceUri("hf://datasets/team/prefs", "none"), "ref").id)
        assert failed.state == "failed" and "'none' not found" in failed.error
