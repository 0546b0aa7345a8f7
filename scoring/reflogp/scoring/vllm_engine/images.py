"""Convert sequences with images into prompts for vLLM without changing the sequences' token ids.

The conversion runs in the vLLM process. The process that runs reflogp's engine uses only `library_of` from this module.

By default, vLLM generates the tokens of an image itself, from a placeholder in the prompt. This module instead passes each
image separately to vLLM's processor, and compares the generated tokens with the caller's token ids. If the tokens differ, the
sequence is refused, so vLLM never scores token ids other than the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reflogp.scoring.data.images import decoded
from reflogp.scoring.vllm_engine.answers import Request
from reflogp.store.images import FIRST_IMAGE_ID, image_ids, pixel_digest, settings_digest
from reflogp.store.texts import first_line

#: Maximum total size of the processed images that are kept in memory for later sequences, in bytes.
_KEPT_BYTES = 1 << 30
#: Width and height of the test images that are scored at startup, in pixels.
_SIZE = 64, 48


def library_of(image_processor: Any) -> str:
    """Return the name of the library that a transformers image processor uses to resize images: "PIL" or "torchvision".

    The two libraries round pixel values differently.
    """
    return "PIL" if type(image_processor).__name__.endswith("Pil") else "torchvision"


class ImageRefusedError(ValueError):
    """vLLM cannot score a sequence with images; the message says why."""


@dataclass(frozen=True)
class _Processed:
    """An image that vLLM's processor has processed.

    Attributes:
        ids: token ids from the first to the last image token, including text tokens between them, int64 (n,).
        is_image: for each token in `ids`, whether the model replaces it with the image's features, bool (n,).
    """

    item: Any
    ids: npt.NDArray[np.int64]
    is_image: npt.NDArray[np.bool_]
    size: int


class ImagePrompts:
    def __init__(self, engine: Any) -> None:
        try:
            self._processor = engine.input_processor.renderer.get_mm_processor()
            image_processor = self._processor.info.get_hf_processor().image_processor
            self.settings, self.library = settings_digest(image_processor).hex(), library_of(image_processor)
            self._placeholder = str(self._processor.dummy_inputs.get_dummy_text({"image": 1}))
        except Exception as error:  # other versions of vLLM may raise any error
            raise ImageRefusedError(f"vLLM cannot load an image processor for the model ({first_line(error)[:200]})") from error
        self._kept: OrderedDict[bytes, _Processed] = OrderedDict()
        self._kept_bytes = 0

    def prompt(self, request: Request, salt: str) -> Any:
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        images = request.images
        assert images is not None
        ids = np.array(request.model_ids(), np.int64)
        places = np.flatnonzero(request.ids >= FIRST_IMAGE_ID)
        made = [self._processed(digest, file) for digest, file in zip(images.digests, images.files, strict=True)]
        ends = np.cumsum(images.counts)
        if len(places) != ends[-1]:
            raise ImageRefusedError(f"the sequence has {len(places)} image tokens, but its images have {ends[-1]}")
        ranges = [
            _place(ids, places[end - count : end], image) for image, count, end in zip(made, images.counts, ends, strict=True)
        ]
        return mm_input(
            ids.tolist(),
            MultiModalKwargsItems({"image": [image.item for image in made]}),
            {"image": [digest.hex() for digest in images.digests]},
            {"image": ranges},
            cache_salt=salt,
        )

    def example(self, shade: int) -> tuple[bytes, bytes, npt.NDArray[np.int64], int]:
        """Return (pixel digest, PNG file, token ids, id of the model's image token) of a test image."""
        import io

        from PIL import Image

        image = Image.new("RGB", _SIZE, (shade, 255 - shade, shade))
        image.paste((255 - shade, shade, 128), (0, 0, _SIZE[0] // 2, _SIZE[1]))
        sink = io.BytesIO()
        image.save(sink, "PNG")
        digest = pixel_digest(image)
        processed = self._processed(digest, sink.getvalue())
        [token] = np.unique(processed.ids[processed.is_image])
        ids = processed.ids.copy()
        ids[processed.is_image] = image_ids(digest, bytes.fromhex(self.settings), int(processed.is_image.sum()))
        return digest, sink.getvalue(), ids, int(token)

    def _processed(self, digest: bytes, file: bytes) -> _Processed:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        try:
            image = decoded(file)
        except ValueError as error:
            raise ImageRefusedError(f"vLLM's environment cannot decode an image: {first_line(error)[:200]}") from error
        if pixel_digest(image) != digest:
            raise ImageRefusedError(
                "vLLM's environment decodes an image to different pixels than reflogp's environment: install the same version "
                "of Pillow in both"
            )
        try:
            items = self._processor.info.parse_mm_data({"image": [image]})
            found = self._processor(self._placeholder, items, hf_processor_mm_kwargs={})
            [item], [place] = found["mm_kwargs"]["image"], found["mm_placeholders"]["image"]
        except Exception as error:  # processors may raise any error
            raise ImageRefusedError(f"vLLM's processor cannot process an image: {first_line(error)[:200]}") from error
        ids = np.array(found["prompt_token_ids"][place.offset : place.offset + place.length], np.int64)
        is_image = np.ones(len(ids), bool) if place.is_embed is None else place.is_embed.numpy().astype(bool)
        first, last = np.flatnonzero(is_image)[[0, -1]]
        size = sum(int(getattr(value, "nbytes", 0)) for value in item.get_data().values())
        made = _Processed(item, ids[first : last + 1], is_image[first : last + 1], size)
        if size <= _KEPT_BYTES:
            self._kept[digest] = made
            self._kept_bytes += size
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size
        return made


def _place(ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64], image: _Processed) -> Any:
    """Return the position of an image's tokens in a prompt, as vLLM's PlaceholderRange.

    Raise ImageRefusedError if the token ids that vLLM generates for the image differ from those in `ids`.
    """
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    first, last = int(places[0]), int(places[-1]) + 1
    own = np.isin(np.arange(first, last), places)
    if not np.array_equal(ids[first:last], image.ids) or not np.array_equal(own, image.is_image):
        raise ImageRefusedError(
            "vLLM's image processor produces different tokens for an image than the sequence contains "
            f"(vLLM: {int(image.is_image.sum())} image tokens; sequence: {len(places)})"
        )
    return PlaceholderRange(first, last - first, None if own.all() else torch.from_numpy(own))
