"""Compare cached trainers with TRL's own trainers and their reference model, for several versions of TRL: `make matrix`.

Makes the environments, runs every case in each, and writes docs/trl-versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reflogp.cli.demo_model import train_tokenizer
from reflogp.store.commands import ScoreArguments
from tests.conftest import PAIRS, save_llama
from tools.matrix.cases import CASES, STEPS, TOLERANCE, Result
from tools.matrix.environments import ENVIRONMENTS, REPOSITORY, Environment

TABLE = REPOSITORY / "docs" / "trl-versions.md"
_ROWS = 48
_LIMIT_S = 3600
_MAIN = [sys.executable, "-c", "from reflogp.cli import main; main()"]


@dataclass
class Column:
    """The results of one environment."""

    environment: Environment
    versions: dict[str, str]
    results: list[Result]
    seconds: float

    @property
    def failures(self) -> list[str]:
        """Return the cases that fail."""
        found = []
        for case, result in zip(CASES, self.results, strict=True):
            if result.difference is None or not result.difference <= TOLERANCE:
                found.append(f"{case.name}: {result.problem or f'losses differ by {result.difference:.2g}'}")
        if not any(result.scored for result in self.results):
            found.append("no run lacked a value, so the command from the error message was never run")
        return found

    def words(self, number: int) -> str:
        """Return the table's cell of a case."""
        result = self.results[number]
        if result.difference is None:
            return "fails"
        return f"{result.difference:.1e}, {result.seconds:.0f} s" + (", fails" if not result.difference <= TOLERANCE else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=REPOSITORY / ".venv-matrix", help="folder of the environments")
    versions = [environment.trl for environment in ENVIRONMENTS]
    parser.add_argument(
        "--trl", nargs="*", choices=versions, help="run only these versions; the table is then printed, not written"
    )
    given = parser.parse_args()
    chosen = [environment for environment in ENVIRONMENTS if not given.trl or environment.trl in given.trl]
    with tempfile.TemporaryDirectory(prefix="reflogp-matrix-") as folder:
        model, rows = _model_and_rows(Path(folder))
        columns = [_run(environment, given.environments.resolve(), Path(folder), model, rows) for environment in chosen]
    table = _table(columns)
    print(table)
    if not given.trl:
        TABLE.write_text(table, encoding="utf-8")
    failures = [f"TRL {column.environment.trl}, {words}" for column in columns for words in column.failures]
    for words in failures:
        print(words, file=sys.stderr)
    return 1 if failures else 0


def _model_and_rows(folder: Path) -> tuple[Path, Path]:
    """Write a Llama of 0.2M random parameters with its tokenizer, and the shortest of the shipped pairs; return both paths."""
    lines = sorted(PAIRS.read_text(encoding="utf-8").splitlines(), key=len)[:_ROWS]
    pairs = [json.loads(line) for line in lines]
    tokenizer = train_tokenizer([m["content"] for pair in pairs for side in pair.values() for m in side], vocab_size=1024)
    size = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_llama(folder / "model", tokenizer, **size)
    rows = folder / "pairs.jsonl"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "model", rows


def _run(environment: Environment, kept: Path, folder: Path, model: Path, rows: Path) -> Column:
    """Run every case in one environment, on a store with the reference and one pair, so that nearly all rows are missing."""
    print(f"TRL {environment.trl}: environment", flush=True)
    python = environment.make(kept)
    own = folder / f"trl-{environment.trl}"
    own.mkdir()
    offline = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(own / "datasets"),
        "REFLOGP_CACHE_DIR": str(own / "cache"),
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # there is so little work that several threads would only wait for each other
        **environment.variables,
    }
    first = own / "first.jsonl"
    first.write_text(rows.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    words = ScoreArguments(str(model), str(first), str(own / "store"), "float32").command().split()[1:]
    subprocess.run([*_MAIN, *words], check=True, env=offline, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    print(f"TRL {environment.trl}: {len(CASES)} cases", flush=True)
    began, results, log = time.monotonic(), own / "results.jsonl", own / "log"
    command = [str(python), "-m", "tools.matrix.cell", "--model", str(model), "--rows", str(rows)]
    command += ["--store", str(own / "store"), "--folder", str(own), "--results", str(results), "--reflogp", json.dumps(_MAIN)]
    with log.open("w") as out, suppress(subprocess.TimeoutExpired):
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        subprocess.run(command, cwd=REPOSITORY, env=offline, timeout=_LIMIT_S, check=False, **streams)
    written = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    found = [Result(**line) for line in written[1:]]
    found += [Result(problem="the process ended before this case") for _ in CASES[len(found) :]]
    column = Column(environment, written[0] if written else {}, found, time.monotonic() - began)
    for case, result in zip(CASES, found, strict=True):
        print(f"  {case.name}: {result.problem or f'{result.difference:.1e}'} ({result.seconds:.0f} s, {result.scored} scored)")
    if column.failures:
        print(log.read_text())
    return column


def _table(columns: list[Column]) -> str:
    def line(name: str, cells: list[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    lines = [
        "# TRL's versions",
        "",
        "Each column shows one version of TRL. The first rows list the versions of the other packages. Each cell below",
        f"these rows compares two runs of {STEPS} steps with a Llama of 0.2M parameters in float32 on a CPU: one with",
        "reflogp's cached trainer, and one with TRL's own trainer and a reference model in memory. A cell shows the",
        f"largest difference between the losses of the two runs ({TOLERANCE:g} is allowed), and the seconds that both",
        "runs took together. The seconds include the time for scoring the missing rows with the command from the",
        "cached trainer's error message. The seconds also depend on what else the machine did. TRL 1.15 computes its",
        "loss only with Triton kernels, which ran in Triton's slow interpreter here. The last row shows how many seconds",
        "all runs of the column took, including imports. `make matrix` writes this page.",
        "",
        line("TRL", [column.environment.trl for column in columns]),
        line("---", ["---"] * len(columns)),
    ]
    for package in ("transformers", "torch", "accelerate"):
        lines.append(line(package, [column.versions.get(package, "?").partition("+")[0] for column in columns]))
    for number, case in enumerate(CASES):
        lines.append(line(case.name, [column.words(number) for column in columns]))
    lines.append(line("all, with imports", [f"{column.seconds:.0f} s" for column in columns]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
