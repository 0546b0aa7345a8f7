"""Options of `reflogp score` that choose and configure the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from reflogp.scoring.engines import EngineChoice, EngineName
from reflogp.store import Reference, ReflogpError, Store, UsageError

_VLLM, _REMOTE = "With --engine vllm", "With --engine remote"

Engine = Annotated[
    EngineName,
    typer.Option(
        help="Engine to use: `torch`, `vllm` (for models that need several GPUs) or `remote` (a `vllm serve` that is already "
        "running)."
    ),
]
StrictEngine = Annotated[
    bool,
    typer.Option(
        "--strict-engine", help="Fail if an engine other than --engine computed any of the store's values for this dataset."
    ),
]
TokenBudget = Annotated[
    str | None,
    typer.Option(
        help="With --engine torch: maximum number of tokens in one batch, halved when memory runs out. Default: `auto` (based "
        "on free memory).",
        metavar="N|auto",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        min=0,
        max=256,
        help="Also store the K most probable tokens of each completion position, for distillation.",
        metavar="K",
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, help="Number of GPUs to shard one model over. Default: 1.", rich_help_panel=_VLLM)
]
VllmOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Additional argument for vLLM, such as gpu_memory_utilization=0.8; repeatable.",
        metavar="NAME=VALUE",
        rich_help_panel=_VLLM,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="URL of the running `vllm serve`, such as http://HOST:8000. The server's API key is read from VLLM_API_KEY.",
        rich_help_panel=_REMOTE,
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        help="Name of the model on the server. Default: the server's model, if it has only one.", rich_help_panel=_REMOTE
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of concurrent requests to the server. Default: 64.", rich_help_panel=_REMOTE),
]
Patience = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to wait for a server that does not respond. Default: 300.", rich_help_panel=_REMOTE),
]
Claim = Annotated[
    str | None,
    typer.Option(
        help="Required if MODEL contains no weights: the reference whose values the server computes. Pass a reference id from "
        "the store, or a file written by `reflogp reference`. The dtype is taken from this reference. With this option, "
        "reflogp does not check the server's values.",
        metavar="ID|FILE",
        rich_help_panel=_REMOTE,
    ),
]
TrustClaim = Annotated[
    bool,
    typer.Option(
        "--trust-claim",
        help="Store the server's values without first comparing some of them with values computed from MODEL's weights.",
        rich_help_panel=_REMOTE,
    ),
]


#: The engine to which each option belongs.
_OWNERS = {
    "token_budget": "torch",
    "tensor_parallel": "vllm",
    "vllm_option": "vllm",
    "url": "remote",
    "served_model": "remote",
    "concurrency": "remote",
    "patience": "remote",
}


def engine_choice(name: EngineName, trust_remote_code: bool, check_claim: bool, values: Mapping[str, Any]) -> EngineChoice:
    """Return the EngineChoice for the engine `name`, with the options in this module that the user gave.

    `values` are the values of the command's parameters. Raises UsageError if an option cannot be parsed or belongs to a
    different engine, or if the engine is remote and no url was given.
    """
    from reflogp.scoring.vllm_engine.options import parse_options

    given = {option: values[option] for option in _OWNERS if values.get(option) not in (None, [], ())}
    for option in given:
        if _OWNERS[option] != name:
            raise UsageError(
                f"--{option.replace('_', '-')} is an option of --engine {_OWNERS[option]}, but the engine is {name}"
            )
    if "token_budget" in given:
        given["token_budget"] = _token_budget(given["token_budget"])
    if "vllm_option" in given:
        given["vllm_options"] = parse_options(given.pop("vllm_option"))
    if "patience" in given:
        given["patience_seconds"] = given.pop("patience")
    if name == "remote" and "url" not in given:
        raise UsageError("--engine remote needs --url, the address of a running `vllm serve`")
    top_k = values.get("top_k") or 0
    return EngineChoice(name, trust_remote_code=trust_remote_code, check_claim=check_claim, top_k=top_k, **given)


def claimed_reference(claim: str, store: Store) -> Reference:
    """Return the reference that `claim` names: a file written by `reflogp reference`, or a reference id in the store."""
    file = Path(claim).expanduser()
    if not file.is_file():
        try:
            return store[claim].reference
        except ReflogpError as error:
            raise UsageError(f"--claim {claim} is neither a file nor the id of a stored reference: {error}") from error
    try:
        return Reference.from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--claim {claim}: this file is not valid output of `reflogp reference`: {error}") from error


def _token_budget(text: str) -> Any:
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f'--token-budget {text}: use a positive whole number, or "auto"')
    return int(text)
