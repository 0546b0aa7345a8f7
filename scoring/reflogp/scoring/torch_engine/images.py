"""Build a vision-language model's inputs: pixels for a padded batch, or the text decoder's inputs for a pack.

For a pack, the vision tower runs once for each distinct image. The image features, including those that some decoders add after
their first layers (DeepStack, arxiv.org/abs/2406.04334), are read from the arguments that the model passes to its text decoder.
Some models (Qwen-VL) use position ids with several components (time, height, width); the model's own function computes these
ids for each sequence.

Before sequences with images are packed, `layout_of` checks the first few of them, to ensure that packing changes neither the
tokens' positions nor which tokens attend to each other.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reflogp.scoring.errors import PictureError
from reflogp.scoring.torch_engine.packing import Pack, image_ends
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages
from reflogp.store.images import FIRST_IMAGE_ID

#: Names under which processors return token types: for each token, 1 for an image token and 0 for any other token.
_TYPES = ("token_type_ids", "mm_token_type_ids")
#: Outputs of a processor that describe its text. They are discarded, because the tokens come from the sequence.
_OF_TEXT = frozenset({"input_ids", "attention_mask", *_TYPES})
#: Decoder arguments that do not prevent packing, because a pack provides them too or does not need them.
_LAID_OUT = frozenset(
    {"inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks", "deepstack_visual_embeds", "cache_position"}
)
#: Maximum size of the image features kept for later packs, in bytes.
KEPT_BYTES = 256 << 20
#: Maximum total size of the decoded images that a batch of two or more sequences has in memory at once, in bytes. There is no
#: limit for the images of a single sequence.
DECODED_BYTES = 1 << 30
#: A tuple that identifies a group of images whose features are computed together. It contains the processor's settings, the
#: images' digests, and the number of tokens of each image.
_Part = tuple[bytes, tuple[bytes, ...], tuple[int, ...]]


class TooManyPixelsError(Exception):
    """The images of several sequences need more than DECODED_BYTES of memory; the batch must be split."""


def pixel_inputs(images: list[SequenceImages]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the model inputs for these images (tensors on the host), and the names in `_TYPES` that the processor returns.

    Args:
        images: the images of one or more sequences; all must use the same processor.

    Raises:
        PictureError: an image can no longer be read.
        TooManyPixelsError: the decoded images of two or more sequences need too much memory.
    """
    processor = images[0].vision.processor
    loaded: dict[bytes, Any] = {}
    room = DECODED_BYTES
    for picture in (picture for entry in images for picture in entry.pictures):
        if picture.digest not in loaded:
            try:
                loaded[picture.digest] = picture.load()
            except ValueError as error:
                raise PictureError(picture.digest, str(error)) from error
            width, height = loaded[picture.digest].size
            room -= width * height * len(loaded[picture.digest].getbands())
            if room < 0 and len(images) > 1:
                raise TooManyPixelsError
    texts = [processor.image_token * len(entry.counts) for entry in images]
    pictures = [[loaded[digest] for digest in entry.digests] for entry in images]
    made = processor(images=pictures, text=texts, padding=True, add_special_tokens=False, return_tensors="pt")
    types = [name for name in _TYPES if name in made]
    return {name: value for name, value in made.items() if name not in _OF_TEXT}, types


