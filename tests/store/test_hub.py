"""Test `reflogp store push` and `pull` with the real huggingface_hub, against a server with the Hub's API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.store import LogprobTable, Store
from tests.store.hub_server import TOKEN, HubFaults, hub
from tests.store.rows import REFERENCE, some_rows

NAME = "team/sft-logps"
PLACE = f"hf://datasets/{NAME}"
ROWS = 3000


@pytest.fixture
def server():
    with hub() as found:
        yield found


@pytest.fixture
def run(server, tmp_path):
    """Return run(words, …) -> (exit code, output).

    Each call is a process, since huggingface_hub reads its settings only once.
    """
    program = "import reflogp.store.maintenance as m; m.SHARD_BYTES = 20_000\n"  # several files
    program += "from reflogp.cli import main; main()"

    def call(*words: str, token: str = TOKEN, **variables: str) -> tuple[int, str]:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "COLUMNS": "400", **variables}
        command = [sys.executable, "-c", program, "store", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.fixture
def store(tmp_path) -> Store:
    found = Store(tmp_path / "store")
    for first in range(0, ROWS, 1000):
        found.create_table(REFERENCE).append(some_rows(first, 1000)[1])
    return found


def table_of(store: Store) -> LogprobTable:
    return store[REFERENCE.reference_id]


def rows_in(server) -> int:
    """Number of rows in the repository's Parquet files."""
    parts = [data for name, data in server.files(NAME).items() if name.startswith("data/part-")]
    return sum(pq.read_metadata(pa.BufferReader(data)).num_rows for data in parts)


def rows_of(store: Store) -> dict[bytes, list[float]]:
    keys = some_rows(0, ROWS)[0]
    sums = table_of(store).snapshot().prefix_sums(keys, np.full(ROWS, 5))
    return dict(zip(keys.to_pylist(), sums.tolist(), strict=True))


def test_what_is_pushed_is_pulled(run, server, store, tmp_path):
    code, said = run("push", store.uri, PLACE)
    assert code == 0, said
    files = server.files(NAME)
    assert {"README.md", "reference.json", "data/part-00001.parquet"} <= files.keys()
    assert server.repositories[NAME].private
    card = files["README.md"].decode()
    assert REFERENCE.reference_id in card and "none of the dataset's text" in card
    code, said = run("pull", str(tmp_path / "other"), PLACE, "--json")
    assert code == 0, said
    assert json.loads(said.splitlines()[0])["written"] == ROWS
    assert rows_of(Store(tmp_path / "other")) == rows_of(store)
    commits = server.repositories[NAME].commits
    first = commits[-1][0]
    code, said = run("push", store.uri, PLACE)
    assert (code, commits[-1][0]) == (0, first) and "already" in said
    table_of(store).append(some_rows(ROWS, 10)[1])
    assert run("push", store.uri, PLACE)[0] == 0
    assert (len(commits), rows_in(server)) == (3, ROWS + 10)
    assert run("pull", str(tmp_path / "earlier"), f"{PLACE}@{first}")[0] == 0
    assert len(table_of(Store(tmp_path / "earlier")).snapshot()) == ROWS
    for status, offline in ((403, "0"), (0, "1")):  # an error, and not the copy that was downloaded before
        server.faults = HubFaults(status=status)
        code, said = run("pull", str(tmp_path / "later"), PLACE, HF_HUB_OFFLINE=offline)
        assert code in (1, 2) and PLACE in said and not (tmp_path / "later").exists()


@pytest.mark.slow
def test_values_of_others_are_not_lost(run, server, store, tmp_path):
    """The error counts what the repository has and the store lacks. After a pull, a push sends all rows together."""
    run("push", store.uri, PLACE, "--public")
    assert not server.repositories[NAME].private
    others = Store(tmp_path / "others")
    others.create_table(REFERENCE).append(some_rows(0, ROWS + 100, values=3)[1])
    code, said = run("push", others.uri, PLACE)
    assert code == 2
    assert re.search(rf"has values of {ROWS:,} sequences that snapshot \d+ of the store lacks", said)
    pulled = re.search(r"`reflogp store (pull \S+ \S+)`", said)
    assert pulled is not None
    assert run(*pulled[1].split())[0] == 0
    assert run("push", others.uri, PLACE)[0] == 0
    assert rows_in(server) == ROWS + 100
    assert run("push", store.uri, PLACE, "--replace")[0] == 0
    assert rows_in(server) == ROWS


