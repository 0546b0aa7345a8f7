"""Datasets by URI, from a real object store: what is allowed arrives whole, all else is refused."""

import gzip
import hashlib
import os
from contextlib import closing

import pytest

from reflogp.scoring.errors import DatasetError
from reflogp.service.dataset_files import DatasetFiles, Incoming
from reflogp.service.fetch import FetchCancelledError, check_uri, fetch
from reflogp.service.ledger import Ledger
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import UsageError
from reflogp.store.storage import open_filesystem
from tests.store.s3 import environment_of, s3_server

BODY = b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n' * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()
PREFIXES = (
    "s3://team/prefs/",
    "az://plain/prefs",
    "hf://datasets/team/prefs/",
    "hf://datasets/pinned/prefs@v1/",
    "hf://datasets/deep/prefs/data/",
)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "uploads"
    made.mkdir()
    return made


def allowing(*prefixes: str, **settings) -> ServerSettings:
    return ServerSettings(store="store", dataset_uris=list(prefixes), **{"max_upload_bytes": 1_000_000, **settings})


def get(uri: str, folder, settings, cancelled=lambda: False):
    with closing(Ledger(folder.parent / f"{folder.name}.sqlite")) as ledger:
        return fetch(uri, Incoming(DatasetFiles(folder, ledger, settings)), settings, cancelled)


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
        "hf://datasets/team/prefs",
        "hf://datasets/team/prefs/",
        "hf://datasets/team/prefs@v1",
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
        "s3://team/prefs-secret/a.jsonl",
        "s3://team/a.jsonl",
        "s3://team.evil/prefs/a.jsonl",
        "gs://team/prefs/a.jsonl",
        "hf://datasets/team/prefs-secret/a.jsonl",
        "hf://datasets/team/other/prefs/a.jsonl",
        "hf://datasets/pinned/prefs/a.jsonl",
        "hf://datasets/pinned/prefs@v2/a.jsonl",
        "hf://datasets/deep/prefs/a.jsonl",
        "hf://datasets/team/prefs-secret",
        "hf://datasets/pinned/prefs",
        "hf://datasets/pinned/prefs@v12",
        "hf://datasets/deep/prefs",
    ],
)
def test_what_no_prefix_allows_is_forbidden(uri):
    with pytest.raises(Problem) as caught:
        check_uri(uri, allowing(*PREFIXES))
    assert caught.value.status == 403 and caught.value.next_step


@pytest.mark.parametrize(
    "uri",
    [
        "https://data.example.org/prefs/a.jsonl",
        "file:///etc/a.jsonl",
        "/etc/passwd",
        "s3a://team/prefs/a.jsonl",
        "hf://datasets/me/a.jsonl",
        "hf://datasets/team/prefs/a.jsonl#x",
        "s3://team/prefs/a.jsonl\r\nHost: evil.com",
        "\ts3://team/prefs/a.jsonl",
        "s3://tеam/prefs/a.jsonl",  # a Cyrillic letter
        "s3://team\\.evil/prefs/a.jsonl",
        "s3://team/prefs/../a.jsonl",
        "s3://team/prefs/%2e%2e/a.jsonl",
        "s3://team/prefs//a.jsonl",
        "s3://team/prefs/a.jsonl?versionId=1",
        "s3://me@team/prefs/a.jsonl",
        "s3://team:80/prefs/a.jsonl",
        "s3://../prefs/a.jsonl",
        "s3:///prefs/a.jsonl",
        "s3://team/prefs/",
        "s3://team/prefs/a.parquet.gz",
        "s3://team/prefs/" + "a" * 5000 + ".jsonl",
        "",
    ],
)
def test_uris_of_hostile_forms_are_refused(uri):
    with pytest.raises(Problem) as caught:
        check_uri(uri, allowing(*PREFIXES, "s3://", "hf://"))
    assert caught.value.status == 422


def test_nothing_is_fetched_without_prefixes(folder):
    with pytest.raises(Problem) as caught:
        check_uri("s3://team/a.jsonl", allowing())
    assert caught.value.status == 403 and "uploads" in caught.value.next_step


@pytest.mark.parametrize(
    "prefix", ["ftp://x/", "https://data.example.org/", "s3:/x", "s3:///x", "s3://x/?a", "x", "s3://x/../y"]
)
def test_a_prefix_that_is_none_is_named(prefix):
    with pytest.raises(UsageError, match="dataset_uris"):
        check_uri("s3://team/a.jsonl", allowing(prefix))


# Object stores


@pytest.fixture(scope="module")
def bucket():
    with s3_server("team") as environment, environment_of(environment):
        filesystem = open_filesystem("s3://team")
        objects = {"prefs/a.jsonl": BODY, "secret/a.jsonl": BODY, "prefs/a-b_c.csv.gz": gzip.compress(BODY)}
        for key, content in {**objects, "prefs/large.jsonl": b"x" * 3_000_000}.items():
            with filesystem.open_output_stream(key, compression=None, buffer_size=1 << 23) as sink:
                sink.write(content)
        yield environment


def test_objects_are_fetched(bucket, folder):
    file, digest = get("s3://team/prefs/a.jsonl", folder, allowing("s3://team/prefs/"))
    assert (file.name, digest, file.read_bytes()) == (f"{DIGEST}.jsonl", DIGEST, BODY)
    packed, _ = get("s3://team/prefs/a-b_c.csv.gz", folder, allowing("s3://"))
    assert packed.name.endswith(".csv.gz") and gzip.decompress(packed.read_bytes()) == BODY  # as it lies there, not unpacked


@pytest.mark.parametrize(
    "uri, says",
    [
        ("s3://team/prefs/none.jsonl", "object does not exist"),
        ("s3://team/prefs/large.jsonl", "larger than 1,000,000"),
        ("s3://team/secret/a.jsonl", "do not allow fetching from this location"),
        ("s3://team/prefs/../secret/a.jsonl", "segment that is empty"),
    ],
)
def test_objects_that_are_not_there_or_not_allowed(bucket, folder, uri, says):
    with pytest.raises(DatasetError, match=says):
        get(uri, folder, allowing("s3://team/prefs/"))
    assert list(folder.iterdir()) == []


def test_a_cancelled_object_leaves_nothing(bucket, folder):
    with pytest.raises(FetchCancelledError):
        get("s3://team/prefs/a.jsonl", folder, allowing("s3://team/"), lambda: True)
    assert list(folder.iterdir()) == [] and os.environ["AWS_REGION"]
