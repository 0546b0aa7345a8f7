"""`reflogp demo`: score example data twice, train on the stored values and write a report, all without a network."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from reflogp.cli.console import needs, out, progress_bar
from reflogp.cli.demo_model import STEPS, build_model
from reflogp.scoring.machine import quiet_libraries
from reflogp.store import UsageError

_DATA_FILE = "gsm8k_pairs.jsonl"
_MAX_LENGTH = 1024
#: Number of training steps.
_STEPS = 30


def demo(
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the model, the store, the training run and the report.")
    ] = Path("reflogp-demo"),
) -> None:
    """Show a complete run: score real pairs, read their values from the store, train with DPO, and write a report.

    The demo takes a minute or two on two CPU cores and needs no network. Its 300 pairs are about grade-school maths.

    Example: reflogp demo --out ./reflogp-demo
    """
    with needs("service,trainer"):
        quiet_libraries()
        from reflogp.scoring import report, score
        from reflogp.trainer import Reference
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    data = str(shipped_data())
    model = str(folder / "model")
    if not (folder / "model" / "model.safetensors").is_file():
        out.print("building a tokenizer and a small Llama model, trained briefly on the chosen answers")
        pairs = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
        with progress_bar("training steps") as bar:
            bar.begin(STEPS)
            build_model(folder / "model", [pair["prompt"] + pair["chosen"] for pair in pairs], advance=bar.advance)
    out.print(f"1. A reference model: {model}")
    for title in ("2. Score", "3. Score again"):
        summary = score(model, data, folder / "store", dtype="float32")
        out.print(f"{title}: {summary.lines()[0]}")

    out.print(f"4. Train: {_STEPS} steps of DPO on the stored values")
    reference = Reference(str(folder / "store"), model=model, dtype="float32")
    trainer = _train(reference, model, folder, data)
    gate = trainer.step_zero
    out.print(
        f"   gate: policy and stored reference differ by at most {gate.max_difference:.2g} nats in each of "
        f"{gate.sequences} sequences ({gate.max_per_root_token:.2g} nats/√tokens, {gate.tolerance:g} allowed)"
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    few = max(1, len(losses) // 5)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    out.print(f"   mean loss: {first:.4f} in the first fifth of the steps, {last:.4f} in the last fifth")

    written = report(model, data, folder / "store", folder / "report", dtype="float32", max_length=_MAX_LENGTH)
    out.print(f"5. Report: {Path(written.output).resolve()}")
    out.print(f"Done in {time.monotonic() - started:.0f} s")


def shipped_data() -> Path:
    """Return the path of the example pairs.

    In an installed wheel, the pairs are in reflogp/cli/examples_data. In a checkout, they are in examples/data.

    Raises UsageError if the file is in neither folder.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "examples_data", package.parents[2] / "examples" / "data"):
        if (folder / _DATA_FILE).is_file():
            return folder / _DATA_FILE
    raise UsageError(f"the example data ({_DATA_FILE}) is not installed")


def _train(reference: Any, model: str, folder: Path, data: str) -> Any:
    import torch
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import DPOConfig

    from reflogp.trainer import CachedDPOTrainer

    disable_progress_bars()
    args = DPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=4,
        max_steps=_STEPS,
        learning_rate=5e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        max_length=_MAX_LENGTH,
    )
    trainer = CachedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=args,
        train_dataset=load_dataset("json", data_files=data, split="train", cache_dir=str(folder / "cache")),
        processing_class=AutoTokenizer.from_pretrained(model),
        reference=reference,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer
