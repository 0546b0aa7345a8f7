"""Reject requests from other sites' pages, and add security headers to every response.

Any page can make a browser send requests to this service, even from behind the firewall that protects it. Such requests are
recognized by three headers: Host (DNS rebinding lets an attacker's host name lead to this machine), Sec-Fetch-Site and Origin,
which browsers set and pages cannot. Browsers send Origin with every request that can change something, and Sec-Fetch-Site over
HTTPS and to loopback addresses. Programs send neither of the two, and are accepted.

Requests that can change something are checked as in Go's net/http.CrossOriginProtection. Requests that only read may not come
from another site either, except the one that opens a page through a link (web.dev/articles/fetch-metadata).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers

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

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/?#@\\,]+)(?::(\d{1,5}))?")
_PORTS = {"http": "80", "https": "443"}


class SiteCheck:
    """Recognizes requests that browsers send on behalf of other sites' pages.

    Args:
        allowed_hosts: host names and IP addresses to accept in the Host header. `*.example.org` accepts all subdomains of
            example.org. Loopback addresses, `localhost` and its subdomains are always accepted.
        has_tokens: True if the service requires tokens. A service that requires tokens accepts all IP addresses and, if
            `allowed_hosts` is empty, all names. This is safe, because a page under an attacker's host name has neither a token
            nor a cookie for this service.
    """

    def __init__(self, allowed_hosts: Sequence[str], has_tokens: bool) -> None:
        self._allowed = [name.lower() for name in allowed_hosts]
        self._has_tokens = has_tokens

    def problem_of(self, method: str, headers: Headers) -> Problem | None:
        """Return why a request is refused, or None if it is not."""
        host = headers.get("host")
        if host is not None and not self._is_own(host):  # HTTP/1.0 clients may omit the Host header; browsers never do
            address = "an IP address" if self._has_tokens else "127.0.0.1"
            next_step = f"use {address}, localhost, or a name listed in the setting allowed_hosts"
            return Problem(403, "the service does not accept this host name", next_step)
        if _is_from_elsewhere(method, headers):
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


def is_of_own_page(headers: Headers) -> bool:
    """Return whether a form that SiteCheck has admitted was sent by a browser, and so from a page of this service."""
    return "sec-fetch-site" in headers or "origin" in headers


def _is_from_elsewhere(method: str, headers: Headers) -> bool:
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site in ("same-origin", "none"):
        return False
    if method in _SAFE_METHODS:
        through_a_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "") in ("document", "")
        return site is not None and not through_a_link
    return site is not None or (origin is not None and not _is_own_origin(origin, headers))


def _is_own_origin(origin: str, headers: Headers) -> bool:
    scheme, _, authority = origin.partition("://")
    own = _host_and_port(authority, scheme)
    return own is not None and own == _host_and_port(headers.get("host", ""), scheme)


def _host_and_port(authority: str, scheme: str) -> tuple[str, str] | None:
    """Parse `HOST` or `HOST:PORT` of a URL. Return None if the text or the scheme is not of a web page."""
    found = _HOST.fullmatch(authority) if scheme in _PORTS else None
    return (found[1].lower(), found[2] or _PORTS[scheme]) if found else None


def _fits(name: str, allowed: str) -> bool:
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
