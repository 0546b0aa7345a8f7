"""Access the SQLite file of the ledger with retries and recovery, and ensure that only one service uses it.

All SQL statements of the ledger are executed through this module. A failing read or write is retried for a limited time. If it
still fails after the last retry, LedgerError is raised, and its message says what is wrong. Each write is one transaction,
which first checks that this service still owns the file. StateLock ensures that only one service uses the state folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import TypeVar

from reflogp.service.errors import LedgerDamagedError, LedgerError, LedgerReplacedError, LedgerUnavailableError
from reflogp.store import UsageError

#: StateLock tries to get the lock every _PAUSE_SECONDS for up to _PATIENCE_SECONDS, because a service that was just killed may
#: still hold the lock.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 2.0, 0.1


class StateLock:
    """An exclusive lock on a state folder. The kernel releases the lock when the process ends, even after a crash.

    A folder that does not exist is created. Only its owner can read it, because it may hold secrets (docs/security.md).

    Both the folder itself and the file `lock` in the folder are locked. The lock on the folder keeps a second service from
    starting even if the file `lock` is deleted or renamed. The lock on the file is needed on file systems that cannot lock
    folders, such as NFS. As a further safeguard, the ledger itself records which service owns it.

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
#: After these errors, the connection is kept, because it still works. If the disk is full, there may be no space to open a new
#: connection.
_CONNECTION_IS_GOOD = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
#: Dict from a text in an error message to SQLite's error code. It is used for exceptions without `sqlite_errorcode`.
_CODES_BY_TEXT = {
    "locked": sqlite3.SQLITE_BUSY,
    "is full": sqlite3.SQLITE_FULL,
    "malformed": sqlite3.SQLITE_CORRUPT,
    "not a database": sqlite3.SQLITE_NOTADB,
    "I/O error": sqlite3.SQLITE_IOERR,
}
_OWNER = "create table if not exists owner (token text not null) strict"


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
        UsageError: the file was written by a newer version of reflogp, is not an SQLite database, is damaged, or stays unusable
            for `patience_seconds`.
    """

    def __init__(self, file: Path, schema: str, version: int, patience_seconds: float) -> None:
        self._file = file.resolve()  # if `file` is a link, SQLite's write-ahead log is next to the target
        self._schema = schema
        self._version = version
        self._patience = patience_seconds
        self._token = secrets.token_hex(16)
        self._lock = RLock()
        self._closed = False
        self.trouble: LedgerError | None = None
        self.failures = 0
        self._db = self._open()
        self._inode = _inode(self._file)

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
            self._recovered()
        return result

    def probe(self) -> None:
        """Test whether the ledger can be used, and update `trouble`. If the ledger cannot be used, no error is raised.

        The test is a write that changes nothing. If `trouble` says that the file is damaged, the file's pages are checked too.
        """
        try:
            self.write(lambda db: db.execute("update owner set token = token"))
            if isinstance(self.trouble, LedgerDamagedError):
                self.read(_check_pages)
                self._recovered()
        except LedgerError:
            pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + (self._patience if self.trouble is None else 0.0)
        pause = _FIRST_PAUSE
        while True:
            try:
                with self._lock:
                    if self._closed:
                        raise LedgerUnavailableError("the ledger of jobs is closed because the service is shutting down")
                    try:
                        return attempt()
                    except sqlite3.DatabaseError as error:
                        failure = self._failure(error)
                        if _code(error) not in _CONNECTION_IS_GOOD:
                            self._open_again()
            except LedgerReplacedError as error:
                self._in_trouble(error)
                raise
            except LedgerUnavailableError as error:
                if self._closed:
                    raise
                failure = error
            if time.monotonic() + pause > deadline:
                self._in_trouble(failure)
                raise failure
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _transaction(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if _inode(self._file) != self._inode:
            raise LedgerReplacedError(
                f"the ledger of jobs ({self._file.name}) was moved, deleted or replaced while the service was running:"
                " put the file back, or restart the service"
            )
        if not all(self._file.with_name(f"{self._file.name}-{part}").exists() for part in ("wal", "shm")):
            self._leave_deleted_log()
        db = self._db
        db.execute("begin immediate")
        try:
            owner = db.execute("select token from owner").fetchone()
            if owner is None or owner[0] != self._token:
                raise LedgerReplacedError(
                    "another service has taken over the ledger of jobs: stop this service, or stop the other service and"
                    " restart this one"
                )
            result = work(db)
            db.execute("commit")
            return result
        except BaseException:
            _roll_back(db)
            raise

    def _failure(self, error: sqlite3.DatabaseError) -> LedgerError:
        """Return a LedgerError for an SQLite error.

        If the SQL statement or its values are wrong, raise the SQLite error unchanged.
        """
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.DataError | sqlite3.NotSupportedError):
            raise error
        self.failures += 1
        code = _code(error)
        if code in _DAMAGED:
            return LedgerDamagedError(damaged_ledger(self._file, str(error)))
        reason = _REASONS.get(code, "SQLite reports an error")
        return LedgerUnavailableError(f"the ledger of jobs ({self._file.name}) cannot currently be used: {reason} ({error})")

    def _in_trouble(self, failure: LedgerError) -> None:
        if type(self.trouble) is not type(failure):
            logger.error("%s", failure)
        if not isinstance(self.trouble, LedgerDamagedError):  # only `probe` clears damage, after it has checked all pages
            self.trouble = failure

    def _recovered(self) -> None:
        logger.info("the ledger of jobs can be used again")
        self.trouble = None

    def _open(self) -> sqlite3.Connection:
        """Open the first connection, create the tables, and record this service as the owner of the file."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                db = self._connect("rwc")
                try:
                    db.execute("pragma journal_mode = wal")
                    if db.execute("pragma user_version").fetchone()[0] > self._version:
                        raise UsageError(
                            f"{self._file} was written by a newer version of reflogp: upgrade reflogp, or use a "
                            "different state folder"
                        )
                    _check_pages(db)
                    db.executescript(f"{self._schema};{_OWNER}")
                    db.execute(f"pragma user_version = {self._version}")
                    db.execute("begin immediate")
                    db.execute("delete from owner")
                    db.execute("insert into owner values (?)", [self._token])
                    db.execute("commit")
                    return db
                except BaseException:
                    db.close()
                    raise
            except sqlite3.DatabaseError as error:
                code = _code(error)
                if code == sqlite3.SQLITE_NOTADB:
                    raise UsageError(
                        f"{self._file} is not a ledger of jobs ({error}): move the file away, or use a different state folder"
                    ) from error
                if code == sqlite3.SQLITE_CORRUPT:
                    raise UsageError(damaged_ledger(self._file, str(error))) from error
                if time.monotonic() + pause > deadline:
                    reason = _REASONS.get(code, "SQLite reports an error")
                    raise UsageError(f"the ledger of jobs {self._file} cannot be used: {reason} ({error})") from error
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._file.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        db.row_factory = sqlite3.Row
        try:
            db.execute("pragma synchronous = full")
        except BaseException:
            db.close()
            raise
        return db

    def _open_again(self) -> None:
        """Replace a failed connection with a new connection. If this is not possible, keep the failed connection."""
        try:
            db = self._connect("rw")
        except sqlite3.Error:
            return
        try:
            db.execute("select 1 from owner").fetchone()
        except sqlite3.Error:
            db.close()
            return
        old, self._db = self._db, db
        try:
            old.close()
        except sqlite3.Error as error:
            logger.warning("a connection to the ledger of jobs could not be closed: %s", error)

    def _leave_deleted_log(self) -> None:
        """Recover after the write-ahead log was deleted while the database was open.

        First write the content of the deleted log into the database, because a crash would lose this content. Then open a new
        connection, which creates a new write-ahead log.
        """
        logger.warning("the -wal or -shm file of %s was deleted while the service was running", self._file.name)
        self._db.execute("pragma wal_checkpoint(truncate)").fetchone()
        self._db.close()
        self._db = self._connect("rw")
        self._db.execute("select 1 from owner").fetchone()


