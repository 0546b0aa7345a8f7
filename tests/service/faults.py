"""Failures of SQLite on demand, at the statement where they are wanted."""

import sqlite3
import threading
from collections import Counter
from contextlib import contextmanager

#: What SQLite says, and the code that goes with it.
ERRORS = {
    "locked": ("database is locked", sqlite3.SQLITE_BUSY),
    "full": ("database or disk is full", sqlite3.SQLITE_FULL),
    "disk": ("disk I/O error", sqlite3.SQLITE_IOERR),
    "cannot open": ("unable to open database file", sqlite3.SQLITE_CANTOPEN),
}


def error_of(kind: str) -> sqlite3.Error:
    text, code = ERRORS[kind]
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class Faults:
    """Which calls of the ledger fail.

    Attributes:
        statements: how many statements each call (by the method's name) has run.
        failed: how many of them were made to fail.
        commits: how many transactions were committed.
    """

    def __init__(self) -> None:
        self.statements: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.commits: Counter[str] = Counter()
        self._site = threading.local()
        self._lock = threading.Lock()
        self._plan: dict[str, list] = {}

    def fail(self, site: str, kind: str, times: int = 1, after: int = 0, committed: bool = False) -> None:
        """Make statements of a method fail.

        Args:
            times: so many, one after the other.
            after: so many good ones.
            committed: fail the commit, but after it was done.
        """
        with self._lock:
            self._plan[site] = [kind, times, after, committed]

    def clear(self) -> None:
        with self._lock:
            self._plan = {}

    def armed(self) -> set[str]:
        """Methods that are still to fail."""
        return set(self._plan)

    @contextmanager
    def at(self, site: str):
        before = getattr(self._site, "name", None)
        self._site.name = before or site
        try:
            yield
        finally:
            self._site.name = before

    def check(self, statement: str, done: bool) -> None:
        """Raise where the present statement is to fail; `done`: it has been run."""
        site = getattr(self._site, "name", None)
        if site is None or statement.startswith(("pragma", "rollback")):
            return
        with self._lock:
            self.statements[site] += not done
            self.commits[site] += statement == "commit" and done
            plan = self._plan.get(site)
            if plan is None or plan[3] is not done or (done and statement != "commit"):
                return
            if plan[2]:
                plan[2] -= 1
                return
            plan[1] -= 1
            if plan[1] <= 0:
                del self._plan[site]
            self.failed[site] += 1
            kind = plan[0]
        raise error_of(kind)


def install(monkeypatch, ledger_class) -> Faults:
    """Put faults under every public method of a ledger that is made from now on."""
    faults = Faults()

    class Connection(sqlite3.Connection):
        def execute(self, statement, *values):
            faults.check(statement, done=False)
            cursor = super().execute(statement, *values)
            faults.check(statement, done=True)
            return cursor

        def executemany(self, statement, *values):
            faults.check(statement, done=False)
            return super().executemany(statement, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{"factory": Connection, **k}))
    for name in call_sites(ledger_class):
        method = getattr(ledger_class, name)

        def watched(self, *arguments, _method=method, _name=name, **named):
            with faults.at(_name):
                return _method(self, *arguments, **named)

        monkeypatch.setattr(ledger_class, name, watched)
    return faults


def call_sites(ledger_class) -> list[str]:
    """Public methods that reach the file."""
    return [
        name
        for name, value in vars(ledger_class).items()
        if callable(value) and not name.startswith("_") and name not in ("close", "probe", "progressed")
    ]
