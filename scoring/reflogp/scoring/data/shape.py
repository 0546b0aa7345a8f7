"""Convert the columns of a preference pair, a KTO row, a row for supervised fine-tuning or a row of token ids into examples.

Pairs and KTO rows are plain text or conversations. In a pair without a prompt column, the prompt is implicit: the beginning
that chosen and rejected have in common. Pairs and KTO rows are interpreted as in TRL 1.16 (trl/data_utils.py:
is_conversational, extract_prompt, unpair_preference_dataset).
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from reflogp.scoring.errors import DatasetError
from reflogp.store.images import IMAGE_COLUMNS, MESSAGE_COLUMNS, media_of
from reflogp.store.texts import shortened, shortened_names

Format = Literal["preference", "kto", "sft", "tokens"]
FORMATS = get_args(Format)
#: (token ids of the prompt, (token ids of each completion, …)).
Tokens = tuple[list[int], tuple[list[int], ...]]

#: Columns that are a whole sequence for supervised fine-tuning (TRL's SFTTrainer), in the order in which they are looked for.
_WHOLE = ("messages", "conversations", "text")
#: Columns, apart from those with images, that determine a row's token ids, if these are not in the row.
TEXT_COLUMNS = ("prompt", "chosen", "rejected", "completion", "tools", "chat_template_kwargs", *_WHOLE)
#: Parameters of apply_chat_template that only pass data to the template. A row's chat_template_kwargs may set them.
_DATA_PARAMETERS = frozenset({"tools", "documents"})
#: A conversation that was written into one cell, as JSON or in Python's notation (which pandas writes into CSV files).
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{.*["']role["']\s*:""", re.DOTALL)


class RowError(ValueError):
    """A row cannot be used. The error message gives the reason, but not the row number."""


class RowLimitError(RowError):
    """A row exceeds a time or memory limit. With a higher limit, the row might be usable."""


@dataclass(frozen=True)
class Example:
    """A prompt and its completions, as text or as messages: (chosen, rejected) of a pair, or (completion,) of a KTO example.

    Attributes:
        prompt: None if the completion is a whole sequence, whose first token is then the prompt.
        template_kwargs: variables for the chat template in addition to the messages: `tools` and the row's
            chat_template_kwargs. Parameters of apply_chat_template that change the template, the encoding or the rendered
            messages are never included.
    """

    prompt: Any
    completions: tuple[Any, ...]
    template_kwargs: dict[str, Any]

    @property
    def conversational(self) -> bool:
        return is_conversational(self.prompt, *self.completions)


def other_delimiter(header: str) -> str | None:
    delimiter = next((each for each in (";", "\t", "|") if each in header and "," not in header), None)
    if delimiter is None:
        return None
    return f"the only column is {shortened(header)}: the file seems to be delimited by {delimiter!r}; write it with commas"


def detect_format(columns: dict[str, Any]) -> Format:
    names = set(columns)
    if "prompt_ids" in names and ({"chosen_ids", "rejected_ids"} <= names or "completion_ids" in names):
        return "tokens"
    if {"chosen", "rejected"} <= names:
        return "preference"
    if {"prompt", "completion"} <= names:
        return "kto"
    if not names.isdisjoint(_WHOLE):
        return "sft"
    shown = shortened_names(sorted(map(str, names))) or "(none)"
    if len(names) == 1 and (problem := other_delimiter(str(*names))):
        raise DatasetError(problem)
    raise DatasetError(
        f"columns {shown} match no known format; expected chosen, rejected and optionally prompt; or prompt, "
        "completion and label; or messages, conversations or text; or prompt_ids, chosen_ids and rejected_ids; or "
        "prompt_ids and completion_ids"
    )


