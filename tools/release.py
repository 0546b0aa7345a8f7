"""Build the wheel and the sdist, and install them in empty environments, one for each extra: `make test-dist`.

    python tools/release.py [--out dist] [--extra service …]

Each environment must be able to run the code of its extra, and must not have packages that the extra does not need.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Extra -> (code that must run, packages that must not be installed).
WORKS: dict[str, tuple[list[str], list[str]]] = {
    "": (
        [
            "from reflogp.client import Client",
            "from reflogp.store import Store, sequence_keys; sequence_keys([[1]], [[2]])",
        ],
        ["torch", "transformers", "fastapi", "trl", "ray", "vllm"],
    ),
    "hub": (
        ["from huggingface_hub import HfApi; import reflogp.store.hub"],
        ["torch", "transformers", "datasets", "fastapi"],
    ),
    "service": (
        ["from reflogp.scoring.torch_engine import Sequence, TorchEngine", "import reflogp.service.app"],
        ["trl", "ray", "vllm"],
    ),
    "trainer": (
        ["from reflogp.trainer import CachedDPOTrainer, RemoteGRPOTrainer"],
        ["fastapi", "uvicorn", "ray", "vllm"],
    ),
    "service,trainer": (["from reflogp.cli.demo import demo"], ["ray", "vllm"]),
    "service,otel": (
        ["from reflogp.scoring.tracing import _process_provider; assert _process_provider()"],
        ["trl", "ray", "vllm"],
    ),
    "service,ray": (["import reflogp.scoring.on_ray.workers"], ["trl", "vllm"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "dist"), help="folder of the wheel and the sdist")
    parser.add_argument("--extra", nargs="*", choices=WORKS, default=list(WORKS), help="only these")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", options.out, str(ROOT))
    [wheel], [sdist] = Path(options.out).glob("*.whl"), Path(options.out).glob("*.tar.gz")
    for extra in options.extra:
        check(wheel, extra)
    check(sdist, "")


def check(file: Path, extra: str) -> None:
    """Install a file and run the code of an extra; exit with the output if something does not work."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        words = [
            "install",
            "--quiet",
            "--no-compile",
            "--disable-pip-version-check",
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        run(python, "-m", "pip", *words, f"{file}[{extra}]" if extra else str(file))
        run(f"{folder}/bin/reflogp", "--help")
        works, absent = WORKS[extra]
        for line in works:
            run(python, "-P", "-c", line)
        run(
            python,
            "-P",
            "-c",
            f"from importlib.util import find_spec; assert not (found := [*filter(find_spec, {absent})]), found",
        )
        if extra:
            run(f"{folder}/bin/reflogp", "doctor")
    print(f"{file.name} [{extra}]: installs and works, {time.monotonic() - begun:.0f} s", flush=True)


def run(*command: str) -> str:
    """Return the output of a command; exit if it fails."""
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
