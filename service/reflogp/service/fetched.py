"""Keep fetched datasets in one folder, each a file or folder named by its content, until no unfinished job needs them.

One quota bounds the bytes of uploads and fetched files together.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from reflogp.service.ledger import Ledger
from reflogp.store.texts import byte_count


class DatasetQuota:
    """A count of bytes with a limit. Safe to use from several threads.

    Args:
        most: maximum bytes of all datasets together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._lock = Lock()
        self._sweepers: list[Callable[[], object]] = []

    @property
    def used(self) -> int:
        return self._used

    def add_sweeper(self, sweep: Callable[[], object]) -> None:
        """Register a function that deletes unneeded files and calls `give` for their bytes."""
        self._sweepers.append(sweep)

    def fits(self, size: int) -> bool:
        """Return whether `size` bytes fit; sweep first if they do not. Blocks."""
        if self._used + size > self.most:
            self.sweep()
        return self._used + size <= self.most

    def take(self, size: int) -> bool:
        """Take room for bytes that have arrived. Return False, and take nothing, if they do not fit. Does not block."""
        with self._lock:
            if self._used + size > self.most:
                return False
            self._used += size
            return True

    def hold(self, size: int) -> None:
        """Count a file that exists already."""
        with self._lock:
            self._used += size

    def give(self, size: int) -> None:
        """Give room back."""
        with self._lock:
            self._used -= size

    def sweep(self) -> None:
        """Delete the files that nobody needs. Blocks."""
        for sweep in self._sweepers:
            sweep()


#: Prefix of the names of files that are still being written.
PARTIAL = ".partial-"


class FetchedFolder:
    """Fetched datasets, each a file or folder named by its content. Safe to use from several threads.

    Args:
        folder: created if it does not exist. What a killed service had half written is deleted from it.
        ledger: lists the datasets that jobs need.
        room: bounds the size of these datasets together with uploads.
    """

    def __init__(self, folder: Path, ledger: Ledger, room: DatasetQuota) -> None:
        self.folder = folder
        self._ledger = ledger
        self._room = room
        self._lock = Lock()
        self._fresh: dict[Path, int] = {}  # kept, but not in the ledger yet -> number of fetches of the file
        folder.mkdir(parents=True, exist_ok=True)
        for partial_dataset in folder.glob(f"{PARTIAL}*"):
            _delete(partial_dataset)
        room.hold(sum(map(_size, folder.iterdir())))
        room.add_sweeper(self.collect)

    def take(self, size: int) -> None:
        """Take room for bytes that have arrived. Raise ValueError if there is no room."""
        if not self._room.take(size):
            self._room.sweep()
            if not self._room.take(size):
                raise self._no_room()

    def check_room(self, size: int) -> None:
        """Raise ValueError if there is no room for `size` bytes."""
        if not self._room.fits(size):
            raise self._no_room()

    def give(self, size: int) -> None:
        """Give back the room of an abandoned dataset."""
        self._room.give(size)

    def keep(self, partial_dataset: Path, name: str, size: int) -> Path:
        """Give a complete file or folder its name; return its path. It stays until `released`, then while a job needs it."""
        file = self.folder / name
        with self._lock:
            if file.exists():
                self._room.give(size)
            if file.is_dir():
                _delete(partial_dataset)
            else:
                partial_dataset.replace(file)
            self._fresh[file] = self._fresh.get(file, 0) + 1
        return file

    def released(self, file: Path) -> None:
        """End the protection of a kept dataset: the ledger names it now, or nobody needs it."""
        with self._lock:
            self._fresh[file] -= 1
            if not self._fresh[file]:
                del self._fresh[file]

    def collect(self) -> int:
        """Delete the datasets that no unfinished job needs; return how many. A retried job fetches its dataset again."""
        deleted = 0
        with self._lock:
            needed = self._ledger.files_in_use(unfinished_only=True)
            for file in self.folder.iterdir():
                if file.name.startswith(PARTIAL) or file in self._fresh or str(file) in needed:
                    continue
                with suppress(FileNotFoundError):
                    size = _size(file)
                    _delete(file)
                    self._room.give(size)
                    deleted += 1
        return deleted

    def _no_room(self) -> ValueError:
        return ValueError(
            f"uploads and fetched datasets may take at most {byte_count(self._room.most)} (max_uploads_bytes), and there is no"
            " room left: delete uploads (DELETE /v1/uploads/NAME), or try again when other jobs are done"
        )


def _size(dataset: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in dataset.iterdir()) if dataset.is_dir() else dataset.stat().st_size


def _delete(dataset: Path) -> None:
    if dataset.is_dir():
        doomed = dataset.with_name(f"{PARTIAL}{secrets.token_hex(8)}")  # a kill in between leaves no dataset that lacks files
        dataset.rename(doomed)
        shutil.rmtree(doomed)
    else:
        dataset.unlink(missing_ok=True)
