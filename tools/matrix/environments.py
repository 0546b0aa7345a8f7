"""Define the environments, one for each version of TRL. They are made once and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

#: Packages that have the main environment's versions in every environment.
_SHARED = ("torch", "numpy", "pyarrow", "deltalake", "httpx", "typer", "rich", "accelerate", "peft")


@dataclass(frozen=True)
class Environment:
    """A version of TRL, and a version of transformers that it works with.

    Attributes:
        more: further requirements.
        variables: environment variables of the runs.
    """

    trl: str
    transformers: str
    datasets: str
    more: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        """Install the environment below `folder`, unless it is installed; return its Python."""
        home = folder / f"trl-{self.trl}"
        python, stamp = home / "bin" / "python", home / "requirements.txt"
        wanted = "\n".join([*self._requirements(), f"--editable {REPOSITORY}"]) + "\n"
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        shutil.rmtree(home, ignore_errors=True)
        uv = shutil.which("uv")
        if uv:
            # uv does not read pip's settings; PIP_FIND_LINKS names the place of torch's build for CPUs
            env = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ","), **os.environ}
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True, env=env)
            install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        else:
            env = dict(os.environ)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *self._requirements()], check=True, env=env)
        # without reflogp's requirements, which ask for the newest transformers
        subprocess.run([*install, "--no-deps", "--editable", str(REPOSITORY)], check=True, env=env)
        stamp.write_text(wanted)
        return python

    def _requirements(self) -> list[str]:
        pins = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
        own = [f"trl=={self.trl}", f"transformers=={self.transformers}", f"datasets=={self.datasets}", *self.more]
        return own + [f"{name}=={pins[name]}" for name in _SHARED]


#: TRL 1.15 computes its loss only in Triton kernels, which run on a CPU in Triton's interpreter.
_ON_TRITON = {"more": ("triton==3.9.0",), "variables": {"TRITON_INTERPRET": "1"}}
ENVIRONMENTS = [
    Environment("1.16.0", "5.23.0", "5.2.0"),
    Environment("1.15.0", "5.22.2", "5.2.0", **_ON_TRITON),
    Environment("1.14.2", "5.20.2", "5.2.0"),
    Environment("1.13.0", "5.18.0", "5.2.0"),
    Environment("1.12.0", "5.16.1", "5.2.0"),
    Environment("1.9.0", "5.14.1", "5.2.0"),
    Environment("1.8.0", "5.13.1", "5.2.0"),
]
