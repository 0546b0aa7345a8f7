"""Look up a service's references by name or id, and return their tables and snapshots.

This module does not load any models. The registry is safe to use from several threads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pyarrow as pa

from reflogp.scoring.data.tokenizer_files import read_tokenizer_files
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.machine import gpus_in_a_child
from reflogp.service.problems import Problem
from reflogp.service.settings import ReferenceSettings, ServerSettings
from reflogp.service.threads import Threads
from reflogp.store import (
    DamagedStoreError,
    LogprobTable,
    Reference,
    ReferenceNotFoundError,
    ReflogpError,
    Snapshot,
    Store,
    StoreUnavailableError,
    UsageError,
)
from reflogp.store.keys import KEY_TYPE
from reflogp.store.reference import AUTO
from reflogp.store.storage import is_local, require_scheme
from reflogp.store.store import choose_reference

_logger = logging.getLogger(__name__)
_NO_KEYS = pa.array([], KEY_TYPE)
#: Number of calls that may read the store at the same time, and how many seconds a request waits for one.
_THREADS, _SECONDS = 16, 120.0
#: How long a check of the store may take, and the pause before the next one, in seconds.
_CHECK_SECONDS, _CHECK_PAUSE_SECONDS = 15.0, 3.0


@dataclass(frozen=True)
class RegisteredReference:
    """A reference from the settings or the store."""

    name: str | None  # in the settings; None if the reference is only in the store
    reference: Reference
    snapshot: int | None = None  # number of the table's latest snapshot; None if there is none
    shards: int = 0
    rows: int = 0
    bytes: int = 0
    problem: str | None = None  # why the table cannot be read


@dataclass(frozen=True)
class Served:
    """A reference in the settings, for which the service has a model."""

    reference: Reference
    settings: ReferenceSettings


def with_dtypes(settings: ServerSettings) -> ServerSettings:
    """Return the settings with a dtype in place of each dtype "auto", chosen as `reflogp score` chooses it."""
    chosen = {}
    for name, entry in settings.references.items():
        if entry.dtype != AUTO:
            continue
        devices = set(settings.devices)
        on_cpu = devices == {"cpu"} or (devices <= {"all", "auto"} and gpus_in_a_child() == 0)
        engine = EngineChoice(entry.engine, device="cpu" if on_cpu else "cuda")
        found, reason = choose_reference(
            Store(settings.store),
            entry.model,
            otherwise=engine.default_dtype(),
            lm_head_dtype=entry.lm_head_dtype,
            revision=entry.revision,
        )
        _logger.info("reference %s: %s", name, reason)
        of_head = None if found.lm_head_dtype == found.dtype else found.lm_head_dtype
        chosen[name] = entry.model_copy(update={"dtype": found.dtype, "lm_head_dtype": of_head})
    return settings.model_copy(update={"references": settings.references | chosen})


class ReferenceRegistry:
    """The references in a service's settings and store, accessible by name or id. The named models are hashed at once.

    Raises UsageError or CheckpointError: a named model cannot be used, or the store's URI has an unknown scheme.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.store = Store(settings.store)
        require_scheme(self.store.uri)
        self.named = {name: Served(entry.reference(), entry) for name, entry in settings.references.items()}
        self._tables: dict[tuple[str, int], LogprobTable] = {}  # by id or name of the reference, and top_k
        self._locks: dict[tuple[str, int], Lock] = {}
        #: Threads for all calls that read the store.
        self.threads = Threads("the store", _THREADS, _SECONDS)
        #: Why the store could not be read when it was last checked, "" if it could, or None before the first check.
        self.trouble: str | None = None
        #: Whether the store did not answer when it was last checked, or when an online request's sequences were last looked up.
        self.away = False

    async def watch(self) -> None:
        """Check every few seconds whether the store can be read, and set `trouble` and `away`. This coroutine never returns."""
        threads = Threads("the store", 1, _CHECK_SECONDS)
        while True:
            try:
                await threads.run(self._stored)
                self.trouble, self.away = "", False
            except Problem as problem:
                self.trouble, self.away = problem.detail, True
            except ReflogpError as error:
                self.trouble, self.away = str(error), isinstance(error, StoreUnavailableError)
            await asyncio.sleep(_CHECK_PAUSE_SECONDS)

    def _stored(self) -> dict[str, Reference]:
        try:
            return {reference.reference_id: reference for reference in self.store.references()}
        except UsageError:
            if self._is_something_else():
                raise
            return {}

    def list(self) -> list[RegisteredReference]:
        """Return all references that are named in the settings or have values in the store, sorted by id.

        A reference that the settings name twice is in the list twice.
        """
        stored = self._stored()
        listed: list[tuple[str | None, Reference]] = [(name, served.reference) for name, served in self.named.items()]
        named = {reference.reference_id for _, reference in listed}
        listed += [(None, reference) for key, reference in stored.items() if key not in named]
        listed.sort(key=lambda entry: entry[1].reference_id)
        return [self._with_size(name, reference, reference.reference_id in stored) for name, reference in listed]

    def _with_size(self, name: str | None, reference: Reference, is_stored: bool) -> RegisteredReference:
        if not is_stored:
            return RegisteredReference(name, reference)
        try:
            table = self.table(reference.reference_id)
            return RegisteredReference(name, reference, table.snapshot_number(), *table.totals())
        except DamagedStoreError as error:  # the other references can still be read
            return RegisteredReference(name, reference, problem=str(error))

    def served(self, name_or_id: str, reference_id: str | None = None) -> Served:
        """Return the reference in the settings that has the given name or id; for others, the service has no models.

        With `reference_id`, return the one of this name and id, or else the first one of this id: several references can have
        the same weights, and so the same id, with different tokenizers.

        Raises ReferenceNotFoundError.
        """
        found = self.named.get(name_or_id)
        if found is None or reference_id not in (None, found.reference.reference_id):
            key = reference_id or name_or_id
            found = next((served for served in self.named.values() if served.reference.reference_id == key), None)
        if found is None:
            raise ReferenceNotFoundError(
                f"this service has no model for reference {name_or_id!r}; references with a model: "
                f"{', '.join(self.named) or 'none'}"
            )
        return found

    def tokenizer_digest(self, name_or_id: str) -> str | None:
        """Return the digest of the current tokenizer files of a reference's model, or None if the files cannot be read."""
        entry = self.served(name_or_id).settings
        with suppress(ReflogpError):
            return read_tokenizer_files(entry.folder()).digest
        return None

    def table(self, name_or_id: str, top_k: int = 0) -> LogprobTable:
        """Return the table of a reference, or the one with the `top_k` most probable tokens of each position.

        Raises ReferenceNotFoundError for an unknown reference or one without stored values.
        """
        named = self.named[name_or_id].reference if name_or_id in self.named else None
        key = named.reference_id if named else name_or_id
        table = self._tables.get((key, top_k))
        if table is not None:
            return table
        if named is None and not _is_id(key):
            raise ReferenceNotFoundError(f"this service has no reference named {name_or_id!r}")
        try:
            opened = self.store[named or key] if not top_k else self._top_table(named or key, top_k)
        except UsageError as error:
            if self._is_something_else():
                raise
            raise ReferenceNotFoundError(f"no values are stored yet for reference {name_or_id!r}") from error
        return self._tables.setdefault((key, top_k), opened)  # another thread may have opened it meanwhile

    def _top_table(self, reference: Reference | str, top_k: int) -> LogprobTable:
        for table in self.store.tables(reference):
            if table.top_k == top_k:
                return table
        raise ReferenceNotFoundError(f"no values with {top_k} most probable tokens are stored yet")

    def _is_something_else(self) -> bool:
        """After UsageError: return True if the store's URI is an existing local path that is not a store.

        A path that does not exist counts as an empty store, as does a folder with an incomplete table, which is being created
        or was left by an interrupted command.
        """
        place = Path(self.store.uri)
        if not is_local(self.store.uri) or not place.exists():
            return False
        with suppress(OSError):  # the path is not a folder, or no longer exists
            return not any(_is_id(path.name) for path in place.iterdir())
        return True

    def snapshot(self, name_or_id: str, number: int | None, top_k: int = 0) -> Snapshot:
        """Return a snapshot of a reference's table; the latest if `number` is None. Several threads can use it.

        In addition to the errors of `table`, raises SnapshotNotFoundError and StoreUnavailableError.
        """
        table = self.table(name_or_id, top_k)
        key = table.reference.reference_id, table.top_k
        with self._locks.setdefault(key, Lock()):  # threads would each load the same index
            snapshot = table.snapshot(number)
            snapshot.stored_lengths(_NO_KEYS)
            return snapshot


def _is_id(text: str) -> bool:
    return len(text) == 32 and all(ch in "0123456789abcdef" for ch in text)
