"""`reflogp reference`: print the id of a reference model. Other subcommands use `find_reference` of this module."""

from __future__ import annotations

import sys

from reflogp.cli import options
from reflogp.cli.console import err, progress_bar
from reflogp.store import Reference, Store, describe_reference, resolve_model
from reflogp.store.commands import ScoreArguments
from reflogp.store.store import choose_reference

_HASHING = "hashing weights (bytes)"


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
    with progress_bar(_HASHING) as bar:
        found = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=bar.hashed)
    sys.stdout.write(found.to_json() + "\n")


def find_reference(store: Store, arguments: ScoreArguments, otherwise: str | None = None) -> tuple[str, Reference]:
    """Return (the model's local folder, the model's reference).

    If the dtype in `arguments` is "auto", print which dtype was chosen, and why. If the digests of the weights are not cached,
    hash the weights and show a progress bar. For the parameter `otherwise` and the errors, see `choose_reference`.
    """
    folder = resolve_model(arguments.model, arguments.revision)
    with progress_bar(_HASHING) as bar:
        found, reason = choose_reference(
            store,
            arguments.model,
            arguments.dtype,
            otherwise=otherwise,
            lm_head_dtype=arguments.lm_head_dtype,
            revision=arguments.revision,
            progress=bar.hashed,
        )
    if reason:
        err.print(reason, markup=False)
    return str(folder), found
