"""Check bearer tokens and the cookies of signed-in browsers, and restrict each route to tokens with the required scope.

The service stores the digests of tokens, never the tokens themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal
from urllib.parse import unquote

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from reflogp.service.problems import Problem
from reflogp.service.settings import Scope, TokenSettings

Required = Literal["read", "jobs", "online"]

#: How long a browser stays signed in, in seconds.
SIGNED_IN_SECONDS = 12 * 3600
#: What a route may require: a token with one of these scopes.
_PERMITTING: dict[Required, set[Scope]] = {
    "read": {"read", "jobs", "online", "score", "admin"},
    "jobs": {"jobs", "score", "admin"},
    "online": {"online", "score", "admin"},
}
#: HTTP methods for which the routes that use `requires` accept the cookie. Methods that change something are not in the
#: list, because browsers also send the cookie when a page of another service on the same host makes a request. The routes that
#: receive the forms of the web pages also accept the cookie, but refuse a form that was not sent from a page of this service
#: (see `sites.is_of_own_page`).
_SAFE_METHODS = ("GET", "HEAD")


def new_token() -> tuple[str, str]:
    """Return a random 256-bit token and its SHA-256 digest. The digest needs no salt, because the token cannot be guessed."""
    token = "reflogp_" + secrets.token_urlsafe(32)
    return token, digest_of(token)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def entry_of(token: str, tokens: list[TokenSettings]) -> TokenSettings | None:
    """Return a token's entry in the settings, or None if the token is unknown or empty.

    Every known digest is compared in constant time, so the response time does not reveal how much of a guess was correct.
    """
    given = digest_of(token)
    known = [entry for entry in tokens if hmac.compare_digest(entry.sha256, given)]
    return known[0] if token and known else None


def caller(request: Request, tokens: list[TokenSettings], cookie: bool = True) -> TokenSettings | None:
    """Return the entry of a request's bearer token or, with `cookie`, of the token in its cookie; None if they are unknown.

    A proxy in front may send a bearer token of its own. The name of a known token is kept in the request's state, for the log
    of refusals.
    """
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    entry = entry_of(token.strip(), tokens) if scheme.lower() == "bearer" else None
    if entry is None and cookie:
        entry = entry_of(unquote(request.cookies.get(cookie_name(request), "")), tokens)
    request.state.token = entry.name if entry else None
    return entry


def cookie_name(request: Request) -> str:
    """Return the name of the cookie with the token. It has the port, because browsers send a cookie to all ports of a host."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"reflogp_token_{port}" if port.isascii() and port.isdigit() else "reflogp_token"


def requires(scope: Required, tokens: list[TokenSettings]) -> Callable[..., Awaitable[str]]:
    """Return a FastAPI dependency that admits only requests whose token permits what the given scope permits.

    The dependency returns the token's name. It raises Problem 401 if the request has no known token, and Problem 403 if the
    token does not permit it.

    Browsers send no bearer token when a user follows a link. A GET or HEAD request without one is therefore admitted if the
    browser is signed in with such a token.

    If the settings contain no tokens, every request is admitted, and the dependency returns the name "loopback". In that case,
    ServerSettings requires the service to listen on a loopback address.
    """

    async def check(
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> str:
        if not tokens:
            return "loopback"
        known = caller(request, tokens, cookie=bearer is None and request.method in _SAFE_METHODS)
        if known is None:
            raise Problem(
                401,
                "no bearer token was sent" if bearer is None else "the bearer token is unknown",
                "send the header Authorization: Bearer TOKEN with one of the service's tokens",
                {"WWW-Authenticate": 'Bearer realm="reflogp"'},
            )
        require_scope(known, scope)
        return known.name

    return check


def require_scope(entry: TokenSettings, scope: Required) -> None:
    """Raise a Problem with status 403 unless one of the token's scopes permits what the given scope permits."""
    if not _PERMITTING[scope] & entry.scopes:
        raise Problem(403, f"token {entry.name!r} does not have the scope {scope!r}", "ask for a token with this scope")
