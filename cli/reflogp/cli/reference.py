"""`reflogp reference`: describe a model as a store identifies it; the other subcommands use `find_reference` too."""

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
    """Print how a store identifies a reference model, as JSON: its id, and the content and numerics that determine the id.

    Hashes the weights and loads no model. If a server's weights are on another machine, this file lets `reflogp score --engine
    remote --claim FILE` write under the right id.

    Example: reflogp reference ./sft-model --dtype bfloat16 > sft.reference.json
    """
    sys.stdout.write(find_reference(model, dtype, lm_head_dtype, revision)[1].to_json() + "\n")


def find_reference(model: str, dtype: str, lm_head_dtype: str | None, revision: str | None) -> tuple[str, Reference]:
    """Return (local folder, reference) of a model; hash its weights under a progress bar unless their digests are cached."""
    folder = resolve_model(model, revision)
    with progress_bar("hashing weights (bytes)") as bar:
        reference = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=bar.hashed)
    return str(folder), reference
