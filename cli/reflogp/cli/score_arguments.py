"""Give the commands that look stored values up the same options, as one `ScoreArguments`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from reflogp.cli import options
from reflogp.store.commands import ScoreArguments
from reflogp.store.windows import TrainerSettings

_Own = ParamSpec("_Own")


def takes_score_arguments(command: Callable[Concatenate[ScoreArguments, _Own], None]) -> Callable[..., None]:
    """Return a command for Typer that has the options of `_score_arguments` in place of its first parameter.

    The required ones come first in `--help`, then the shared options, then the command's own.
    """
    shared = inspect.signature(_score_arguments, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    both = [*shared.values(), *own]

    @wraps(command)
    def expanded(**values: Any) -> None:
        arguments = _score_arguments(**{name: values.pop(name) for name in shared})
        command(arguments, **values)  # type: ignore[call-arg]  # Typer passes the command's own parameters by name

    signature = inspect.Signature(
        [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in sorted(both, key=lambda parameter: parameter.default is not parameter.empty)
        ]
    )
    expanded.__signature__ = signature  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return expanded


def _score_arguments(
    model: options.Model,
    data: options.Data,
    store: options.Store,
    dtype: options.StoreDtype = "auto",
    lm_head_dtype: options.LmHeadDtype = None,
    max_length: options.MaxLength = None,
    truncation_mode: options.TruncationMode = "keep_start",
    form: options.Form = None,
    split: options.Split = "train",
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> ScoreArguments:
    return ScoreArguments(
        model,
        data,
        store,
        dtype,
        TrainerSettings(max_length, truncation_mode),
        lm_head_dtype=lm_head_dtype,
        revision=revision,
        split=split,
        form=form,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
