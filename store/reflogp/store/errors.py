"""All errors of the store, as one tree.

ReflogpError                    base of every error of all packages: the command line prints it as one sentence
├── UsageError                  the call itself is wrong: a path, a name, a column, an option
│   └── StoreNotFoundError      there is no store at a URI
└── StoreError                  the store or a checkpoint cannot serve the call
    ├── StoreFormatError        written by a newer reflogp
    ├── StoreUnavailableError   cannot be opened, read or written
    ├── DamagedStoreError       parts of it are damaged, and the call needs all of it
    ├── ReferenceNotFoundError  the store holds nothing for this reference model
    ├── SnapshotNotFoundError   no such snapshot number, or the snapshot was vacuumed
    ├── CheckpointError         weight files that are missing, truncated or of a refused kind
    └── FileChangedError        a file was replaced or written to while it was read
        └── ContentMismatchError   its content does not match an id or a digest

StoreDamageWarning (a UserWarning): a reader ignores a damaged part of the store, which the warning names.
"""


class ReflogpError(Exception):
    """Base of every error that reflogp raises on purpose."""


class UsageError(ReflogpError):
    """An argument of the call is wrong, such as a path, a name, a column or an option."""


class StoreNotFoundError(UsageError):
    """There is no store at a URI, for example because nothing was scored into it yet."""


class StoreError(ReflogpError):
    """The store, or a model's checkpoint, cannot serve the call."""


class StoreFormatError(StoreError):
    """The store was written by a newer reflogp than this one."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened, read or written."""


class DamagedStoreError(StoreError):
    """Parts of the store are damaged, and the call (a write, for example) needs the whole store."""


class StoreDamageWarning(UserWarning):
    """A part of the store is damaged; its rows count as missing, and the other rows can still be read."""


class ReferenceNotFoundError(StoreError):
    """The store holds no table for the requested reference id."""


class SnapshotNotFoundError(StoreError):
    """The table has no snapshot with the requested number, or that snapshot can no longer be read."""


class CheckpointError(StoreError):
    """A model folder's weight files are missing or truncated, or have a format that is refused."""


class FileChangedError(StoreError):
    """A file was replaced or written to while it was read; reading it again may help."""


class ContentMismatchError(FileChangedError):
    """A file's content does not match an id or a digest; reading it again does not help."""
