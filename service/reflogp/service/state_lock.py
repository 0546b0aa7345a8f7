"""Lock a state folder, so that only one service uses it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from reflogp.store import UsageError

#: Seconds to wait for the lock, since a service that was just killed may still be exiting, and the pause between attempts.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 2.0, 0.1


class StateLock:
    """An exclusive lock on a state folder. The kernel releases it when the process ends, even after a crash.

    There are two locks, so that no deleted or renamed file lets a second service in: one on the folder itself, and one on the
    file `lock` in it, for file systems (NFS) that cannot lock folders. The ledger is a third guard: it records the service that
    owns it.

    Raises:
        UsageError: another service uses the folder, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = [
                os.open(folder, os.O_RDONLY | os.O_DIRECTORY),
                os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644),
            ]
        except OSError as error:
            raise UsageError(f"the state folder {folder} cannot be written: {error.strerror}") from error
        stop = time.monotonic() + _PATIENCE_SECONDS
        while not all(map(_locked, self._held)):
            if time.monotonic() > stop:
                self.close()
                raise UsageError(f"another service uses the state folder {folder}: stop it, or give this one another `state`")
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Release the folder."""
        for handle in self._held:
            os.close(handle)
        self._held = []


def _locked(handle: int) -> bool:
    """Lock a file or folder; return False if another process holds the lock.

    A file or folder whose file system does not support locks counts as locked.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
