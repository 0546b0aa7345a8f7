"""What a user should know about a dataset that can be scored but is probably not meant so."""

from __future__ import annotations

import json
from typing import Any

from reflogp.scoring.data.shape import RowError, is_conversational, split_implicit_prompt
from reflogp.store.texts import shortened_names

_COMPLETIONS = ("chosen", "rejected", "completion")


def dataset_notes(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[str, ...]:
    """Return sentences about a dataset, given its first rows and its tokenizer (None if a processor makes the tokens)."""
    columns = [name for name in ("prompt", *_COMPLETIONS) if any(name in row for row in rows)]
    notes = []
    as_json = [name for name in columns if any(_is_messages_as_json(row.get(name)) for row in rows)]
    if as_json:
        notes.append(
            f"messages as JSON text in {shortened_names(as_json)} are read as plain text, without the chat template, as a "
            "trainer reads them; for conversations, decode the cells (json.loads) and save the rows as JSON Lines or Parquet"
        )
    others = sorted({str(name) for row in rows for name, value in row.items() if isinstance(value, str)} - set(columns))
    if others and all(_has_no_prompt(row) for row in rows):
        notes.append(
            "the rows have no prompt: prompts are read from a column named prompt, but the file has "
            f"{shortened_names(others)}; rename the column with the prompts"
        )
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "strftime_now" in template and any(is_conversational(*(row.get(name) for name in columns)) for row in rows):
        notes.append(
            "the chat template prints the date (strftime_now), so the tokens and keys of all rows change every day: train on "
            "the same day, or use a template with a fixed date (--chat-template)"
        )
    return tuple(notes)


def _is_messages_as_json(value: Any) -> bool:
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return False
    try:
        return is_conversational(json.loads(value))
    except (ValueError, RecursionError):
        return False


def _has_no_prompt(row: dict[str, Any]) -> bool:
    if "prompt" in row or not all(isinstance(row.get(name), str) for name in ("chosen", "rejected")):
        return not row.get("prompt")
    try:
        return not split_implicit_prompt(row["chosen"], row["rejected"])[0]
    except RowError:
        return True
