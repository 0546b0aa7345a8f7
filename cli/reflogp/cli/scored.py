"""Open models, datasets and their stored values, according to the options of `reflogp score`, `join`, `report` and `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflogp.cli.console import err, progress_bar
from reflogp.store import Reference, Snapshot, Store, resolve_model
from reflogp.store.commands import ScoreArguments, naming_command
from reflogp.store.store import choose_reference

if TYPE_CHECKING:
    from reflogp.scoring.data.read import RowSource
    from reflogp.scoring.data.tokenized import TokenizedDataset
    from reflogp.scoring.versus import Versus

HASHING = "hashing weights (bytes)"


def find_reference(store: Store, arguments: ScoreArguments, otherwise: str | None = None) -> tuple[str, Reference]:
    """Return (the model's local folder, the model's reference), and print why the dtype was chosen if it is "auto".

    For the parameter `otherwise` and the errors, see `choose_reference`.
    """
    folder = resolve_model(arguments.model, arguments.revision)
    with progress_bar(HASHING) as bar:
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
        err.print(reason)
    return str(folder), found


def tokenized(rows: RowSource, folder: str, arguments: ScoreArguments) -> TokenizedDataset:
    """Return the rows as a dataset of token ids. The rows are tokenized later, when the result is iterated over."""
    from reflogp.scoring.data.tokenize import chosen_processor, chosen_tokenizer
    from reflogp.scoring.data.tokenized import TokenizedDataset

    chosen = arguments.tokenizer, arguments.chat_template, arguments.trust_remote_code
    return TokenizedDataset(
        rows,
        lambda: chosen_tokenizer(folder, *chosen),
        arguments.form,  # type: ignore[arg-type]
        load_vision=lambda: chosen_processor(folder, *chosen),
    )


def open_scored(arguments: ScoreArguments, number: int | None) -> tuple[TokenizedDataset, Snapshot]:
    """Open a dataset, and the snapshot (None: the latest) in which its values are looked up. The model is not loaded.

    The message of StoreNotFoundError and ReferenceNotFoundError contains the command that scores the dataset.
    """
    from reflogp.scoring.data.read import RowSource

    rows = RowSource(arguments.data, arguments.split)
    opened = Store(arguments.store)
    with naming_command(arguments.command()):
        folder, reference = find_reference(opened, arguments)
        snapshot = opened[reference].snapshot(number)
    return tokenized(rows, folder, arguments), snapshot


def open_versus(model: str | None, arguments: ScoreArguments, first: Snapshot) -> Versus | None:
    """Open the second model of --versus, and print why its dtype was chosen if it is "auto"."""
    from reflogp.scoring.data.tokenize import chosen_tokenizer
    from reflogp.scoring.versus import find_versus

    if model is None:
        return None
    chosen = arguments.tokenizer, arguments.chat_template, arguments.trust_remote_code
    with progress_bar(HASHING) as bar:
        versus, reason = find_versus(
            Store(arguments.store),
            model,
            arguments,
            first.reference,
            lambda folder: chosen_tokenizer(folder, *chosen),
            bar.hashed,
        )
    if reason:
        err.print(f"{model}: {reason}")
    return versus
