"""Tokenize rows with images in the same way as TRL's DataCollatorForVisionPreference, but without processing pixels.

The rules are the same as in TRL 1.16 (trl/trainer/dpo_trainer.py, trl/data_utils.py). The content of each message becomes a
list of parts. In the prompt, placeholders for the images are inserted at the start of the first user message whose content is
text. If there is no such message, the prompt must already contain the placeholders. After the chat template is rendered, the
prompt and the completions are tokenized separately, without adding special tokens. In a row with plain text instead of
messages, the text is used unchanged. No EOS token is appended. The column `tools` is ignored. This module does not import trl.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from reflogp.scoring.data.shape import Example, RowError, Tokens, examples_of, require_text_and_images
from reflogp.store import UsageError
from reflogp.store.images import ImageTokens, Kind, media_types
from reflogp.store.texts import counted, first_line

_ROLES = ("system", "user", "assistant", "tool")


def image_row_tokens(columns: dict[str, Any], images: list[tuple[bytes, Kind]], tokens: ImageTokens) -> Tokens:
    """Return (prompt_ids, (chosen_ids, rejected_ids)) for a pair with images.

    In prompt_ids, image ids (see `image_ids` in `reflogp.store.images`) replace the image tokens.

    Args:
        images: (pixel digest, (size, mode)) of each image in the row, in order.

    Raises RowError if the row is not a pair with a prompt, if it has more or fewer images than placeholders, or if the chat
    template or the processor fails for the row.
    """
    require_text_and_images(columns)
    if "prompt" not in columns:
        raise RowError("in a dataset with images, each pair needs a prompt column")
    [example] = examples_of({name: value for name, value in columns.items() if name != "tools"}, "preference", images=True)
    try:
        prompt, *completions = _rendered(example, len(images), tokens.processor)
        kinds = [kind for _, kind in images]
        prompt_ids = tokens.identified(tokens.ids(prompt, kinds), images)
        return prompt_ids.tolist(), tuple(tokens.ids(text, []) for text in completions)
    except (RowError, MemoryError):
        raise
    except UsageError as error:
        raise RowError(str(error)) from error
    except Exception as error:  # a template is a program, and processors raise exceptions of any type
        raise RowError(f"the processor fails for this row: {first_line(error)}") from error


def _rendered(example: Example, images: int, processor: Any) -> list[str]:
    """Return the text of the prompt and the texts of the completions.

    The chat template renders the prompt alone and, for each completion, the prompt followed by that completion. The longest
    common prefix of all these texts is the text of the prompt. What follows this prefix in a text with a completion is the text
    of that completion.
    """
    if not example.conversational:
        return [example.prompt, *example.completions]
    prompt = with_image_parts(example.prompt, images)
    completions = [with_image_parts(messages, 0) for messages in example.completions]
    last = prompt[-1]["role"]
    if last not in ("user", "tool", "assistant"):
        raise RowError(f"the prompt's last message has the role {last!r}; expected 'user', 'assistant' or 'tool'")
    render: Callable[..., str] = processor.apply_chat_template
    kwargs = {name: value for name, value in example.template_kwargs.items() if name != "tools"}
    continued = {"continue_final_message": last == "assistant", "add_generation_prompt": last != "assistant"}
    begun = render(prompt, tools=None, tokenize=False, **continued, **kwargs)
    whole = [render(prompt + completion, tools=None, tokenize=False, **kwargs) for completion in completions]
    shared = os.path.commonprefix([begun, *whole])  # noqa: RUF071 - of characters
    return [shared, *(text[len(shared) :] for text in whole)]


def with_image_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return the messages with each message's content converted to a list of parts."""
    found: list[dict[str, Any]] = []
    placed = False
    for message in messages:
        role, content = message["role"], message.get("content")
        if role not in _ROLES:
            raise RowError(f"a message has the unknown role {role!r}; expected 'system', 'user', 'assistant' or 'tool'")
        if isinstance(content, str):
            first = role == "user" and not placed
            parts = [{"type": "image"}] * images if first else []
            placed |= role == "user"
            message = {**message, "content": [*parts, {"type": "text", "text": content}]}
        found.append(message)
    if any(_images_in(message) for message in found if message["role"] == "tool"):
        raise RowError("a message with the role tool contains an image; move the image to a prompt message with another role")
    parts = [part for message in found for part in _images_in(message)]
    if any(part.get("image") is not None for part in parts):
        raise RowError("a content part contains an image; put the images in a column named images")
    if len(parts) != images:
        raise RowError(
            f"the messages have {counted(len(parts), 'placeholder')} for {counted(images, 'image')}; the prompt needs one "
            "placeholder (a content part of type image) for each image, and completions must have none"
        )
    others = [{"content": [part for part in _parts(message) if part not in parts]} for message in found]
    for other in media_types(others):
        raise RowError(f"the row contains a content part of type {other[:40]}, but only text and images can be scored")
    return found


def _images_in(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in _parts(message) if isinstance(part, dict) and part.get("type") == "image"]


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []
