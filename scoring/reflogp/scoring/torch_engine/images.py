"""Feed a vision-language model: pixels for a padded batch, or features of images in a pack's embeddings.

In a pack the vision tower runs once for each distinct image. The features are read where the model itself puts them: at the
entry of its text decoder. This works for models whose image tokens are ordinary positions to the decoder. Models that treat
them otherwise (Gemma 3: attention in both directions; Qwen-VL: three-part positions) name the types of tokens in their inputs
("token_type_ids", "mm_token_type_ids"), and are scored in padded batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reflogp.scoring.errors import PictureError
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages
from reflogp.store.images import FIRST_IMAGE_ID, blanks

#: Inputs of a model that name the type of each token, as processors make them.
_TYPES = ("token_type_ids", "mm_token_type_ids")
_OF_TEXT = frozenset({"input_ids", "attention_mask", *_TYPES})


def pixel_inputs(images: list[SequenceImages]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return a model's inputs for the images of some sequences, on the host, and the names of its inputs of token types.

    Args:
        images: the images of at least one sequence, all of one processor.

    Raises PictureError if an image cannot be read any more.
    """
    processor = images[0].vision.processor
    loaded: dict[bytes, Any] = {}
    for picture in (picture for entry in images for picture in entry.pictures):
        if picture.digest not in loaded:
            try:
                loaded[picture.digest] = picture.load()
            except ValueError as error:
                raise PictureError(picture.digest, str(error)) from error
    texts = [processor.image_token * len(entry.counts) for entry in images]
    pictures = [[loaded[digest] for digest in entry.digests] for entry in images]
    made = processor(images=pictures, text=texts, padding=True, add_special_tokens=False, return_tensors="pt")
    types = [name for name in _TYPES if name in made]
    return {name: value for name, value in made.items() if name not in _OF_TEXT}, types


def token_types(images: SequenceImages, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 1 where a token belongs to an image and 0 elsewhere, as processors do, (n,). `ids` hold no image ids."""
    return np.isin(ids, images.vision.processor.image_token_ids).astype(np.int64)


def is_packable(images: SequenceImages) -> bool:
    """Return True if the decoder takes image tokens as ordinary positions. Processes a blank image."""
    processor = images.vision.processor
    made = processor(
        images=[blanks([((64, 64), "RGB")])], text=[processor.image_token], add_special_tokens=False, return_tensors="pt"
    )
    return not any(name in made for name in _TYPES)


def pack_embeddings(model: Any, pack: Pack, sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """Return the embeddings of a pack's tokens, with features in the places of images, (tokens, hidden size).

    Args:
        model: the model; its vision tower runs once for each distinct image of the pack, or for each distinct set of images of
            a prompt where an image's features depend on the others.
        pack: a pack of sequences with images.
        sequences: the sequences that the pack was made of.
        device: the model's device.
    """
    ids = np.where(pack.token_ids >= FIRST_IMAGE_ID, 0, pack.token_ids)
    embeddings: torch.Tensor = model.get_input_embeddings()(torch.from_numpy(ids).to(device))
    features = _features(model, (sequences[branch.sequence] for branch in pack.branches), device)
    places, values = [], []
    for branch in pack.branches:
        images = sequences[branch.sequence].images
        if images is None:
            continue
        at = branch.path[pack.token_ids[branch.path] >= FIRST_IMAGE_ID]
        of_branch = torch.cat([features[part.digests] for part in images.parts()])
        own = at >= branch.start  # the others belong to earlier branches
        places.append(torch.from_numpy(at[own]).to(device))
        values.append(of_branch[torch.from_numpy(own).to(device)])
    if places:
        embeddings = embeddings.index_copy(0, torch.cat(places), torch.cat(values).to(embeddings.dtype))
    return embeddings


def _features(model: Any, sequences: Iterable[Sequence], device: torch.device) -> dict[tuple[bytes, ...], torch.Tensor]:
    """Return digests of images -> what the decoder gets in the places of these images, (tokens of them, hidden size)."""
    found: dict[tuple[bytes, ...], torch.Tensor] = {}
    for sequence in sequences:
        for part in [] if sequence.images is None else sequence.images.parts():
            if part.digests not in found:
                ids = torch.full((1, sum(part.counts)), part.vision.image_token_id, device=device)
                found[part.digests] = _decoder_input(model, ids, on_device(pixel_inputs([part])[0], device))
    return found


def on_device(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


class _ReadError(Exception):
    """Ends a forward pass at the entry of the decoder."""


def _decoder_input(model: Any, ids: torch.Tensor, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the embeddings that the model gives its text decoder for these inputs, (tokens, hidden size)."""
    seen: list[torch.Tensor] = []

    def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["inputs_embeds"][0])
        raise _ReadError

    handle = model.get_decoder().register_forward_pre_hook(read, with_kwargs=True)
    try:
        model.base_model(input_ids=ids, use_cache=False, **pixels)
    except _ReadError:
        pass
    finally:
        handle.remove()
    return seen[0]
