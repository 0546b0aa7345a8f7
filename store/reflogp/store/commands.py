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
    """The arguments of `reflogp score` that determine how it reads and tokenizes the dataset, and which values it stores.

    The method `command` builds a command line with these arguments, for use in messages. Commands that look up stored values,
    such as `reflogp join`, take the same arguments.

    Attributes:
        model, data, store: the reference model, the dataset and the store, as written on the command line.
        dtype: compute dtype of the reference model, or "auto" for the dtype in which the model's log-probs in the store were
            computed. If the store has no log-probs of the model, "auto" is the engine's default dtype.
        settings: the trainer's settings. ld_alpha is ignored: scoring stores one value per token, and ld_alpha is applied
            later, when the values are summed.
        lm_head_dtype: dtype in which the output layer computes logits: "float32", or None for the model's dtype.
        revision: revision of a hub model.
        split: split of a saved DatasetDict or of a dataset on the Hub.
        form: the dataset's format, or None to detect it.
        tokenizer: folder or hub id of the tokenizer, or None for the model's tokenizer.
        chat_template: path of a Jinja template file, or None for the tokenizer's template.
        trust_remote_code: whether to run code from the checkpoint.
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
        """Return the complete command line, omitting options with default values."""
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
    """If the `with` block raises StoreNotFoundError or ReferenceNotFoundError, append `command` to the error's message.

    `command` is the command line that scores the data. All other errors are passed on unchanged.
    """
    try:
        yield
    except (StoreNotFoundError, ReferenceNotFoundError) as error:
        raise type(error)(f"{error}. Score the data: {command}") from error


def repair_command(table_uri: str) -> str:
    """Return the command line that repairs a table. `table_uri` has the form `<store>/<reference id>/logprobs`."""
    store, reference_id = split_table_uri(table_uri)
    return shlex.join(["reflogp", "store", "verify", store, "--reference", reference_id, "--repair"])
