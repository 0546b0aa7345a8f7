"""`reflogp score` and `reflogp reference`: score what the store lacks, and print the id of a reference model."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, needs, print_notes, print_result, progress_bar
from reflogp.cli.options import takes_score_arguments
from reflogp.scoring.engines import EngineChoice, EngineName
from reflogp.scoring.machine import places, quiet_libraries
from reflogp.store import Reference, ReflogpError, Store, UsageError, describe_reference, read_checkpoint, resolve_model
from reflogp.store.commands import ScoreArguments
from reflogp.store.reference import AUTO

if TYPE_CHECKING:
    from reflogp.scoring.runs.scheduler import Workers

HASHING = "hashing weights (bytes)"
_VLLM, _REMOTE = "With --engine vllm", "With --engine remote"
#: The engine to which each option belongs.
_OWNERS: dict[str, EngineName] = {
    "token_budget": "torch",
    "tensor_parallel": "vllm",
    "vllm_option": "vllm",
    "url": "remote",
    "served_model": "remote",
    "concurrency": "remote",
    "patience": "remote",
    "claim": "remote",
    "trust_claim": "remote",
}
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
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Engine to use: `torch`, `vllm` (for models that need several GPUs) or `remote` (a `vllm serve` that is "
            "already running)."
        ),
    ] = "torch",
    strict_engine: Annotated[
        bool,
        typer.Option(
            "--strict-engine", help="Fail if an engine other than --engine computed any of the store's values for this dataset."
        ),
    ] = False,
    devices: options.Devices = None,
    token_budget: options.TokenBudget = "auto",
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
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Number of GPUs to shard one model over.", rich_help_panel=_VLLM)
    ] = 1,
    vllm_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional argument for vLLM, such as gpu_memory_utilization=0.8; repeatable.",
            metavar="NAME=VALUE",
            rich_help_panel=_VLLM,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of the running `vllm serve`, such as http://HOST:8000. The server's API key is read from VLLM_API_KEY.",
            rich_help_panel=_REMOTE,
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            help="Name of the model on the server. Default: the server's model, if it has only one.", rich_help_panel=_REMOTE
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent requests to the server.", rich_help_panel=_REMOTE)
    ] = 64,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that does not respond.", rich_help_panel=_REMOTE)
    ] = 300,
    claim: Annotated[
        str | None,
        typer.Option(
            help="Required if MODEL contains no weights: the reference whose values the server computes. Pass a reference id "
            "from the store, or a file written by `reflogp reference`. The dtype is taken from this reference. With this "
            "option, reflogp does not check the server's values.",
            metavar="ID|FILE",
            rich_help_panel=_REMOTE,
        ),
    ] = None,
    trust_claim: Annotated[
        bool,
        typer.Option(
            "--trust-claim",
            help="Store the server's values without first comparing some of them with values computed from MODEL's weights.",
            rich_help_panel=_REMOTE,
        ),
    ] = False,
    top_k: Annotated[
        int,
        typer.Option(
            min=0,
            max=256,
            help="Also store the K most probable tokens of each completion position, for distillation.",
            metavar="K",
        ),
    ] = 0,
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

        from reflogp.scoring.api import tokenized
        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.runs.pipeline import EngineScheduler
        from reflogp.scoring.runs.processes import LocalWorkers
        from reflogp.scoring.runs.scheduler import Scheduler
        from reflogp.scoring.runs.score import score_dataset
        from reflogp.scoring.vllm_engine.options import parse_options
    quiet_libraries()
    for option, owner in _OWNERS.items():
        source = ctx.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and owner != engine:
            raise UsageError(f"--{option.replace('_', '-')} is an option of --engine {owner}, but the engine is {engine}")
    if engine == "remote" and url is None:
        raise UsageError("--engine remote needs --url, the address of a running `vllm serve`")
    choice = EngineChoice(
        engine,
        token_budget=token_budget,
        trust_remote_code=arguments.trust_remote_code,
        tensor_parallel=tensor_parallel,
        vllm_options=parse_options(vllm_option or []),
        url=url,
        served_model=served_model,
        concurrency=concurrency,
        patience_seconds=patience,
        check_claim=claim is None and not trust_claim,
        top_k=top_k,
    )
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
                from reflogp.scoring.on_ray.workers import ClusterWorkers, connected, on_workers
            stack.enter_context(connected(ray or None))
            choice = on_workers(choice)
        if claim is None:
            if engine == "remote":
                _require_weights(arguments.model, arguments.revision)
            folder, reference = find_reference(opened, arguments, choice.default_dtype())
        else:
            folder = str(resolve_model(arguments.model, arguments.revision, weights=False))
            reference = _claimed_reference(claim, opened, arguments)
        choice.require_dtype(reference.dtype)
        workers: Workers | None = None
        if ray is not None:
            workers = ClusterWorkers(arguments.model, arguments.revision, reference, choice, ray_workers)
        elif len(found) > 1 or any(place.visible for place in found):  # a single device that sees all GPUs needs no process
            workers = LocalWorkers(folder, reference, choice, found)
        scheduler: EngineScheduler | Scheduler
        if workers is None:
            scheduler = EngineScheduler(partial(choice.make, folder, reference), commit_sequences=commit_sequences)
        else:
            scheduler = Scheduler(workers, commit_sequences=commit_sequences)
        stack.enter_context(closing(scheduler))
        bar = stack.enter_context(progress_bar("scoring"))
        summary = score_dataset(
            tokenized(rows, folder, arguments),
            opened.values_table(reference, top_k),
            scheduler,
            settings=arguments.settings,
            watcher=bar,
            strict_engine=engine if strict_engine else None,
        )
    print_notes(summary.notes)
    print_result(summary.as_dict(), as_json, *summary.lines())
    rows.check_unchanged()  # raises an error if the dataset has changed since it was read; the stored values are kept
    if summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)


def find_reference(store: Store, arguments: ScoreArguments, otherwise: str | None = None) -> tuple[str, Reference]:
    """Return (the model's local folder, its reference), and print why the dtype was chosen if it is "auto"."""
    from reflogp.scoring import api

    with progress_bar(HASHING) as bar:
        folder, found, reason = api.find_reference(store, arguments, otherwise, bar.hashed)
    if reason:
        err.print(reason)
    return folder, found


def _require_weights(model: str, revision: str | None) -> None:
    """Raise UsageError if the model's weights are not on this machine. The message suggests --claim."""
    try:
        read_checkpoint(resolve_model(model, revision))
    except UsageError as error:
        raise UsageError(
            f"{error}; if the weights are on another machine, name the reference with --claim: its id in the store, or a file "
            "with the output of `reflogp reference` on that machine"
        ) from error


def _claimed_reference(claim: str, store: Store, arguments: ScoreArguments) -> Reference:
    """Return the reference that `claim` names: a file written by `reflogp reference`, or a reference id in the store.

    Raises UsageError if --dtype or --lm-head-dtype was given and contradicts this reference.
    """
    file = Path(claim).expanduser()
    if file.is_file():
        try:
            reference = Reference.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"--claim {claim}: this file is not valid output of `reflogp reference`: {error}") from error
    else:
        try:
            reference = store[claim].reference
        except ReflogpError as error:
            raise UsageError(f"--claim {claim} is neither a file nor the id of a stored reference: {error}") from error
    for name, given in (("dtype", arguments.dtype), ("lm_head_dtype", arguments.lm_head_dtype)):
        claimed, option = getattr(reference, name), f"--{name.replace('_', '-')}"
        if given not in (None, AUTO, claimed):
            raise UsageError(f"{option} {given}: the reference given with --claim has {name} {claimed}; omit {option}")
    return reference


def reference(
    model: options.Model,
    dtype: options.Dtype = "bfloat16",
    lm_head_dtype: options.LmHeadDtype = None,
    revision: options.Revision = None,
) -> None:
    """Print a JSON object with a reference model's id, and the digests, config and dtypes from which the id is computed.

    This command hashes the weights, but does not load the model.

    `reflogp score --engine remote` can run on a machine without the vLLM server's weights. In this case, run this
    command on a machine that has the weights, save the output to a file, and pass the file to `reflogp score` with --claim. The
    values are then stored under the correct id.

    Example: reflogp reference ./sft-model --dtype bfloat16 > sft.reference.json
    """
    resolve_model(model, revision)
    with progress_bar(HASHING) as bar:
        found = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=bar.hashed)
    sys.stdout.write(found.to_json() + "\n")
