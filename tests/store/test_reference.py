import json
import shutil

import pytest

from reflogp.store import CheckpointError, UsageError, describe_reference, digests


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def reference_id(folder, dtype="float32"):
    return describe_reference(str(folder), dtype).reference_id


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_two_folders_with_the_same_weights_have_one_id(reference_folder, tmp_path):
    assert reference_id(copied(reference_folder, tmp_path / "elsewhere")) == reference_id(reference_folder)


def test_one_changed_byte_is_another_reference(reference_folder, tmp_path):
    other = copied(reference_folder, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert reference_id(other) != reference_id(reference_folder)


def test_the_dtype_is_part_of_the_id(reference_folder):
    assert len({reference_id(reference_folder, dtype) for dtype in ("float32", "bfloat16", "float16")}) == 3
    assert reference_id(reference_folder, "checkpoint") == reference_id(reference_folder, "float32")


def test_only_the_semantic_part_of_the_config_counts(reference_folder, tmp_path):
    same = copied(reference_folder, tmp_path / "same")
    edit_config(same, _name_or_path="x", transformers_version="9.9", use_cache=False, pad_token_id=5, dtype="bfloat16")
    other = copied(reference_folder, tmp_path / "other")
    edit_config(other, rms_norm_eps=1e-3)
    assert reference_id(same) == reference_id(reference_folder) != reference_id(other)


def test_hashing_shows_progress_and_is_remembered_until_the_file_changes(reference_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REFLOGP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_CLOCK_STEP_SECONDS", 0)  # files that changed a moment ago are not remembered
    weights = copied(reference_folder, tmp_path / "model") / "model.safetensors"
    reads: list[tuple[int, int]] = []

    def hashed():
        reads.clear()
        return digests.file_digests([weights], lambda done, total: reads.append((done, total)))[weights]

    first = hashed()
    assert reads[-1] == (weights.stat().st_size, weights.stat().st_size)
    assert hashed() == first
    assert not reads
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert hashed() != first
    assert reads


def test_a_missing_weight_file_is_named(reference_folder, tmp_path):
    folder = copied(reference_folder, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        reference_id(folder)


@pytest.mark.parametrize("keep", [5, -1000])
def test_a_truncated_weight_file_is_named(reference_folder, tmp_path, keep):
    folder = copied(reference_folder, tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        reference_id(folder)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "some-name-that-is-not-there"])
def test_a_model_that_is_not_there(model):
    with pytest.raises(UsageError):
        describe_reference(model)


def test_an_unknown_dtype(reference_folder):
    with pytest.raises(UsageError, match="float32"):
        describe_reference(str(reference_folder), "int7")
