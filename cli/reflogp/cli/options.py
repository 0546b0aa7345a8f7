"""Every option and argument that more than one command has, described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from reflogp.client.models import Format
from reflogp.store.commands import ScoreArguments
from reflogp.store.storage import PLACES
from reflogp.store.windows import TrainerSettings
from reflogp.store.windows import TruncationMode as Mode

_Own = ParamSpec("_Own")

_STORE = f"Store: {PLACES}."
_DTYPES = (
    "Compute dtype: bfloat16, float32 or float16; bfloat16-autocast or float16-autocast for float32 weights in mixed precision "
    "(as with a trainer's bf16=True or fp16=True); or checkpoint for the dtype in config.json. The dtype is part of the "
    "reference id."
)
_AUTO = "auto: the dtype of the model's values in the store. If there are none"
_TRAINERS = "if it differs from the {}'s. Use the same {} for score, join and report."

Model = Annotated[
    str,
    typer.Argument(
        help="Reference model: a folder with config.json and safetensors files, the folder of a PEFT adapter, or a hub id."
    ),
]
Data = Annotated[
    str,
    typer.Argument(
        help="Dataset: a JSON Lines, JSON or CSV file (can be compressed, such as .jsonl.gz), a Parquet or Arrow file, a "
        "folder of files in one of these formats, a folder written by datasets.save_to_disk, the name of a dataset on the Hub, "
        "or one file on the Hub: hf://datasets/ORGANISATION/NAME/FILE."
    ),
]
Store = Annotated[str, typer.Option("--store", help=_STORE, metavar="URI")]
StoreArgument = Annotated[str, typer.Argument(help=_STORE, metavar="URI")]
ServedStore = Annotated[
    str | None,
    typer.Option("--store", help=f"{_STORE} Default: $REFLOGP_STORE, or `store` in the settings file.", metavar="URI"),
]
Split = Annotated[str, typer.Option(help="Split to read from a hub dataset or a saved DatasetDict.")]
Dtype = Annotated[str, typer.Option(help=_DTYPES)]
StoreDtype = Annotated[
    str,
    typer.Option(
        help=f"{_DTYPES} {_AUTO}, `reflogp score` uses bfloat16, or float32 without a GPU, and the other commands fail."
    ),
]
ServedDtype = Annotated[
    str | None,
    typer.Option(help=f"{_DTYPES} Applies to the models given with --model. {_AUTO}, bfloat16, or float32 without a GPU."),
]
LmHeadDtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the logits: float32, or the model's compute dtype (the default). The dtype is part of the reference id."
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of tokens in the prompt and completion together, as in the trainer's config. Default: no maximum.",
    ),
]
TruncationMode = Annotated[
    Mode,
    typer.Option(
        help="Which part of a sequence to keep if it exceeds --max-length. keep_end needs a separate scoring run for each "
        "max_length."
    ),
]
LdAlpha = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="LD-DPO's weight for tokens beyond the length of the pair's shorter completion. Default: all tokens have the same "
        "weight.",
    ),
]
Form = Annotated[
    Format | None,
    typer.Option(
        "--format", help="Format of the rows. Default: detected from the columns. With kto, each pair becomes two KTO rows."
    ),
]
SnapshotNumber = Annotated[int | None, typer.Option("--snapshot", help="Number of the snapshot to read. Default: the latest.")]
Versus = Annotated[
    str | None,
    typer.Option(
        help="Second model, to compare the first with: a folder or hub id. Its values are in the same store, for the same "
        "tokens. --dtype applies to both models; --revision and --snapshot do not apply to the second.",
        metavar="MODEL",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Revision of the model on the Hub.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help=f"Folder or hub id of the trainer's tokenizer, {_TRAINERS.format('model', 'tokenizer')}", metavar="PATH"),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help=f"Jinja file with the trainer's chat template, {_TRAINERS.format('tokenizer', 'file')}", metavar="FILE"),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model or the tokenizer. Off by default."),
]
_DEVICES = (
    "Devices to use, each with its own worker process: all (every GPU, or the CPU if there is no GPU), auto (one device, which "
    "the engine chooses), cpu, or a list such as cuda:0,cuda:1. With tensor parallelism over N GPUs, one worker uses N GPUs."
)
ServedDevices = Annotated[
    list[str] | None, typer.Option("--devices", "--device", help=f"{_DEVICES} Default: all.", metavar="all|NAME,…")
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--devices",
        "--device",
        help=f"{_DEVICES} A single device needs no worker process. With --engine remote: the device on which some of the "
        "server's values are checked. Default: auto.",
        metavar="all|NAME,…",
    ),
]


def _token_budget(text: str) -> int | str:
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f'{text}: use a positive whole number, or "auto"')
    return text if text == "auto" else int(text)


TokenBudget = Annotated[
    Any,
    typer.Option(
        parser=_token_budget,
        help="With --engine torch: maximum number of tokens in one batch, halved when memory runs out. auto: as many as the "
        "free memory allows.",
        metavar="N|auto",
    ),
]
Url = Annotated[str, typer.Argument(help="URL of the service, as printed by `reflogp serve`.", metavar="URL")]
Token = Annotated[
    str | None, typer.Option("--token", envvar="REFLOGP_TOKEN", help="Bearer token, if the service requires one.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job until it has completed, failed or been cancelled.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as one JSON object on the last line.")]


def names(devices: list[str] | None) -> list[str]:
    """Return the names in the values of --devices, or an empty list if the option was not given."""
    return [name.strip() for value in devices or [] for name in value.split(",")]


def takes_score_arguments(command: Callable[Concatenate[ScoreArguments, _Own], None]) -> Callable[..., None]:
    """Add the parameters of `_score_arguments` to a Typer command, whose first argument is their ScoreArguments.

    `--help` shows required parameters first, then the optional parameters of `_score_arguments`, then those of `command`.
    """
    shared = inspect.signature(_score_arguments, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    both = sorted([*shared.values(), *own], key=lambda parameter: parameter.default is not parameter.empty)

    @wraps(command)
    def expanded(**values: Any) -> None:
        given = {name: values.pop(name) for name in shared}
        settings = TrainerSettings(given.pop("max_length"), given.pop("truncation_mode"))
        command(ScoreArguments(**given, settings=settings), **values)  # type: ignore[call-arg]  # Typer passes them by name

    expanded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in both]
    )
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
    return expanded


def _score_arguments(
    model: Model,
    data: Data,
    store: Store,
    dtype: StoreDtype = "auto",
    lm_head_dtype: LmHeadDtype = None,
    max_length: MaxLength = None,
    truncation_mode: TruncationMode = "keep_start",
    form: Form = None,
    split: Split = "train",
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None: ...
