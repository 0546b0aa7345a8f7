"""The second model of a join or a report: its log-probs are looked up with the tokens of the first, and subtracted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from reflogp.store import Join, Reference, Snapshot, Store, UsageError, resolve_model
from reflogp.store.commands import ScoreArguments, naming_command
from reflogp.store.digests import Progress
from reflogp.store.store import choose_reference
from reflogp.store.texts import counted


@dataclass(frozen=True)
class Versus:
    """The second model, and where its values are.

    Attributes:
        score: command that scores the dataset with the second model, and with the tokenizer and the dtype of the first.
        load_tokenizer: function that returns the tokenizer with which the second model would have read the dataset.
    """

    first: str
    model: str
    snapshot: Snapshot
    score: str
    load_tokenizer: Callable[[], PreTrainedTokenizerBase]

    def explain(self, missing: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
        """Say that the second model has no values for `missing` rows, and why if the tokenizers tell.

        Returns:
            (sentence without a full stop, command that helps). The command is None if the models cannot be compared.
        """
        said = f"{self.model} has no values for {counted(missing, 'row')} in the store"
        theirs = self.load_tokenizer()
        ids = theirs.get_vocab()
        if any(ids.get(token, number) != number for token, number in tokenizer.get_vocab().items()):
            differ = (
                f"{self.first} and {self.model} tokenize differently: the same token has different ids in their vocabularies"
            )
            return f"{said}. {differ}, so their log-probs cannot be compared", None
        if (theirs.chat_template, theirs.eos_token) != (tokenizer.chat_template, tokenizer.eos_token):
            differ = f"{self.first} and {self.model} tokenize differently: their chat templates or EOS tokens differ"
            said = f"{said}. {differ}, so {self.model} needs values of the tokens that {self.first}'s tokenizer makes"
        return said, self.score


def find_versus(
    store: Store,
    model: str,
    arguments: ScoreArguments,
    first: Reference,
    load_tokenizer: Callable[[str], PreTrainedTokenizerBase],
    progress: Progress | None = None,
) -> tuple[Versus, str]:
    """Return the second model, and the reason for its dtype (see `choose_reference`)."""
    own_head = first.lm_head_dtype if first.lm_head_dtype != first.dtype else None
    tokenizer = arguments.tokenizer or arguments.model
    command = replace(
        arguments, model=model, revision=None, dtype=first.dtype, lm_head_dtype=own_head, tokenizer=tokenizer
    ).command()
    with naming_command(command):
        found, reason = choose_reference(
            store, model, arguments.dtype, lm_head_dtype=arguments.lm_head_dtype, progress=progress
        )
        if found.reference_id == first.reference_id:
            raise UsageError(
                f"{arguments.model} and {model} are the same model (reference {found.reference_id}), so every log-ratio is 0: "
                "name another model"
            )
        snapshot = store[found].snapshot()
    folder = str(resolve_model(model, None))
    return Versus(arguments.model, model, snapshot, command, lambda: load_tokenizer(folder)), reason


def log_ratios(join: Join, other: Join) -> dict[str, npt.NDArray[np.float32]]:
    """Return the log-prob sums of the first model minus those of the second, in nats, float32 (n,) for each new column.

    The columns are log_ratio_chosen and log_ratio_rejected for pairs, and log_ratio for other rows. For pairs,
    implicit_reward_margin is the difference of the two.
    """
    ratios = {
        f"log_ratio{name.removeprefix('ref').removesuffix('_logps')}": logps - other.logps[name]
        for name, logps in join.logps.items()
    }
    if "log_ratio_chosen" in ratios:
        ratios["implicit_reward_margin"] = ratios["log_ratio_chosen"] - ratios["log_ratio_rejected"]
    return ratios
