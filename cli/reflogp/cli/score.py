"""`reflogp score`: score a dataset's sequences that are not in the store yet."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from reflogp.cli import engine_options, options
from reflogp.cli.console import EXIT_MISSES, needs, print_notes, print_result, progress_bar, quiet_libraries
from reflogp.cli.engine_options import claimed_reference, engine_choice
from reflogp.cli.options import takes_score_arguments
from reflogp.cli.scored import find_reference, tokenized
from reflogp.scoring.machine import places
from reflogp.store import Reference, Store, UsageError, read_checkpoint, resolve_model
from reflogp.store.commands import ScoreArguments
from reflogp.store.reference import AUTO

if TYPE_CHECKING:
    from reflogp.scoring.runs.scheduler import Workers

_ADDRESS = re.compile(r"auto|local|ray://\S+|[^/\s]+:\d+")


class ScoreCommand(TyperCommand):
    """The `score` command, whose option --ray can be given without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, text in enumerate(args):
            if text == "--ray" and not _ADDRESS.fullmatch("".join(args[at + 1 : at + 2])):
                args = [*args[:at], "--ray=", *args[at + 1 :]]
        return super().parse_args(ctx, args)


@takes_score_arguments
def score(
    arguments: ScoreArguments,
    ctx: typer.Context,
    engine: engine_options.Engine = "torch",
    strict_engine: engine_options.StrictEngine = False,
    devices: options.Devices = None,
    token_budget: engine_options.TokenBudget = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Score on a Ray cluster: one worker per GPU, or per N GPUs with --tensor-parallel N; one worker per CPU if "
            "the cluster has no GPU. ADDRESS: auto, HOST:PORT or ray://HOST:PORT. Default: $RAY_ADDRESS. If that is not set, "
            "Ray is started on this machine.",
            metavar="[ADDRESS]",
        ),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers on Ray. Default: as many as the cluster has resources for.")
    ] = None,
    tensor_parallel: engine_options.TensorParallel = None,
    vllm_option: engine_options.VllmOption = None,
    url: engine_options.Url = None,
    served_model: engine_options.ServedModel = None,
    concurrency: engine_options.Concurrency = None,
    patience: engine_options.Patience = None,
    claim: engine_options.Claim = None,
    trust_claim: engine_options.TrustClaim = False,
    top_k: engine_options.TopK = 0,
    commit_sequences: Annotated[
        int, typer.Option(min=1, help="Commit values to the store after this many sequences, but at least every 30 seconds.")
    ] = 4096,
    as_json: options.AsJson = False,
) -> None:
    """Score a dataset's sequences with a reference model and store the log-probs.

    Only sequences that are not in the store yet are scored, and a sequence that occurs in several rows is scored once. If a run
    is interrupted, the same command continues where the run stopped. Rows that cannot be used are reported and skipped. If
    there are such rows, the exit code is 3.

    Example: reflogp score ./sft-model pairs.jsonl.gz --store ./logps --dtype bfloat16 --max-length 2048

    Example: reflogp score ./sft-model pairs.jsonl.gz --store ./logps --devices all

    Example: reflogp score ./sft-70b pairs.jsonl.gz --store ./logps --engine vllm --tensor-parallel 8

    Example: reflogp score ./teacher chats.jsonl --store ./logps --top-k 64
    """
    with needs("service"):
        import torch

        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.runs.processes import LocalWorkers
        from reflogp.scoring.runs.scheduler import Scheduler
        from reflogp.scoring.runs.score import score_dataset
    quiet_libraries()
    choice = engine_choice(engine, arguments.trust_remote_code, claim is None and not trust_claim, ctx.params)
    if (claim or trust_claim) and engine != "remote":
        raise UsageError(f"--{'claim' if claim else 'trust-claim'} is an option of --engine remote, but the engine is {engine}")
    if ray_workers is not None and ray is None:
        raise UsageError("--ray-workers needs --ray")
    if ray is not None and engine == "remote":
        raise UsageError(
            "--engine remote cannot be combined with --ray, because the server computes the values; omit --ray, and set "
            "the number of concurrent requests with --concurrency"
        )
    found, names = [], options.names(devices)
    if ray is None and engine != "remote":
        found = places(names, torch.cuda.device_count, max(1, choice.gpus()), engine == "vllm") if names else []
    elif len(names) > 1 or names == ["all"]:
        other = "--ray" if ray is not None else "--engine remote"
        raise UsageError(
            f"--devices {','.join(names)} starts several workers on this machine, which cannot be combined with {other}"
        )
    if names:
        choice = replace(choice, device=found[0].device if found else names[0])
    opened = Store(arguments.store)
    rows = RowSource(arguments.data, arguments.split)
    with ExitStack() as stack:
        if ray is not None:
            with needs("ray"):
                from reflogp.scoring.on_ray.cluster import connected, on_workers
                from reflogp.scoring.on_ray.workers import ClusterWorkers
            stack.enter_context(connected(ray or None))
            choice = on_workers(choice)
        if claim is None:
            if engine == "remote":
                _require_weights(arguments.model, arguments.revision)
            folder, reference = find_reference(opened, arguments, choice.default_dtype())
        else:
            folder = str(resolve_model(arguments.model, arguments.revision, weights=False))
            reference = claimed_reference(claim, opened)
            _require_claimed(arguments, reference)
        choice.require_dtype(reference.dtype)
        workers: Workers | None = None
        if ray is not None:
            workers = ClusterWorkers(arguments.model, arguments.revision, reference, choice, ray_workers)
        elif len(found) > 1 or any(place.visible for place in found):  # a single device that sees all GPUs needs no process
            workers = LocalWorkers(folder, reference, choice, found)
        make = None if workers else partial(choice.make, folder, reference)
        scheduler = stack.enter_context(closing(Scheduler(make, workers, commit_sequences=commit_sequences)))
        bar = stack.enter_context(progress_bar("scoring"))
        summary = score_dataset(
            tokenized(rows, folder, arguments),
            opened,
            reference,
            scheduler,
            settings=arguments.settings,
            watcher=bar,
            strict_engine=engine if strict_engine else None,
            top_k=top_k,
        )
    print_notes(summary.notes)
    print_result(summary.as_dict(), as_json, *summary.lines())
    rows.check_unchanged()  # raises an error if the dataset has changed since it was read; the stored values are kept
    if summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)


def _require_weights(model: str, revision: str | None) -> None:
    """Raise UsageError if the model's weights are not on this machine. The message suggests --claim."""
    try:
        read_checkpoint(resolve_model(model, revision))
    except UsageError as error:
        raise UsageError(
            f"{error}; if the weights are on another machine, name the reference with --claim: its id in the store, or a file "
            "with the output of `reflogp reference` on that machine"
        ) from error


def _require_claimed(arguments: ScoreArguments, reference: Reference) -> None:
    """Raise UsageError if --dtype or --lm-head-dtype was given and contradicts the claimed reference."""
    for name, given in (("dtype", arguments.dtype), ("lm_head_dtype", arguments.lm_head_dtype)):
        claimed, option = getattr(reference, name), f"--{name.replace('_', '-')}"
        if given not in (None, AUTO, claimed):
            raise UsageError(f"{option} {given}: the reference given with --claim has {name} {claimed}; omit {option}")
