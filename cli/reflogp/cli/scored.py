"""Open datasets and their stored values, according to the options of `reflogp score`, `join` and `report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflogp.cli.reference import find_reference
from reflogp.store import Snapshot, Store, UsageError
from reflogp.store.commands import ScoreArguments, naming_command

if TYPE_CHECKING:
    from reflogp.scoring.data.read import RowSource
    from reflogp.scoring.data.tokenized import TokenizedDataset


def open_rows(arguments: ScoreArguments) -> RowSource:
    """Open the dataset `arguments.data`. Raises UsageError if it cannot be opened, or if --format names an unknown format."""
    from reflogp.scoring.data.read import RowSource
    from reflogp.scoring.data.shape import FORMATS

    if arguments.form is not None and arguments.form not in FORMATS:
        raise UsageError(f"--format {arguments.form}: unknown format; choose from {', '.join(FORMATS)}")
    return RowSource(arguments.data, arguments.split)


def tokenized(rows: RowSource, folder: str, arguments: ScoreArguments) -> TokenizedDataset:
    """Return the rows as a dataset of token ids. The rows are tokenized later, when the result is iterated over.

    Args:
        rows: the dataset, as returned by `open_rows`.
        folder: the model's folder. Its tokenizer is used unless `arguments` names another tokenizer.
        arguments: contains the tokenizer, chat template and format to use.
    """
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
    """Open a dataset, and the snapshot in which its values are looked up. The model is not loaded.

    Args:
        arguments: the arguments with which the dataset was scored.
        number: number of the snapshot, or None for the latest.

    Raises:
        UsageError: the dataset or the model cannot be used.
        StoreNotFoundError, ReferenceNotFoundError: the store does not exist, or has no log-probs of the model. The message
            contains the complete command that scores the dataset.
        StoreError: the snapshot cannot be read.
    """
    rows = open_rows(arguments)
    opened = Store(arguments.store)
    with naming_command(arguments.command()):
        folder, reference = find_reference(opened, arguments)
        snapshot = opened[reference].snapshot(number)
    return tokenized(rows, folder, arguments), snapshot
