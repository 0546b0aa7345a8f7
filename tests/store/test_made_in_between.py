"""Test a table that another process creates while a store is read: the table is found or reported as missing, never both."""

from pathlib import Path

import pytest

from reflogp.store import ReferenceNotFoundError, Store, StoreNotFoundError, UsageError, storage
from reflogp.store.reference import describe_all_numerics
from reflogp.store.store import choose_reference
from tests.store.test_reference import copied, edit_config

READS = 12  # more reads than a lookup in a store of two references needs


@pytest.fixture(scope="module")
def described(reference_folder):
    return describe_all_numerics(str(reference_folder))


@pytest.fixture(scope="module")
def another(reference_folder, tmp_path_factory):
    """Return the reference of a model with the same weights and another configuration."""
    folder = copied(reference_folder, tmp_path_factory.mktemp("models") / "other")
    edit_config(folder, rms_norm_eps=1e-3)
    return describe_all_numerics(str(folder))[0]


def make_before_read(monkeypatch, number, make):
    """Call `make` before read number `number`, counted from 0, of a file or a folder of the store."""
    reads = iter(range(1_000))
    inside = []

    def counting(real):
        def read(*arguments, **named):
            if not inside and next(reads) == number:
                inside.append(True)
                make()
                inside.clear()
            return real(*arguments, **named)

        return read

    for module, name in ((storage, "read_file"), (Store, "_entries")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))


WAYS = {
    "table": lambda store, reference, model: store.table(reference.reference_id).reference.reference_id,
    "table_of": lambda store, reference, model: store.table_of(reference).reference.reference_id,
    "held": lambda store, reference, model: next((found.reference_id for found in store.held([reference])), None),
    "choose_reference": lambda store, reference, model: choose_reference(store, model)[0].reference_id,
}


@pytest.mark.parametrize("there", ["nothing", "another folder's", "another dtype's"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_or_named_as_missing(way, there, described, another, reference_folder, tmp_path, monkeypatch):
    wanted, other = described[:2]
    answers = []
    for number in range(READS):
        store = Store(tmp_path / str(number))
        Path(store.uri).mkdir()
        if there == "another folder's":
            store.create_table(another)
        if there == "another dtype's":
            store.create_table(other)
        with monkeypatch.context() as patch:
            made = []

            def make(store=store, made=made):
                store.create_table(wanted)
                made.append(True)

            make_before_read(patch, number, make)
            try:
                found = WAYS[way](store, wanted, str(reference_folder))
            except (ReferenceNotFoundError, StoreNotFoundError, UsageError) as error:
                assert f"{wanted.reference_id} (" not in str(error), "the error reports the reference as missing and as present"
                answers.append("missing")
            else:
                # If the store has another dtype of the model, that dtype may be chosen.
                allowed = (
                    [wanted.reference_id, other.reference_id] if way == "choose_reference" else [wanted.reference_id, None]
                )
                assert found in allowed
                answers.append("missing" if found is None else "found")
        if made and not (
            way == "choose_reference" and there == "another dtype's"
        ):  # if the store has two dtypes, the caller has to give one
            assert WAYS[way](store, wanted, str(reference_folder)) == wanted.reference_id
    assert "missing" in answers
    assert "found" in answers
