"""Open a store: a folder or object store prefix with one table per reference model.

The layout is `<store>/<reference id>/{reference.json, logprobs/, top-K/}`: top-K is a table with the K most probable tokens of
each position, which exists if somebody has scored with them. `choose_reference` resolves `dtype="auto"` to the dtype in
which the model's log-probs in the store were computed.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow.fs as pafs

from reflogp.store import storage
from reflogp.store.digests import Progress
from reflogp.store.errors import (
    DamagedStoreError,
    ReferenceNotFoundError,
    StoreDamageWarning,
    StoreNotFoundError,
    UsageError,
)
from reflogp.store.reference import AUTO, REFERENCE_FILE, Reference, describe_all_numerics, describe_reference
from reflogp.store.schema import check_top_k
from reflogp.store.table import LogprobTable
from reflogp.store.texts import short_repr
from reflogp.store.top import ValuesTable

_TABLE_FOLDER = "logprobs"
_TOP_FOLDER = re.compile("top-([1-9][0-9]*)")


class Store:
    """A store of reference log-probs.

    Args:
        uri: a local folder, or a URI that begins with s3://, gs:// or az://.
        options: delta-rs storage options, in addition to the environment variables that delta-rs reads. For example,
            {"timeout": "5s"} is how long a try of a request to an object store may take.

    Methods raise StoreUnavailableError if the store cannot be read or written to, StoreFormatError if a newer version of
    reflogp wrote it, UsageError if the URI leads to something that is not a store, and DamagedStoreError if a reference.json or
    a log that they need is damaged.

    Examples:
        >>> from reflogp.store import Store
        >>> store = Store("./logps")
        >>> for reference in store.references():
        ...     print(reference.name, reference.dtype, store[reference].snapshot())
        sft-model bfloat16 Snapshot(... of reference ...: ... rows in ...)
    """

    def __init__(self, uri: str | os.PathLike[str], options: dict[str, str] | None = None) -> None:
        self.uri = storage.normalize_uri(uri)
        self._options = storage.with_defaults(self.uri, options)

    def __repr__(self) -> str:
        return short_repr("Store", self.uri)

    def references(self) -> list[Reference]:
        """Return the reference models in the store, ordered by id.

        A reference whose reference.json is damaged is skipped with a StoreDamageWarning. Raises StoreNotFoundError if there is
        no store at the URI.
        """
        self._refuse_what_is_no_store()
        if not storage.may_exist(self.uri):
            raise StoreNotFoundError(f"there is no store at {self.uri}: check the path, or create a store with `reflogp score`")
        with storage.translate_errors(f"the store {self.uri} cannot be read"):
            entries = self._entries()
            found, damaged = [], 0
            for folder in sorted(name for name, kind in entries.items() if kind == pafs.FileType.Directory):
                try:
                    if reference := self._read_reference(folder):
                        found.append(reference)
                except DamagedStoreError as error:  # the other references can still be read
                    warnings.warn(str(error), StoreDamageWarning, stacklevel=2)
                    damaged += 1
        if not entries and not storage.is_local(self.uri):
            raise StoreNotFoundError(f"there is no store at {self.uri}: check the path, or create a store with `reflogp score`")
        if entries and not found and not damaged:
            raise UsageError(f"{self.uri} is not a reflogp store: it contains no folder with a reference.json")
        return found

    def __getitem__(self, reference: Reference | str) -> LogprobTable:
        """Return the table of a reference in the store.

        Args:
            reference: the reference, as returned by `describe_reference`, its id (32 hex digits), or the name of its model, if
                the store has one reference with this name.

        Raises:
            StoreNotFoundError: there is no store at the URI.
            UsageError: several references have the name.
            ReferenceNotFoundError: the store has no table for this reference. The message lists the store's references; if the
                store has values of the same model in other dtypes, it names these dtypes.
        """
        self._refuse_what_is_no_store()
        reference_id = reference.reference_id if isinstance(reference, Reference) else reference
        with storage.translate_errors(f"the store {self.uri} cannot be read"):
            found = self._read_reference(reference_id) if re.fullmatch("[0-9a-f]{32}", reference_id) else None
        if found is None:
            others = self.references()
            named = [other for other in others if reference in (other, other.name)]
            if len(named) > 1:
                ids = ", ".join(f"{other.reference_id} ({other.dtypes()})" for other in named)
                raise UsageError(f"the store {self.uri} has several references named {reference}: pass one of the ids {ids}")
            if not named:
                raise self._not_found(reference, others)
            [found] = named
        return LogprobTable(self._table_uri(found.reference_id), found, self._options)

    def _not_found(self, reference: Reference | str, others: Sequence[Reference]) -> ReferenceNotFoundError:
        there = _named(others)
        if isinstance(reference, str):
            return ReferenceNotFoundError(f"the store {self.uri} has no reference {reference}; its references: {there}")
        wanted = (reference.weights, reference.config, reference.adapter)
        same = [other for other in others if (other.weights, other.config, other.adapter) == wanted]
        hint = ""
        if same:
            dtypes = " and in ".join(other.dtypes() for other in same)
            hint = (
                f"; the store has values of the same model in {dtypes} (to use them, set --dtype, or dtype= in Python)"
                f"{_logits_option(same)}"
            )
        return ReferenceNotFoundError(
            f"the store {self.uri} has no values of {reference.name} in {reference.dtypes()} (reference "
            f"{reference.reference_id}); its references: {there}{hint}"
        )

    def held(self, candidates: Sequence[Reference]) -> list[Reference]:
        """Return the references in `candidates` for which the store has a table; none if there is no store at the URI."""
        self._refuse_what_is_no_store()
        if not storage.may_exist(self.uri):
            return []
        with storage.translate_errors(f"the store {self.uri} cannot be read"):
            entries = self._entries()
            there = [reference for reference in candidates if reference.reference_id in entries]
            return [reference for reference in there if self._read_reference(reference.reference_id) is not None]

    def create_table(self, reference: Reference, top_k: int = 0) -> LogprobTable:
        """Return the table of `reference`. Create the table if it does not exist, and check that it can be written to.

        Each position of the table's rows has `top_k` most probable tokens; 0 is the table without them.
        """
        self._refuse_what_is_no_store()
        folder = f"{self.uri}/{reference.reference_id}"
        uri = self._table_uri(reference.reference_id, top_k)
        storage.make_folder(uri)
        with storage.translate_errors(f"the store {self.uri} cannot be written"):
            known = self._read_reference(reference.reference_id)
            try:
                table = LogprobTable(uri, known or reference, self._options)
            except ReferenceNotFoundError:
                LogprobTable.create(uri, self._options, top_k)
                table = LogprobTable(uri, known or reference, self._options)
            table.check_writable()
            if known is None:  # written last, so that every folder with a reference.json has a table
                filesystem = storage.open_filesystem(folder, self._options)
                storage.write_file(filesystem, REFERENCE_FILE, reference.to_json().encode())
        return table

    def values_table(self, reference: Reference, top_k: int = 0) -> ValuesTable:
        """Return the tables to score into, with the `top_k` most probable tokens of each position; see `create_table`."""
        check_top_k(top_k)
        base = self.create_table(reference)
        if not top_k:
            return ValuesTable(base)
        return ValuesTable(base, self.create_table(reference, top_k), self._top_tables(base.reference, top_k + 1))

    def top_table(self, reference: Reference | str, top_k: int) -> LogprobTable:
        """Return the first of `top_tables`."""
        return self.top_tables(reference, top_k)[0]

    def top_tables(self, reference: Reference | str, top_k: int) -> list[LogprobTable]:
        """Return the reference's tables with at least the `top_k` most probable tokens of each position, by ascending number.

        Raises ReferenceNotFoundError if the store has no such table, and the errors of `store[reference]`.
        """
        check_top_k(top_k)
        known = self[reference].reference
        if found := self._top_tables(known, top_k):
            return found
        there = ", ".join(str(table.top_k) for table in self._top_tables(known)) or "none"
        raise ReferenceNotFoundError(
            f"the store {self.uri} has no values of reference {known.name} with the {top_k} most probable tokens (it has: "
            f"{there}): score with --top-k {top_k}"
        )

    def tables(self, reference: Reference | str) -> list[LogprobTable]:
        """Return all tables of a reference, by ascending `top_k`: the first is `store[reference]`."""
        base = self[reference]
        return [base, *self._top_tables(base.reference)]

    def _top_tables(self, reference: Reference, least: int = 1) -> list[LogprobTable]:
        folder = f"{self.uri}/{reference.reference_id}"
        with storage.translate_errors(f"the store {self.uri} cannot be read"):
            filesystem = storage.open_filesystem(folder, self._options)
            names = [entry.base_name for entry in filesystem.get_file_info(pafs.FileSelector(""))]
        found = sorted(int(match[1]) for name in names if (match := _TOP_FOLDER.fullmatch(name)))
        tables = []
        for uri in (self._table_uri(reference.reference_id, k) for k in found if k >= least):
            with suppress(ReferenceNotFoundError):  # the folder of a table that is being created, or whose creation was killed
                tables.append(LogprobTable(uri, reference, self._options))
        return tables

    def _refuse_what_is_no_store(self) -> None:
        """Raise UsageError if the URI leads to a file, a model folder or a Delta table on this machine."""
        if storage.is_local(self.uri):
            if Path(self.uri).is_file():
                raise UsageError(f"{self.uri} is a file, but a store is a folder")
            if Path(self.uri, "config.json").exists():
                raise UsageError(f"{self.uri} is a model folder; choose a different folder for the store")
            if Path(self.uri, "_delta_log").exists():
                raise UsageError(f"{self.uri} is a Delta table, not a reflogp store; nothing was read or written")

    def _entries(self) -> dict[str, pafs.FileType]:
        """Return a dict from the name of each entry in the store's folder to its type, or {} if the folder does not exist."""
        root = storage.open_filesystem(self.uri, self._options)
        return {entry.base_name: entry.type for entry in root.get_file_info(pafs.FileSelector("", allow_not_found=True))}

    def _table_uri(self, reference_id: str, top_k: int = 0) -> str:
        return f"{self.uri}/{reference_id}/{f'top-{top_k}' if top_k else _TABLE_FOLDER}"

    def _read_reference(self, reference_id: str) -> Reference | None:
        if storage.is_local(self.uri) and not Path(self.uri, reference_id).is_dir():
            return None
        filesystem = storage.open_filesystem(f"{self.uri}/{reference_id}", self._options)
        data = storage.read_file(filesystem, REFERENCE_FILE)
        if data is None:
            return None
        try:
            reference = Reference.from_json(data.decode())
            if reference.reference_id != reference_id:
                raise ValueError(f"its reference_id is {reference.reference_id}")
        except ValueError as error:
            raise DamagedStoreError(
                f"{self.uri}/{reference_id}/{REFERENCE_FILE} is damaged ({error}). Delete it; the next run that scores with "
                "this model writes it again"
            ) from error
        return reference


