"""Compile the CUDA path of the torch engine for an H100, without a GPU: `make sm90`.

    LD_PRELOAD=no_driver.so python -m tools.sm90 [--out PAGE] [--family WORD …]

Prints a page of tables and writes it to a file: how often models of many families and FlexAttention are compiled, what their
kernels need on the device, and how often the host waits for the device in a pass.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import textwrap
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch
import transformers
import triton

from tools.sm90 import h100
from tools.sm90.h100 import SHARED_MEMORY, Kernel
from tools.sm90.models import FAMILIES
from tools.sm90.passes import ATTENTIONS, Compiled, CompiledAttention, Packs, compile_attention, compile_family, draw_packs

ROOT = Path(__file__).resolve().parent.parent.parent
#: Names and dtypes of the families whose head is shown.
_HEADS = (("Qwen2 7B", torch.bfloat16), ("Gemma 2 9B", torch.bfloat16), ("Qwen2 7B", torch.float32))
#: Triton's names of dtypes.
_TYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def main() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    page_of_all = ROOT / f"benchmarks/results/sm90-torch-{version}.md"
    parser.add_argument("--out", type=Path, help=f"the page (default: {page_of_all.relative_to(ROOT)})")
    parser.add_argument("--family", nargs="*", default=[""], help="only families whose name contains one of these words")
    given = parser.parse_args()
    if given.out is None and given.family != [""]:
        parser.error("--family also needs --out, so that the page of all families is kept")
    warnings.simplefilter("ignore")
    h100.pretend()
    drawn, models = draw_packs(), []
    with tempfile.TemporaryDirectory() as caches, h100.FakeTensors():  # what earlier runs have compiled is compiled again
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=caches, TRITON_CACHE_DIR=f"{caches}/triton")
        for family in FAMILIES:
            if any(word in family.name for word in given.family):
                print(family.label, file=sys.stderr, flush=True)
                models.append(compile_family(family, drawn))
        print("FlexAttention", file=sys.stderr, flush=True)
        h100.forget()
        attentions = [compile_attention(layer, drawn) for layer in ATTENTIONS]
    problems = sum(made.problem is not None for made in (*models, *attentions))
    parts = [*_introduction(), *_models(models, drawn), *_heads(models), *_attentions(attentions)]
    page = "\n\n".join(parts) + "\n"
    print(page, end="")
    (given.out or page_of_all).write_text(page)
    sys.exit(f"{problems} of {len(models)} models and {len(attentions)} layers failed" if problems else 0)


def _introduction() -> list[str]:
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    return [
        "# Compiled for an H100 without a GPU",
        _paragraph(
            "`make sm90` writes this page. Nothing was executed on a GPU. Passes ran on tensors without values; Inductor and "
            "Triton compiled their kernels for sm_90. The page says nothing about speed or about the values of results."
        ),
        f"Made with {versions}, Python {platform.python_version()}.",
        _paragraph(
            f"A block of threads of an H100 can use {SHARED_MEMORY:,} bytes of shared memory. A kernel that needs more cannot "
            "run. “Stack” is the local memory in bytes that each thread uses because its values do not fit in registers (STACK "
            "in the output of `cuobjdump --dump-resource-usage`). Where Inductor would measure several configurations of a "
            "kernel on the device, the one with the least stack counts."
        ),
    ]


def _models(models: list[Compiled], drawn: Packs) -> list[str]:
    small, full, tiny = (f"{len(pack):,}" for pack in (drawn.small, drawn.full, drawn.tiny))
    titles = ["model, two layers", "attention", "log-sum-exp", "graphs at the check", f"more from {small} to {full}"]
    titles += [f"more at {tiny}", "most shared memory", "most stack", "host waits", "mask calls"]
    rows, notes = [], defaultdict(list)
    for made in models:
        checked, waits = made.checked, made.steps["full again"].waits if "full again" in made.steps else Counter[str]()
        kinds = [", ".join(checked.kernels), checked.log_sum_exp] if checked else ["", ""]
        graphs = [_graphs(made, *steps) for steps in (("check",), ("small", "full", "full again"), ("tiny",))]
        most = [_most(made.kernels(), name) for name in ("shared", "stack")]
        row = [made.family.label, *kinds, *graphs, *most, _counted(waits), f"{made.mask_calls}"]
        rows.append([made.family.label, *["failed"] * (len(row) - 1)] if made.problem else row)
        if made.problem:
            notes[made.problem].append(made.family.label)
        for what, why in checked.rejected.items() if checked else ():
            notes[f"the check refused {what}: {why}"].append(made.family.label)
        if checked and not checked.compiled:
            notes["layers are not compiled"].append(made.family.label)
    return [
        "## Models",
        _paragraph(
            f"Each model was checked as the engine checks it at load, then ran passes over packs of {small}, {full}, {full} "
            f"and {tiny} tokens (a model that is too wide for 32-bit indices at {full}: with fewer). "
            "A graph is a piece of code that torch compiles at once. “More” are the graphs that passes of "
            f"these sizes added to those of the check. “Host waits” are the operations of the second pass of {full} tokens in "
            "which the host waits for the device. “Mask calls” are this pass's calls of transformers' "
            "`find_packed_sequence_indices`."
        ),
        _table(titles, rows),
        *(["\n".join(f"- {note} ({'; '.join(names)})" for note, names in notes.items())] if notes else []),
    ]


def _heads(models: list[Compiled]) -> list[str]:
    titles = ["model", "vocabulary", "kernel", "loads of logits", "shared memory", "registers", "stack"]
    titles += ["more kernels for one row", "more at temperature 0.7"]
    rows = []
    for made in models:
        if (made.family.name, made.family.dtype) in _HEADS:
            more = [f"{len(made.kernels(step))}" for step in ("one row", "temperature")]
            loads = re.compile(rf"tt\.load .*tensor<[^>]*!tt\.ptr<{_TYPES[made.family.dtype]}>")
            for kernel in made.kernels("check", "small", "full"):
                if kernel.part == "head":
                    row = [
                        made.family.label,
                        f"{made.family.sizes[-1]:,}",
                        f"`{kernel.name}`",
                        f"{len(loads.findall(kernel.code))}",
                    ]
                    rows.append([*row, f"{kernel.shared:,}", f"{kernel.registers}", f"{kernel.stack:,}", *more])
    return [
        "## Log-sum-exp over the vocabulary",
        _paragraph(
            "The Triton kernels that the head compiled at the check and in passes. “Loads of logits” are the places in a "
            "kernel's code that load blocks of numbers of the logits' dtype. At each of them, the kernel reads all logits once."
        ),
        _table(titles, rows),
    ]


def _attentions(attentions: list[CompiledAttention]) -> list[str]:
    titles = ["heads", "key heads", "head size", "value size", "dtype", "cap", "window", "sinks", "pack", "FlexAttention"]
    titles += ["shared memory", "registers", "stack", "the engine uses"]
    rows, reasons = [], list[str]()
    for made in attentions:
        layer, result = made.layer, "compiled" if made.record.graphs else "runs without being compiled"
        if made.problem is not None:
            reasons.append(f"- ({len(reasons) + 1}) {made.problem}")
            result = f"fails ({len(reasons)})"
        row = [f"{number}" for number in (layer.heads, layer.key_heads, layer.size, layer.value_size or layer.size)]
        row += [str(layer.dtype).removeprefix("torch."), f"{layer.softcap or ''}", f"{layer.window or ''}"]
        row += ["yes" if layer.sinks else "", layer.pack, result]
        row += [
            ", ".join(f"{getattr(kernel, name):,}" for kernel in made.templates()) for name in ("shared", "registers", "stack")
        ]
        rows.append([*row, made.chosen])
    return [
        "## FlexAttention",
        "All these layers were computed in one process, in this order. Each compiles another version of one function.",
        _table(titles, rows),
        *(["\n".join(reasons)] if reasons else []),
    ]


def _graphs(made: Compiled, *steps: str) -> str:
    return _counted(Counter(part for step in steps if step in made.steps for part in made.steps[step].graphs))


def _counted(counts: Counter[str]) -> str:
    """Return, for example, "3 (head 1, layers 2)"."""
    parts = ", ".join(f"{name} {count}" for name, count in sorted((+counts).items()))
    return f"{counts.total()} ({parts})" if parts else "0"


def _most(kernels: list[Kernel], name: str) -> str:
    """Return the largest number that a kernel has under this name, and the kernel's part."""
    most = max(kernels, key=lambda kernel: getattr(kernel, name), default=None)
    return f"{getattr(most, name):,} ({most.part})" if most is not None and getattr(most, name) else "0"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def _table(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


if __name__ == "__main__":
    main()
