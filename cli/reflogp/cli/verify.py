"""`reflogp verify`: compute some values again, and compare them with those in the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_FAILED, Bar, err, needs, print_result, progress_bar
from reflogp.cli.options import takes_score_arguments
from reflogp.cli.stored import open_scored
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.machine import quiet_libraries
from reflogp.store import ReflogpError, Snapshot
from reflogp.store.commands import ScoreArguments
from reflogp.store.joins import completion_columns
from reflogp.store.texts import counted
from reflogp.store.windows import windows

if TYPE_CHECKING:
    from reflogp.scoring.data.tokenize import TokenizedRows
    from reflogp.scoring.engines import PassEngine


@takes_score_arguments
def verify(
    arguments: ScoreArguments,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to compare, chosen at random. 0: all rows.")] = 64,
    snapshot: options.SnapshotNumber = None,
    device: Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda, cuda:1, …")] = "auto",
    token_budget: options.TokenBudget = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Compute the values of some of a dataset's rows again with the model, and compare them with the stored values.

    This checks that values are the model's; `reflogp store verify` checks that a store's files are undamaged, without a model.

    Nothing is written to the store. The exit code is 1 if the values of a row differ by more than rounding in the reference's
    dtype, or if none of the chosen rows has stored values. Chosen rows without stored values are counted.

    Example: reflogp verify ./sft-model pairs.jsonl --store ./logps
    """
    with needs("service"):
        from reflogp.trainer.gate import is_moe, tolerance
    quiet_libraries()
    choice = EngineChoice(device=device, token_budget=token_budget, trust_remote_code=arguments.trust_remote_code)
    folder, dataset, stored = open_scored(arguments, snapshot)
    source, reference, chosen = dataset.source, stored.reference, dataset.source.count()
    if 0 < rows < chosen:
        dataset, chosen = dataset.only(random.Random(0).sample(range(chosen), rows)), rows
    with closing(choice.make(folder, reference)) as engine, progress_bar("verifying") as bar:
        parts = (_differences(window, stored, engine, arguments, bar, chosen) for window in dataset)
        seen = np.array(list(chain.from_iterable(parts)), np.float64).reshape(-1, 4)
    source.check_unchanged()
    row, tokens, of_sum, of_tokens = seen[seen[:, 1] > 0].T
    if not len(row):
        raise ReflogpError(f"{counted(chosen, 'row')} without stored values to compare. Score the data: {arguments.command()}")
    per_root = np.abs(of_sum) / np.sqrt(tokens)
    off = np.nan_to_num(np.maximum(per_root, of_tokens), nan=np.inf)  # infinite where stored values are damaged or not finite
    allowed = tolerance(reference.dtype, is_moe(SimpleNamespace(**(reference.config.get("text_config") or reference.config))))
    wrong = list(dict.fromkeys(int(row[i]) for i in np.argsort(-off) if off[i] > allowed))
    readable = np.isfinite(off)
    sizes = {"max_difference": np.abs(of_sum), "max_per_root_token": per_root, "max_token_rms": of_tokens}
    found: dict[str, Any] = {
        "rows": len(np.unique(row)),
        "sequences": len(row),
        "without_values": len(seen) - len(row),
        **{name: float(values[readable].max(initial=0.0)) for name, values in sizes.items()},
        "mean_difference": float(of_sum[readable].sum() / max(1, readable.sum())),
        "tolerance": allowed,
        "wrong_rows": wrong,
        "reference_id": reference.reference_id,
        "snapshot": stored.number,
    }
    lines = (
        "computed {sequences:,} sequences of {rows:,} rows again; {without_values:,} sequences have no stored values",
        "sums differ by up to {max_difference:.2g} nats ({max_per_root_token:.2g} nats/√tokens, {tolerance:g} allowed), by "
        "{mean_difference:+.2g} on average; tokens of a sequence by up to {max_token_rms:.2g} nats (root mean square)",
    )
    print_result(found, as_json, *(line.format(**found) for line in lines))
    if wrong:
        err.print(f"not the model's values (row numbers from 0, worst first): {', '.join(map(str, wrong[:10]))}", style="red")
        err.print(f"{counted(len(wrong), 'row')} in all; score the data into another store")
        raise typer.Exit(EXIT_FAILED)


def _differences(
    window: TokenizedRows, stored: Snapshot, engine: PassEngine, arguments: ScoreArguments, bar: Bar, rows: int
) -> Iterator[tuple[float, ...]]:
    """Score the sequences of a window that have stored values. `rows` is the number of rows in all windows.

    For each, yield (row number, number of tokens, stored - computed sum in nats, root mean square of the tokens' differences).
    The differences are NaN if the stored values are damaged. For sequences without stored values, yield (row number, 0, 0, 0).
    """
    from reflogp.scoring.runs.score import images_for_engine
    from reflogp.scoring.torch_engine.sequences import Sequence, token_logps_of

    for number, problem in window.problems.items():
        bar.bad_row(number, problem)
    if not len(window.table):
        return
    numbers, images = window.table["row"].to_pylist(), images_for_engine(window)
    asked, sequences, cut = [], [], (arguments.settings.max_length, arguments.settings.truncation_mode)
    bar.begin(rows * (len(window.table.column_names) - 2))  # all columns except row and prompt_ids
    for column in completion_columns(window.table.column_names):
        view = windows(window.table["prompt_ids"], window.table[column], *cut)
        found = stored.find(view.keys())
        sums, values = found.prefix_sums(view.needed), found.token_logps()
        for at in np.flatnonzero((view.needed > 0) & ~view.dropped):
            if found.lengths[at] < view.needed[at]:
                yield numbers[at], 0, 0, 0
                continue
            prompt, completion = (ids[at].values.to_numpy() for ids in (view.prompt_ids, view.completion_ids))
            sequences.append(Sequence(prompt, completion[: view.needed[at]], images=images[at] if images else None))
            asked.append((numbers[at], sums[at], values[at]))
    problems = engine.problems(sequences)
    for index, outcome in chain(problems.items(), chain.from_iterable(engine.passes(sequences, problems))):
        row, total, logps = asked[index]
        if isinstance(outcome, str):
            bar.bad_row(row, outcome)
            continue
        bar.advance(1, len(sequences[index]))
        computed = token_logps_of(outcome).astype(np.float64)
        apart = np.nan if logps is None else logps[: len(computed)] - computed
        yield row, len(computed), total - computed.sum(), np.sqrt(np.mean(np.square(apart)))
