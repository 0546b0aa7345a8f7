"""Every error that the store raises, as one tree.

ReflogpError                    base of all four packages: the command line prints it as one sentence
├── UsageError                  the call itself is wrong: a path, a name, a column, an option
└── StoreError                  the store or a checkpoint cannot serve the call
    ├── StoreFormatError        written by a newer reflogp
    ├── StoreUnavailableError   cannot be opened, read or written
    ├── ReferenceNotFoundError  the store holds nothing for this reference model
    ├── SnapshotNotFoundError   no such snapshot number
    └── CheckpointError         weight files that are missing, truncated or of a refused kind
"""


class ReflogpError(Exception):
    """Base of every error that reflogp raises on purpose."""


class UsageError(ReflogpError):
    """The caller named something that does not exist or does not fit."""


class StoreError(ReflogpError):
    """The store, or the checkpoint that names one of its tables, cannot serve the call."""


class StoreFormatError(StoreError):
    """The store was written by a newer reflogp than this one."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened, read or written."""


class ReferenceNotFoundError(StoreError):
    """The store holds no table for the reference id that was asked for."""


class SnapshotNotFoundError(StoreError):
    """The table has no snapshot of the number that was asked for."""


class CheckpointError(StoreError):
    """A model folder's weight files are missing, truncated or of a kind that is refused."""
