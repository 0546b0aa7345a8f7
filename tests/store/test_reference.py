import json
import shutil

import pytest

from reflogp.store import CheckpointError, UsageError, describe_reference


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def reference_id(folder, dtype="float32"):
    return describe_reference(str(folder), dtype).reference_id


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_id_depends_on_weights_dtype_and_the_semantic_part_of_the_config(reference_folder, tmp_path):
    own = reference_id(reference_folder)
    assert len({reference_id(reference_folder, dtype) for dtype in ("float32", "bfloat16", "float16")}) == 3
    assert reference_id(reference_folder, "checkpoint") == own
    other = copied(reference_folder, tmp_path / "other")
    assert reference_id(other) == own
    edit_config(other, _name_or_path="x", transformers_version="9.9", use_cache=False, pad_token_id=5, dtype="bfloat16")
    assert reference_id(other) == own
    edit_config(other, rms_norm_eps=1e-3)
    assert reference_id(other) != own
    changed = copied(reference_folder, tmp_path / "changed") / "model.safetensors"
    weights = bytearray(changed.read_bytes())
    weights[-1] ^= 1
    changed.write_bytes(weights)
    assert reference_id(changed.parent) not in (own, reference_id(other))


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