@pytest.mark.slow
def test_a_damaged_repository_is_named_and_can_be_replaced(run, server, store, tmp_path):
    run("push", store.uri, PLACE)
    whole = server.files(NAME)
    for damage in ("data/part-00001.parquet", "reference.json"):
        server.repositories[NAME].commit({**whole, damage: b"PAR1 nothing PAR1"})
        for words in (("push", store.uri), ("pull", str(tmp_path / "other"))):
            code, said = run(*words, PLACE)
            assert code == 2
            assert damage.removeprefix("data/") in said and "cannot be read" in said
    server.repositories[NAME].commit({**whole, "data/part-00001.parquet": b"PAR1 nothing PAR1"})
    assert run("push", store.uri, PLACE, "--replace")[0] == 0
    assert server.files(NAME) == whole
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_files_and_commits_of_others_stay(run, server, store):
    """Also a commit that comes during a push."""
    run("push", store.uri, PLACE)
    theirs = {"README.md": b"---\ntags:\n- reflogp\n---\nours", "data/extra/mine.parquet": b"PAR1", "LICENSE": b"free"}
    server.repositories[NAME].commit(server.files(NAME) | theirs)
    table_of(store).append(some_rows(ROWS, 10)[1])
    server.faults = HubFaults(commits_between=True)
    code, said = run("push", store.uri, PLACE)
    assert code == 2
    assert "was changed during the push" in said
    server.faults = HubFaults()
    assert run("push", store.uri, PLACE)[0] == 0
    assert (theirs | {"note.txt": b"between"}).items() <= server.files(NAME).items()
    assert rows_in(server) == ROWS + 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "more", "why"),
    [
        (("pull", "{store}", "hf://datasets/team/none"), {}, "does not exist, or the token has no permission"),
        (("pull", "{store}", f"{PLACE}@abc"), {}, "does not exist, or the token has no permission"),
        (("pull", "{store}", "hf://team/sft-logps"), {}, "use hf://datasets/ORGANISATION/NAME"),
        (("push", "{store}", f"{PLACE}@main"), {}, "leave out @main"),
        (("push", "{store}", PLACE), {"token": "hf_another"}, "log in with `hf auth login`"),
        (("push", "{store}", PLACE), {"HF_ENDPOINT": "http://127.0.0.1:9"}, PLACE),
    ],
)
def test_errors_say_what_is_wrong(words, more, why, run, server, store):
    run("push", store.uri, PLACE)
    before = len(server.repositories[NAME].commits), len(table_of(store).snapshot())
    code, said = run(*(word.format(store=store.uri) for word in words), **more)
    assert code in (1, 2)
    assert why in said, said
    assert (len(server.repositories[NAME].commits), len(table_of(store).snapshot())) == before


@pytest.mark.slow
def test_a_repository_with_other_data_is_left_alone(run, server, store):
    run("push", store.uri, PLACE)
    other = {"data/train.parquet": b"PAR1"}
    server.repositories["team/data"] = type(server.repositories[NAME])(private=True)
    server.repositories["team/data"].commit(other)
    code, said = run("push", store.uri, "hf://datasets/team/data")
    assert code == 2
    assert "contains data that reflogp did not push" in said
    code, said = run("pull", store.uri, "hf://datasets/team/data")
    assert code == 2
    assert "was not written by `reflogp store push`" in said
    assert "data/train.parquet" not in server.downloaded
    files = server.files(NAME)
    other_id = files["reference.json"].replace(REFERENCE.reference_id.encode(), b"cd" * 16)
    server.repositories[NAME].commit({**files, "reference.json": other_id})
    code, said = run("push", store.uri, PLACE)
    assert code == 2
    assert f"contains log-probs of reference {'cd' * 16}" in said
    assert server.files("team/data") == other
