"""Access the SQLite file of the ledger, and ensure that only one service uses it.

All SQL statements of the ledger are executed through this module. A failing read or write is retried for a limited time. If it
still fails after the last retry, LedgerError is raised, and its message says what is wrong. Each write is one transaction.
StateLock ensures that only one service uses the state folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from threading import Lock
from typing import TypeVar

from reflogp.service.errors import LedgerDamagedError, LedgerError, LedgerUnavailableError
from reflogp.store import UsageError

#: StateLock tries to get the lock every _PAUSE_SECONDS for up to _PATIENCE_SECONDS, because a service that was just killed may
#: still hold the lock.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 2.0, 0.1


class StateLock:
    """An exclusive lock on a state folder. The kernel releases the lock when the process ends, even after a crash.

    A folder that does not exist is created. Only its owner can read it, because it may hold secrets (docs/security.md).

    Both the folder itself and the file `lock` in the folder are locked. The lock on the folder keeps a second service from
    starting even if the file `lock` is deleted or renamed. The lock on the file is needed on file systems that cannot lock
    folders, such as NFS.

    Raises:
        UsageError: another service uses the folder, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
                raise UsageError(
                    f"another service uses the state folder {folder}: stop the other service, or set a different `state` folder"
                )
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Release the locks."""
        for handle in self._held:
            os.close(handle)
        self._held = []


def _locked(handle: int) -> bool:
    """Lock a file or folder; return False if another process holds the lock.

    If the file system does not support locks, return True, although no lock is held.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Maximum time in seconds that SQLite itself waits for a lock held by another process. The retries in this module wait longer.
_BUSY_SECONDS = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_REASONS = {
    sqlite3.SQLITE_BUSY: "another process has locked the file",
    sqlite3.SQLITE_LOCKED: "another process has locked the file",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the file cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_IOERR: "the file cannot be read or written",
}


class LedgerFile:
    """An SQLite file in WAL mode. Several threads can use a LedgerFile at the same time.

    Args:
        file: path of the SQLite file, which is created if it does not exist.
        schema: SQL statements that create the tables. The statements run at every start, so they must be safe to repeat.
        version: version of the schema; a file with a higher version is refused.
        patience_seconds: how long a failing read or write is retried. While `trouble` is set, nothing is retried.

    Attributes:
        trouble: the error that says why the ledger cannot currently be used, or None if it can be used.
        failures: number of failed attempts to read or write the file, including retries.

    Raises:
        UsageError: the file was written by a newer version of reflogp, is damaged or not an SQLite database, or stays unusable
            for `patience_seconds`.
    """

    def __init__(self, file: Path, schema: str, version: int, patience_seconds: float) -> None:
        self._file = file
        self._schema = schema
        self._version = version
        self._patience = patience_seconds
        self._lock = Lock()
        self._closed = False
        self.trouble: LedgerError | None = None
        self.failures = 0
        try:
            self._db = self._patiently(self._open)
        except LedgerError as error:
            raise UsageError(str(error)) from error

    def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Call `work`, which must not write to the database, and return its result.

        Raise LedgerError if `work` still fails after the last retry.
        """
        return self._patiently(lambda: work(self._db))

    def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Call `work` in a transaction. The transaction is on disk when this method returns.

        Raise LedgerError if the transaction still fails after the last retry.

        A transaction that is reported as failed may still have reached the disk, so `work` must be safe to call twice.
        """
        result = self._patiently(lambda: self._transaction(work))
        if self.trouble is not None and not isinstance(self.trouble, LedgerDamagedError):
            logger.info("the ledger of jobs can be used again")
            self.trouble = None
        return result

    def probe(self) -> None:
        """Test whether the ledger can be written, and update `trouble`. If it cannot be written, no error is raised."""
        with suppress(LedgerError):
            self.write(lambda db: db.execute(f"pragma user_version = {self._version}"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + (self._patience if self.trouble is None else 0.0)
        pause = _FIRST_PAUSE
        while True:
            with self._lock:
                if self._closed:
                    raise LedgerUnavailableError("the ledger of jobs is closed because the service is shutting down")
                try:
                    return attempt()
                except sqlite3.DatabaseError as error:
                    failure = self._failure(error)
            if isinstance(failure, LedgerDamagedError) or time.monotonic() + pause > deadline:
                if type(self.trouble) is not type(failure):
                    logger.error("%s", failure)
                if not isinstance(self.trouble, LedgerDamagedError):
                    self.trouble = failure
                raise failure
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _transaction(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        self._db.execute("begin immediate")
        try:
            result = work(self._db)
            self._db.execute("commit")
            return result
        except BaseException:
            with suppress(sqlite3.Error):  # after some errors, SQLite has already rolled the transaction back
                self._db.execute("rollback")
            raise

    def _failure(self, error: sqlite3.DatabaseError) -> LedgerError:
        """Return a LedgerError for an SQLite error.

        If the SQL statement or its values are wrong, raise the SQLite error unchanged.
        """
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.DataError | sqlite3.NotSupportedError):
            raise error
        self.failures += 1
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # none for a text that is not UTF-8
        if code in _DAMAGED:
            return self._damaged(str(error))
        reason = _REASONS.get(code, "SQLite reports an error")
        return LedgerUnavailableError(f"the ledger of jobs ({self._file.name}) cannot currently be used: {reason} ({error})")

    def _damaged(self, what: str) -> LedgerDamagedError:
        aside = quote(str(self._file.parent / "damaged"))
        return LedgerDamagedError(
            f"the ledger of jobs ({self._file.name}) is damaged ({what}): move it away with `mkdir -p {aside} && "
            f"mv {quote(str(self._file))}* {aside}`, start the service, send the uploads again, and submit the jobs again "
            "(sequences whose values are in the store are not scored again)"
        )

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("pragma synchronous = full")
            db.execute("pragma journal_mode = wal")
            if db.execute("pragma user_version").fetchone()[0] > self._version:
                raise UsageError(
                    f"{self._file} was written by a newer version of reflogp: upgrade reflogp, or use a different state folder"
                )
            said = db.execute("pragma quick_check(1)").fetchone()[0]
            if said != "ok":
                raise self._damaged(said.strip().splitlines()[-1])
            db.executescript(self._schema)
            db.execute(f"pragma user_version = {self._version}")
        except BaseException:
            db.close()
            raise
        return db
