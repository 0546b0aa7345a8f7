"""`reflogp reference`: what a model is to a store; and how the other subcommands find that out."""

from __future__ import annotations

import sys

from reflogp.cli import options
from reflogp.cli.console import progress_bar
from reflogp.store import Reference, describe_reference, resolve_model


def reference(
    model: options.Model,
    dtype: options.Dtype = "bfloat16",
    lm_head_dtype: options.LmHeadDtype = None,
    revision: options.Revision = None,
) -> None:
    """Print what a reference model is to a store, as JSON: its id, and the content and numerics that make it.

    Hashes the weights and loads no model. Where a server's weights are not at hand, the file lets `reflogp score --engine
    remote --claim FILE` write under the right id.

    Example: reflogp reference ./sft-model --dtype bfloat16 > sft.reference.json
    """
    sys.stdout.write(find_reference(model, dtype, lm_head_dtype, revision)[1].to_json() + "\n")


def find_reference(model: str, dtype: str, lm_head_dtype: str | None, revision: str | None) -> tuple[str, Reference]:
    """(local folder, reference) of a model, hashing its weights under a progress bar unless they are known."""
    folder = resolve_model(model, revision)
    with progress_bar("hashing weights (bytes)") as bar:
        reference = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=bar.hashed)
    return str(folder), reference
