"""Define the options that several subcommands share, so that they have the same meaning and text everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Reference model: a folder with config.json and safetensors, or a hub id.")]
Data = Annotated[
    str,
    typer.Argument(
        help="Dataset: JSON lines, JSON, CSV, Parquet or Arrow file (may be .gz), a folder of them or of "
        "datasets.save_to_disk, or a hub name."
    ),
]
Store = Annotated[str, typer.Option("--store", help="Store: a folder, or s3://, gs://, az://.", metavar="URI")]
Split = Annotated[str, typer.Option(help="Split of a hub dataset or a saved DatasetDict.")]
_DTYPES = (
    "bfloat16, float32, float16; bfloat16-autocast or float16-autocast for float32 weights in mixed precision (bf16=True, "
    "fp16=True); checkpoint for the one in config.json"
)
Dtype = Annotated[str, typer.Option(help=f"Compute dtype: {_DTYPES}. Part of the reference id.")]
StoreDtype = Annotated[
    str,
    typer.Option(
        help=f"Compute dtype: {_DTYPES}. Part of the reference id. auto: the one in which the store holds the model; if it "
        "holds none, bfloat16, or float32 without a GPU."
    ),
]
LmHeadDtype = Annotated[
    str | None,
    typer.Option(help="float32 computes the logits in float32. Default: in --dtype. Part of the reference id."),
]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Tokens of prompt and completion together, as in the trainer's config. Default: all.")
]
TruncationMode = Annotated[
    str,
    typer.Option(help="Which end a longer sequence keeps: keep_start, or keep_end (every max_length is then scored apart)."),
]
Form = Annotated[
    str | None,
    typer.Option("--format", help="preference, kto or tokens. Default: found from the columns. kto on pairs unpairs them."),
]
SnapshotNumber = Annotated[int | None, typer.Option("--snapshot", help="Snapshot number. Default: the latest.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub id.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Tokenizer that the trainer uses, where it is not the model's: a folder or a hub id. Give it to score, join and "
        "report alike.",
        metavar="PATH",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Jinja file with the chat template that the trainer's tokenizer has, where it is not the folder's. Give it to "
        "score, join and report alike.",
        metavar="FILE",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modelling code that the checkpoint brings. Off unless given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line: the summary, or the error.")]
