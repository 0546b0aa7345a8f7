"""Clients of a service: `Client`, and `AsyncClient` with the same words.

Knows how to send and when to try again; what is sent is `wire`'s. Needs httpx, no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version
from types import TracebackType
from typing import Any

import httpx
import pyarrow as pa

from reflogp_client import wire
from reflogp_store import UsageError

#: Seconds to connect, and to wait for the next bytes of an answer.
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)


class Client:
    """Talks to a service.

    Args:
        url: of the service, as `reflogp serve` prints it.
        token: bearer token; not needed on loopback where the service has none.
        timeout: seconds to wait for an answer's next bytes; None for the default of 60, 5 to connect.

    Methods raise ServiceError and its kin (reflogp_client.errors). Requests that do no harm twice are tried again, with growing
    pauses, where the connection fails or the service is busy.

    Example:
        with Client("http://127.0.0.1:8311") as client:
            found = client.lookup("sft", sequence_keys([[1, 5, 9]], [[7, 2]]))
    """

    def __init__(self, url: str, token: str | None = None, timeout: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(**_options(self.url, token, timeout))

    def references(self) -> list[wire.ReferenceInfo]:
        """The reference models that the service, or its store, knows."""
        return wire.references_of(self._send(wire.references_call()))

    def lookup(
        self, reference: str, keys: pa.Array | Sequence[bytes], *, values: bool = False, snapshot: int | None = None
    ) -> wire.Lookup:
        """What the store has for some keys.

        Args:
            reference: name or id.
            keys: n keys of 16 bytes, as `reflogp_store.sequence_keys` makes them.
            values: give token_logps too.
            snapshot: number; None for the latest.
        """
        return wire.lookup_of(self._send(wire.lookup_call(reference, keys, values, snapshot)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, call: wire.Call) -> httpx.Response:
        for attempt in range(1, wire.TRIES + 1):
            try:
                answer: httpx.Response | httpx.TransportError = self._http.request(**wire.arguments(call))
            except httpx.TransportError as error:
                answer = error
            pause = wire.pause_after(answer, call, attempt, self.url)
            if pause is None:
                break
            time.sleep(pause)
        assert isinstance(answer, httpx.Response)
        return answer


class AsyncClient:
    """As `Client`, for asyncio: `async with`, and every method awaited."""

    def __init__(self, url: str, token: str | None = None, timeout: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(**_options(self.url, token, timeout))

    async def references(self) -> list[wire.ReferenceInfo]:
        """As Client.references."""
        return wire.references_of(await self._send(wire.references_call()))

    async def lookup(
        self, reference: str, keys: pa.Array | Sequence[bytes], *, values: bool = False, snapshot: int | None = None
    ) -> wire.Lookup:
        """As Client.lookup."""
        return wire.lookup_of(await self._send(wire.lookup_call(reference, keys, values, snapshot)))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, call: wire.Call) -> httpx.Response:
        for attempt in range(1, wire.TRIES + 1):
            try:
                answer: httpx.Response | httpx.TransportError = await self._http.request(**wire.arguments(call))
            except httpx.TransportError as error:
                answer = error
            pause = wire.pause_after(answer, call, attempt, self.url)
            if pause is None:
                break
            await asyncio.sleep(pause)
        assert isinstance(answer, httpx.Response)
        return answer


def _options(url: str, token: str | None, timeout: float | None) -> dict[str, Any]:
    """What both kinds of httpx client are made with."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"service {url!r}: a URL begins with http:// or https://")
    headers = {"user-agent": f"reflogp/{version('reflogp')}"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    limit = _TIMEOUT if timeout is None else httpx.Timeout(timeout, connect=min(timeout, 5.0))
    return {"base_url": url, "headers": headers, "timeout": limit}
