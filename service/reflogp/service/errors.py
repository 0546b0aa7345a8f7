"""Errors of the service.

ReflogpError (reflogp.store.errors)
└── LedgerError              the ledger of jobs cannot currently be used
    ├── LedgerUnavailableError  it is locked, or its disk is full or failing
    ├── LedgerDamagedError      some of its pages are damaged
    └── LedgerReplacedError     another service has taken it over, or its file is gone
"""

from __future__ import annotations

from reflogp.store.errors import ReflogpError


class LedgerError(ReflogpError):
    """The service's ledger of jobs cannot currently be used. The message says why."""


class LedgerUnavailableError(LedgerError):
    """The ledger is locked by another process, or its disk is full or failing. A failed call may succeed later."""


class LedgerDamagedError(LedgerError):
    """Some pages of the ledger's file are damaged."""


class LedgerReplacedError(LedgerError):
    """Another service has taken over the ledger, or the ledger's file was moved, deleted or replaced."""
