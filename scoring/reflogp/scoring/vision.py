"""Load the processor of a vision-language model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor

from reflogp.scoring.errors import TokenizerError
from reflogp.store import read_checkpoint, resolve_model
from reflogp.store.images import ImageTokens, image_token
from reflogp.store.texts import first_line


@dataclass(frozen=True, eq=False)
class VisionProcessor:
    """A model's processor, which converts texts and images into the model's inputs.

    Attributes:
        tokens: object that converts a text with images into token ids. It needs only the sizes and modes of the images.
        folder: folder from which the processor was loaded; None for a processor object that the caller passed.
    """

    processor: Any
    image_token_id: int
    tokens: ImageTokens
    folder: str | None = None

    @classmethod
    def of(cls, processor: Any, config: Any, folder: str | None = None) -> VisionProcessor | None:
        """Return the VisionProcessor for a processor and a model's config, or None if one of them supports only text."""
        token = image_token(config)
        if getattr(processor, "image_processor", None) is None or token is None:
            return None
        return cls(processor, token, ImageTokens(processor, token), folder)


def load_processor(
    folder: str, model: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> VisionProcessor | None:
    """Load a model's processor. Return None if the model accepts only text, or if `folder` or `model` has only a tokenizer."""
    base = resolve_model(model)
    if not (base / "config.json").is_file():
        if not (base / "adapter_config.json").is_file():
            return None  # the folder has only a tokenizer. The weights are on a server, to which reflogp sends no images
        base = read_checkpoint(base).folder
    names = ("processor_config.json", "preprocessor_config.json")
    places = [Path(folder), *([base] if str(folder) == model else [])]  # an adapter's folder rarely has these files
    found = next((place for place in places if any((place / name).is_file() for name in names)), None)
    if found is None:
        return None
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code, local_files_only=True)
        processor = AutoProcessor.from_pretrained(found, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and more
        text = first_line(error)
        raise TokenizerError(f"{found}: the image processor cannot be loaded: {text}") from error
    if chat_template is not None and hasattr(processor, "tokenizer"):
        processor.chat_template = processor.tokenizer.chat_template = chat_template
    return VisionProcessor.of(processor, config, str(found))
