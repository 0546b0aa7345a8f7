"""Read reflogp's options of a framework's run: from the command line (`--reflogp.…`), or from a section of a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reflogp.store import UsageError
from reflogp.trainer.reference import Reference

#: Environment variable that passes a command's options, as JSON, to the processes that a launcher starts.
_FOR_PROCESSES = "REFLOGP_TRAIN_OPTIONS"


def _option(default: Any, description: str, **how: Any) -> Any:
    """Return a field, whose metadata are arguments of `add_argument`."""
    return field(default=default, metadata={"help": description, **how})


@dataclass(frozen=True)
class Options:
    """Where a framework's run gets its reference log-probs. Each attribute's metadata describe it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    store: str = field(metadata={"help": "a store (folder, s3://…) or a running service (http://…)", "required": True})
    model: str | None = _option(
        None,
        "the reference: a folder or hub id, a reference id, or a name in the service; by default, the model that the framework "
        "would load as its reference",
    )
    dtype: str = _option("auto", "the reference's dtype; by default, that of the model's stored values")
    snapshot: int | None = _option(None, "number of the snapshot to read; by default, the latest", type=int)
    on_miss: Literal["error", "score"] = _option(
        "error",
        "what to do about rows without values: stop and show the command that scores them (error), or have the service score "
        "them (score)",
        choices=("error", "score"),
    )
    policy_starts_elsewhere: bool = _option(
        False,
        "needed if the policy does not start from the reference's weights: its log-probs of the first batch are then not "
        "compared with the stored values",
        action="store_true",
    )

    def __post_init__(self) -> None:
        """Raise UsageError if options contradict each other."""
        self.reference()

    def reference(self) -> Reference:
        return Reference(self.store, self.model, self.dtype, self.snapshot, self.on_miss)


def read_options(command: str, words: Sequence[str], others: str) -> tuple[Options, list[str]]:
    """Separate the options that begin with --reflogp from the other arguments of a command.

    If the command has no such options, use those of the command that started this process (see `give_to_processes`). With
    --help, print the options. If an option is unknown or invalid, or --reflogp.store is missing, exit with status 2.

    Args:
        command: name of the command, for its help text.
        words: the arguments of the command.
        others: description of the other arguments, for the help text.
    """
    parser = argparse.ArgumentParser(prog=command, epilog=others, allow_abbrev=False)
    for option in dataclasses.fields(Options):
        default = None if option.default is dataclasses.MISSING else option.default
        parser.add_argument(f"--reflogp.{option.name}", dest=option.name, default=default, **option.metadata)
    if _FOR_PROCESSES in os.environ and not any(word.startswith("--reflogp.") for word in words):
        return Options(**json.loads(os.environ[_FOR_PROCESSES])), list(words)
    options, rest = parser.parse_known_args(words)
    if unknown := [word for word in rest if word.startswith("--reflogp.")]:
        parser.error(f"unknown option {unknown[0].split('=')[0]}; --help lists the options that begin with --reflogp.")
    try:
        return Options(**vars(options)), rest
    except UsageError as error:
        parser.error(str(error))


def give_to_processes(options: Options) -> None:
    """Pass reflogp's options to the training processes in an environment variable, because the launcher passes only the
    command's other arguments."""
    os.environ[_FOR_PROCESSES] = json.dumps(dataclasses.asdict(options))
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that run this package's files as scripts must not import its modules by name


def warn_if_untested(package: str, *tested: str) -> None:
    """Warn if the installed version of a framework is not one that reflogp was tested with. A prefix such as "0.11" covers all
    versions that begin with it."""
    found = importlib.metadata.version(package)
    if not any(f"{found}.".startswith(f"{version}.") for version in tested):
        warnings.warn(
            f"reflogp is tested with {package} {' and '.join(tested)}, not {found}: if the run fails, try one of them",
            stacklevel=2,
        )
