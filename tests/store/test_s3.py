"""Test a store on a real S3 server: credentials, conditional commits, maintenance, and failures of object stores."""

import os
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from reflogp.store import Store, StoreUnavailableError, UsageError
from tests.store.rows import REFERENCE, some_rows
from tests.store.s3 import Relay, environment_of, s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as environment:
        yield environment


@pytest.fixture
def uri(server, request):
    with environment_of(server):
        yield f"s3://logps/{request.node.name}"


def values_of(table, keys):
    return [values.tolist() for values in table.snapshot().token_logps(keys)]


def test_append_compact_vacuum_and_old_snapshots(uri):
    table = Store(uri).create_table(REFERENCE)
    keys, rows = some_rows(0, 60)
    for start in range(0, 60, 20):
        table.append(rows.slice(start, 20))
    old = table.snapshot_number()
    assert table.compact().shards_after == 1
    assert values_of(table, keys) == rows["token_logps"].to_pylist()
    assert table.snapshot(old).stored_lengths(keys).tolist() == [5] * 60
    assert len(table.vacuum(0, alone=True)) == 3
    assert not table.verify()
    assert Store(uri).references() == [REFERENCE]
    with pytest.raises(UsageError, match="no store"):
        Store("s3://logps/nothing-here").references()


def test_credentials_from_a_profile(server, tmp_path):
    """The environment holds no key; the key is only in the files that every S3 tool reads."""
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = someone\naws_secret_access_key = not-a-secret\n")
    (tmp_path / "config").write_text("[profile team]\nregion = us-east-1\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {
        "AWS_ENDPOINT_URL": server["AWS_ENDPOINT_URL"],
        "AWS_ALLOW_HTTP": "true",
        "AWS_PROFILE": "team",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    program = (
        "from reflogp.store import Store; from tests.store.rows import REFERENCE, some_rows;"
        "print(Store('s3://logps/profile').create_table(REFERENCE).append(some_rows(0, 3)[1]).written)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize("opening", ["references", "create_table"])
def test_a_wrong_bucket_is_one_sentence(server, opening):
    with environment_of(server), pytest.raises(StoreUnavailableError) as caught:
        getattr(Store("s3://no-such-bucket/store"), opening)(*([REFERENCE] if opening == "create_table" else []))
    message = str(caught.value)
    assert "bucket does not exist" in message
    assert "\n" not in message
    assert len(message) < 200


def test_an_object_store_that_hangs_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ALLOW_HTTP": "true"}
        keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1"}
        with environment_of(hanging | keys):
            began = time.monotonic()
            with pytest.raises(StoreUnavailableError, match=r"cannot be read: .*timed out"):
                Store("s3://logps/store", options={"timeout": "1s"}).references()
        assert time.monotonic() - began < 30


def test_a_connection_that_is_lost_and_comes_back(uri, server, monkeypatch):
    """The connection is lost during an append: no new row is visible, committed rows stay, and a repeated call succeeds."""
    keys, rows = some_rows(0, 20)
    with Relay(urlsplit(server["AWS_ENDPOINT_URL"]).port) as relay:
        with environment_of({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}):
            table = Store(uri).create_table(REFERENCE)
        table.append(rows.slice(0, 10))
        original = table._commit

        def cut_before_commit(*arguments):
            relay.say("cut")
            return original(*arguments)

        monkeypatch.setattr(table, "_commit", cut_before_commit)
        with pytest.raises(StoreUnavailableError) as caught:
            table.append(rows.slice(10))
        assert "\n" not in str(caught.value)
        monkeypatch.undo()
        elsewhere = Store(uri)[REFERENCE.reference_id]
        assert elsewhere.snapshot().stored_lengths(keys).tolist() == [5] * 10 + [-1] * 10
        relay.say("mend")
        assert table.append(rows.slice(10)).written == 10
        assert values_of(elsewhere, keys) == rows["token_logps"].to_pylist()
        assert not elsewhere.verify()
