"""Produce the items of an iterable in a background thread, which stays a few items ahead of the consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from typing import Generic, TypeVar

T = TypeVar("T")

#: Maximum number of seconds that `close` waits for the thread. If the thread is still producing an item after this time, it
#: ends when the item is finished, or when the process exits.
_LAST_SECONDS = 5.0
#: Seconds between two calls of `meanwhile`. While the queue is full, the thread also checks at this interval whether `close`
#: was called.
_LOOK_SECONDS = 0.1


class Prefetch(Generic[T]):
    """An iterable whose items a background thread produces in advance. Close it, so that the thread is stopped.

    The thread runs in a copy of the caller's context, so that its spans belong to the caller's trace.

    Args:
        items: the iterable that produces the items. The thread iterates over it. A generator is then closed in the same thread.
        depth: maximum number of finished items that wait in the queue; the thread may hold one more.
    """

    def __init__(self, items: Iterable[T], depth: int, name: str) -> None:
        self._items = items
        self._made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._make,), name=name, daemon=True)
        self._thread.start()

    def items(self, meanwhile: Callable[[], None]) -> Iterator[T]:
        """Yield the items. If the iterable raises an error, raise the error after all earlier items have been yielded.

        Args:
            meanwhile: function that is called several times a second while the next item is not ready.
        """
        while True:
            try:
                made = self._made.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                meanwhile()
                continue
            if made is None:
                return
            if isinstance(made, BaseException):
                raise made
            yield made[0]

    def close(self) -> None:
        """Stop producing items, and wait a few seconds for the thread to exit."""
        self._closing.set()
        self._thread.join(_LAST_SECONDS)

    def _make(self) -> None:
        last: BaseException | None = None
        items = iter(self._items)
        try:
            for item in items:
                if not self._put((item,)):
                    break
        except BaseException as error:
            last = error
        finally:
            if isinstance(items, Iterator) and hasattr(items, "close"):
                items.close()  # in this thread, where the generator entered its context managers
        self._put(last)

    def _put(self, made: tuple[T] | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._made.put(made, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False
