"""Run the tests of the Hub with other versions of huggingface_hub than .venv has: `make hub-versions`.

    python -m tools.hub_versions [--environments .venv-hub] [--version 1.5.0 …]

Versions that transformers and datasets no longer support are installed as by `pip install 'reflogp[hub]'`, without those two
packages; only push and pull are tested. The other versions precede .venv on the import path, the oldest with the oldest
transformers and datasets. They are also tested with the readers of hf:// and the service's jobs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_STORE = ("tests/store/test_hub.py",)
_ALL = (*_STORE, "tests/service/test_fetch.py", "tests/service/test_jobs.py")
_TESTING = ("pytest", "pytest-timeout", "fastapi", "uvicorn", "pyyaml")


@dataclass(frozen=True)
class Version:
    """A version of huggingface_hub.

    Attributes:
        with_others: packages that also precede .venv on the import path; None for an environment without transformers and
            datasets.
    """

    number: str
    with_others: tuple[str, ...] | None = ()


#: The oldest version of the extra `hub`, the first 1.x, the oldest version of the extras `service` and `trainer`, the last 1.x,
#: and the first 2.x.
VERSIONS = (
    Version("0.36.2", None),
    Version("1.0.1", None),
    Version("1.5.0", ("transformers==5.16.0", "datasets==4.7.0")),
    Version("1.33.0"),
    Version("2.0.0"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-hub", help="folder of the environments")
    parser.add_argument(
        "--version", nargs="*", choices=[version.number for version in VERSIONS], help="test only these versions"
    )
    given = parser.parse_args()
    failed = []
    for version in VERSIONS:
        if given.version and version.number not in given.version:
            continue
        python = make(version, given.environments.resolve() / version.number)
        print(f"huggingface_hub {version.number}", flush=True)
        if subprocess.run(_tests(python, version), cwd=ROOT, check=False).returncode:
            failed.append(version.number)
    if failed:
        print(f"failed with huggingface_hub {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def make(version: Version, folder: Path) -> Path:
    """Make the environment unless it exists; return its Python."""
    python, packages, done = folder / "bin" / "python", _packages(folder), folder / "done"
    if done.is_file():
        return python
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    words = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    words += [f"huggingface_hub=={version.number}"]
    if version.with_others is None:
        subprocess.run([*words, "--editable", f"{ROOT}[hub]", *_TESTING], check=True)
    else:
        subprocess.run([*words, "--no-deps", *version.with_others], check=True)
        # Folders from a .pth file come after the environment's own packages on the import path.
        (packages / "main.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    done.touch()
    return python


def _packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _tests(python: Path, version: Version) -> list[str | Path]:
    words = [python, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return [*words, *(_STORE if version.with_others is None else (*_ALL, "-k", "hub"))]


if __name__ == "__main__":
    sys.exit(main())
