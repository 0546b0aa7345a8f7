"""Train on pairs with images.

TRL tokenizes pairs with images batch by batch, in its collator (DataCollatorForVisionPreference). The same collator creates the
tokens from which a row's keys are computed. To save time, the collator gets blank images of the same sizes for this purpose,
instead of the row's images. In the collator's output, the image tokens are then replaced with image ids, which identify the
row's images (see reflogp.store.images). Because the collator drops the reference columns, reflogp adds these columns to the
batches.
"""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value

from reflogp.store import UsageError
from reflogp.store.images import (
    FIRST_IMAGE_ID,
    ImageTokens,
    blanks,
    image_token,
    kind_of_image,
    pixel_digest,
)
from reflogp.store.joins import PAIR_COLUMNS
from reflogp.store.texts import shortened
from reflogp.trainer.join import reference_columns
from reflogp.trainer.ranks import on_all_ranks

#: Name of TRL's collator for pairs with images.
_COLLATOR = "DataCollatorForVisionPreference"
#: Packages whose versions may change the tokens.
_MAKERS = ("reflogp", "trl", "transformers", "tokenizers", "datasets", "pillow")
_TOKENS = Features({name: List(Value("int64")) for name in ("prompt_ids", *PAIR_COLUMNS)})


def token_rows(dataset: Dataset | IterableDataset, trainer: Any, name: str) -> Dataset:
    """Return the token ids of pairs with images, in the columns prompt_ids, chosen_ids and rejected_ids.

    The token ids contain image ids in place of image tokens.

    The first process on each node computes the token ids, using `dataset_num_proc` worker processes.

    Raises UsageError if the dataset is a stream, if the run uses a collator other than TRL's, or if the model's config does not
    name an image token. Also raises UsageError, with the row's number, if a row cannot be used or if truncation to `max_length`
    would remove tokens of a row's images.
    """
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "pass pairs with images as a Dataset, not as a stream, because their keys are computed before training"
        )
    if trainer.reference.on_miss != "error":
        raise UsageError(
            f"on_miss={trainer.reference.on_miss!r} supports only text; run `reflogp score` on the pairs with images before "
            "training, and omit on_miss="
        )
    collator = trainer.data_collator
    collator = collator.collator if isinstance(collator, CollatorWithReference) else collator
    if type(collator).__name__ != _COLLATOR:
        raise UsageError(
            "the keys of rows with images are computed from the output of TRL's collator for pairs, but this run uses the "
            f"collator {type(collator).__name__}: omit data_collator (for KTO, use TRL's own trainer)"
        )
    token = image_token(trainer.accelerator.unwrap_model(trainer.model).config)
    if token is None:
        raise UsageError(
            f"the config of {type(trainer.model).__name__} does not name an image token (image_token_id), which reflogp needs "
            "for pairs with images: use TRL's own trainer, without stored values"
        )

    def work() -> Dataset:
        return dataset.map(
            RowTokens(collator, token, name),
            with_indices=True,
            remove_columns=dataset.column_names,
            features=_TOKENS,
            num_proc=trainer.args.dataset_num_proc,
            desc=f"Reading {name}'s images",
        )

    is_first = trainer.accelerator.is_local_main_process
    own = on_all_ranks(f"reading {name}'s images", lambda: work() if is_first else None)
    # The node's other processes find the result in the cache of `datasets`.
    others = on_all_ranks(f"reading {name}'s images", lambda: None if is_first else work())
    rows = own if is_first else others
    assert rows is not None
    _require_whole_images(rows, trainer.args.max_length, name)
    return rows


class RowTokens:
    """A callable for `datasets.map` that computes the token ids of one row. `token` is the id of the model's image token."""

    def __init__(self, collator: Any, token: int, name: str) -> None:
        self._tokens = ImageTokens(collator.processor, token)
        self._collator = copy.copy(collator)
        self._collator.processor, self._collator.max_length = self._tokens.processor, None
        self._name = name
        # `datasets` derives the names of its cache files from a hash of this object. Therefore, the object contains the version
        # of every package that may change the tokens.
        self._versions = [importlib.metadata.version(package) for package in _MAKERS]

    def __call__(self, row: dict[str, Any], number: int) -> dict[str, list[int]]:
        try:
            if "image" not in row and "images" not in row:
                raise UsageError("the column `images` is missing; add it, with an empty list for rows without images")
            column = "image" if "image" in row else "images"
            if row[column] is None:
                raise UsageError(
                    f"{column} is null, which TRL cannot read; use a column named `images`, with an empty "
                    "list for rows without images"
                )
            images = [row["image"]] if column == "image" else row["images"]
            if strange := [image for image in images if not hasattr(image, "tobytes")]:
                raise UsageError(
                    f"an image has the type {type(strange[0]).__name__}, so it is not decoded; cast the column, for example "
                    'with dataset.cast_column("images", List(Image()))'
                )
            seen = [(pixel_digest(image), kind_of_image(image)) for image in images]
            blank = blanks([kind for _, kind in seen])
            made = self._collator([{**row, column: blank[0] if column == "image" else blank}])
            ids, mask, completion = (made[column].numpy() for column in ("input_ids", "attention_mask", "completion_mask"))
            prompt = self._tokens.identified(ids[0][(mask[0] == 1) & (completion[0] == 0)].tolist(), seen)
        except Exception as error:  # templates and processors raise errors of any type
            raise UsageError(f"row {number} of {self._name} cannot be used: {shortened(str(error) or repr(error))}") from error
        sides = {column: ids[side][completion[side] == 1].tolist() for side, column in enumerate(PAIR_COLUMNS)}
        return {"prompt_ids": prompt.tolist(), **sides}


class CollatorWithReference:
    """A collator that adds the rows' reference columns (float32 of shape (rows,)) to the batches from TRL's collator."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        import torch

        columns = reference_columns(rows[0])
        plain = [{name: value for name, value in row.items() if name not in columns} for row in rows]
        batch = self.collator(plain)
        for name in columns:
            batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.float32)
        return batch


def _require_whole_images(rows: Dataset, max_length: int | None, name: str) -> None:
    """Raise UsageError if the collator's truncation would remove image tokens. Without this check, the model would fail during
    training."""
    if max_length is None:
        return
    prompts = rows.with_format("arrow")["prompt_ids"]
    prompts = prompts.combine_chunks() if isinstance(prompts, pa.ChunkedArray) else pa.array(prompts[:])
    for number, prompt in enumerate(prompts):
        places = np.flatnonzero(prompt.values.to_numpy() >= FIRST_IMAGE_ID)
        if len(places) and places[-1] >= max_length:
            raise UsageError(
                f"row {number} of {name}: max_length={max_length} would cut off tokens of the row's images (the last image "
                f"token is token {places[-1] + 1} of the row); increase max_length or remove the row"
            )
