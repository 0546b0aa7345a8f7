"""`reflogp serve` and `reflogp token`: start a service, and create tokens for it."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from reflogp.cli import options
from reflogp.cli.console import err, needs, out
from reflogp.store import UsageError


def serve(
    store: options.ServedStore = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A reference model and its name on the service; repeatable.", metavar="NAME=PATH"),
    ] = None,
    dtype: options.ServedDtype = None,
    devices: options.ServedDevices = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Folder for jobs, uploads and results. Default: a folder for this store in ~/.local/state/reflogp.",
            metavar="DIR",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file with settings. Options of this command and environment variables (REFLOGP_…) override the file.",
            metavar="FILE",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 chooses a free port. Default: 8311.")] = None,
) -> None:
    """Run the scoring service, which handles jobs, online requests and lookups over HTTP, and serves web pages.

    Its /openapi.json describes every route. Unfinished jobs continue when the service is restarted. Without tokens, the
    service listens only on loopback. `reflogp token NAME` creates a token for the settings file. For TLS, run a proxy in front
    of the service.

    Example: reflogp serve --model sft=./sft-model --dtype bfloat16 --store ./logps
    """
    with needs("service"):
        from reflogp.service.run import run
        from reflogp.service.settings import read_settings
    references: dict[str, Any] = {}
    for entry in model or []:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--model {entry}: use the form NAME=PATH")
        references[name] = {"model": path} | ({"dtype": dtype} if dtype else {})
    if dtype and not references:
        raise UsageError("--dtype requires --model; for the references in a settings file, set dtype in that file")
    flags = {"store": store, "state": state, "host": host, "port": port}
    settings = read_settings(config, references=references or None, devices=options.names(devices) or None, **flags)
    if not settings.tokens:
        err.print(
            "no tokens are set, so everyone on this machine may read and score; the service listens only on loopback",
            style="yellow",
        )
    with suppress(KeyboardInterrupt):  # uvicorn raises it after it has stopped in order
        run(settings)


def token(
    name: Annotated[str, typer.Argument(help="Name of the token's user, shown in logs and as the submitter of jobs.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Scope of the token: read; jobs or online (each includes read); score (both) or admin; repeatable. "
            "Default: score."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings file of the service, to which the token's lines are appended.", metavar="FILE"),
    ] = None,
) -> None:
    """Create a bearer token, and print it with the lines that admit it, for the service's settings file.

    With --config, the lines are appended to this file, and only the token is printed. The lines contain a digest of the token,
    not the token itself, so the token cannot be shown again. Restart the service to admit the token. Run `umask 077` first, so
    that other users of the machine cannot read the file that you write the token to.

    Example: reflogp token trainers --config service.toml > trainers.token
    """
    with needs("service"):
        from reflogp.service.auth import new_token
        from reflogp.service.settings import SCOPES
    scopes = scope or ["score"]
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise UsageError(f"--scope {unknown[0]}: unknown scope; choose from {', '.join(SCOPES)}")
    secret, digest = new_token()
    # JSON strings and lists of strings are TOML, too.
    lines = ["[[tokens]]", f"name = {json.dumps(name)}", f'sha256 = "{digest}"', f"scopes = {json.dumps(scopes)}"]
    if config is not None:
        try:
            with config.open("a+", encoding="utf-8") as file:
                file.seek(0)
                if name in (entry.get("name") for entry in tomllib.loads(file.read()).get("tokens", [])):
                    raise UsageError(
                        f"{config} already has a token with the name {name}: choose another name, or delete the lines of that "
                        "token to replace it"
                    )
                file.write("\n" + "\n".join(lines) + "\n")
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--config {config} is not a TOML file: {error}") from error
        except OSError as error:
            raise UsageError(f"--config {config} cannot be written: {error.strerror}") from error
        lines = []
    out.print(secret)
    for line in lines:
        out.print(line)
    if lines:
        err.print("the first line is the token, which cannot be shown again; the others are for the service's settings file")
