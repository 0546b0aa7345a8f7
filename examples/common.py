"""Code that the examples share: options, the model and the rows, settings for a CPU, and printing the results of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars

from reflogp.cli.demo_model import build_model
from reflogp.cli.main import app
from reflogp.scoring.machine import quiet_libraries

PAIRS = Path(__file__).parent / "data" / "gsm8k_pairs.jsonl"

#: TrainingArguments for a CPU. On a GPU, remove use_cpu and bf16, and score in bfloat16: TRL then trains in bfloat16.
ON_CPU = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-4,
    "max_length": 512,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def parser_of(
    description: str, steps: int = 10, rows: int = 64, model: str = "a Llama with 4M parameters", folder: str = "model"
) -> argparse.ArgumentParser:
    """Return a parser for the options that all examples have: --model, --rows, --out and --steps.

    Args:
        description: text that --help prints above the options.
        steps: default of --steps.
        rows: default of --rows.
        model: description of the model that the example builds if --model is not given.
        folder: name of the subfolder of OUT in which the example builds this model.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(folder=folder)
    parser.add_argument(
        "--model",
        help="folder or hub id of the model that serves as the reference and as the starting point of training; default:  "
        f"{model}, built in OUT/{folder} from the example data",
    )
    parser.add_argument("--rows", type=int, default=rows, help="use only the first ROWS rows (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reflogp-examples"),
        help="folder for the runs and for the store that the examples share, OUT/logps (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=steps, help="number of optimizer steps per run (default: %(default)s)")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and silence the output of libraries.

    Returns:
        The options: model and store as text, out, rows, steps, builds_model (True if --model is not given), and the parser's
        other options.
    """
    options = parser.parse_args()
    quiet_libraries()
    disable_progress_bars()
    options.builds_model, options.model = options.model is None, options.model or str(options.out / options.folder)
    options.store = str(options.out / "logps")
    return options


def options_of(description: str, steps: int = 10, **more: dict[str, Any]) -> argparse.Namespace:
    """Parse the command line of an example that uses text pairs. `more` contains the options that only this example has.

    Returns:
        The options: model, data, store, out and steps, with paths as text, and the options from `more`.
    """
    parser = parser_of(description, steps)
    parser.add_argument(
        "--data",
        type=Path,
        default=PAIRS,
        help="preference pairs as JSON Lines with prompt, chosen and rejected; default: the example data",
    )
    for name, settings in more.items():
        parser.add_argument("--" + name.replace("_", "-"), **settings)
    options = parsed(parser)
    options.source, options.data = options.data, str(options.out / "pairs.jsonl")
    return options


def prepare(options: argparse.Namespace) -> None:
    """Write the rows to OUT/pairs.jsonl and, if --model is not given, a small model to OUT/model."""
    options.out.mkdir(parents=True, exist_ok=True)
    with options.source.open(encoding="utf-8") as lines:
        Path(options.data).write_text("".join(itertools.islice(lines, options.rows)), encoding="utf-8")
    if options.builds_model and not (Path(options.model) / "model.safetensors").is_file():
        print(f"Building a small model in {options.model}", flush=True)
        pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
        build_model(Path(options.model), [pair["prompt"] + pair["chosen"] for pair in pairs], steps=10, batch=4)


def reflogp(*arguments: str) -> dict[str, Any]:
    """Run a `reflogp` command, print its counts, and return its JSON summary."""
    print("$ reflogp " + shlex.join(arguments), flush=True)
    with redirect_stdout(StringIO()) as printed:
        code = app([*arguments, "--json"], standalone_mode=False)
    summary: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    print(f"  {summary['rows']} rows, {summary['sequences']} sequences: {summary['hits']} hits, {summary['scored']} scored")
    if code:
        sys.exit(f"{summary['bad_rows']} rows could not be scored")
    return summary


def losses_of(trainer: Any) -> list[float]:
    """Return the loss of each logged step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def show(trainer: Any) -> None:
    """Print the result of the gate, the losses, and the path of the run's record."""
    gate, losses, joined = trainer.step_zero, losses_of(trainer), trainer.joins["train"]
    print(
        f"values: {joined.rows} rows from {joined.where.store}, snapshot {joined.where.snapshot}, "
        f"reference {joined.where.reference_id}\n"
        f"gate: policy and reference differ by at most {gate.max_difference:.2g} nats in each of {gate.sequences} "
        f"sequences ({gate.max_per_root_token:.2g} nats/√tokens, {gate.tolerance:g} allowed)\n"
        f"losses: {' '.join(f'{loss:.4f}' for loss in losses)}\n"
        f"record: {Path(trainer.args.output_dir) / 'reflogp.json'}"
    )
