"""Runs a Python file, or pytest, as on a machine where some packages are not installed.

    python -m tests.without deltalake,datasets -- FILE [ARGUMENTS …]
    python -m tests.without deltalake,datasets -- pytest [ARGUMENTS …]

`find_spec` answers None for the packages, and an import raises ModuleNotFoundError.
"""

import runpy
import sys
from importlib.machinery import PathFinder

if __name__ == "__main__":
    packages, _, program, *arguments = sys.argv[1:]
    hidden, find_spec = packages.split(","), PathFinder.find_spec
    assert not set(hidden) & sys.modules.keys()
    # A class method, because pytest keeps it as an attribute of a class.
    PathFinder.find_spec = classmethod(lambda _, name, *at: None if name.split(".")[0] in hidden else find_spec(name, *at))
    sys.argv = [program, *arguments]
    if program == "pytest":
        import pytest

        sys.exit(pytest.main(arguments))
    runpy.run_path(program, run_name="__main__")
