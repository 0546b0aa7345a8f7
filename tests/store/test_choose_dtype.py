"""Test `dtype="auto"`, which chooses the only dtype in which a store holds a model, whatever other models it holds."""

import random
from pathlib import Path

import pytest

from reflogp.store import ReferenceNotFoundError, Store, StoreNotFoundError, UsageError, describe_reference
from reflogp.store.reference import describe_all_numerics
from reflogp.store.store import choose_reference
from tests.store.rows import REFERENCE
from tests.store.test_reference import copied, edit_config


@pytest.fixture(scope="module")
def model(reference_folder):
    return str(reference_folder)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.mark.parametrize("seed", range(8))
def test_what_a_store_holds_decides(model, store, reference_folder, tmp_path, seed):
    """Test stores with random tables of this model and of another model with the same weights."""
    other = copied(reference_folder, tmp_path / "other")
    edit_config(other, rms_norm_eps=1e-3)
    chance = random.Random(seed)
    held = chance.sample(describe_all_numerics(model), chance.randint(0, 2))
    for reference in [*held, *chance.sample(describe_all_numerics(str(other)), chance.randint(0, 3))]:
        store.create_table(reference)
    otherwise = chance.choice(["bfloat16", "float32"])
    if len(held) > 1:
        with pytest.raises(UsageError, match="say which one to use") as refused:
            choose_reference(store, model, otherwise=otherwise)
        assert all(reference.dtypes() in str(refused.value) for reference in held)
    else:
        found, reason = choose_reference(store, model, otherwise=otherwise)
        assert found == (held[0] if held else describe_reference(model, otherwise))
        assert reason.startswith(f"dtype {found.dtypes()}: ")
    if not held:
        with pytest.raises((StoreNotFoundError, ReferenceNotFoundError)):
            choose_reference(store, model)
    heads = [reference for reference in held if reference.lm_head_dtype == "float32"]
    if len(heads) == 1:
        assert choose_reference(store, model, lm_head_dtype="float32")[0] == heads[0]
    for reference in held:  # a given dtype is used unchanged
        if reference.lm_head_dtype == reference.dtype:
            assert choose_reference(store, model, reference.dtype) == (reference, "")


def test_a_missing_table_names_the_dtypes_that_the_store_has(model, store, reference_folder, tmp_path):
    """Test that tables of another model with the same weights are not offered, and that logits in float32 are named."""
    other = copied(reference_folder, tmp_path / "other")
    edit_config(other, rms_norm_eps=1e-3)
    asked = describe_reference(model, "bfloat16")
    store.create_table(describe_reference(str(other), "float32"))
    with pytest.raises(ReferenceNotFoundError) as refused:
        store[asked]
    assert "same model" not in str(refused.value)
    store.create_table(describe_reference(model, "float16"))
    with pytest.raises(
        ReferenceNotFoundError, match=r"the same model in float16 \(to use them, set --dtype, or dtype= in Python\)$"
    ):
        store[asked]
    store.create_table(describe_reference(model, "bfloat16", lm_head_dtype="float32"))
    with pytest.raises(ReferenceNotFoundError, match=r"bfloat16 with logits in float32 .* add --lm-head-dtype float32"):
        store[asked]


def test_a_folder_without_a_reference_is_no_table(model, store):
    """Test the files that a process leaves when it is killed while it creates a table."""
    store.create_table(REFERENCE)
    left = describe_reference(model, "float16")
    folder = store.create_table(left).uri.removesuffix("/logprobs")
    Path(folder, "reference.json").unlink()
    found, _ = choose_reference(store, model, otherwise="float32")
    assert found.dtype == "float32"
    with pytest.raises(ReferenceNotFoundError, match="has no values of"):
        choose_reference(store, model)
