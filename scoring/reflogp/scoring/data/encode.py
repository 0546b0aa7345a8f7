"""Encode examples as token ids in the same way as TRL.

The rules are the same as in TRL 1.16 (trl/trainer/dpo_trainer.py and kto_trainer.py, `_prepare_dataset`). An EOS token is added
only to plain-text completions that do not already end with one. For each completion, two texts are tokenized: the prompt, and
the prompt followed by the completion. The completion starts after the longest common prefix of the two lists of tokens. If the
two completions of a pair would start at different positions, both completions start at the earlier position. Prompt tokens from
this position on are dropped. This module does not import trl. Chat templates and tokenizers run in the process that calls this
module. Therefore, `row_process` calls this module in child processes, which can be killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.shape import Example, RowError
from reflogp.scoring.errors import TokenizerError
from reflogp.store.texts import first_line

#: Error message for a row that cannot be tokenized within the memory limit.
TOO_MUCH_MEMORY = "tokenizing the row takes too much memory"
#: (token ids of the prompt, (token ids of each completion, …)).
Tokens = tuple[list[int], tuple[list[int], ...]]


def tokenize_examples(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> list[Tokens | RowError]:
    """Encode examples in the same way as TRL. For each example, return the token ids of the prompt and of each completion, or a
    RowError."""
    rendered: list[list[Any] | RowError] = []
    for example in examples:
        try:
            rendered.append(render(example, tokenizer))
        except RowError as error:
            rendered.append(error)
    return encode(rendered, tokenizer)


def encode(rendered: list[list[Any] | RowError], tokenizer: PreTrainedTokenizerBase) -> list[Tokens | RowError]:
    """Convert rendered examples (see `render`) to token ids. Errors are returned unchanged."""
    flat = [text for parts in rendered if not isinstance(parts, RowError) for text in parts]
    encoded = iter(_encode(flat, tokenizer))
    outcome: list[Tokens | RowError] = []
    for parts in rendered:
        if isinstance(parts, RowError):
            outcome.append(parts)
            continue
        prompt, *whole = [next(encoded) for _ in parts]
        cut = min(common_prefix(prompt, sequence) for sequence in whole)
        completions = tuple(sequence[cut:] for sequence in whole)
        outcome.append((prompt[:cut], completions))
    return outcome


def common_prefix(left: list[int] | str, right: list[int] | str) -> int:
    """Return the length of the common prefix of two lists of tokens (in tokens) or of two texts (in characters)."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


@dataclass(frozen=True)
class _Text:
    """A text to encode, and whether to add the tokenizer's special tokens before and after it."""

    text: str
    special_tokens: bool

    def __len__(self) -> int:
        return len(self.text)


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Render the prompt and, for each completion, the prompt followed by that completion.

    Returns:
        One entry for the prompt, followed by one for each completion. An entry is a text to encode, or a list of token ids if
        the example is conversational and the tokenizer's class overrides `apply_chat_template`.

    Raises:
        RowError: the chat template fails for the example, or rendering takes too much memory.
        TokenizerError: the tokenizer lacks the chat template or the EOS token that the example needs.
    """
    if not example.conversational:
        eos = tokenizer.eos_token
        if eos is None:
            raise TokenizerError(
                "the tokenizer has no EOS token, but plain-text completions must end with one, as in TRL; set eos_token in its "
                "tokenizer_config.json, or use conversational data"
            )
        ended = [c if c.endswith(eos) else c + eos for c in example.completions]
        return [_Text(text, True) for text in (example.prompt, *(example.prompt + c for c in ended))]
    if not tokenizer.chat_template and _renders_by_template(tokenizer):
        raise TokenizerError(
            "the rows are conversations, but the tokenizer has no chat template; set chat_template in its tokenizer_config.json"
        )
    kwargs = example.template_kwargs
    try:
        return [
            _render(tokenizer, example.prompt, add_generation_prompt=True, **kwargs),
            *(_render(tokenizer, example.prompt + c, **kwargs) for c in example.completions),
        ]
    except MemoryError:
        raise RowError(TOO_MUCH_MEMORY) from None
    except Exception as error:  # a template is a program, which can raise any exception
        raise RowError(f"the chat template fails for this row: {first_line(error)}") from error


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
