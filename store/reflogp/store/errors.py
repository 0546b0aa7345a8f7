"""The exception classes of the store."""


class ReflogpError(Exception):
    """Base class of every error that reflogp raises deliberately."""


class UsageError(ReflogpError):
    """An argument is invalid, for example a path, a name, a column or an option."""


class StoreNotFoundError(UsageError):
    """There is no store at the given URI, for example because no log-probs have been stored there yet."""


class StoreError(ReflogpError):
    """Something is wrong with the store, a model's checkpoint or another file that reflogp reads."""


class StoreFormatError(StoreError):
    """The store was written by a newer version of reflogp."""


class StoreUnavailableError(StoreError):
    """The store or the Hugging Face Hub cannot be reached, read or written to."""


class DamagedStoreError(StoreError):
    """A part of the store that the call needs is damaged. A write, for example, needs the reference's whole table."""


class StoreDamageWarning(UserWarning):
    """A reference.json is damaged, so its reference is not listed; the other references can still be read."""


class ReferenceNotFoundError(StoreError):
    """The store or service has no values for the requested reference model."""


class SnapshotNotFoundError(StoreError):
    """The table has no snapshot with the requested number, or the snapshot can no longer be read."""


class CheckpointError(StoreError):
    """A model's weights are missing, or a file of the model is damaged or in a format that reflogp does not accept."""


class FileChangedError(StoreError):
    """A file was replaced or written to while it was being read; reading it again may help."""


class ContentMismatchError(FileChangedError):
    """A file's content does not match the expected id or digest; reading it again does not help."""
