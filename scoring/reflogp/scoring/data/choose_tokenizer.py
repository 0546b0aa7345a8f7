"""Load the tokenizer that a command's options choose: the model's or another, with its own chat template or the user's."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.tokenize import load_tokenizer
from reflogp.store import UsageError, resolve_model


def chosen_tokenizer(
    model: str, tokenizer: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer for a reference model.

    Args:
        model: the reference model's folder.
        tokenizer: folder or hub id of another tokenizer; None for the model's own.
        chat_template: a file with a Jinja template that replaces the tokenizer's template; None keeps the tokenizer's.

    Raises:
        TokenizerError: there is no tokenizer.
        UsageError: a folder or a template cannot be read, or the template is empty.
    """
    folder = model if tokenizer is None else str(resolve_model(tokenizer, None, weights=False))
    template = None if chat_template is None else _text_of(chat_template)
    loaded = load_tokenizer(folder, trust_remote_code)
    if template is not None:
        loaded.chat_template = template
    return loaded


def _text_of(file: str) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise UsageError(f"--chat-template {file}: is empty")
    return text
