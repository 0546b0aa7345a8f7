"""Run vLLM in its own process, for the benchmarks: it gets token ids and returns seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pairs import Pairs

REPOSITORY = Path(__file__).resolve().parent.parent
VLLM_PYTHON = Path(os.environ.get("REFLOGP_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))


class Vllm:
    """vLLM with prompt_logprobs=0, one process for all its runs.

    Args:
        model: folder of the model.
        python: an interpreter that has vLLM; by default the interpreter that `make setup-vllm` installs.
        random_weights: use random weights, because the folder has only a config.
        prompt_logprobs: number of most probable tokens of each position to compute too.
    """

    name = "vLLM, prompt_logprobs=0"

    def __init__(self, model: Path, python: Path = VLLM_PYTHON, random_weights: bool = False, prompt_logprobs: int = 0) -> None:
        weights = ["--random-weights"] if random_weights else []
        weights += ["--prompt-logprobs", str(prompt_logprobs)]
        self._process = subprocess.Popen(
            [str(python), str(REPOSITORY / "benchmarks" / "vllm_side.py"), str(model), *weights],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if "--verbose" in sys.argv else subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    @staticmethod
    def there() -> bool:
        return VLLM_PYTHON.is_file()

    def seconds(self, pairs: Pairs) -> float:
        assert self._process.stdin is not None
        prompts = [[*map(int, s.prompt_ids), *map(int, s.completion_ids)] for s in pairs.sequences()]
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"reflogp"'):
                return json.loads(line)
        raise RuntimeError("vLLM ended; run with --verbose to see why")
