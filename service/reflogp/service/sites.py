"""Keep pages of other sites out: the checks of Host, Origin and Sec-Fetch-Site, and the headers of every answer.

A browser sends requests to this service for any page that asks it to, from inside a firewall and with the browser's cookies.
Three things tell such a request from one of our own pages or of a program:

- Host names whom the browser believes to be asking. A name that an attacker owns and points at 127.0.0.1 (DNS rebinding) is
  refused.
- Sec-Fetch-Site, which no page can set, says how the page relates to us. Browsers send it over HTTPS and to loopback.
- Origin names the page's own site in every request that can change something.

Programs (curl, clients, Prometheus) send neither of the last two and pass. The rule is that of Go's
net/http.CrossOriginProtection, and the standard resource isolation policy (web.dev/articles/fetch-metadata) for reading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.problems import Problem

#: The headers of every answer that has no others of its own. With the referrer policy `no-referrer` a browser would send
#: `Origin: null` with our own forms, and over plain HTTP nothing else tells them from another site's.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Sec-Fetch-Dest of a page that is opened by a link: not of a frame, an object or an image in the other page.
_OPENED = ("document", "")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/?#@\\,]+)(?::(\d{1,5}))?")
_PORTS = {"http": "80", "https": "443"}


class SafeHeaders:
    """Adds HEADERS to every answer, those of errors included."""

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


class OwnSite:
    """Refuses requests that a page of another site makes a browser send.

    Args:
        allowed_hosts: names that the service may be asked by, `*.example.org` for every name below example.org; loopback names
            always may.
        has_tokens: addresses are allowed, and so is every name where `allowed_hosts` is empty: a page under an attacker's name
            has neither a token nor a cookie of ours.
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
        if host is not None and not self._is_own(host):  # HTTP/1.0 has none, and no browser leaves it out
            also = "an IP address, or a name" if self._has_tokens else "or a name"
            next_step = f"use http://127.0.0.1 or localhost, {also} that the setting allowed_hosts lists"
            return Problem(403, "the service may not be asked by this host name", next_step)
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
        # Nobody can point an address elsewhere. Probes and Prometheus in a cluster ask by addresses.
        return address.is_loopback or self._has_tokens or name in self._allowed


def is_from_elsewhere(method: str, headers: Headers) -> bool:
    """Whether a browser sent a request for a page of another site, as far as its headers tell.

    Reading is allowed where a link of another site leads here. A program that sends neither header is not from elsewhere.
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
    """Whether one of our own pages sent a form: a browser says so in Sec-Fetch-Site, or else by Origin."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return _names(headers.get("origin", ""), headers)


def _names(origin: str, headers: Headers) -> bool:
    """Whether an origin is the host that was asked, or the one that a proxy says was asked.

    No page can make a browser send X-Forwarded-Host to another site: that needs a preflight, which is never answered.
    """
    scheme, _, authority = origin.partition("://")
    if scheme not in _PORTS:
        return False
    asked = (headers.get("host", ""), headers.get("x-forwarded-host", "").split(",")[0].strip())
    own = _place(authority, scheme)
    return own is not None and any(_place(host, scheme) == own for host in asked)


def _place(authority: str, scheme: str) -> tuple[str, str] | None:
    """(host, port) of an authority; None where it is not one."""
    found = _HOST.fullmatch(authority)
    return (found[1].lower(), found[2] or _PORTS[scheme]) if found else None


def _fits(name: str, allowed: str) -> bool:
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