def damaged_ledger(file: Path, what: str) -> str:
    """Return the error message for a damaged ledger. The message lists the recovery steps."""
    return (
        f"the ledger of jobs ({file.name}) is damaged ({what}): stop the service, copy {file.name} and {file.name}-wal to"
        f" another folder, and run `sqlite3 {file.name} .recover | sqlite3 recovered.sqlite` there; then, in the state folder,"
        f" replace {file.name} with recovered.sqlite, delete {file.name}-wal if it exists, and start the service; if recovery"
        f" fails, move {file.name} and {file.name}-wal out of the state folder, start the service, and submit the jobs again"
        " (sequences whose values are in the store are not scored again)"
    )


def _check_pages(db: sqlite3.Connection) -> None:
    """Check all pages of the file. Raise sqlite3.DatabaseError if a page is damaged."""
    said = db.execute("pragma quick_check(1)").fetchone()[0]
    if said != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {said.strip().splitlines()[-1]}")


def _code(error: sqlite3.Error) -> int:
    """Return the primary SQLite error code of an exception."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF
    return next((code for text, code in _CODES_BY_TEXT.items() if text in str(error)), sqlite3.SQLITE_ERROR)


def _inode(file: Path) -> tuple[int, int] | None:
    """Return the device number and inode number of a file, or None if the file does not exist."""
    try:
        about = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerUnavailableError(f"the ledger of jobs ({file.name}) cannot currently be used: {error.strerror}") from error
    return about.st_dev, about.st_ino


def _roll_back(db: sqlite3.Connection) -> None:
    try:
        if db.in_transaction:
            db.execute("rollback")
    except sqlite3.Error as error:
        logger.warning("a transaction in the ledger of jobs could not be rolled back: %s", error)
