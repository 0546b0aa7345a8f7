"""Errors of the service.

ReflogpError (reflogp.store.errors)
└── LedgerError              a read or write of the ledger of jobs failed
    ├── LedgerUnavailableError  the ledger is locked or closed, or its disk is full or failing
    └── LedgerDamagedError      some pages of the ledger's file are damaged
"""

from __future__ import annotations

from reflogp.store.errors import ReflogpError


class LedgerError(ReflogpError):
    """A read or write of the service's ledger of jobs failed. The message says why."""


class LedgerUnavailableError(LedgerError):
    """The ledger is locked by another process, its disk is full or failing, or the service is shutting down.

    Unless the service is shutting down, the same call may succeed later.
    """


class LedgerDamagedError(LedgerError):
    """Some pages of the ledger's file are damaged. The service stops."""
