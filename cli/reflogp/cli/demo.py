"""`reflogp demo`: score example data twice, train on the stored values and write a report, all without a network.

The demo follows the steps of a real training run with reflogp, in the same order.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from reflogp.cli.console import missing_extra, out, progress_bar, quiet_libraries
from reflogp.store import Store, UsageError, describe_reference
from reflogp.store.commands import ScoreArguments
from reflogp.store.windows import TrainerSettings

_DATA_FILE = "gsm8k_pairs.jsonl"
_MAX_LENGTH = 1024


def demo(
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the model, the store, the training run and the report.")
    ] = Path("reflogp-demo"),
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of your own model. Default: a small model that the demo builds.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Dataset of your own preference pairs. Default: 300 pairs about grade-school maths.")
    ] = None,
    rows: Annotated[int, typer.Option(min=8, help="Maximum number of pairs to train on.")] = 300,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 30,
    dtype: Annotated[
        str, typer.Option(help="Compute dtype of the reference: any value of `reflogp score --dtype` except auto.")
    ] = "float32",
) -> None:
    """Show a complete run: score real pairs, read their values from the store, train with DPO, and write a report.

    The demo takes a minute or two on two CPU cores and needs no network. To use your own model and pairs, pass --model and
    --data.
    """
    try:
        quiet_libraries()
        import torch

        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.data.tokenize import load_tokenizer
        from reflogp.scoring.data.tokenized import TokenizedDataset
        from reflogp.scoring.reports.build import write_report
        from reflogp.scoring.runs.scheduler import Scheduler
        from reflogp.scoring.runs.score import score_dataset
        from reflogp.scoring.torch_engine import TorchEngine
        from reflogp.trainer import CachedDPOTrainer, Reference
    except ImportError as error:
        raise missing_extra("service,trainer", error) from error
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    data_file = data or str(shipped_data())

    if model is None:
        model = str(folder / "model")
        if not (folder / "model" / "model.safetensors").is_file():
            out.print(
                "[bold]1. A reference model[/bold]: a tokenizer and a small Llama model, trained briefly on the chosen answers",
                markup=True,
            )
            _build(folder / "model", RowSource(data_file))
        else:
            out.print(f"[bold]1. A reference model[/bold]: {escape(model)}, from an earlier demo", markup=True)
    else:
        out.print(f"[bold]1. A reference model[/bold]: {escape(model)}", markup=True)

    store = Store(folder / "store")
    reference = describe_reference(model, dtype)
    dataset = TokenizedDataset(RowSource(data_file), lambda: load_tokenizer(model))
    for title in ("2. Score", "3. Score again"):
        with progress_bar("scoring") as bar:
            summary = score_dataset(
                dataset,
                store,
                reference,
                Scheduler(lambda: TorchEngine(str(model), dtype)),
                watcher=bar,
            )
        out.print(
            f"[bold]{title}[/bold]: {summary.rows} rows, {summary.sequences} sequences: {summary.hits} hits, "
            f"{summary.duplicates} duplicates, {summary.scored} scored"
            + (f" at {summary.tokens_per_second:,.0f} tokens/s" if summary.scored else "")
            + f" (reference {reference.reference_id[:12]}…, snapshot {summary.snapshot})",
            markup=True,
        )

    out.print(f"[bold]4. Train[/bold]: {steps} steps of DPO on the stored values", markup=True)
    source = Reference(str(folder / "store"), model=model, dtype=dtype)
    with _models_that_run(torch) as ran:
        trainer = _train(CachedDPOTrainer, source, model, data_file, folder / "run", rows, steps)
    gate = trainer.step_zero
    out.print(
        f"   gate: policy and stored reference differ by at most {gate.max_difference:.2g} nats in each of "
        f"{gate.sequences} sequences ({gate.max_per_root_token:.2g} nats/√tokens, {gate.tolerance:g} allowed)"
    )
    out.print(f"   language models that ran during training: {len(ran)} (the policy and {len(ran) - 1} reference models)")
    history = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    few = max(1, len(history) // 5)
    first, last = (sum(entry["loss"] for entry in some) / few for some in (history[:few], history[-few:]))
    out.print(f"   mean loss: {first:.4f} in the first fifth of the steps, {last:.4f} in the last fifth")
    chosen, rejected = (
        sum(entry[f"rewards/{side}"] for entry in history[-few:]) / few / trainer.beta for side in ("chosen", "rejected")
    )
    out.print(
        f"   policy minus reference in the last fifth: chosen {chosen:+.2f}, rejected {rejected:+.2f} nats per completion"
    )

    settings = TrainerSettings(max_length=_MAX_LENGTH)
    score = ScoreArguments(model, data_file, str(folder / "store"), dtype, settings).command()
    report = write_report(dataset, store[reference].snapshot(), str(folder / "report"), settings, score=score, model=model)
    out.print(f"[bold]5. Report[/bold]: {escape(str(Path(report.output).resolve()))}", markup=True)
    out.print(
        f"Done in {time.monotonic() - started:.0f} s. {(folder / 'run' / 'reflogp.json').resolve()} names the store, reference "
        "and snapshot that the values come from"
    )


def shipped_data() -> Path:
    """Return the path of the example pairs.

    In an installed wheel, the pairs are in reflogp/cli/examples_data. In a checkout, they are in examples/data.

    Raises UsageError if the file is in neither folder.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "examples_data", package.parents[2] / "examples" / "data"):
        if (folder / _DATA_FILE).is_file():
            return folder / _DATA_FILE
    raise UsageError(f"the example data ({_DATA_FILE}) is not installed; pass your own data with --data")


def _build(folder: Path, source: Any) -> None:
    from reflogp.cli.demo_model import STEPS, build_model
    from reflogp.scoring.data.shape import RowError, examples_of

    conversations = []
    for row in source:
        try:
            [example] = examples_of(row.columns or {}, "preference")
        except RowError:
            continue
        prompt, chosen = example.prompt, example.completions[0]
        if not example.conversational:
            prompt = [{"role": "user", "content": prompt}]
            chosen = [{"role": "assistant", "content": chosen}]
        conversations.append(prompt + chosen)
    if not conversations:
        raise UsageError(
            f"{source.name} has no usable preference pairs to build a demo model from; pass other data with --data"
        )
    with progress_bar("training steps") as bar:
        bar.begin(STEPS)
        parameters = build_model(folder, conversations, steps=STEPS, advance=bar.advance)
    out.print(f"   {parameters / 1e6:.1f}M parameters in {folder}")


def _train(trainer_class: Any, source: Any, model: str, data_file: str, run: Path, rows: int, steps: int) -> Any:
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig

    from reflogp.scoring.data.read import RowSource

    disable_progress_bars()
    readable = [row.columns for row, _ in zip(RowSource(data_file), range(rows), strict=False) if row.columns]
    args = DPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=5e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        max_length=_MAX_LENGTH,
    )
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=args,
        train_dataset=Dataset.from_list(readable),
        processing_class=AutoTokenizer.from_pretrained(model),
        reference=source,
    )
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


class _models_that_run:
    """A context manager that records which language models run a forward pass in the `with` block.

    To do so, it registers a forward pre-hook for all modules. `__enter__` returns a set, and the hook adds the `id()` of each
    such model to this set.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.seen: set[int] = set()

    def __enter__(self) -> set[int]:
        from transformers import PreTrainedModel

        def note(module: Any, args: Any) -> None:
            if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
                self.seen.add(id(module))

        self._handle = self._torch.nn.modules.module.register_module_forward_pre_hook(note)
        return self.seen

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()
