"""Examples as token ids, by TRL's rule.

TRL 1.16's rule (trl/trainer/dpo_trainer.py and kto_trainer.py, `_prepare_dataset`): EOS is added to plain completions only;
prompt and prompt+completion are tokenized apart; the completion begins where they first differ, for a pair at the earlier of
the two places. Does not import trl. Runs a template and a tokenizer in this process; `row_process` does it in one that can be
killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.shape import Example, RowError
from reflogp.scoring.errors import TokenizerError

#: What is said of a row that reached the limit of memory.
TOO_MUCH_MEMORY = "tokenising it takes too much memory"
#: A prompt and its completions as token ids.
Tokens = tuple[list[int], tuple[list[int], ...]]


def tokenize_examples(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> list[Tokens | RowError]:
    """(prompt_ids, completions) of each example by TRL's rule, or what is wrong with it."""
    rendered: list[list[Any] | RowError] = []
    for example in examples:
        try:
            rendered.append(render(example, tokenizer))
        except RowError as error:
            rendered.append(error)
    return encode(rendered, tokenizer)


def encode(rendered: list[list[Any] | RowError], tokenizer: PreTrainedTokenizerBase) -> list[Tokens | RowError]:
    """Token ids of what `render` gave; problems pass through."""
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


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that two lists share."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


@dataclass(frozen=True)
class _Text:
    """A text to encode, and whether the tokenizer's own special tokens go around it."""

    text: str
    special_tokens: bool

    def __len__(self) -> int:
        return len(self.text)


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Prompt, then prompt+completion for each completion: texts, or token ids where only the tokenizer can render.

    Raises RowError for what the chat template refuses, TokenizerError for a tokenizer without a template or an EOS token.
    """
    if not example.conversational:
        eos = tokenizer.eos_token
        if eos is None:
            raise TokenizerError(
                "the tokenizer has no EOS token, which ends a plain-text completion (as TRL does); set eos_token in its "
                "tokenizer_config.json, or use conversational data"
            )
        ended = [c if c.endswith(eos) else c + eos for c in example.completions]
        return [_Text(text, True) for text in (example.prompt, *(example.prompt + c for c in ended))]
    if not tokenizer.chat_template and _renders_by_template(tokenizer):
        raise TokenizerError("the rows are conversations, and the tokenizer has no chat template")
    kwargs = example.template_kwargs
    try:
        return [
            _render(tokenizer, example.prompt, add_generation_prompt=True, **kwargs),
            *(_render(tokenizer, example.prompt + c, **kwargs) for c in example.completions),
        ]
    except MemoryError:
        raise RowError(TOO_MUCH_MEMORY) from None
    except Exception as error:  # a template is a program; whatever it raises is about this row
        raise RowError(f"the chat template refuses it: {(str(error).splitlines() or [repr(error)])[0]}") from error


def _renders_by_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether rendering is transformers' own: then text can be rendered first and encoded in bulk, with equal results."""
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
