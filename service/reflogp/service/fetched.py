"""Keep fetched datasets in one folder until no unfinished job needs them.

A single quota limits the total size of uploads and fetched datasets.
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
    """A limit on the total size of uploads and fetched datasets, and a count of the bytes in use. Thread-safe.

    Args:
        most: the limit, in bytes.
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
        """Register a function that deletes unneeded files and calls `give` with their sizes."""
        self._sweepers.append(sweep)

    def fits(self, size: int) -> bool:
        """Return whether `size` more bytes fit within the quota, after deleting unneeded files if necessary.

        This call blocks.
        """
        if self._used + size > self.most:
            self.sweep()
        return self._used + size <= self.most

    def take(self, size: int) -> bool:
        """Add `size` to the bytes in use, and return True.

        If this would exceed the limit, add nothing and return False. This call does not block.
        """
        with self._lock:
            if self._used + size > self.most:
                return False
            self._used += size
            return True

    def hold(self, size: int) -> None:
        """Add the size of an existing file to the bytes in use, without checking the limit."""
        with self._lock:
            self._used += size

    def give(self, size: int) -> None:
        """Subtract `size` from the bytes in use."""
        with self._lock:
            self._used -= size

    def sweep(self) -> None:
        """Delete all unneeded files. This call blocks."""
        for sweep in self._sweepers:
            sweep()


#: Prefix of the names of files and folders that are still being written or are being deleted.
PARTIAL = ".partial-"


class FetchedFolder:
    """A folder of fetched datasets. Each dataset is a file or folder named after its digest. Thread-safe.

    Args:
        folder: path of the folder, which is created if it does not exist. Incomplete datasets that a killed service left
            in it are deleted.
        ledger: records which datasets the jobs need.
        room: quota for the total size of fetched datasets and uploads.
    """

    def __init__(self, folder: Path, ledger: Ledger, room: DatasetQuota) -> None:
        self.folder = folder
        self._ledger = ledger
        self._room = room
        self._lock = Lock()
        # for each dataset that may not be in the ledger yet: the number of fetches that protect it from deletion
        self._fresh: dict[Path, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for partial_dataset in folder.glob(f"{PARTIAL}*"):
            _delete(partial_dataset)
        room.hold(sum(map(_size, folder.iterdir())))
        room.add_sweeper(self.collect)

    def take(self, size: int) -> None:
        """Count `size` received bytes against the quota.

        Raise ValueError if these bytes would exceed the quota even after all unneeded files are deleted.
        """
        if not self._room.take(size):
            self._room.sweep()
            if not self._room.take(size):
                raise self._no_room()

    def check_room(self, size: int) -> None:
        """Raise ValueError if `size` more bytes would exceed the quota even after all unneeded files are deleted."""
        if not self._room.fits(size):
            raise self._no_room()

    def give(self, size: int) -> None:
        """Subtract `size`, the size of a deleted or incomplete dataset, from the bytes that count against the quota."""
        self._room.give(size)

    def keep(self, partial_dataset: Path, name: str, size: int) -> Path:
        """Rename a complete file or folder to its final name, and return the new path.

        If a dataset of this name already exists, only one copy is kept. `collect` deletes the dataset only after `released` is
        called, and only when no unfinished job needs the dataset.

        Args:
            partial_dataset: path of the complete file or folder, whose name still begins with PARTIAL.
            name: final name, which consists of the digest and, for a file, the suffix.
            size: number of bytes that were counted against the quota for this dataset.
        """
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
        """Allow `collect` to delete a dataset that `keep` has protected.

        Call this method once the ledger refers to the dataset, or once the dataset is no longer needed.
        """
        with self._lock:
            self._fresh[file] -= 1
            if not self._fresh[file]:
                del self._fresh[file]

    def collect(self) -> int:
        """Delete the datasets that no unfinished job needs; return how many were deleted.

        If a failed or cancelled job is retried later, its dataset is fetched again.
        """
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
            f"uploads and fetched datasets may take at most {byte_count(self._room.most)} (max_uploads_bytes), and there"
            " is not enough space left for this dataset: delete uploads (DELETE /v1/uploads/NAME), or try again when other"
            " jobs have ended"
        )


def _size(dataset: Path) -> int:
    """Return the size of a file, or the total size of the files in a folder."""
    return sum(file.stat().st_size for file in dataset.iterdir()) if dataset.is_dir() else dataset.stat().st_size


def _delete(dataset: Path) -> None:
    if dataset.is_dir():
        # if the service is killed after the rename, it deletes the folder at its next start
        doomed = dataset.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
        dataset.rename(doomed)
        shutil.rmtree(doomed)
    else:
        dataset.unlink(missing_ok=True)
