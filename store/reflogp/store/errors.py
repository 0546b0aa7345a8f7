"""The exception classes of the store.

ReflogpError                    base class of every error that reflogp raises deliberately; the CLI shows no traceback for it
├── UsageError                  an argument is invalid: a path, a name, a column, an option
│   └── StoreNotFoundError      there is no store at a URI
└── StoreError                  something is wrong with the store or with a checkpoint
    ├── StoreFormatError        the store was written by a newer version of reflogp
    ├── StoreUnavailableError   the store cannot be opened, read or written
    ├── DamagedStoreError       parts of the store are damaged, but the call needs the whole store
    ├── ReferenceNotFoundError  the store has no values for this reference model
    ├── SnapshotNotFoundError   there is no snapshot with this number, or it was vacuumed
    ├── CheckpointError         weight files are missing, truncated or in a format that is not accepted
    └── FileChangedError        a file was replaced or written to while it was being read
        └── ContentMismatchError   the file's content does not match the expected id or digest

StoreDamageWarning (a UserWarning): part of the store is damaged and was ignored. The message names that part.
"""


class ReflogpError(Exception):
    """Base class of every error that reflogp raises deliberately."""


class UsageError(ReflogpError):
    """An argument is invalid, for example a path, a name, a column or an option."""


class StoreNotFoundError(UsageError):
    """There is no store at the given URI, for example because no log-probs have been stored there yet."""


class StoreError(ReflogpError):
    """Something is wrong with the store or with a model's checkpoint."""


class StoreFormatError(StoreError):
    """The store was written by a newer version of reflogp."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened, read or written."""


class DamagedStoreError(StoreError):
    """Parts of the store are damaged, but the call (for example, a write) needs the whole store."""


class StoreDamageWarning(UserWarning):
    """Part of the store is damaged. The rows in that part count as missing; all other rows can still be read."""


class ReferenceNotFoundError(StoreError):
    """The store has no table for the requested reference id."""


class SnapshotNotFoundError(StoreError):
    """The table has no snapshot with the requested number, or that snapshot can no longer be read."""


class CheckpointError(StoreError):
    """A model folder's weight files are missing or truncated, or in a format that reflogp does not accept."""


class FileChangedError(StoreError):
    """A file was replaced or written to while it was being read; reading it again may help."""


class ContentMismatchError(FileChangedError):
    """A file's content does not match the expected id or digest; reading it again does not help."""
