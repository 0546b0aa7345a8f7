"""Bearer tokens: who may call, and what for.

Knows digests, never tokens. Called by the app for every route but health, and by the pages, where a cookie holds the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import unquote

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from reflogp_service.server.problems import Problem
from reflogp_service.server.settings import Scope, TokenSettings

#: A signed-in browser's cookie; its value is the token, percent-encoded.
COOKIE = "reflogp_token"
#: A cookie comes with whatever request a page makes a browser send, so it is good for looking only.
_SAFE_METHODS = ("GET", "HEAD")


def new_token() -> tuple[str, str]:
    """(a token of 256 random bits, its sha256). A digest without salt is enough: such a token cannot be guessed."""
    token = "reflogp_" + secrets.token_urlsafe(32)
    return token, digest_of(token)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def entry_of(token: str, tokens: list[TokenSettings]) -> TokenSettings | None:
    """The settings' entry of a token, None for an unknown one and for no token.

    Every known digest is compared, each in constant time, so an answer's delay says nothing about how close a guess was.
    """
    given = digest_of(token)
    known = [entry for entry in tokens if hmac.compare_digest(entry.sha256, given)]
    return known[0] if token and known else None


def entry_of_cookie(request: Request, tokens: list[TokenSettings]) -> TokenSettings | None:
    """The same for the token in a request's cookie."""
    return entry_of(unquote(request.cookies.get(COOKIE, "")), tokens)


def requires(scope: Scope, tokens: list[TokenSettings]) -> Callable[..., Awaitable[str]]:
    """A dependency that lets a request pass when its token has the scope; gives the token's name.

    A GET without the header may bring the token in the pages' cookie: a browser's links and EventSource cannot send a header.
    Without any tokens (loopback only, see ServerSettings) everybody passes.
    """

    async def check(
        request: Request,
        documented: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],  # for OpenAPI
    ) -> str:
        if not tokens:
            return "loopback"
        header = request.headers.get("authorization")
        kind, _, token = (header or "").partition(" ")
        if header is None and request.method in _SAFE_METHODS:
            known = entry_of_cookie(request, tokens)
        else:
            known = entry_of(token.strip(), tokens) if kind.lower() == "bearer" else None
        if known is None:
            detail = "no bearer token was sent" if header is None else "the bearer token is not known here"
            raise Problem(401, detail, "send Authorization: Bearer TOKEN", {"WWW-Authenticate": 'Bearer realm="reflogp"'})
        require_scope(known, scope)
        return known.name

    return check


def require_scope(entry: TokenSettings, scope: Scope) -> None:
    """Raise a Problem unless a token has the scope, or is an administrator's."""
    if not {scope, "admin"} & entry.scopes:
        raise Problem(403, f"token {entry.name!r} may not {scope}", f"ask for a token with the scope {scope!r}")