def output_columns(form: Format, first: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the columns that contain the completions' token ids once a dataset of this format is tokenized, given
    the columns of its first row that matches this format."""
    if form == "preference" or (form == "tokens" and "completion_ids" not in first):
        return ("chosen_ids", "rejected_ids")
    if form == "tokens" and first.get("KL_completion_ids") is not None:
        return ("completion_ids", "KL_completion_ids")
    return ("completion_ids",)


def examples_of(columns: dict[str, Any], form: Format, images: bool = False) -> list[Example]:
    """Return a row's examples. A row is one example, but a pair that is read as KTO data becomes two examples, as in TRL."""
    if not images:
        require_text(columns)
    if form == "sft" and "completion" not in columns:
        return [Example(None, (_whole(columns),), _template_kwargs(columns))]
    pair = form == "preference" or "completion" not in columns
    names = ("chosen", "rejected") if pair else ("completion",)
    for name in names if "prompt" not in columns and pair else ("prompt", *names):
        if columns.get(name) is None:
            cells = " (in CSV, empty cells and words such as NA, None and null are null)" if name in columns else ""
            raise RowError(f"{name} is null or missing{cells}")
    prompt, completions = columns.get("prompt"), tuple(columns[name] for name in names)
    for name, value in zip(names, completions, strict=True):
        if not isinstance(value, str | list):
            raise _wrong_type(name, value)
    if "prompt" not in columns:
        prompt, *rest = split_implicit_prompt(*completions)
        completions = tuple(rest)
    conversational = is_conversational(prompt, *completions)
    if conversational and not prompt:
        raise RowError(
            "the conversation has no prompt; put its first messages in a column `prompt`, or let chosen and rejected begin "
            "with the same messages and then differ"
        )
    for name, value in zip(("prompt", *names), (prompt, *completions), strict=True):
        _check_type(name, value, conversational)
    kwargs = _template_kwargs(columns)
    if pair and form == "kto":
        return [Example(prompt, (completion,), kwargs) for completion in completions]
    return [Example(prompt, completions, kwargs)]


def _whole(columns: dict[str, Any]) -> Any:
    """Return a row's whole sequence, a text or a list of messages. Messages may have `from` and `value`, as in TRL."""
    name = next(name for name in _WHOLE if name in columns)
    value = columns[name]
    if value is None:
        raise RowError(f"{name} is null or missing")
    if name == "text":
        _check_type(name, value, False)
        return value
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        names = {"from": "role", "value": "content"}
        value = [{names.get(key, key): content for key, content in message.items()} for message in value]
    _check_type(name, value, True)
    return value


def split_implicit_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected), given two texts or lists of messages: the prompt is their common prefix.

    The prompt ends where TRL's extract_prompt ends it, including in edge cases. If it ended elsewhere, the row's keys would
    differ from the keys that a TRL trainer computes. A space before the first difference belongs to the completions. If
    `chosen` or `rejected` is a prefix of the other, the last character or message of the shorter one belongs to the
    completions. Raises RowError if `chosen` or `rejected` is empty.
    """
    if not len(chosen) or not len(rejected):
        raise RowError("chosen or rejected is empty, and there is no prompt column")
    cut = min(len(chosen), len(rejected)) - 1
    for at, (left, right) in enumerate(zip(chosen, rejected, strict=False)):
        if left != right:
            cut = at - 1 if chosen[at - 1] == " " else at
            break
    return chosen[:cut], chosen[cut:], rejected[cut:]


def is_conversational(*values: Any) -> bool:
    return any(isinstance(v, list) and v and isinstance(v[0], dict) and "role" in v[0] for v in values)


def token_row(columns: dict[str, Any], outputs: tuple[str, ...]) -> tuple[list[int], tuple[list[int], ...]]:
    """Return (prompt_ids, completions) for a row that already contains token ids.

    Raises RowError if a column is not a list of integers in [0, 2**32), or if the row contains images, video or audio.
    """
    require_text(columns)
    found = []
    for name in ("prompt_ids", *outputs):
        ids = columns.get(name)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
            raise RowError(f"{name} is not a list of token ids")
        found.append(ids)
    return found[0], tuple(found[1:])


def require_text(columns: dict[str, Any]) -> None:
    """Raise RowError for a row with images, video or audio.

    Scoring only the text of such a row would give the log-probs of a different input.
    """
    media = media_of(columns)
    if media is not None:
        raise RowError(
            f"the row contains more than text ({media}), but only text is scored; remove everything that is not text, or "
            "remove the row"
        )


def require_text_and_images(columns: dict[str, Any]) -> None:
    """Raise RowError for a row with columns of video, audio or processed media. Content parts of messages are not checked."""
    other = media_of({name: value for name, value in columns.items() if name not in (*IMAGE_COLUMNS, *MESSAGE_COLUMNS)})
    if other is not None:
        raise RowError(f"the row contains more than text and images ({other}), but only text and images can be scored")


def _check_type(name: str, value: Any, conversational: bool) -> None:
    if conversational:
        if not isinstance(value, list) or not all(isinstance(m, dict) and m.get("role") for m in value):
            raise RowError(f"{name} is not a list of messages that each have a role")
    elif not isinstance(value, str):
        raise _wrong_type(name, value)


def _wrong_type(name: str, value: Any) -> RowError:
    return RowError(f"{name} has type {type(value).__name__}; expected text, or a list of messages that each have a role")


def _template_kwargs(columns: dict[str, Any]) -> dict[str, Any]:
    tools, extra = columns.get("tools"), columns.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError(f"tools is not JSON: {error}") from error
    if extra is not None and not isinstance(extra, dict):
        raise RowError("chat_template_kwargs is not a JSON object")
    extra = {name: value for name, value in (extra or {}).items() if value is not None or name not in reserved_kwargs()}
    refused = sorted(set(extra) & reserved_kwargs())
    if refused:
        raise RowError(
            f"chat_template_kwargs sets {', '.join(refused)}, which would change how a row is rendered or encoded; keep "
            "only variables of the chat template"
        )
    return {"tools": tools, **extra}


@cache
def reserved_kwargs() -> frozenset[str]:
    parameters: set[str] = {"messages"}  # the template's name for the conversation
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.add(name)
    return frozenset(parameters - _DATA_PARAMETERS)


def dataset_notes(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[str, ...]:
    """Return what a user should know about a dataset that can be scored but is probably not meant so."""
    columns = [name for name in ("prompt", "chosen", "rejected", "completion") if any(name in row for row in rows)]
    is_whole = not set(columns) - {"prompt"}
    columns = columns if not is_whole else [name for name in _WHOLE if any(name in row for row in rows)]
    notes = []
    texts = {name: [row[name] for row in rows if isinstance(row.get(name), str)] for name in columns}
    as_text = [name for name in columns if any(map(_MESSAGES_AS_TEXT.match, texts[name]))]
    if as_text:
        notes.append(
            f"messages as text in {shortened_names(as_text)} are read as plain text, without the chat template, as a trainer "
            "reads them; for conversations, decode the cells (json.loads for JSON, ast.literal_eval for Python's notation) and "
            "save the rows as JSON Lines or Parquet"
        )
    empty = [name for name in columns if name != "prompt" and "" in texts[name]]
    if empty and any("prompt" in row for row in rows):
        notes.append(
            f"{shortened_names(empty)} is empty in some rows: as in a trainer, such a completion is only the token that ends "
            "a text"
        )
    others = sorted({str(name) for row in rows for name, value in row.items() if isinstance(value, str)} - set(columns))
    if not is_whole and others and all(_has_no_prompt(row) for row in rows):
        notes.append(
            "the rows have no prompt: prompts are read from a column named prompt, but the file has "
            f"{shortened_names(others)}; rename the column with the prompts"
        )
    elif not is_whole and others and not any("prompt" in row for row in rows) and any(_has_no_prompt(row) for row in rows):
        notes.append(
            "the rows have no column named prompt: as in TRL, what chosen and rejected begin with is their prompt; if "
            f"{shortened_names(others)} has the prompts, rename it"
        )
    template = str(getattr(tokenizer, "chat_template", None) or "")
    chats = any(is_conversational(*(row.get(name) for name in columns)) or row.get("conversations") for row in rows)
    if "strftime_now" in template and chats:
        notes.append(
            "the chat template prints the date (strftime_now), so the tokens and keys of all rows change every day: train on "
            "the same day, or use a template with a fixed date (--chat-template)"
        )
    return tuple(notes)


def _has_no_prompt(row: dict[str, Any]) -> bool:
    if "prompt" in row or not all(isinstance(row.get(name), str) for name in ("chosen", "rejected")):
        return not row.get("prompt")
    try:
        return not split_implicit_prompt(row["chosen"], row["rejected"])[0]
    except RowError:
        return True
