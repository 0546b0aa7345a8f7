"""Build the complete command lines that messages quote, so that users can copy them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from reflogp.store.errors import ReferenceNotFoundError, StoreNotFoundError


def score_command(
    model: str,
    data: str,
    store: str,
    dtype: str = "auto",
    *,
    lm_head_dtype: str | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    split: str = "train",
    revision: str | None = None,
    form: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Return the `reflogp score` command with these arguments; options at their defaults are left out."""
    options = [
        ("--dtype", dtype if dtype != "auto" else None),
        ("--lm-head-dtype", lm_head_dtype),
        ("--max-length", max_length),
        ("--truncation-mode", truncation_mode if truncation_mode != "keep_start" else None),
        ("--split", split if split != "train" else None),
        ("--revision", revision),
        ("--format", form),
        ("--tokenizer", tokenizer),
        ("--chat-template", chat_template),
    ]
    words = ["reflogp", "score", model, data, "--store", store]
    words += [str(word) for option in options if option[1] is not None for word in option]
    words += ["--trust-remote-code"] * trust_remote_code
    return shlex.join(words)


@contextmanager
def naming_command(command: str) -> Iterator[None]:
    """Add the complete scoring command to an error that nothing was scored yet, if the block raises one."""
    try:
        yield
    except (StoreNotFoundError, ReferenceNotFoundError) as error:
        raise type(error)(f"{error}. Score the data: {command}") from error


def repair_command(table_uri: str) -> str:
    """Return `reflogp store verify --repair` for the store of a table (`<store>/<reference id>/logprobs`)."""
    store, reference_id, _ = table_uri.rsplit("/", 2)
    return shlex.join(["reflogp", "store", "verify", store, "--reference", reference_id, "--repair"])
