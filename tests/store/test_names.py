"""Test the names of the package, some of which are imported only when they are used."""

import importlib
import subprocess
import sys

import reflogp.store
from tests.conftest import REPOSITORY


def test_every_public_name_is_what_its_module_defines():
    for name in reversed(reflogp.store.__all__):  # `verify` is used before `repair`, which is in the same module
        found = getattr(reflogp.store, name)
        assert getattr(importlib.import_module(found.__module__), name) is found


def test_what_needs_no_table_works_without_deltalake(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from reflogp.store import ReflogpError, describe_reference, join_logps, sequence_keys\n"
        "print(len(sequence_keys([[1, 2]], [[3]])))\n"
        "from reflogp.store import Store\n"
    )
    command = [sys.executable, "-m", "tests.without", "deltalake", "--", str(program)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "No module named 'deltalake'" in done.stderr
