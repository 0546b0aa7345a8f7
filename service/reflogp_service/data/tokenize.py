"""Token sequences exactly as TRL makes them, so that a key here is the key of what a trainer trains on.

TRL 1.16's rule (trl/trainer/dpo_trainer.py and kto_trainer.py, `_prepare_dataset`): EOS is added to plain completions only;
prompt and prompt+completion are tokenized apart; the completion begins where they first differ, for a pair at the earlier of
the two places. Knows tokenizers; does not import trl. Called by scoring and by `reflogp join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from reflogp_service.data.read import Row, RowSource, batched
from reflogp_service.data.shape import (
    Example,
    Format,
    RowError,
    detect_format,
    examples_of,
    output_columns,
    token_row,
)
from reflogp_service.errors import DatasetError, TokenizerError
from reflogp_store import read_checkpoint, resolve_model

_IDS = pa.list_(pa.int64())


@dataclass(frozen=True)
class TokenizedRows:
    """Some rows of a dataset as token ids.

    Attributes:
        table: columns row (int64: the row's number in the dataset), prompt_ids and one column per completion
            (list<int64>): chosen_ids and rejected_ids, or completion_ids (and KL_completion_ids).
        rows: the same rows as they were read, in the table's order.
        problems: row number -> why it is not in the table.
        last_row: number of the last row that was read, usable or not.
    """

    table: pa.Table
    rows: list[dict[str, Any]]
    problems: dict[int, str] = field(default_factory=dict)
    last_row: int = -1


def load_tokenizer(model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; an adapter's folder without one has its base model's.

    Raises TokenizerError when there is none.
    """
    folder = resolve_model(model)
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        folder = read_checkpoint(folder).folder
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for a broken tokenizer
        raise TokenizerError(f"{model}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error


def tokenize_dataset(
    source: RowSource, tokenizer: PreTrainedTokenizerBase | None, form: Format | None = None, window: int = 1024
) -> Iterator[TokenizedRows]:
    """Tokenise a dataset, `window` rows at a time, in bounded memory.

    Args:
        source: the rows.
        tokenizer: the reference model's; None is enough for the tokens format.
        form: "preference", "kto" or "tokens"; None finds it from the first readable row.
        window: rows per item.

    Raises:
        DatasetError: no row is readable, or the columns fit no format.
        TokenizerError: the tokenizer lacks a chat template or an EOS token that the rows need.
    """
    outputs: tuple[str, ...] | None = None
    why = "it is empty"
    for rows in batched(source, window):
        if outputs is None:
            first = next((row.columns for row in rows if row.columns is not None), None)
            if first is not None:
                form, outputs = _settle(form, first)
        if outputs is None and rows[0].number == 0:
            why = f"row 0: {rows[0].problem}"
        if form is None or outputs is None:
            yield TokenizedRows(_table([], [], ()), [], {r.number: r.problem or "" for r in rows}, rows[-1].number)
            continue
        yield _tokenize_window(rows, tokenizer, form, outputs)
    if outputs is None:
        raise DatasetError(f"{source.name} has no readable row; {why}")


def _settle(form: Format | None, first: dict[str, Any]) -> tuple[Format, tuple[str, ...]]:
    found = detect_format(first)
    if form is not None and form != found and (form, found) != ("kto", "preference"):
        raise DatasetError(f"the columns {', '.join(first)} are of format {found}, not {form}")
    return form or found, output_columns(form or found, first)


def _tokenize_window(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase | None, form: Format, outputs: tuple[str, ...]
) -> TokenizedRows:
    problems: dict[int, str] = {}
    numbers: list[int] = []
    kept: list[dict[str, Any]] = []
    ids: list[tuple[list[int], tuple[list[int], ...]]] = []
    examples: list[Example] = []
    for row in rows:
        if row.columns is None:
            problems[row.number] = row.problem or "unreadable"
            continue
        try:
            if form == "tokens":
                ids.append(token_row(row.columns, outputs))
                found = 1
            else:
                of_row = examples_of(row.columns, form)
                examples += of_row
                found = len(of_row)
        except RowError as error:
            problems[row.number] = str(error)
            continue
        numbers += [row.number] * found
        kept += [row.columns] * found
    if examples:
        if tokenizer is None:
            raise TokenizerError("text rows need a tokenizer")
        tokenized = tokenize_examples(examples, tokenizer)
        good = [i for i, outcome in enumerate(tokenized) if not isinstance(outcome, RowError)]
        problems |= {numbers[i]: str(o) for i, o in enumerate(tokenized) if isinstance(o, RowError)}
        ids = [cast(tuple[list[int], tuple[list[int], ...]], tokenized[i]) for i in good]
        numbers, kept = [numbers[i] for i in good], [kept[i] for i in good]
    return TokenizedRows(_table(numbers, ids, outputs), kept, problems, rows[-1].number)


def _table(numbers: list[int], ids: list[tuple[list[int], tuple[list[int], ...]]], outputs: tuple[str, ...]) -> pa.Table:
    columns = {
        "row": pa.array(numbers, pa.int64()),
        "prompt_ids": pa.array([prompt for prompt, _ in ids], _IDS),
    }
    columns |= {name: pa.array([c[i] for _, c in ids], _IDS) for i, name in enumerate(outputs)}
    return pa.table(columns)


def tokenize_examples(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], tuple[list[int], ...]] | RowError]:
    """(prompt_ids, completions) of each example by TRL's rule, or what is wrong with it."""
    texts: list[list[Any] | RowError] = []
    for example in examples:
        try:
            texts.append(_texts(example, tokenizer))
        except RowError as error:
            texts.append(error)
    flat = [text for parts in texts if not isinstance(parts, RowError) for text in parts]
    encoded = iter(_encode(flat, tokenizer))
    outcome: list[tuple[list[int], tuple[list[int], ...]] | RowError] = []
    for parts in texts:
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


def _texts(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Prompt, then prompt+completion for each completion: texts, or token ids where only the tokenizer can render."""
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
    except Exception as error:  # a template is a program; whatever it raises is about this row
        raise RowError(f"the chat template refuses it: {str(error).splitlines()[0] if str(error) else error!r}") from error


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
