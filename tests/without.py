"""Runs a Python file, or pytest, as on a machine where some packages are not installed.

    python -m tests.without deltalake,datasets -- FILE [ARGUMENTS …]
    python -m tests.without deltalake,datasets -- pytest [ARGUMENTS …]

`find_spec` answers None for the packages and an import raises ModuleNotFoundError. `name!by` hides a package from every module
but those of the package `by`, which cannot do without it.
"""

from __future__ import annotations

import builtins
import importlib
import runpy
import sys
from typing import Any


class _Blind:
    """A finder that does not see some packages."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.split(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide(names: list[str]) -> None:
    """Hide packages from this process."""
    from_all = frozenset(name for name in names if "!" not in name)
    found = from_all & set(sys.modules)
    assert not found, f"imported already: {found}"
    sys.meta_path[:] = [_Blind(finder, from_all) for finder in sys.meta_path]
    importlib.invalidate_caches()
    but = dict(name.split("!") for name in names if "!" in name)
    real = builtins.__import__

    def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        package, importer = name.split(".")[0], str((globals or {}).get("__name__", ""))
        if level == 0 and package in but and importer.split(".")[0] not in (package, but[package]):
            raise ModuleNotFoundError(f"No module named {package!r} for {importer}", name=package)
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded


if __name__ == "__main__":
    packages, _, program, *arguments = sys.argv[1:]
    hide(packages.split(","))
    sys.argv = [program, *arguments]
    if program == "pytest":
        import pytest

        sys.exit(pytest.main(arguments))
    runpy.run_path(program, run_name="__main__")
