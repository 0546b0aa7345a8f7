"""`reflogp doctor`: show what works in an installation, what does not, and which commands fix the problems."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from rich.text import Text

from reflogp.cli import options
from reflogp.cli.console import EXIT_FAILED, out, print_json
from reflogp.client import Client, NotAllowedError, ServiceError, ServiceUnreachableError
from reflogp.store import ReflogpError, Store, StoreDamageWarning, StoreNotFoundError, read_checkpoint, resolve_model
from reflogp.store.texts import counted, visible

#: Dict from each extra to its purpose, which follows "needed to" in messages. `_vllm` checks the extra `vllm`.
_EXTRAS = {
    "service": "score, serve or join",
    "trainer": "train with TRL",
    "ray": "score with --ray",
    "openrlhf": "train with OpenRLHF",
}
_COLORS = {"ok": "green", "note": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    what: str  # what was checked, such as "trainer" (an extra), "cuda:0" or "store"
    state: Literal["ok", "note", "broken"]  # a note is a limitation that may not matter to the user
    said: str
    help: str = ""  # the command or step that helps


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also check whether this model's files are complete.", metavar="MODEL")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Also check whether this store is readable and writable.", metavar="URI")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Also check whether this service responds and accepts the token, and list its references."),
    ] = None,
    token: options.Token = None,
    as_json: options.AsJson = False,
) -> None:
    """Check the installation, and say how to fix problems or install what is missing.

    This command does not load a model. If --model is a hub id, the model is downloaded unless it is in the hub's cache. With
    --store, this command writes a small file for each reference in the store and deletes it again. It changes nothing else. The
    exit code is 1 if something is broken.

    Example: reflogp doctor --model ./sft-model --store s3://team/logps --url http://127.0.0.1:8311
    """
    findings = [*_installation(), *_devices()]
    findings += _model(model) if model is not None else []
    findings += _store(store) if store is not None else []
    findings += [_service(url, token)] if url is not None else []
    broken = [finding for finding in findings if finding.state == "broken"]
    if as_json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            out.print(Text.assemble((finding.state, _COLORS[finding.state]), visible(f" {finding.what}: {finding.said}")))
            if finding.help:
                out.print(f"       {finding.help}", style="cyan")
        out.print("nothing is broken" if not broken else f"problems to fix: {len(broken)}", style="bold")
    if broken:
        raise typer.Exit(EXIT_FAILED)


def _installation() -> Iterator[Finding]:
    yield Finding("reflogp", "ok", f"{version('reflogp')}, Python {platform.python_version()}, {platform.machine()}")
    for extra, purpose in _EXTRAS.items():
        missing, wrong = _unmet(extra)
        if wrong:
            command = "pip install " + " ".join(f"'{requirement}'" for requirement in wrong.values())
            said = ", ".join(f"{name} {version(name)} does not satisfy {wrong[name].specifier}" for name in wrong)
            yield Finding(extra, "broken", said, command)
        elif missing:
            said = f"not installed (needed to {purpose}): {', '.join(missing)} missing"
            yield Finding(extra, "note", said, f"pip install 'reflogp[{extra}]'")
        else:
            yield Finding(extra, "ok", f"installed (needed to {purpose})")
    yield _vllm()


def _unmet(extra: str) -> tuple[list[str], dict[str, Requirement]]:
    """Return the packages of an extra that are not installed, and the requirements of those in a wrong version, by name."""
    missing, wrong = [], {}
    for requirement in map(Requirement, requires("reflogp") or []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker.evaluate({"extra": ""}):
            continue  # every installation has this requirement, even without the extra
        try:
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                wrong[requirement.name] = requirement
        except PackageNotFoundError:
            missing.append(requirement.name)
    return missing, wrong


def _vllm() -> Finding:
    named = os.environ.get("REFLOGP_VLLM_PYTHON")
    if named and not os.access(named, os.X_OK):
        step = "set REFLOGP_VLLM_PYTHON to the Python interpreter of an environment with vLLM and reflogp"
        return Finding("vllm", "broken", f"REFLOGP_VLLM_PYTHON={named} cannot be run", step)
    if named or find_spec("vllm") is not None:
        return Finding("vllm", "ok", f"score --engine vllm uses {named or sys.executable}")
    step = "python -m venv vllm && vllm/bin/pip install 'reflogp[vllm]' && export REFLOGP_VLLM_PYTHON=$PWD/vllm/bin/python"
    return Finding("vllm", "note", "not installed (needed only for models that are too large for one GPU)", step)


def _devices() -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}" + ("" if torch.version.cuda is None else f" for CUDA {torch.version.cuda}")
        advice = "" if torch.version.cuda is None else "check the driver: nvidia-smi"
        yield Finding("device", "note", f"{built} finds no usable GPU, so scoring runs on the CPU, which is slow", advice)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        said = f"{properties.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, torch {torch.__version__}"
        if not torch.cuda.is_bf16_supported():
            yield Finding(f"cuda:{number}", "note", f"{said}; no bfloat16", "score with --dtype float16 or float32")
            continue
        yield Finding(f"cuda:{number}", "ok", said)
    if find_spec("reflogp.service") is not None and not _unmet("service")[0]:
        from reflogp.scoring.torch_engine.attention import installed_kernels

        yield Finding("attention", "ok", f"kernels, fastest first: {', '.join(installed_kernels())}")


def _model(model: str) -> Iterator[Finding]:
    try:
        checkpoint = read_checkpoint(resolve_model(model))
    except ReflogpError as error:
        yield Finding("model", "broken", str(error), "pass a folder with config.json and safetensors files, or a hub id")
        return
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    architecture = ", ".join(checkpoint.config.get("architectures") or ["unknown"])
    yield Finding("model", "ok", f"{architecture}, {size / 1e6:,.0f} MB of weights, complete")


def _store(uri: str) -> Iterator[Finding]:
    try:
        opened = Store(uri)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StoreDamageWarning)
            references = opened.references()
        for reference in references:
            opened[reference.reference_id].check_writable()
    except StoreNotFoundError as error:
        yield Finding("store", "note", str(error))
        return
    except (ReflogpError, StoreDamageWarning) as error:
        yield Finding("store", "broken", str(error), f"reflogp store verify {uri}")
        return
    if references:
        names = ", ".join(f"{reference.name} in {reference.dtype}" for reference in references)
        yield Finding("store", "ok", f"{counted(len(references), 'reference')} ({names}), readable and writable")
    else:
        yield Finding("store", "note", f"{uri} is empty; the first `reflogp score` creates a store there")


def _service(url: str, token: str | None) -> Finding:
    try:
        with Client(url, token) as client:
            references = client.references()
    except ServiceUnreachableError as error:
        start = "check --url (http://HOST:PORT), or start a service: reflogp serve --store URI --model NAME=PATH"
        return Finding("service", "broken", f"{url} cannot be reached ({type(error.__cause__).__name__})", start)
    except NotAllowedError as error:
        step = "pass a token with the scope `read` in --token or REFLOGP_TOKEN; `reflogp token` creates tokens"
        said = f"{url} does not accept the token" if token else f"{url} requires a token"
        return Finding("service", "broken", f"{said}: {error}", step)
    except ServiceError as error:
        step = "check that --url is the address of a reflogp service, and see the service's log"
        return Finding("service", "broken", f"{url}: {error}", step)
    names = ", ".join(f"{one.name or one.reference_id} in {one.dtype}" for one in references) or "none"
    accepts = "accepts the token" if token else "requires no token"
    return Finding("service", "ok", f"{url} responds and {accepts}; references: {names}")
