"""Read the options (`--reflogp.…`) of commands that start a framework's training using stored reference log-probs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import warnings
from collections.abc import Sequence
from typing import get_args

from reflogp.store import UsageError
from reflogp.store.reference import Dtype
from reflogp.trainer.batches.in_trainer import StoredReference
from reflogp.trainer.batches.reference import check_source
from reflogp.trainer.source import ReferenceSource

#: Environment variable that passes a command's options, as JSON, to the processes that a launcher starts.
_FOR_PROCESSES = "REFLOGP_TRAIN_OPTIONS"


def read_options(
    command: str,
    words: Sequence[str],
    model: str,
    dtype: str = "if the store has the model's values in only one dtype, that dtype; otherwise the policy's dtype",
) -> tuple[argparse.Namespace, list[str], argparse.ArgumentParser]:
    """Separate the options that begin with --reflogp from the other arguments of a command.

    If the command has no such options, use the options of the command that started this process (see `give_to_processes`).
    If an option is unknown or invalid, or --reflogp.store is missing, print a message and exit with status 2.

    Args:
        command: name of the command, for its help text.
        words: the arguments of the command.
        model, dtype: descriptions of the defaults of --reflogp.model and --reflogp.dtype, for the help text. If `dtype` is not
            given, the help text states the default that `stored_reference` uses. Commands with a different default must
            describe it in `dtype`.

    Returns:
        A tuple of the parsed options that begin with --reflogp, the other arguments, and the parser.
    """
    parser = argparse.ArgumentParser(prog=command, add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("reference log-probs (reflogp)").add_argument
    add("--reflogp.store", dest="store", metavar="URI", help="a store (folder, s3://…) or a running service (http://…)")
    add("--reflogp.model", dest="model", help=f"the reference model; default: {model}")
    add("--reflogp.dtype", dest="dtype", choices=get_args(Dtype), help=f"the reference's dtype; default: {dtype}")
    add(
        "--reflogp.reference",
        dest="reference",
        metavar="NAME",
        help="the reference's name in a service; can be given instead of --reflogp.model",
    )
    add(
        "--reflogp.reference_id",
        dest="reference_id",
        metavar="ID",
        help="the reference's id; can be given instead of --reflogp.model",
    )
    add(
        "--reflogp.snapshot",
        dest="snapshot",
        type=int,
        metavar="N",
        help="number of the snapshot to read; default: the latest",
    )
    add(
        "--reflogp.on_miss",
        dest="on_miss",
        choices=("error", "score", "run"),
        default="error",
        help="what to do about rows without values: stop and show the command that scores them (error, the default), have the "
        "service score them (score), or run the scoring command on this machine before training (run)",
    )
    add(
        "--reflogp.policy_starts_elsewhere",
        dest="policy_starts_elsewhere",
        action="store_true",
        help="required if the policy does not start from the reference's weights; the policy's log-probs of the first batch "
        "are then not compared with the stored values",
    )
    add(
        "--reflogp.step_zero_tolerance",
        dest="step_zero_tolerance",
        type=float,
        metavar="NATS",
        help="allowed difference between the policy's and the reference's log-probs in the first batch, summed over a "
        "completion, in nats/√tokens; by default, it depends on the dtype, and the policy and the reference must have the same "
        "dtype",
    )
    add(
        "--reflogp.on_finding",
        dest="on_finding",
        choices=("fail", "warn"),
        default="fail",
        help="what to do if the audit finds wrong reference values or an unexpected forward pass: stop the run (fail, the "
        "default) or log a warning (warn)",
    )
    given = [word for word in words if word.startswith("--reflogp.")]
    if not given and _FOR_PROCESSES in os.environ:
        options, others = argparse.Namespace(**json.loads(os.environ[_FOR_PROCESSES])), list(words)
    else:
        options, others = parser.parse_known_args(words)
        if unknown := [word for word in others if word.startswith("--reflogp.")]:
            parser.error(f"unknown option {unknown[0].split('=')[0]}; --help lists the options that begin with --reflogp.")
    if options.store is None and not {"-h", "--help"} & set(others):
        parser.error("--reflogp.store is required: pass the store or service that has the reference log-probs")
    return options, others, parser


def warn_if_untested(package: str, tested: str) -> None:
    """Warn if the installed version of a framework is not the version that reflogp was tested with.

    The run continues. If the framework's behaviour has changed, the policy's log-probs of the first batch may differ from
    the reference's; the `step_zero` check then fails.

    Args:
        package: name of the framework's package.
        tested: the tested version. A prefix such as "0.11" covers all versions that begin with it.
    """
    found = importlib.metadata.version(package)
    if f"{found}.".startswith(f"{tested}."):
        return
    warnings.warn(
        f"reflogp is tested with {package} {tested}, not {found}: if the run fails or its audit reports a problem, try "
        f"{package} {tested}",
        stacklevel=2,
    )


def give_to_processes(options: argparse.Namespace) -> None:
    """Pass reflogp's options to the training processes in an environment variable, because the launcher passes only the
    command's other arguments."""
    os.environ[_FOR_PROCESSES] = json.dumps(vars(options))


def names_reference(options: argparse.Namespace) -> bool:
    """Return True if the options name the reference. If they do not, the framework's settings determine which model is the
    reference.
    """
    return not (options.model is None and options.reference is None and options.reference_id is None)


def unclear_reference(setting: str, model: str) -> UsageError:
    """Return the error for a framework setting that may change the reference.

    Args:
        setting: name of that setting.
        model: name of the setting that otherwise determines the reference model.
    """
    return UsageError(
        f"with {setting}, the reference may differ from the model in {model}: name the reference with --reflogp.model, "
        "--reflogp.reference or --reflogp.reference_id; if the policy does not start from that model's weights, also pass "
        "--reflogp.policy_starts_elsewhere"
    )


def source_of(options: argparse.Namespace, model: str | None, dtype: str) -> ReferenceSource:
    """Return the source of the reference log-probs.

    Args:
        options: the options that `read_options` returned.
        model: the model that the framework would load as its reference. It is ignored if the options name the reference, and
            may then be None.
        dtype: dtype of the reference if the options do not set one.

    Raises UsageError if options contradict each other, or if --reflogp.store is a file.
    """
    is_named = options.model is None and names_reference(options)
    source = ReferenceSource(
        options.store,
        model=None if is_named else options.model or model,
        dtype=options.dtype or dtype,
        reference_id=options.reference_id,
        reference=options.reference,
        snapshot=options.snapshot,
        on_miss="score" if options.on_miss == "score" else "error",
    )
    check_source(source, options.on_miss == "run")
    return source


def stored_reference(options: argparse.Namespace, model: str | None) -> StoredReference:
    """Return a run's settings for stored values.

    If the reference is given as a model (not by its id or its name in a service) and the options set no dtype, the dtype is
    chosen when the run starts: if the store or service has the model's values in only one dtype, that dtype; otherwise the
    policy's dtype.

    Args:
        options, model: see `source_of`.
    """
    return StoredReference(
        source_of(options, model, "auto"),
        run_command=options.on_miss == "run",
        policy_starts_at_reference=not options.policy_starts_elsewhere,
        step_zero_tolerance=options.step_zero_tolerance,
        on_finding=options.on_finding,
    )
