"""Reject requests from other sites' pages, and add security headers to every response.

Any page can make a browser send requests to this service. Such requests may carry this service's cookies, and may come from a
browser behind the firewall that protects the service. Three headers distinguish requests made by other sites' pages from
requests made by this service's own pages or by programs:

- Host is the host name in the request's URL. An attacker can make a host name of their own resolve to 127.0.0.1 (DNS
  rebinding), so unknown host names are rejected (SameSiteGuard states the exceptions).
- Sec-Fetch-Site says whether the page that sent the request has the same origin as this service, has another origin on the same
  site, or belongs to another site. Pages cannot set Sec-Fetch-Site. Browsers send Sec-Fetch-Site only over HTTPS and to
  loopback addresses.
- Origin is the scheme, host and port of the page's URL. Browsers send Origin with every request that can change something.

Programs (curl, clients, Prometheus) send neither Sec-Fetch-Site nor Origin and are accepted. Requests with methods that can
change something are checked in the same way as in Go's net/http.CrossOriginProtection. For requests with read-only methods, the
checks are stricter than the standard resource isolation policy (web.dev/articles/fetch-metadata) in two ways. A page that has
another origin on the same site as this service is treated like a page of another site. Neither kind of page can show this
service's pages in frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.problems import Problem

#: Headers added to every response that does not set them itself. The referrer policy is not `no-referrer`, because browsers
#: would then send `Origin: null` with our own forms, and over plain HTTP no other header distinguishes our forms from forms on
#: other sites.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Values of Sec-Fetch-Dest ("" if the header is missing) in requests that open a page through a link. Requests for a frame,
#: object or image in another page have other values.
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
    """ASGI middleware that rejects requests that browsers send on behalf of other sites' pages.

    Args:
        allowed_hosts: host names and IP addresses to accept in the Host header. `*.example.org` accepts all subdomains of
            example.org. Loopback addresses, `localhost` and its subdomains are always accepted.
        has_tokens: True if the service requires tokens. A service that requires tokens accepts all IP addresses and, if
            `allowed_hosts` is empty, all names. This is safe, because a page under an attacker's host name has neither a token
            nor a cookie for this service.
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
        if host is not None and not self._is_own(host):  # HTTP/1.0 clients may omit the Host header; browsers never do
            address = "an IP address" if self._has_tokens else "127.0.0.1"
            next_step = f"use {address}, localhost, or a name listed in the setting allowed_hosts"
            return Problem(403, "the service does not accept this host name", next_step)
        if is_from_elsewhere(method, headers):
            return Problem(
                403,
                "the request was made from a page on another site",
                "open this service's own pages, or send the request from a program instead of a browser",
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
        # DNS rebinding needs a host name, so IP addresses are safe. Health probes and Prometheus in a cluster use IP addresses.
        return address.is_loopback or self._has_tokens or name in self._allowed


def is_from_elsewhere(method: str, headers: Headers) -> bool:
    """Return whether a request's headers show that a browser sent it on behalf of another site's page.

    Links on other sites may open pages of this service, so return False for the request that opens a page through a link. Also
    return False for a request with neither Sec-Fetch-Site nor Origin.
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
    """Return whether a form was sent from a page of this service.

    This is decided by the Sec-Fetch-Site header or, if the request has none, by the Origin header.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return _names(headers.get("origin", ""), headers)


def _names(origin: str, headers: Headers) -> bool:
    """Return whether an origin has the host and port of the request, as given by Host or by X-Forwarded-Host (set by proxies).

    X-Forwarded-Host can be trusted here: a page of another site cannot make a browser send it, because the browser would first
    send a preflight request, which this service always rejects.
    """
    scheme, _, authority = origin.partition("://")
    if scheme not in _PORTS:
        return False
    asked = (headers.get("host", ""), headers.get("x-forwarded-host", "").split(",")[0].strip())
    own = _place(authority, scheme)
    return own is not None and any(_place(host, scheme) == own for host in asked)


def _place(authority: str, scheme: str) -> tuple[str, str] | None:
    """Parse the authority part of a URL (host and optional port).

    Return the host and the port, or None if the text is invalid. If the text has no port, return the scheme's default port.
    """
    found = _HOST.fullmatch(authority)
    return (found[1].lower(), found[2] or _PORTS[scheme]) if found else None


def _fits(name: str, allowed: str) -> bool:
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