def choose_reference(
    store: Store,
    model: str,
    dtype: str = AUTO,
    *,
    otherwise: str | None = None,
    lm_head_dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[Reference, str]:
    """Choose a model's dtype: `dtype` itself or, if it is "auto", the dtype of the model's log-probs in the store.

    Args:
        otherwise: dtype to use if `dtype` is "auto" and the store has no log-probs of the model, or None for an error.
        lm_head_dtype: "float32" for logits in float32, or None for logits in the model's dtype. If `dtype` is "auto", None
            also allows a reference in the store that has logits in float32.
        model, dtype, revision, progress: as in `describe_reference`.

    Returns:
        (reference, reason). The reason is a sentence without a full stop, or "" if the dtype was given.

    Raises:
        StoreNotFoundError: `dtype` is "auto", `otherwise` is None, and there is no store.
        ReferenceNotFoundError: `dtype` is "auto", `otherwise` is None, and the store has no log-probs of the model.
        UsageError: `dtype` is "auto", and the store has log-probs of the model that were computed in several dtypes.
    """
    if dtype != AUTO:
        return describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=progress), ""
    described = describe_all_numerics(model, lm_head_dtype=lm_head_dtype, revision=revision, progress=progress)
    held = store.held(described)
    if len(held) == 1:
        return held[0], f"dtype {held[0].dtypes()}: {store.uri} has values of this model in this dtype"
    if held:
        raise UsageError(
            f"{store.uri} has values of {model} in {' and in '.join(reference.dtypes() for reference in held)}: say which one "
            f"to use (--dtype, or dtype= in Python){_logits_option(held)}"
        )
    if otherwise is None:
        there = _named(store.references())
        raise ReferenceNotFoundError(f"the store {store.uri} has no values of {described[0].name}; its references: {there}")
    found = next(one for one in described if one.dtype == otherwise and (lm_head_dtype or one.lm_head_dtype == otherwise))
    return found, f"dtype {found.dtypes()}: the default, because {store.uri} has no values of this model yet"


def _named(references: Sequence[Reference]) -> str:
    return ", ".join(f"{one.reference_id} ({one.name}, {one.dtype})" for one in references) or "none"


def _logits_option(held: Sequence[Reference]) -> str:
    if all(reference.lm_head_dtype == reference.dtype for reference in held):
        return ""
    return "; for logits in float32, add --lm-head-dtype float32, or lm_head_dtype='float32'"
