"""One service for one state folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from reflogp.store import UsageError

#: A service that was just killed may still be on its way out.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 2.0, 0.1


class StateLock:
    """Holds a state folder for this process; the kernel lets go of it when the process ends, however it ends.

    Two locks, so that no deleted or renamed file lets a second service in: one on the folder itself, and one on the file `lock`
    in it, for file systems (NFS) that lock no folders. The ledger has a third guard: it knows which service owns it.

    Raises:
        UsageError: another service holds the folder, or it cannot be written.
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
        """Let go of the folder."""
        for handle in self._held:
            os.close(handle)
        self._held = []


def _locked(handle: int) -> bool:
    """Lock a file or folder; False where another process has. One that cannot be locked at all counts as locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
