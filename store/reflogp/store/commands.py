"""Build the complete command lines that messages suggest, so that users can copy and run them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from reflogp.store.errors import ReferenceNotFoundError, StoreNotFoundError
from reflogp.store.reference import AUTO
from reflogp.store.storage import split_table_uri
from reflogp.store.windows import TrainerSettings


@dataclass(frozen=True)
class ScoreArguments:
    """The arguments of `reflogp score`, as on the command line, that determine the rows, the tokens and the values.

    Commands that look up stored values, such as `reflogp join`, take them too. Of `settings`, ld_alpha is ignored: it is
    applied when values are summed.
    """

    model: str
    data: str
    store: str
    dtype: str = AUTO
    settings: TrainerSettings = field(default_factory=TrainerSettings)
    lm_head_dtype: str | None = None
    revision: str | None = None
    split: str = "train"
    form: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False

    def command(self) -> str:
        """Return the complete command line, without options that have their default values."""
        mode = self.settings.truncation_mode
        options = [
            ("--dtype", self.dtype if self.dtype != AUTO else None),
            ("--lm-head-dtype", self.lm_head_dtype),
            ("--max-length", self.settings.max_length),
            ("--truncation-mode", mode if mode != "keep_start" else None),
            ("--split", self.split if self.split != "train" else None),
            ("--revision", self.revision),
            ("--format", self.form),
            ("--tokenizer", self.tokenizer),
            ("--chat-template", self.chat_template),
        ]
        words = ["reflogp", "score", self.model, self.data, "--store", self.store]
        words += [str(word) for option in options if option[1] is not None for word in option]
        words += ["--trust-remote-code"] * self.trust_remote_code
        return shlex.join(words)


@contextmanager
def naming_command(command: str) -> Iterator[None]:
    """Append `command`, which scores the data, to the message of a StoreNotFoundError or ReferenceNotFoundError."""
    try:
        yield
    except (StoreNotFoundError, ReferenceNotFoundError) as error:
        raise type(error)(f"{error}. Score the data: {command}") from error


def repair_command(table_uri: str) -> str:
    store, reference_id = split_table_uri(table_uri)
    return shlex.join(["reflogp", "store", "verify", store, "--reference", reference_id, "--repair"])
