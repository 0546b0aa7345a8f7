"""Look up a service's references by name or id, with their tables and snapshots.

Loads no model. Safe to use from several threads.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pyarrow as pa

from reflogp.scoring.data.tokenizer_files import open_tokenizer
from reflogp.service.settings import ServerSettings
from reflogp.store import (
    LogprobTable,
    Reference,
    ReferenceNotFoundError,
    ReflogpError,
    Snapshot,
    Store,
    UsageError,
    describe_reference,
    resolve_model,
)
from reflogp.store.keys import KEY_TYPE
from reflogp.store.storage import is_local, require_scheme

_NO_KEYS = pa.array([], KEY_TYPE)


@dataclass(frozen=True)
class RegisteredReference:
    """A reference that requests can name by its id, or by its name if the settings give one.

    Attributes:
        name: name in the settings, or None.
        table: table of the store, or None if the store has no values of this reference.
    """

    name: str | None
    reference: Reference
    table: LogprobTable | None


class ReferenceRegistry:
    """References by name or id.

    Args:
        settings: names of models, and the store. Named models are hashed at once; hashes of weight files are cached.

    Raises:
        UsageError, CheckpointError: a named model does not exist or cannot be used, or the store's URI has an unknown scheme.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.store = Store(settings.store)
        require_scheme(self.store.uri)
        self._named = {
            name: describe_reference(entry.model, entry.dtype, lm_head_dtype=entry.lm_head_dtype, revision=entry.revision)
            for name, entry in settings.references.items()
        }
        self._models = dict(settings.references)
        self._engines = {name: entry.engine for name, entry in settings.references.items()}
        self._tables: dict[str, LogprobTable] = {}
        self._lock = Lock()

    def list(self) -> list[RegisteredReference]:
        """Return all named references and all other references of the store, sorted by id.

        Raises UsageError if the store's path holds something that is not a store.
        """
        names = {reference.reference_id: name for name, reference in self._named.items()}
        try:
            stored = {reference.reference_id: reference for reference in self.store.references()}
        except UsageError:
            if self._is_something_else():
                raise
            stored = {}
        listed = {**{r.reference_id: r for r in self._named.values()}, **stored}
        return [
            RegisteredReference(names.get(key), reference, self.table(key) if key in stored else None)
            for key, reference in sorted(listed.items())
        ]

    def model_of(self, name_or_id: str) -> Reference:
        """Return the reference of a model that this service can load.

        Raises ReferenceNotFoundError for an unknown reference, and for a reference that only the store has.
        """
        by_id = {reference.reference_id: reference for reference in self._named.values()}
        found = self._named.get(name_or_id) or by_id.get(name_or_id)
        if found is None:
            raise ReferenceNotFoundError(
                f"this service has no model for reference {name_or_id!r}; it has: {', '.join(self._named) or 'none'}"
            )
        return found

    def tokenizer_digest(self, reference: Reference) -> str | None:
        """Return the digest of the tokenizer files in a reference's folder now, or None if they cannot be read."""
        for name, entry in self._models.items():
            if self._named[name].reference_id == reference.reference_id:
                with suppress(ReflogpError), open_tokenizer(str(resolve_model(entry.model, entry.revision))) as files:
                    return files.digest
        return None

    def named(self) -> dict[str, Reference]:
        """Return name -> reference, for the references that have a name and a model."""
        return dict(self._named)

    def supports_temperature(self, reference_id: str) -> bool:
        """Return whether a reference's engine supports temperatures other than 1, which divide the logits."""
        return any(
            reference.reference_id == reference_id and self._engines[name] == "torch" for name, reference in self._named.items()
        )

    def table(self, name_or_id: str) -> LogprobTable:
        """Return the table of a reference.

        Raises ReferenceNotFoundError for an unknown reference and for a reference without stored values, UsageError if the path
        of the store holds something that is not a store.
        """
        named = self._named.get(name_or_id)
        key = named.reference_id if named else name_or_id
        with self._lock:
            if key not in self._tables or self._tables[key].log_is_damaged:  # the log may have been repaired since
                if named is None and not _is_id(key):
                    raise ReferenceNotFoundError(f"this service has no reference named {name_or_id!r}")
                try:
                    self._tables[key] = self.store.table_of(named) if named else self.store.table(key)
                except UsageError as error:
                    if self._is_something_else():
                        raise
                    raise ReferenceNotFoundError(f"nothing was scored with {name_or_id!r} yet") from error
            return self._tables[key]

    def _is_something_else(self) -> bool:
        """Return whether the store's path holds something that is not a store.

        These count as an empty store: a path that does not exist, and a folder with an incomplete table, which is being created
        or was left by an interrupted command (for example on a full disk).
        """
        place = Path(self.store.uri)
        return is_local(self.store.uri) and place.exists() and not any(map(_is_id, _names(place)))

    def snapshot(self, name_or_id: str, number: int | None) -> Snapshot:
        """Return a snapshot of a reference, with its index loaded.

        Args:
            number: number of the snapshot; None for the latest.

        Raises ReferenceNotFoundError, SnapshotNotFoundError, StoreUnavailableError.
        """
        table = self.table(name_or_id)
        with self._lock:  # a table is not safe to use from several threads; a snapshot with a loaded index is
            snapshot = table.snapshot(number)
            snapshot.stored_lengths(_NO_KEYS)
            return snapshot


def _is_id(text: str) -> bool:
    return len(text) == 32 and all(ch in "0123456789abcdef" for ch in text)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:  # a file, or gone
        return []
