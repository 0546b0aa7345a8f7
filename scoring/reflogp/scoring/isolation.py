"""Find the item that kills the process that works on it, by halving the group that was lost."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: An item is given up when this many processes have died while it was their only item.
_DEATHS = 2


class Isolation(Generic[T]):
    """Says, each time a process dies, which groups to try next."""

    def __init__(self) -> None:
        self._deaths: dict[T, int] = {}

    def died(self, items: list[T]) -> tuple[list[list[T]], T | None]:
        """Return the groups to retry, one after the other and each alone; or the item to give up, if it is found."""
        if len(items) > 1:
            middle = (len(items) + 1) // 2
            return [items[:middle], items[middle:]], None
        [item] = items
        self._deaths[item] = self._deaths.get(item, 0) + 1
        return ([], item) if self._deaths[item] >= _DEATHS else ([items], None)
