"""`reflogp serve` and `reflogp token`: start a service, make a token for it."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from reflogp_client.cli.console import err, needs, out
from reflogp_store import UsageError


def serve(
    store: Annotated[str | None, typer.Option("--store", help="A folder, or s3://, gs://, az://.", metavar="URI")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A reference model by a name; may be repeated.", metavar="NAME=PATH"),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="TOML file with settings; flags win.", metavar="FILE")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default: 8311.")] = None,
) -> None:
    """Answer for a store over HTTP: /v1/references, /v1/lookup, /docs, /healthz, /readyz, /metrics.

    Without tokens it listens on loopback only. `reflogp token NAME` makes a token for the settings file. TLS is a proxy's work.

    Example: reflogp serve --model sft=./sft-model --store ./logps
    """
    try:
        import uvicorn

        from reflogp_service.server.app import create_app
        from reflogp_service.server.settings import read_settings
    except ImportError as error:
        raise needs("service", error) from error
    references: dict[str, Any] = {}
    for entry in model or []:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--model {entry}: give NAME=PATH")
        references[name] = {"model": path}
    settings = read_settings(config, store=store, references=references or None, host=host, port=port)
    if not settings.tokens:
        err.print("no tokens are set: everybody on this machine may read; only loopback is served", style="yellow")
    app = create_app(settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=30,
        log_config=None,
        server_header=False,
    )


def token(
    name: Annotated[str, typer.Argument(help="Who it is for; appears in logs.")],
    scope: Annotated[list[str] | None, typer.Option(help="read, score or admin; repeatable. Default: read, score.")] = None,
) -> None:
    """Make a bearer token: printed once, and the lines for the settings file, which hold only its digest."""
    try:
        from reflogp_service.server.auth import new_token
        from reflogp_service.server.settings import SCOPES
    except ImportError as error:
        raise needs("service", error) from error
    scopes = scope or ["read", "score"]
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise UsageError(f"--scope {unknown[0]}: use {', '.join(SCOPES)}")
    secret, digest = new_token()
    err.print("the token, which nobody will show again:")
    out.print(secret, markup=False)
    err.print("for the settings file:")
    quoted = ", ".join(f'"{entry}"' for entry in scopes)
    err.print(f'[[tokens]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = [{quoted}]', markup=False)
