"""An iteration in a thread of its own, a few items ahead of whoever uses it.

Knows nothing of the items. Used where making items and using them take turns otherwise.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds that `close` waits for an item that is being made. The thread ends with the process, if not by then.
_LAST_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class Ahead(Generic[T]):
    """Items of an iterable, made ahead; a context manager, which ends the thread.

    Args:
        items: iterated, and closed, in the thread.
        depth: finished items that wait at most. One more is being made.
        name: of the thread.
    """

    def __init__(self, items: Iterable[T], depth: int, name: str) -> None:
        self._items = items
        self._made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self.items(lambda: None)

    def items(self, meanwhile: Callable[[], None]) -> Iterator[T]:
        """Yield the items; raise what making one raised, after those before it.

        Args:
            meanwhile: called several times a second while the next item is awaited.
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
        """Make no further item, and wait for the thread."""
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
                items.close()  # here, where a generator's own context managers were entered
        self._put(last)

    def _put(self, made: tuple[T] | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._made.put(made, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False
