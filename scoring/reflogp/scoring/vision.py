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
    """A model's processor, for tokens and for pixels.

    Attributes:
        processor: transformers' processor.
        image_token_id: the token that the model replaces by an image's features.
        tokens: makes tokens from the sizes of images.
        folder: folder that the processor was loaded from; None for an object of the caller.
    """

    processor: Any
    image_token_id: int
    tokens: ImageTokens
    folder: str | None = None

    @classmethod
    def of(cls, processor: Any, config: Any, folder: str | None = None) -> VisionProcessor | None:
        """Return the VisionProcessor of a processor and a model's config; None if one of the two takes text only."""
        token = image_token(config)
        if getattr(processor, "image_processor", None) is None or token is None:
            return None
        return cls(processor, token, ImageTokens(processor, token), folder)


def load_processor(
    folder: str, model: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> VisionProcessor | None:
    """Load the processor for a model; return None if the model takes text only or the folder has only a tokenizer.

    Args:
        folder: folder of the processor; the model's own or another.
        model: folder of the model, or of an adapter of it. The model's config names its image token.
        chat_template: a Jinja template that replaces the processor's; None keeps it.
        trust_remote_code: run code from the folder.

    Raises TokenizerError when the processor cannot be loaded.
    """
    base = resolve_model(model)
    if not (base / "config.json").is_file():
        if not (base / "adapter_config.json").is_file():
            return None  # a tokenizer alone: the weights are elsewhere, behind a server, which is not asked for images
        base = read_checkpoint(base).folder
    names = ("processor_config.json", "preprocessor_config.json")
    places = [Path(folder), *([base] if str(folder) == model else [])]  # an adapter's folder seldom holds a processor
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