def token_types(images: SequenceImages, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return token types as a processor does: an array with the shape of `ids`, 1 for image tokens and 0 for all other tokens.

    `ids` are the token ids that the model gets (see `Sequence.model_ids`).
    """
    return np.isin(ids, images.vision.processor.image_token_ids).astype(np.int64)


@dataclass(frozen=True)
class DecoderInputs:
    """The inputs of a model's text decoder for a pack with images, on the device.

    Attributes:
        embeddings: the tokens' embeddings, shape (tokens, hidden size), with image features in place of the embeddings of image
            tokens.
        positions: positions that the model's own position function computes, int64 (components, tokens); None if the model has
            no such function.
        deep: features that some decoders add to the hidden states of image tokens after each of their first layers: one tensor
            of shape (image tokens, hidden size) per layer. Empty for most models.
    """

    embeddings: torch.Tensor
    positions: torch.Tensor | None
    image_places: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    both_ways: bool

    def keywords(self, positions: torch.Tensor) -> dict[str, Any]:
        own = positions[None] if self.positions is None else self.positions[:, None]
        deep = {"visual_pos_masks": self.image_places[None], "deepstack_visual_embeds": list(self.deep)} if self.deep else {}
        return {"inputs_embeds": self.embeddings[None], "position_ids": own, **deep}


@dataclass(frozen=True)
class _Features:
    """The decoder's inputs for the tokens of images that are processed together.

    Attributes:
        embeddings: features of the image tokens, (image tokens, hidden size).
        grids: arguments of the model's own position function that describe the images, such as `image_grid_thw`, on the host;
            empty if the model has no such function.
    """

    embeddings: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    grids: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deep))


class ImageFeatures:
    """Builds the decoder's inputs for packs with images.

    The vision tower runs once for each distinct image of a pack. If an image's features depend on the prompt's other images,
    all images of a prompt are processed together; prompts of the pack that have the same images share the result.

    The most recently used features are kept for later packs, up to a memory limit. If an image's features are larger than the
    limit, the image is decoded and processed again for each pack that contains it.

    Args:
        model: the model. While inputs are built, it must use the attention implementation that it was loaded with, not
            that of packs.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._kept: OrderedDict[_Part, _Features] = OrderedDict()
        self._kept_bytes = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def close(self) -> None:
        # an unfinished generator of TorchEngine.flow refers to this object, and would keep the model in memory
        self.clear()
        self._model = None

    @torch.inference_mode()
    def of_pack(self, pack: Pack, sequences: list[Sequence], both_ways: bool) -> DecoderInputs:
        is_image = pack.token_ids >= FIRST_IMAGE_ID
        ids = torch.from_numpy(np.where(is_image, 0, pack.token_ids)).to(self._device)
        embeddings: torch.Tensor = self._model.get_input_embeddings()(ids)
        features: dict[_Part, _Features] = {}  # all features of this pack, including features that are too large to keep
        chosen: list[tuple[_Features, torch.Tensor | slice]] = []  # (features of a part, which of its tokens a branch adds)
        positions: list[torch.Tensor] = []
        for branch in pack.branches:
            images = sequences[branch.sequence].images
            assert images is not None
            parts = [_key(part) for part in images.parts()]
            for part, key in zip(images.parts(), parts, strict=True):
                if key not in features:
                    features[key] = self._of_part(part, key)
            at = branch.path[is_image[branch.path]]
            ends = np.cumsum([sum(counts) for *_, counts in parts])
            own = np.split(at >= branch.start, ends[:-1])  # earlier branches add the other tokens
            chosen += [
                (features[key], slice(None) if mask.all() else torch.from_numpy(mask.nonzero()[0]).to(self._device))
                for key, mask in zip(parts, own, strict=True)
                if mask.any()
            ]
            if self._has_own_positions():
                grids = [features[key].grids for key in parts]
                positions.append(self._own_positions(sequences[branch.sequence], grids)[:, branch.shared :])
        places = torch.from_numpy(is_image).to(self._device)
        values = torch.cat([found.embeddings[added] for found, added in chosen])
        layers = range(len(chosen[0][0].deep))
        return DecoderInputs(
            embeddings=embeddings.index_copy(0, places.nonzero()[:, 0], values.to(embeddings.dtype)),
            positions=torch.cat(positions, 1).to(self._device) if positions else None,
            image_places=places,
            deep=tuple(torch.cat([found.deep[layer][added] for found, added in chosen]) for layer in layers),
            both_ways=both_ways,
        )

    @torch.inference_mode()
    def positions_of(self, sequence: Sequence) -> torch.Tensor:
        """Return the positions that a sequence's tokens have in a pack, int64 (components, tokens), on the host."""
        assert sequence.images is not None
        if not self._has_own_positions():
            return torch.arange(len(sequence))[None]
        parts = [self._of_part(part, _key(part)) for part in sequence.images.parts()]
        return self._own_positions(sequence, [part.grids for part in parts])

    def _has_own_positions(self) -> bool:
        return hasattr(self._model.base_model, "get_rope_index")

    def _own_positions(self, sequence: Sequence, grids: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        images = sequence.images
        assert images is not None
        ids = sequence.model_ids()
        given = {name: torch.cat([part[name] for part in grids]) for name in grids[0]}
        if "mm_token_type_ids" in _position_arguments(self._model):
            given["mm_token_type_ids"] = torch.from_numpy(token_types(images, ids))[None]
        found: torch.Tensor = self._model.base_model.get_rope_index(input_ids=torch.from_numpy(ids)[None], **given)[0][:, 0]
        return found

    def _of_part(self, part: SequenceImages, key: _Part) -> _Features:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._computed(part)
        if found.size <= KEPT_BYTES:
            self._kept[key] = found
            self._kept_bytes += found.size
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size
        return found

    def _computed(self, part: SequenceImages) -> _Features:
        """The model runs on the images' tokens, and is stopped when it calls its decoder."""
        pixels, types = pixel_inputs([part])
        ids = torch.full((1, sum(part.counts)), part.vision.image_token_id, device=self._device)
        more = on_device(pixels, self._device) | {name: torch.ones_like(ids) for name in types}
        with decoder_calls(self._model, stop=True) as seen, suppress(_ReadError):
            self._model.base_model(input_ids=ids, use_cache=False, **more)
        deep = seen[0].get("deepstack_visual_embeds") or ()
        grids = {name: pixels[name] for name in _position_arguments(self._model) if name in pixels}
        return _Features(seen[0]["inputs_embeds"][0], tuple(deep), grids)


def _key(part: SequenceImages) -> _Part:
    return part.vision.tokens.settings, part.digests, part.counts


def _position_arguments(model: Any) -> frozenset[str]:
    function = getattr(model.base_model, "get_rope_index", None)
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def layout_of(config: Any, sequence: Sequence, given: dict[str, Any], positions: torch.Tensor) -> tuple[bool, str | None]:
    """Compare the inputs that a model passes to its decoder for one sequence with the inputs that a pack can provide."""
    others = [name for name, value in given.items() if name not in _LAID_OUT and _holds_tensor(value)]
    if others:
        return False, f"the model's decoder takes inputs that a pack cannot provide: {', '.join(others)}"
    own = given.get("position_ids")
    if own is None:
        own = torch.arange(len(sequence))[None]
    own = own.reshape(-1, len(sequence)).cpu()
    if own.shape[0] not in (1, positions.shape[0]) or not torch.equal(own.expand_as(positions), positions):
        return False, "the model gives some tokens different positions than a pack does"
    masks = given.get("attention_mask")
    for both_ways in (False, True):
        if _attends_so(masks, sequence, config, both_ways):
            return both_ways, None
    return False, "the model's attention mask differs from a pack's"


def _attends_so(masks: Any, sequence: Sequence, config: Any, both_ways: bool) -> bool:
    """Return True if each token attends to the same tokens under `masks` as in a pack.

    `masks` is None (a causal mask), a tensor, or a dictionary that maps each layer type to its mask.
    """
    kinds = masks if isinstance(masks, dict) else {"full_attention": masks}
    reach = torch.from_numpy(image_ends(sequence.ids(), both_ways))[:, None]
    key = torch.arange(len(sequence))
    for kind, mask in kinds.items():
        if mask is None and not both_ways:
            continue
        if kind not in ("full_attention", "sliding_attention") or not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            return False
        seen = key[None] < reach
        if kind == "sliding_attention":
            seen &= key[None] > key[:, None] - config.sliding_window
        allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        if allowed.shape != seen.shape or not torch.equal(allowed.cpu(), seen):
            return False
    return True


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))


def on_device(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


class _ReadError(Exception):
    """Raised to stop a forward pass when the model calls its decoder."""


@contextmanager
def decoder_calls(model: Any, stop: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Collect the keyword arguments of each call to a model's text decoder while the block runs."""
    seen: list[dict[str, Any]] = []

    def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs)
        if stop:
            raise _ReadError

    handle = model.get_decoder().register_forward_pre_hook(read, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
