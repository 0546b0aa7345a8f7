"""Bearer tokens: who may call, and what for.

Knows digests, never tokens. Called by the app for every route but health.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from reflogp_service.server.problems import Problem
from reflogp_service.server.settings import Scope, TokenSettings


def new_token() -> tuple[str, str]:
    """(a token of 256 random bits, its sha256). A digest without salt is enough: such a token cannot be guessed."""
    token = "reflogp_" + secrets.token_urlsafe(32)
    return token, digest_of(token)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def requires(scope: Scope, tokens: list[TokenSettings]) -> Callable[..., str]:
    """A dependency that lets a request pass when its token has the scope; gives the token's name.

    Every known digest is compared, each in constant time, so an answer's delay says nothing about how close a guess was.
    Without any tokens (loopback only, see ServerSettings) everybody passes.
    """

    def check(
        request: Request,
        documented: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],  # for OpenAPI
    ) -> str:
        if not tokens:
            return "loopback"
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        given = digest_of(token.strip())
        known = [entry for entry in tokens if hmac.compare_digest(entry.sha256, given)]
        if kind.lower() != "bearer" or not known:
            raise Problem(
                401, "no valid bearer token", "send Authorization: Bearer TOKEN", {"WWW-Authenticate": 'Bearer realm="reflogp"'}
            )
        if not {scope, "admin"} & known[0].scopes:
            raise Problem(403, f"token {known[0].name!r} may not {scope}", f"ask for a token with the scope {scope!r}")
        return known[0].name

    return check
