"""The lock on the state folder, and the SQLite file of the ledger."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from threading import Lock

from reflogp.store import ReflogpError, UsageError

logger = logging.getLogger(__name__)

#: StateLock tries to get the lock every _PAUSE_SECONDS for up to _PATIENCE_SECONDS, because a service that was just killed may
#: still hold the lock.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 2.0, 0.1


class LedgerError(ReflogpError):
    """A read or write of the service's ledger of jobs failed.

    The file is locked by another process or damaged, its disk is full or failing, or the service is shutting down. Unless the
    file is damaged or the service is shutting down, the same call may succeed later.
    """


class StateLock:
    """An exclusive lock on a state folder. The kernel releases the lock when the process ends, even after a crash.

    A folder that does not exist is created. Only its owner can read it, because it may hold secrets (docs/security.md).

    Raises:
        UsageError: another service uses the folder, or the folder cannot be written or locked.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = (folder / "lock").open("a")
        except OSError as error:
            raise UsageError(f"the state folder {folder} cannot be written: {error.strerror}") from error
        stop = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > stop:
                    self.close()
                    raise UsageError(
                        f"another service uses the state folder {folder}: stop the other service, or set a different `state` "
                        "folder"
                    ) from None
            except OSError as error:
                raise UsageError(f"the state folder {folder} cannot be locked: {error.strerror}") from error
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        self._file.close()


class LedgerFile:
    """An SQLite file in WAL mode. Several threads can use a LedgerFile at the same time; writes do not hold up reads.

    Args:
        file: path of the SQLite file, which is created if it does not exist.
        schema: SQL statements that create the tables. The statements run at every start, so they must be safe to repeat.
        version: version of the schema; a file with a higher version is refused.
        patience_seconds: how long a call waits for a lock that another process holds. While `trouble` is set, no call waits.

    Raises:
        UsageError: the file was written by a newer version of reflogp, is damaged or not an SQLite database, or is locked.
    """

    def __init__(self, file: Path, schema: str, version: int, patience_seconds: float) -> None:
        self._file = file
        self._version = version
        self._patience = patience_seconds
        self._reading, self._writing = Lock(), Lock()
        self._is_closed = False
        self.trouble: LedgerError | None = None  # why the ledger cannot currently be used
        try:
            self._writer = self._connect()
            self._prepare(schema)
            self._reader = self._connect()
        except sqlite3.OperationalError as error:
            raise UsageError(f"the ledger of jobs ({file}) cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that must not write to the database. Raises LedgerError."""
        with self._reading, self._errors_noted():
            yield self._reader

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction, which is on disk after the `with` block.

        Raises LedgerError. The transaction may have reached the disk nevertheless, so it must be safe to repeat it.
        """
        with self._writing, self._errors_noted():
            self._writer.execute(f"pragma busy_timeout = {0 if self.trouble else int(1000 * self._patience)}")
            self._writer.execute("begin immediate")
            with self._writer:  # ends the transaction
                yield self._writer
        if self.trouble is not None:
            logger.info("the ledger of jobs can be used again")
            self.trouble = None

    def probe(self, db: sqlite3.Connection) -> None:
        """Write something that changes nothing, so that a full disk is noticed."""
        db.execute(f"pragma user_version = {self._version}")

    def close(self) -> None:
        with self._reading, self._writing:
            self._is_closed = True
            self._reader.close()
            self._writer.close()

    @contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """Turn SQLite's errors into LedgerError and note them in `trouble`, unless a statement or its values are wrong."""
        if self._is_closed:
            raise LedgerError("the ledger of jobs is closed because the service is shutting down")
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.NotSupportedError):
            raise
        except sqlite3.DatabaseError as error:
            failure = LedgerError(f"the ledger of jobs ({self._file.name}) cannot currently be used: {error}")
            if self.trouble is None:
                logger.error("%s", failure)
            self.trouble = failure
            raise failure from error

    def _damaged(self, what: str) -> UsageError:
        aside = quote(str(self._file.parent / "damaged"))
        return UsageError(
            f"the ledger of jobs ({self._file.name}) is damaged ({what}): move it away with `mkdir -p {aside} && "
            f"mv {quote(str(self._file))}* {aside}`, start the service, send the uploads again, and submit the jobs again "
            "(sequences whose values are in the store are not scored again)"
        )

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=self._patience, check_same_thread=False, isolation_level=None)
        db.row_factory = sqlite3.Row
        db.execute("pragma synchronous = full")
        db.execute("pragma journal_mode = wal")
        return db

    def _prepare(self, schema: str) -> None:
        db = self._writer
        if db.execute("pragma user_version").fetchone()[0] > self._version:
            raise UsageError(
                f"{self._file} was written by a newer version of reflogp: upgrade reflogp, or use a different state folder"
            )
        said = db.execute("pragma quick_check(1)").fetchone()[0]
        if said != "ok":
            raise self._damaged(said.strip().splitlines()[-1])
        db.executescript(schema)
        self.probe(db)
