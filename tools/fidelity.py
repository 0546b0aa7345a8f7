"""Measure the table of docs/fidelity.md: the scoring path of every family, and its errors against plain forward passes.

`make fidelity` writes the table, and keeps the section of `tools.sweep`; the tests assert the same numbers.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from tests.conftest import plain_token_logps
from tools.families import FAMILIES, VOCAB, build

TABLE = Path(__file__).resolve().parents[1] / "docs" / "fidelity.md"
#: Heading of the section of that page which tools/sweep.py writes; it is the last one.
SWEEP = "## Every class of transformers"


@dataclass(frozen=True)
class Fidelity:
    """Errors against plain, unpadded float32 forwards, in nats per token. `trl_bfloat16` is None if TRL's pass fails."""

    path: str
    float32_max: float
    bfloat16_rms: float
    trl_bfloat16: float | None


def some_pairs(count: int = 64, seed: int = 0) -> list[Sequence]:
    """Return chosen and rejected sequences in turn.

    A pair has one prompt, and every other pair has the prompt of the previous pair.
    """
    source = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [source.randrange(3, VOCAB) for _ in range(source.randint(low, high))]

    sequences, prompt = [], ids(5, 60)
    for pair in range(count):
        prompt = ids(5, 60) if pair % 2 == 0 else prompt
        sequences += [Sequence(prompt, ids(3, 50)), Sequence(prompt, ids(3, 50))]
    return sequences


def measure(name: str) -> Fidelity:
    """Score some pairs with a tiny random model of this family."""
    sequences = some_pairs()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(name).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        exact = [np.array(plain_token_logps(model, s.prompt_ids, s.completion_ids)) for s in sequences]
        engine = TorchEngine(folder, "float32")
        float32 = engine.score(sequences)
        half_engine = TorchEngine(folder, "bfloat16")
        half = half_engine.score(sequences)
        assert half_engine.self_check.path == engine.self_check.path
        try:
            trl = rms(trl_token_logps(folder, sequences), exact)
        except Exception:
            trl = None
    worst = max(float(np.abs(a - b).max()) for a, b in zip(float32, exact, strict=True))
    return Fidelity(engine.self_check.path, worst, rms(half, exact), trl)


def spread_among_neighbours(engine: TorchEngine) -> float:
    """Return the largest difference of a sequence's values between 20 random packs, some with sequences that share its prompt.

    The engine's model has VOCAB tokens, and its token budget is below a thousand, so that the packs differ.
    """
    source = random.Random(5)
    prompt, completion = [source.randrange(3, VOCAB) for _ in range(30)], [source.randrange(3, VOCAB) for _ in range(25)]
    values = []
    for seed in range(20):
        others = some_pairs(count=seed, seed=seed)
        others += [Sequence(prompt, completion[:cut] + [source.randrange(3, VOCAB)] * 9) for cut in range(0, seed, 3)]
        source.shuffle(others)
        values.append(engine.score([*others, Sequence(prompt, completion)])[-1])
    return float(np.ptp(np.stack(values), axis=0).max())


def rms(values: list, exact: list) -> float:
    """Return the root mean square difference over all tokens."""
    return float(np.sqrt(np.mean(np.concatenate([v - e for v, e in zip(values, exact, strict=True)]) ** 2)))


def trl_token_logps(folder, sequences: list[Sequence], autocast: torch.dtype | None = None) -> list[np.ndarray]:
    """Return log-probs per token as in TRL's precomputation: with TRL's collator, batches of 8 pairs and TRL's fused head.

    Args:
        autocast: float32 weights under torch.autocast with this dtype; None for bfloat16 weights without autocast.
    """
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if autocast else torch.bfloat16).eval()
    add_fused_lm_head(model)
    pairs = [sequences[i : i + 2] for i in range(0, len(sequences), 2)]
    collate = DataCollatorForPreference(pad_token_id=0, max_length=None)
    result = []
    for start in range(0, len(pairs), 8):
        rows = [
            {"prompt_ids": list(c.prompt_ids), "chosen_ids": list(c.completion_ids), "rejected_ids": list(r.completion_ids)}
            for c, r in pairs[start : start + 8]
        ]
        batch = collate(rows)
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            logps = model(**inputs, labels=labels, fused_lm_head=True).log_probs
        values = [row[mask.bool()].numpy() for row, mask in zip(logps, batch["completion_mask"][:, 1:], strict=True)]
        half = len(rows)
        result += [side for pair in zip(values[:half], values[half:], strict=True) for side in pair]
    return result


def write_table() -> None:
    """Measure every family and write docs/fidelity.md."""
    lines = [
        "# Fidelity",
        "",
        "The table compares log-probs of reflogp with those of plain, unpadded float32 forward passes of transformers.",
        "An error is the difference, in nats, between a token's log-prob and its log-prob from the plain forward pass.",
        "RMS is the root mean square over all tokens.",
        "For each family, 128 sequences were scored on a CPU with a tiny model that has random weights. Each prompt is shared",
        "by four of the sequences. `make fidelity` writes this part of the page.",
        "",
        "- The path is the way in which the torch engine scores sequences. The engine chooses a path when it loads the",
        "  model. On the *packed* path, it packs sequences without padding and computes a shared prompt only once. On the",
        "  *padded* path, it scores sequences in padded batches. In this table, the models on the padded path carry state from",
        "  token to token, or bypass transformers' attention interface.",
        "- The last column shows the error of TRL's own precomputation in bfloat16 at batch size 8.",
        "",
        "| family | path | float32, largest error | bfloat16, RMS error | TRL 1.16 bfloat16, RMS error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in FAMILIES:
        found = measure(name)
        trl = "fails" if found.trl_bfloat16 is None else f"{found.trl_bfloat16:.4f}"
        lines.append(f"| {name} | {found.path} | {found.float32_max:.1e} | {found.bfloat16_rms:.4f} | {trl} |")
        print(lines[-1], flush=True)
    *_, sweep = TABLE.read_text(encoding="utf-8").partition(f"\n{SWEEP}\n")
    TABLE.write_text("\n".join([*lines, "", SWEEP, sweep]), encoding="utf-8")


if __name__ == "__main__":
    write_table()
