"""Errors of the service.

ReflogpError (reflogp.store.errors)
└── LedgerError              the ledger of jobs cannot be used now
    ├── LedgerUnavailableError  it is locked, or its disk is full or fails
    ├── LedgerDamagedError      some of its pages are damaged
    └── LedgerReplacedError     another service has taken it over, or its file is gone
"""

from __future__ import annotations

from reflogp.store.errors import ReflogpError


class LedgerError(ReflogpError):
    """A service's ledger of jobs cannot be used now. The message says why, and what to do."""


class LedgerUnavailableError(LedgerError):
    """The ledger is locked by another process, or its disk is full or fails. A call that failed may succeed later."""


class LedgerDamagedError(LedgerError):
    """Pages of the ledger are damaged."""


class LedgerReplacedError(LedgerError):
    """Another service has taken the ledger over, or its file was moved, deleted or replaced."""
