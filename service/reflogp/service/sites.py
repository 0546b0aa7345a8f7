"""Refuse requests from pages of other sites (by Host, Origin and Sec-Fetch-Site), and add security headers to every response.

A browser sends requests to this service for any page that asks it to, from inside a firewall and with the browser's cookies.
Three headers distinguish such a request from a request of our own pages or of a program:

- Host is the name under which the browser reached the service. A name that an attacker owns and points at 127.0.0.1 (DNS
  rebinding) is refused.
- Sec-Fetch-Site, which no page can set, gives the relation between the page's site and ours. Browsers send it over HTTPS and to
  loopback addresses.
- Origin is the page's own site, in every request that can change something.

Programs (curl, clients, Prometheus) send neither Sec-Fetch-Site nor Origin and are accepted. The rule is that of Go's
net/http.CrossOriginProtection; for methods that only read, it is the standard resource isolation policy
(web.dev/articles/fetch-metadata).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.problems import Problem

#: Headers of every response, unless the response sets them itself. With the referrer policy `no-referrer` a browser would send
#: `Origin: null` with our own forms, and over plain HTTP no other header distinguishes them from forms of another site.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Sec-Fetch-Dest of a page that is opened by a link, not loaded as a frame, object or image of another page.
_OPENED = ("document", "")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/?#@\\,]+)(?::(\d{1,5}))?")
_PORTS = {"http": "80", "https": "443"}


class SecurityHeaders:
    """ASGI middleware that adds HEADERS to every response, including errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class SameSiteGuard:
    """ASGI middleware that refuses requests which a page of another site makes a browser send.

    Args:
        allowed_hosts: accepted host names; `*.example.org` accepts every name below example.org. Loopback names are always
            accepted.
        has_tokens: True if the service has tokens. IP addresses are then accepted, and every name if `allowed_hosts` is empty,
            because a page under an attacker's name has neither a token nor a cookie of ours.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str], has_tokens: bool) -> None:
        self._app = app
        self._allowed = [name.lower() for name in allowed_hosts]
        self._has_tokens = has_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refused(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is not None:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, method: str, headers: Headers) -> Problem | None:
        host = headers.get("host")
        if host is not None and not self._is_own(host):  # HTTP/1.0 clients may omit it; browsers never do
            also = "an IP address, or a name" if self._has_tokens else "or a name"
            next_step = f"use http://127.0.0.1 or localhost, {also} that the setting allowed_hosts lists"
            return Problem(403, "the service does not accept this host name", next_step)
        if is_from_elsewhere(method, headers):
            return Problem(
                403, "the request was made by a page of another site", "open this service's own pages, or use a client"
            )
        return None

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if not found:
            return False
        name = found[1].strip("[]").removesuffix(".").lower()
        try:
            address = ip_address(name)
        except ValueError:
            if name == "localhost" or name.endswith(".localhost"):
                return True
            return (self._has_tokens and not self._allowed) or any(_fits(name, allowed) for allowed in self._allowed)
        # DNS rebinding needs a name. Probes and Prometheus in a cluster use addresses.
        return address.is_loopback or self._has_tokens or name in self._allowed


def is_from_elsewhere(method: str, headers: Headers) -> bool:
    """Return whether a browser sent a request for a page of another site, as far as its headers show.

    Following a link from another site to a page here is allowed. A request with neither Sec-Fetch-Site nor Origin is not from
    elsewhere.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if method in SAFE_METHODS:
        if site in (None, "same-origin", "none"):
            return False
        return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest", "") not in _OPENED
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and not _names(origin, headers)


def is_of_own_page(headers: Headers) -> bool:
    """Return whether one of our own pages sent a form, by Sec-Fetch-Site or, without that header, by Origin."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return _names(headers.get("origin", ""), headers)


def _names(origin: str, headers: Headers) -> bool:
    """Return whether an origin is the host of the request, in Host or in a proxy's X-Forwarded-Host.

    No page can make a browser send X-Forwarded-Host to another site: that needs a preflight request, which is never allowed.
    """
    scheme, _, authority = origin.partition("://")
    if scheme not in _PORTS:
        return False
    asked = (headers.get("host", ""), headers.get("x-forwarded-host", "").split(",")[0].strip())
    own = _place(authority, scheme)
    return own is not None and any(_place(host, scheme) == own for host in asked)


def _place(authority: str, scheme: str) -> tuple[str, str] | None:
    """Return (host, port) of an authority, or None if it is invalid."""
    found = _HOST.fullmatch(authority)
    return (found[1].lower(), found[2] or _PORTS[scheme]) if found else None


def _fits(name: str, allowed: str) -> bool:
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
