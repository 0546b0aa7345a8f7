"""Test digests of files: they are correct after every kind of change, and kept only where no other user can write them."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest

from reflogp.store import ReflogpError, describe_reference, digests


def truth(file) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def digest(file) -> str:
    return digests.file_digests([file])[file]


def flipped(content: bytes) -> bytes:
    return bytes(byte ^ 0x20 for byte in content)


def in_place(file, content: bytes) -> None:
    """Write other content of the same size into the same inode, and restore the old times of the file."""
    about = file.stat()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def renamed_over(file, content: bytes) -> None:
    about = file.stat()
    other = file.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.rename(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("REFLOGP_CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize("change", [in_place, renamed_over])
def test_a_changed_file_has_its_own_digest(tmp_path, cache, change):
    file = tmp_path / "weights"
    file.write_bytes(b"some weights" * 100)
    first, content = file.read_bytes(), b"some weights" * 100
    for turn in range(20):  # the changes follow at once: file times have steps, and a change within one step must be detected
        assert digest(file) == truth(file), turn
        content = flipped(content)
        change(file, content)
    assert digest(file) == truth(file)
    assert file.read_bytes() == first


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(digests, "_CLOCK_STEP_SECONDS", 0)  # digests of files that changed a moment ago are remembered too
    file, reads = tmp_path / "weights", []
    file.write_bytes(b"some weights")
    for _ in range(2):
        assert digests.file_digests([file], lambda *done_and_total: reads.append(done_and_total)) == {file: truth(file)}
    assert reads == [(12, 12)]
    file.write_bytes(b"longer weights")
    assert digest(file) == truth(file)


def test_a_file_that_is_written_while_it_is_hashed_is_refused(tmp_path, cache):
    file = tmp_path / "weights"
    file.write_bytes(b"some weights" * 100)
    with pytest.raises(ReflogpError, match="weights was changed, replaced or deleted"):
        digests.file_digests([file], lambda done, total: in_place(file, flipped(file.read_bytes())))
    assert digest(file) == truth(file)


def a_link(own) -> None:
    elsewhere = own.parent.with_name("elsewhere")
    own.rename(elsewhere)
    own.symlink_to(elsewhere)


ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")


@pytest.mark.parametrize(
    "change", [lambda own: own.chmod(0o777), pytest.param(lambda own: os.chown(own, 12345, 12345), marks=ROOT_ONLY), a_link]
)
def test_digests_that_others_can_write_are_not_believed(tmp_path, cache, caplog, monkeypatch, change):
    monkeypatch.setattr(digests, "_CLOCK_STEP_SECONDS", 0)  # digests of files that changed a moment ago are remembered too
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    digest(file)
    [own] = cache.iterdir()
    assert own.name == f"digests-{os.getuid()}" and stat.S_IMODE(own.stat().st_mode) == 0o700
    for remembered in own.iterdir():
        remembered.write_bytes(re.sub(rb"[0-9a-f]{64}", b"ab" * 32, remembered.read_bytes()))
    assert digest(file) == "ab" * 32, "a digest is remembered"
    change(own)
    assert digest(file) == truth(file)
    assert [record for record in caplog.records if "cannot be cached" in record.message]


@pytest.fixture
def hub(reference_folder, tmp_path, cache):
    """Make a cache folder as the hub's client does: a blob that is named by its sha256, and a snapshot that links to it."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "one"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / truth(reference_folder / "model.safetensors")
    shutil.copy(reference_folder / "model.safetensors", blob)
    shutil.copy(reference_folder / "config.json", snapshot)
    for path in (blobs, snapshot, blob):
        path.chmod(0o755)
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


def hashed(folder):
    """Return (digests of a model's weights, whether a file was read to compute them)."""
    reads = []
    weights = describe_reference(str(folder), "float32", progress=lambda done, total: reads.append(done)).weights
    return weights, bool(reads)


def test_a_blobs_name_is_believed_where_only_the_hubs_client_wrote_it(hub):
    blob = (hub / "model.safetensors").resolve()
    assert hashed(hub) == ((blob.name,), False)


@pytest.mark.parametrize("again", [False, True], ids=["one revision", "a later revision links to it again"])
def test_a_blob_that_was_changed_under_its_name_is_hashed(hub, again):
    blob = (hub / "model.safetensors").resolve()
    in_place(blob, blob.read_bytes()[:-1] + b"x")
    if again:
        later = shutil.copytree(hub, hub.with_name("two"), symlinks=True)
        (later / "model.safetensors").unlink()
        (later / "model.safetensors").symlink_to(blob)
        hub = later
    assert truth(blob) != blob.name
    assert hashed(hub) == ((truth(blob),), True)


def test_a_user_without_a_home_has_a_cache_too():
    """As in a container with a user id that no passwd file knows."""
    program = "from reflogp.store.digests import cache_dir; print(cache_dir())"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "REFLOGP_CACHE_DIR")
    }
    enter = ["setpriv", "--reuid=54321", "--clear-groups"]
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only root may become another user")
    done = subprocess.run([*enter, sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip().endswith("reflogp-cache-54321"), done.stderr
