"""Define the options that several subcommands share, so that an option has the same meaning and text in every subcommand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from reflogp.store.commands import ScoreArguments
from reflogp.store.storage import PLACES
from reflogp.store.windows import TrainerSettings

_Own = ParamSpec("_Own")

Model = Annotated[str, typer.Argument(help="Reference model: a folder with config.json and safetensors, or a hub id.")]
Data = Annotated[
    str,
    typer.Argument(
        help="Dataset: JSON lines, JSON, CSV, Parquet or Arrow file (may be .gz), a folder of such files "
        "or from datasets.save_to_disk, a hub name, or one file of the Hub: hf://datasets/ORGANISATION/NAME/FILE."
    ),
]
Store = Annotated[str, typer.Option("--store", help=f"Store: {PLACES}.", metavar="URI")]
Split = Annotated[str, typer.Option(help="Split of a hub dataset or a saved DatasetDict.")]
_DTYPES = (
    "bfloat16, float32, float16; bfloat16-autocast or float16-autocast for float32 weights in mixed precision (bf16=True, "
    "fp16=True); checkpoint for the dtype in config.json"
)
Dtype = Annotated[str, typer.Option(help=f"Compute dtype: {_DTYPES}. Part of the reference id.")]
StoreDtype = Annotated[
    str,
    typer.Option(
        help=f"Compute dtype: {_DTYPES}. Part of the reference id. auto: the dtype in which the store holds the model; if "
        "the store lacks the model, bfloat16, or float32 without a GPU."
    ),
]
LmHeadDtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the logits: float32, or by default the dtype in which the model computes. Part of the reference id."
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum number of tokens of prompt and completion, as in the trainer's config. Default: no maximum."
    ),
]
TruncationMode = Annotated[
    str,
    typer.Option(
        help="Part that is kept of a sequence above --max-length: keep_start, or keep_end (one scoring run per max_length)."
    ),
]
Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Format of the rows: preference, kto or tokens. Default: by the columns. kto makes two KTO rows of a pair.",
    ),
]
SnapshotNumber = Annotated[int | None, typer.Option("--snapshot", help="Snapshot number. Default: the latest.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub id.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Tokenizer of the trainer, if it differs from the model's: a folder or a hub id. Give the same tokenizer to "
        "score, join and report.",
        metavar="PATH",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Jinja file with the trainer's chat template, if it differs from the tokenizer's template. Give the same file "
        "to score, join and report.",
        metavar="FILE",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modelling code that comes with the checkpoint. Off by default.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line: the summary, or the error.")]


def takes_score_arguments(command: Callable[Concatenate[ScoreArguments, _Own], None]) -> Callable[..., None]:
    """Return a command for Typer that has the options of `_score_arguments` in place of its first parameter.

    The required options come first in `--help`, then the shared options, then the command's own options.
    """
    shared = inspect.signature(_score_arguments, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    both = [*shared.values(), *own]

    @wraps(command)
    def expanded(**values: Any) -> None:
        arguments = _score_arguments(**{name: values.pop(name) for name in shared})
        command(arguments, **values)  # type: ignore[call-arg]  # Typer passes the command's own parameters by name

    signature = inspect.Signature(
        [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in sorted(both, key=lambda parameter: parameter.default is not parameter.empty)
        ]
    )
    expanded.__signature__ = signature  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
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
) -> ScoreArguments:
    return ScoreArguments(
        model,
        data,
        store,
        dtype,
        TrainerSettings(max_length, truncation_mode),
        lm_head_dtype=lm_head_dtype,
        revision=revision,
        split=split,
        form=form,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
