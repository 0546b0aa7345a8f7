"""Check bearer tokens and browser sessions, and restrict each route to tokens with the required scope.

The service stores the digests of tokens, never the tokens themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from reflogp.service.problems import Problem
from reflogp.service.settings import Scope, TokenSettings

#: How long a browser stays signed in, in seconds.
SESSION_SECONDS = 12 * 3600
#: Maximum number of sessions per token. Signing in beyond this limit ends the token's oldest session, so the sessions of one
#: token can neither fill the memory nor end sessions of other tokens.
_MOST_SESSIONS = 100
#: HTTP methods for which the routes that use `requires` accept the session cookie. Methods that change something are not in the
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


@dataclass(frozen=True)
class _Session:
    sha256: str  # digest of the token that was used to sign in
    expires_at: float  # in seconds, on the clock of time.monotonic


class Sessions:
    """Sessions of signed-in browsers.

    A cookie contains a session id, not a token, so signing out invalidates all copies of the cookie.

    Sessions are kept in memory, so restarting the service ends all sessions, including those of tokens that were removed from
    the settings.

    Args:
        tokens: the tokens that users can sign in with.
    """

    def __init__(self, tokens: list[TokenSettings]) -> None:
        self._entries = {entry.sha256: entry for entry in tokens}
        self._sessions: dict[str, _Session] = {}  # from the digest of each cookie to its session, oldest session first

    def begin(self, token: str) -> str:
        """Begin a session for a known token, and return the value of the session cookie."""
        sha256, now = digest_of(token), time.monotonic()
        self._sessions = {name: session for name, session in self._sessions.items() if session.expires_at > now}
        own = [name for name, session in self._sessions.items() if session.sha256 == sha256]
        for name in own[: max(0, len(own) - _MOST_SESSIONS + 1)]:
            del self._sessions[name]
        cookie = secrets.token_urlsafe(32)
        self._sessions[digest_of(cookie)] = _Session(sha256, now + SESSION_SECONDS)
        return cookie

    def end(self, request: Request) -> None:
        """End the session of the browser that sent the request."""
        self._sessions.pop(digest_of(request.cookies.get(cookie_name(request), "")), None)

    def entry(self, request: Request) -> TokenSettings | None:
        """Return the settings entry of the token that the browser signed in with, or None if the browser is not signed in."""
        session = self._sessions.get(digest_of(request.cookies.get(cookie_name(request), "")))
        if session is None or session.expires_at <= time.monotonic():
            return None
        return self._entries.get(session.sha256)


def sessions_of(request: Request) -> Sessions:
    """Return the sessions of the service that received the request."""
    found: Sessions = request.app.state.sessions
    return found


def cookie_name(request: Request) -> str:
    """Return the name of the session cookie. Browsers send a cookie to all ports of a host, so the name contains the port."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"reflogp_session_{port}" if port.isascii() and port.isdigit() else "reflogp_session"


def requires(scope: Scope, tokens: list[TokenSettings]) -> Callable[..., Awaitable[str]]:
    """Return a FastAPI dependency that admits only requests whose token has the given scope or the scope `admin`.

    The dependency returns the token's name. It raises Problem 401 if the request has no known token, and Problem 403 if the
    token has neither scope.

    Browsers send no Authorization header when a user follows a link or a script opens an EventSource. A GET or HEAD request
    without this header is therefore admitted if the browser is signed in with a token that has one of these scopes. If the
    settings contain no tokens, every request is admitted, and the dependency returns the name "loopback". In that case,
    ServerSettings requires the service to listen on a loopback address.
    """

    async def check(
        request: Request,
        documented: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],  # for OpenAPI
    ) -> str:
        request.state.token = None
        if not tokens:
            return "loopback"
        header = request.headers.get("authorization")
        kind, _, token = (header or "").partition(" ")
        if header is None and request.method in _SAFE_METHODS:
            known = sessions_of(request).entry(request)
        else:
            known = entry_of(token.strip(), tokens) if kind.lower() == "bearer" else None
        if known is None:
            if header is None:
                detail = "no bearer token was sent"
            elif kind.lower() != "bearer":
                detail = "the Authorization header does not contain a bearer token"
            else:
                detail = "the bearer token is unknown"
            raise Problem(
                401,
                detail,
                "send the header Authorization: Bearer TOKEN with one of the service's tokens",
                {"WWW-Authenticate": 'Bearer realm="reflogp"'},
            )
        require_scope(known, scope)
        request.state.token = known
        return known.name

    return check


def still_allowed(request: Request) -> bool:
    """Return whether a long response may continue: False once the browser session that authorized the request has ended."""
    entry: TokenSettings | None = request.state.token
    return entry is None or "authorization" in request.headers or sessions_of(request).entry(request) is not None


def may_read(request: Request) -> bool:
    """Return True if the caller may read the details of all jobs, and False if it may read only those of its own jobs."""
    entry: TokenSettings | None = request.state.token
    return entry is None or bool({"read", "admin"} & entry.scopes)


def require_scope(entry: TokenSettings, scope: Scope) -> None:
    """Raise a Problem with status 403 unless the token has the given scope or the scope `admin`."""
    if not {scope, "admin"} & entry.scopes:
        raise Problem(403, f"token {entry.name!r} does not have the scope {scope!r}", "ask for a token with this scope")
