"""`reflogp verify`: right values pass, changed ones are named, and nothing is written."""

import json

import numpy as np
import pytest

from tests.conftest import last_object, write_rows
from tests.trainer_ext.conftest import damaged_copy, score_pairs

ROWS = 12  # pairs, so 24 sequences


@pytest.fixture
def data(pair_rows, tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", pair_rows[:ROWS])


@pytest.fixture
def store(reference_folder, data, tmp_path):
    score_pairs(reference_folder, data, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def verify(reflogp, reference_folder):
    """verify(data, store, *options) -> (exit code, the JSON object, stderr)"""

    def run(data, store, *options):
        code, printed, said = reflogp("verify", reference_folder, data, "--store", store, "--json", *options)
        return code, last_object(printed), said

    return run


def contents(store) -> dict:
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_right_values(dtype, allowed, reference_folder, data, tmp_path, verify, reflogp):
    score_pairs(reference_folder, data, tmp_path / "store", dtype)
    before = contents(tmp_path / "store")
    code, found, _ = verify(data, tmp_path / "store")
    assert (code, found["rows"], found["sequences"], found["without_values"], found["wrong_rows"]) == (0, ROWS, 24, 0, [])
    assert found["max_per_root_token"] <= found["tolerance"] == allowed
    assert found["max_token_rms"] <= allowed
    array = tmp_path / "array.json"
    array.write_text(json.dumps([json.loads(line) for line in data.read_text().splitlines()]))
    options = ("--store", tmp_path / "store", "--rows", 3, "--max-length", 300)
    code, printed, said = reflogp("verify", reference_folder, array, *options)
    assert code == 0, said
    assert "computed 6 sequences of 3 rows again; 0 sequences have no stored values" in printed
    assert f"nats/√tokens, {allowed:g} allowed" in printed
    assert contents(tmp_path / "store") == before


def test_rows_without_values_are_counted(pair_rows, store, tmp_path, verify):
    more = write_rows(tmp_path / "more.jsonl", [*pair_rows[: ROWS + 2], {"prompt": 1, "chosen": None, "rejected": None}])
    code, found, said = verify(more, store, "--rows", 0)
    assert (code, found["rows"], found["sequences"], found["without_values"]) == (0, ROWS, 24, 4)
    assert f"row {ROWS + 2}" in said  # it cannot be read
    code, found, _ = verify(write_rows(tmp_path / "new.jsonl", pair_rows[ROWS : ROWS + 2]), store)
    assert code == 1 and "2 rows without stored values to compare. Score the data: reflogp score" in found["error"]


def test_the_values_of_another_model_are_caught(store, data, tmp_path, verify):
    noise = np.random.default_rng(0)
    other = damaged_copy(store, tmp_path / "other", lambda values: values + noise.normal(0.05, 0.3, len(values)))
    code, found, said = verify(data, other)
    assert (code, sorted(found["wrong_rows"])) == (1, list(range(ROWS)))
    assert found["max_difference"] > 1 and "12 rows in all" in said


@pytest.mark.parametrize("change", [lambda values: values[::-1], lambda values: values * np.nan])
def test_the_rows_whose_values_were_changed_are_named(change, store, data, tmp_path, verify, pair_rows):
    """Also where only the order changed, which keeps the sum, and where values are not finite."""
    numbers = iter(range(1000))
    bad = damaged_copy(store, tmp_path / "bad", lambda values: change(values) if next(numbers) == 5 else values)
    code, found, said = verify(data, bad)
    assert (code, found["sequences"], len(found["wrong_rows"])) == (1, 24, 1)
    assert f"worst first): {found['wrong_rows'][0]}\n" in said
    alone = write_rows(tmp_path / "alone.jsonl", [pair_rows[found["wrong_rows"][0]]])
    assert verify(alone, bad)[1]["wrong_rows"] == [0]


def test_a_store_without_the_model(data, store, tmp_path, verify):
    code, found, _ = verify(data, tmp_path / "none")
    assert code == 2 and "Score the data: reflogp score" in found["error"]
    code, found, _ = verify(data, store, "--dtype", "bfloat16")
    assert code == 1 and f"--store {store} --dtype bfloat16" in found["error"]
