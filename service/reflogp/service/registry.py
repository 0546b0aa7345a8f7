"""The references that a service answers for: their names, their tables, their latest snapshots.

Knows settings and the store. Loads no model. Safe to call from several threads. Called by the app's routes.
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
from reflogp.store.storage import is_local

_NO_KEYS = pa.array([], KEY_TYPE)


@dataclass(frozen=True)
class RegisteredReference:
    """A reference that can be asked for: by its id, and by a name where the settings give one."""

    name: str | None
    reference: Reference
    table: LogprobTable | None


class ReferenceRegistry:
    """References by name or id.

    Args:
        settings: names and the store. Named models are described at once: their weight files are hashed, which is remembered.

    Raises:
        UsageError, CheckpointError: a named model is not there or cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.store = Store(settings.store)
        self._named = {
            name: describe_reference(entry.model, entry.dtype, lm_head_dtype=entry.lm_head_dtype, revision=entry.revision)
            for name, entry in settings.references.items()
        }
        self._models = dict(settings.references)
        self._engines = {name: entry.engine for name, entry in settings.references.items()}
        self._tables: dict[str, LogprobTable] = {}
        self._lock = Lock()

    def list(self) -> list[RegisteredReference]:
        """Every named reference, and every other one that the store holds."""
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
        """The reference of a model that this service can load.

        Raises ReferenceNotFoundError for an unknown one, and for one that only the store knows.
        """
        by_id = {reference.reference_id: reference for reference in self._named.values()}
        found = self._named.get(name_or_id) or by_id.get(name_or_id)
        if found is None:
            raise ReferenceNotFoundError(
                f"this service has no model for reference {name_or_id!r}; it has: {', '.join(self._named) or 'none'}"
            )
        return found

    def tokenizer_digest(self, reference: Reference) -> str | None:
        """Digest of the tokenizer's files that a reference's folder has now; None where they cannot be read."""
        for name, entry in self._models.items():
            if self._named[name].reference_id == reference.reference_id:
                with suppress(ReflogpError), open_tokenizer(str(resolve_model(entry.model, entry.revision))) as files:
                    return files.digest
        return None

    def named(self) -> dict[str, Reference]:
        """References that have a name and a model, by name."""
        return dict(self._named)

    def takes_temperatures(self, reference_id: str) -> bool:
        """Whether a model's engine can divide the logits by something."""
        return any(
            reference.reference_id == reference_id and self._engines[name] == "torch" for name, reference in self._named.items()
        )

    def table(self, name_or_id: str) -> LogprobTable:
        """The table of a reference.

        Raises ReferenceNotFoundError for an unknown one, and for a named one that nothing was scored with.
        """
        named = self._named.get(name_or_id)
        key = named.reference_id if named else name_or_id
        with self._lock:
            if key not in self._tables or self._tables[key].log_is_damaged:  # it may have been mended since
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
        """Whether what is no store yet is none at all: a store that is not there, or is being made, is an empty one."""
        place = Path(self.store.uri)
        being_made = any((place / reference.reference_id).is_dir() for reference in self._named.values())
        return is_local(self.store.uri) and place.exists() and not being_made

    def snapshot(self, name_or_id: str, number: int | None) -> Snapshot:
        """A snapshot of a reference, its index read.

        Raises ReferenceNotFoundError, SnapshotNotFoundError, StoreUnavailableError.
        """
        table = self.table(name_or_id)
        with self._lock:  # a table is not made for several threads; a snapshot whose index is read is
            snapshot = table.snapshot(number)
            snapshot.stored_lengths(_NO_KEYS)
            return snapshot


def _is_id(text: str) -> bool:
    return len(text) == 32 and all(ch in "0123456789abcdef" for ch in text)
