"""Run the cases of one environment with its Python: cached trainers, and TRL's trainers with a reference model in memory.

The output is one line of JSON for each case. The rows that the cached trainer lacks are scored in the main environment with the
command from its error message, as by a user.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, MissingLogpsError, Reference
from reflogp.trainer.gate import versions
from tests.trainer_ext.on_cpu import ON_CPU
from tools.matrix.cases import CASES, MOVES, STEPS, Case, Result

T = TypeVar("T")

#: Trainer of a case -> (config, cached trainer, TRL's trainer).
_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "dpo": (DPOConfig, CachedDPOTrainer, DPOTrainer),
    "kto": (KTOConfig, CachedKTOTrainer, KTOTrainer),
}


class Cell:
    """Runs cases on a model, pairs to train on, and pairs to evaluate on.

    Args:
        model: the reference model's folder, from which the policy starts.
        rows: pairs; the last eight are kept for evaluation.
        store: store of the reference log-probs.
        reflogp: the main environment's `reflogp` command, as a list of words.
        folder: folder for the files of the runs.
    """

    def __init__(self, model: Path, rows: list[dict[str, Any]], store: Path, reflogp: list[str], folder: Path) -> None:
        self._model, self._rows, self._reflogp, self._folder = model, rows, reflogp, folder
        self._reference = Reference(str(store), dtype="float32")
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def run(self, case: Case) -> Result:
        """Run both trainers of a case, and compare their losses."""
        began, result = time.monotonic(), Result()
        try:
            ours = self._losses(case, True, result)
            trls = self._losses(case, False, result)
            if len(ours) != len(trls) or len(ours) < STEPS:
                result.problem = f"{len(ours)} losses of ours and {len(trls)} of TRL's"
            elif max(trls[:STEPS]) - min(trls[:STEPS]) < MOVES:
                result.problem = "the losses do not change"
            else:
                result.difference = float(np.abs(np.array(ours) - np.array(trls)).max())
        except Exception as error:  # the table shows the error; the other cases still run
            traceback.print_exc()
            result.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        result.seconds = time.monotonic() - began
        return result

    def _losses(self, case: Case, cached: bool, result: Result) -> list[float]:
        """Return the loss of every step, from `training_step` (logs are rounded), and the loss of the evaluation."""
        trainer = self._scoring_what_is_missing(lambda: self._trainer(case, cached), result)
        losses: list[float] = []
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = step(*args, **kwargs)
            losses.append(float(loss))
            return loss

        trainer.training_step = training_step
        trainer.train()
        if case.evaluates and cached:
            new = self._dataset(case)[1]
            losses.append(self._scoring_what_is_missing(lambda: trainer.evaluate(new), result)["eval_loss"])
        elif case.evaluates:
            losses.append(trainer.evaluate(self._dataset(case)[1])["eval_loss"])
        return losses

    def _trainer(self, case: Case, cached: bool) -> Any:
        set_seed(7)
        train, _ = self._dataset(case)
        config_class, cached_class, trl_class = _CLASSES[case.trainer]
        name = f"{CASES.index(case)}-{'cached' if cached else 'trl'}"
        settings = {
            **ON_CPU,
            "output_dir": str(self._folder / name),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 5e-5,
            "max_length": 112,  # some rows are cut
        }
        if case.trainer == "dpo":
            settings["truncation_mode"] = "keep_start"
        options: dict[str, Any] = {"train_dataset": train, "processing_class": self._tokenizer}
        if case.lora:
            options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        policy = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        args = config_class(**{**settings, **case.settings})
        if cached:
            return cached_class(policy, args=args, reference=self._reference, **options)
        trainer = trl_class(policy, args=args, **options)
        assert case.lora or isinstance(trainer.ref_model, torch.nn.Module), "TRL's run has no reference model in memory"
        return trainer

    def _dataset(self, case: Case) -> tuple[Dataset, Dataset]:
        rows = self._rows
        if case.trainer == "kto":
            sides = [(row, side) for row in rows for side in ("chosen", "rejected")]
            rows = [{"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row, side in sides]
        return Dataset.from_list(rows[:-8]), Dataset.from_list(rows[-8:])

    def _scoring_what_is_missing(self, work: Callable[[], T], result: Result) -> T:
        try:
            return work()
        except MissingLogpsError as error:
            program, *words = shlex.split(error.command)
            assert program == "reflogp"
            subprocess.run([*self._reflogp, *words], check=True, stdin=subprocess.DEVNULL)
            result.scored += len(error.rows)
        return work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "rows", "store", "folder", "results"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--reflogp", type=json.loads, required=True, help="a list, as JSON")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    cell = Cell(given.model, rows, given.store, given.reflogp, given.folder)
    with given.results.open("w", encoding="utf-8") as out:
        out.write(json.dumps(versions()) + "\n")
        for case in CASES:
            out.write(json.dumps(asdict(cell.run(case))) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
