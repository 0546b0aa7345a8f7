"""Encode examples as token ids in the same way as TRL.

The rules are the same as in TRL 1.16 (`_prepare_dataset` in trl/trainer/dpo_trainer.py, kto_trainer.py and sft_trainer.py). An
EOS token is added only to plain-text completions that do not already end with one. For each completion, two texts are
tokenized: the prompt, and the prompt followed by the completion. The completion starts after the longest common prefix of the
two lists of tokens. If the two completions of a pair would start at different positions, both completions start at the earlier
position. Prompt tokens from this position on are dropped. This module does not import trl.

Chat templates are rendered one row at a time. Their texts are encoded in batches, which a fast tokenizer divides among threads
of its own, so that one process keeps several cores busy.

Rows with images are tokenized as by TRL's DataCollatorForVisionPreference, but without processing pixels. The content of each
message becomes a list of parts. In the prompt, placeholders for the images are inserted at the start of the first user message
whose content is text. If there is no such message, the prompt must already contain the placeholders. After the chat template is
rendered, the prompt and the completions are tokenized separately, without adding special tokens. In a row with plain text
instead of messages, the text is used unchanged. No EOS token is appended. The column `tools` is ignored.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.images import RowImage
from reflogp.scoring.data.shape import Example, Format, RowError, RowLimitError, Tokens, examples_of, require_text_and_images
from reflogp.scoring.errors import TokenizerError
from reflogp.store import UsageError
from reflogp.store.images import ImageTokens, Kind, media_types
from reflogp.store.texts import counted, first_line

#: Rendered texts are encoded when they have at least this many characters in total.
_BATCH_CHARACTERS = 1 << 20
_TOO_MUCH_MEMORY = "tokenizing the row takes too much memory"


def tokenize_rows(
    rows: Sequence[dict[str, Any]],
    form: Format,
    tokenizer: PreTrainedTokenizerBase | ImageTokens,
    images: Sequence[tuple[RowImage, ...] | RowError] | None = None,
    begin: Callable[[int | None], None] = lambda at: None,
    alone: bool = False,
) -> list[list[Tokens | RowError]]:
    """Tokenize rows.

    Args:
        begin: function that is called with a row's index before the row is rendered, and with None before a batch of texts is
            encoded. It can stop the work by raising an error.

    Returns:
        A list for each row, in order, with the token ids or the error of each example. For a row that cannot be used, the list
        contains only an error.

    Raises:
        TokenizerError: the tokenizer lacks a chat template or an EOS token that the rows need.
    """
    found: list[list[Any]] = []
    waiting: list[int] = []
    characters = 0
    for at, columns in enumerate(rows):
        begin(at)
        if isinstance(tokenizer, ImageTokens):
            assert images is not None
            found.append(_of_row(partial(_with_images, columns, images[at], tokenizer)))
            continue
        found.append(_of_row(partial(_rendered, columns, form, tokenizer)))
        waiting.append(at)
        characters += sum(len(text) for parts in found[at] if not isinstance(parts, RowError) for text in parts)
        if alone or characters >= _BATCH_CHARACTERS or at == len(rows) - 1:
            if not alone:
                begin(None)
            _encode_rows(found, waiting, tokenizer)
            waiting, characters = [], 0
    return found


def _encode_rows(found: list[list[Any]], numbers: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Replace the rendered examples of some rows with token ids, in place."""
    try:
        encoded = iter(encode([example for at in numbers for example in found[at]], tokenizer))
        for at in numbers:
            found[at] = [next(encoded) for _ in found[at]]
    except Exception:  # at least one row cannot be encoded
        for at in numbers:
            found[at] = _of_row(partial(encode, found[at], tokenizer))


def _of_row(work: Callable[[], list[Any]]) -> list[Any]:
    try:
        return work()
    except TokenizerError:
        raise
    except RowError as error:
        return [error]
    except MemoryError:
        return [RowLimitError(_TOO_MUCH_MEMORY)]
    except UnicodeEncodeError:
        return [RowError("the row contains an unpaired surrogate (such as \\ud800), which no tokenizer accepts")]
    except Exception as error:  # tokenizers and templates are programs, which can raise any exception
        return [RowError(f"the row cannot be tokenized: {type(error).__name__}: {first_line(error)}")]


