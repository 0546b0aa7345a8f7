"""Every error that the store raises, as one tree.

ReflogpError                    base of all four packages: the command line prints it as one sentence
├── UsageError                  the call itself is wrong: a path, a name, a column, an option
│   └── StoreNotFoundError      there is no store at a URI
└── StoreError                  the store or a checkpoint cannot serve the call
    ├── StoreFormatError        written by a newer reflogp
    ├── StoreUnavailableError   cannot be opened, read or written
    ├── DamagedStoreError       parts of it are damaged, and what was asked needs it whole
    ├── ReferenceNotFoundError  the store holds nothing for this reference model
    ├── SnapshotNotFoundError   no such snapshot number
    ├── CheckpointError         weight files that are missing, truncated or of a refused kind
    └── FileChangedError        a file was replaced or written to while it was read
        └── OtherContentError   its content is not what an id or a digest names

StoreDamageWarning (a UserWarning): a reader goes on without a damaged part, and says which.
"""


class ReflogpError(Exception):
    """Base of every error that reflogp raises on purpose."""


class UsageError(ReflogpError):
    """The caller named something that does not exist or does not fit."""


class StoreNotFoundError(UsageError):
    """There is no store at a URI, which is so before anything was scored into it."""


class StoreError(ReflogpError):
    """The store, or the checkpoint that names one of its tables, cannot serve the call."""


class StoreFormatError(StoreError):
    """The store was written by a newer reflogp than this one."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened, read or written."""


class DamagedStoreError(StoreError):
    """Parts of the store are damaged, and what was asked needs it whole (writing, for one)."""


class StoreDamageWarning(UserWarning):
    """A part of the store is damaged; what it held is served as missing, the rest as ever."""


class ReferenceNotFoundError(StoreError):
    """The store holds no table for the reference id that was asked for."""


class SnapshotNotFoundError(StoreError):
    """The table has no snapshot of the number that was asked for."""


class CheckpointError(StoreError):
    """A model folder's weight files are missing, truncated or of a kind that is refused."""


class FileChangedError(StoreError):
    """A file was replaced or written to while it was read; reading it again may help."""


class OtherContentError(FileChangedError):
    """A file's content is not what an id or a digest names; reading it again does not help."""
