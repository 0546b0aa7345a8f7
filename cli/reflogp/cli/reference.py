"""`reflogp reference`: print the id of a reference model."""

from __future__ import annotations

import sys

from reflogp.cli import options
from reflogp.cli.console import progress_bar
from reflogp.cli.scored import HASHING
from reflogp.store import describe_reference, resolve_model


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