def _rendered(columns: dict[str, Any], form: Format, tokenizer: PreTrainedTokenizerBase) -> list[list[Any] | RowError]:
    rendered: list[list[Any] | RowError] = []
    for example in examples_of(columns, form):
        try:
            rendered.append(render(example, tokenizer))
        except RowError as error:
            rendered.append(error)
    return rendered


def _with_images(columns: dict[str, Any], images: tuple[RowImage, ...] | RowError, tokens: ImageTokens) -> list[Tokens]:
    if isinstance(images, RowError):
        raise images
    return [image_row_tokens(columns, [(image.digest, image.kind) for image in images], tokens)]


def encode(rendered: list[list[Any] | RowError], tokenizer: PreTrainedTokenizerBase) -> list[Tokens | RowError]:
    flat = [text for parts in rendered if not isinstance(parts, RowError) for text in parts]
    encoded = iter(_encode(flat, tokenizer))
    outcome: list[Tokens | RowError] = []
    for parts in rendered:
        if isinstance(parts, RowError):
            outcome.append(parts)
            continue
        prompt, *whole = [next(encoded) for _ in parts]
        if not whole:
            outcome.append((prompt[:1], (prompt[1:],)))
            continue
        cut = min(common_prefix(prompt, sequence) for sequence in whole)
        completions = tuple(sequence[cut:] for sequence in whole)
        outcome.append((prompt[:cut], completions))
    return outcome


def common_prefix(left: list[int] | str, right: list[int] | str) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


@dataclass(frozen=True)
class _Text:
    text: str
    special_tokens: bool

    def __len__(self) -> int:
        return len(self.text)


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Render the prompt and, for each completion, the prompt followed by that completion."""
    if not example.conversational:
        eos = tokenizer.eos_token
        if eos is None:
            raise TokenizerError(
                "the tokenizer has no EOS token, but plain-text completions must end with one, as in TRL; set eos_token in its "
                "tokenizer_config.json, or use conversational data"
            )
        ended = [c if c.endswith(eos) else c + eos for c in example.completions]
        if example.prompt is None:
            return [_Text(text, True) for text in ended]
        return [_Text(text, True) for text in (example.prompt, *(example.prompt + c for c in ended))]
    if not tokenizer.chat_template and _renders_by_template(tokenizer):
        raise TokenizerError(
            "the rows are conversations, but the tokenizer has no chat template; set chat_template in its tokenizer_config.json"
        )
    kwargs = example.template_kwargs
    try:
        if example.prompt is None:
            return [_render(tokenizer, messages, **kwargs) for messages in example.completions]
        return [
            _render(tokenizer, example.prompt, add_generation_prompt=True, **kwargs),
            *(_render(tokenizer, example.prompt + c, **kwargs) for c in example.completions),
        ]
    except MemoryError:
        raise RowLimitError(_TOO_MUCH_MEMORY) from None
    except Exception as error:  # a template is a program, which can raise any exception
        raise RowError(f"the chat template fails for this row{_place(error)}: {first_line(error)}") from error


def _place(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (line {lines[-1]} of the template)" if lines else ""


def _renders_by_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer uses transformers' own `apply_chat_template`.

    If so, a conversation can be rendered first and its text encoded later, in one batch with other texts. This results in the
    same token ids as `apply_chat_template` with `tokenize=True`.
    """
    return bool(type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Any], **kwargs: Any) -> Any:
    if _renders_by_template(tokenizer):
        return _Text(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs), False)
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)["input_ids"])


def _encode(texts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    encoded: list[Any] = list(texts)
    for special in (True, False):
        at = [i for i, text in enumerate(texts) if isinstance(text, _Text) and text.special_tokens is special]
        if at:
            batch = tokenizer([texts[i].text for i in at], add_special_tokens=special)["input_ids"]
            for i, ids in zip(at, batch, strict=True):
                encoded[i] = ids
    return encoded


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
        prompt, *completions = _texts_with_images(example, len(images), tokens.processor)
        kinds = [kind for _, kind in images]
        prompt_ids = tokens.identified(tokens.ids(prompt, kinds), images)
        return prompt_ids.tolist(), tuple(tokens.ids(text, []) for text in completions)
    except (RowError, MemoryError):
        raise
    except UsageError as error:
        raise RowError(str(error)) from error
    except Exception as error:  # a template is a program, and processors raise exceptions of any type
        raise RowError(f"the processor fails for this row: {first_line(error)}") from error


def _texts_with_images(example: Example, images: int, processor: Any) -> list[str]:
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
