"""Look up reference log-probs in a store's snapshot, in a service, or in a file that `reflogp join` or a service's job
wrote."""

from __future__ import annotations

import functools
import json
import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import transformers
from transformers import CONFIG_MAPPING

from reflogp.client import Client, Job, Lookup, ReferenceInfo
from reflogp.store import (
    Reference,
    ReferenceNotFoundError,
    ReflogpError,
    Snapshot,
    Store,
    UsageError,
    read_checkpoint,
    resolve_model,
)
from reflogp.store.commands import ScoreArguments
from reflogp.store.joins import PAIR_COLUMNS, Asked, FoundLogps, Join, answer, check_ld_alpha
from reflogp.store.windows import TrainerSettings

#: Maximum number of keys per lookup over HTTP. The response has 12 bytes per key.
_KEYS_AT_ONCE = 1_000_000
#: Maximum number of sequences whose token values are requested from a service at once. The response has 80 MB if each sequence
#: has 2,000 tokens.
_VALUES_AT_ONCE = 10_000


@dataclass(frozen=True)
class Where:
    """The origin of reference values, described precisely enough to request the same values again.

    Attributes:
        store: the store's URI, the service's URL, or the file's path.
        reference_id: the reference model's id.
        reference_dtype: dtype in which the reference model computed the values.
        snapshot: number of the snapshot. In a service, 0 means that nothing has been scored yet.
    """

    store: str
    reference_id: str
    reference_dtype: str
    snapshot: int


class Values(Protocol):
    """The reference log-probs in one snapshot of a store or service, or in a file."""

    where: Where

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        """Look up the keys of a dataset's rows, and return a Join with the sums of the rows' log-probs.

        Raises UsageError if the source is a file that was written for other settings or another type of dataset.
        """

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        """Return one list<float32> per key, with the log-probs of the completion's tokens.

        If a key's values are missing or damaged, null takes the place of its list.

        Raises UsageError if only sums are available.
        """

    def command(self, model: str | None, data: str, settings: TrainerSettings) -> str:
        """Return the command that scores `data` and adds the results to this source, or an empty string if the source is a
        file.

        The command names the reference model as given by `model` or, if `model` is None, by the model's name in the store. For
        a service, `model` is ignored, and the command contains the service's name for the reference.
        """


def command_to_score(model: str, reference: Reference, data: str, store: str, settings: TrainerSettings) -> str:
    """Return the `reflogp score` command for a dataset, with every option that changes the reference's values."""
    return ScoreArguments(
        model,
        data,
        store,
        reference.dtype,
        TrainerSettings(**settings.scored_apart),
        lm_head_dtype=reference.lm_head_dtype if reference.lm_head_dtype != reference.dtype else None,
        trust_remote_code=needs_remote_code(model),
    ).command()


def needs_remote_code(model: str) -> bool:
    """Return True if transformers needs code from the checkpoint to load a model or its tokenizer. Return False if the
    checkpoint cannot be found or read."""
    try:
        folder = resolve_model(model, weights=False)
        if not (folder / "config.json").is_file():
            folder = read_checkpoint(folder).folder
    except ReflogpError:  # the checkpoint cannot be found or read
        return False
    config, tokenizer = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    brings_model = "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING
    own_class = str(tokenizer.get("tokenizer_class") or "")
    return brings_model or ("auto_map" in tokenizer and not hasattr(transformers, own_class))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class StoreValues:
    """The reference log-probs in a store's table."""

    def __init__(self, store: str, reference: Reference, snapshot: Snapshot) -> None:
        self.where = Where(store, snapshot.reference_id, reference.dtype, snapshot.number)
        self._reference, self._lookup = reference, snapshot

    @classmethod
    def open(cls, location: str, reference: Reference | str, snapshot: int | None) -> StoreValues:
        store = Store(location)
        table = store.table(reference) if isinstance(reference, str) else store.table_of(reference)
        return cls(store.uri, table.reference, table.snapshot(snapshot))

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        return answer(asked, self._lookup, settings.ld_alpha)

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        return self._lookup.find(keys).token_lists()

    def command(self, model: str | None, data: str, settings: TrainerSettings) -> str:
        return command_to_score(model or self._reference.name, self._reference, data, self.where.store, settings)


class ServiceValues:
    """The reference log-probs in a running service, which can also score missing rows."""

    def __init__(self, url: str, token: str | None, reference: ReferenceInfo, snapshot: int) -> None:
        self.where = Where(url, reference.reference_id, reference.dtype, snapshot)
        self.reference = reference
        self._token = token
        self._clients: dict[int, Client] = {}

    @property
    def client(self) -> Client:
        """Return this process's client. A data loader's worker needs its own client, because a forked process cannot use its
        parent's connections."""
        if os.getpid() not in self._clients:
            self._clients = {os.getpid(): Client(self.where.store, self._token)}
        return self._clients[os.getpid()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    @classmethod
    def open(
        cls, url: str, token: str | None, reference: str | None, snapshot: int | None, described: Reference | None
    ) -> ServiceValues:
        url = url.rstrip("/")
        with Client(url, token) as client:
            known = client.references()
        for found in known:
            if reference in (found.name, found.reference_id):
                if described is not None and found.reference_id != described.reference_id:
                    raise UsageError(
                        f"{reference} in {url} has the reference id {found.reference_id}, but the id of the model passed as "
                        f"model= is {described.reference_id}: omit model= or reference="
                    )
                return cls(url, token, found, (found.snapshot or 0) if snapshot is None else snapshot)
        names = ", ".join(f"{found.name or '-'} ({found.reference_id}, {found.dtype})" for found in known) or "none"
        raise ReferenceNotFoundError(f"{url} has no reference {reference}; its references: {names}")

    @staticmethod
    def held(url: str, token: str | None, name: str | None, candidates: list[Reference]) -> list[Reference]:
        """Return the references in `candidates` that the service at `url` serves. If `name` is given, return only the reference
        with this name or id."""
        with Client(url.rstrip("/"), token) as client:
            served = {known.reference_id for known in client.references() if name in (None, known.name, known.reference_id)}
        return [reference for reference in candidates if reference.reference_id in served]

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        return answer(asked, self, settings.ld_alpha)

    def find(self, keys: pa.Array) -> FoundLogps:
        lengths = np.full(len(keys), -1, np.int32)
        sums = np.full(len(keys), np.nan)
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = slice(start, start + _KEYS_AT_ONCE)
            if self.where.snapshot:  # snapshot 0: nothing has been scored yet
                found = self.look_up(keys[part])
                lengths[part], sums[part] = found.lengths, found.sums
        return _FoundByService(self, keys, lengths, sums)

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        parts = [pa.array([], pa.list_(pa.float32()))]
        for start in range(0, len(keys), _VALUES_AT_ONCE):
            found = self.look_up(keys[start : start + _VALUES_AT_ONCE], values=True)
            parts.append(pa.array(found.token_logps, pa.list_(pa.float32())))
        return pa.concat_arrays(parts)

    def look_up(self, keys: pa.Array, values: bool = False) -> Lookup:
        return self.client.lookup(self.where.reference_id, keys, values=values, snapshot=self.where.snapshot)

    def command(self, model: str | None, data: str, settings: TrainerSettings) -> str:
        reference = self.reference.name or self.reference.reference_id
        words = ["reflogp", "submit", self.where.store, data, "--reference", reference, "--format", "tokens", "--watch"]
        for name, value in settings.scored_apart.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def score(
        self, rows: pa.Table, settings: TrainerSettings, on_change: Callable[[Job], None], timeout: float | None
    ) -> ServiceValues:
        """Have the service score tokenized rows in a job, and wait for the job to finish. Return a ServiceValues for the
        snapshot with the job's results.

        Args:
            rows: table of token ids, with prompt_ids and the completion columns.
            settings: the trainer's settings. The job uses those that determine which sequences are scored.
            on_change: function that is called with the job whenever its state changes.
            timeout: maximum number of seconds to wait for the job, or None for no limit.

        Raises:
            DeadlineExceededError: the job did not finish in time; the service continues the job.
            JobFailedError: the job failed or was cancelled.
            ServiceUnreachableError: the service remained unreachable while the client retried.
        """
        with tempfile.TemporaryDirectory(prefix="reflogp-") as folder:
            file = Path(folder) / "missing.parquet"
            pq.write_table(rows, file)
            job = self.client.submit(
                file,
                self.reference.name or self.reference.reference_id,
                format="tokens",
                title="missing rows of a training run",
                **settings.scored_apart,
            )
        self.client.watch(job.id, on_change, timeout=timeout, check=True)
        [found] = [found for found in self.client.references() if found.reference_id == self.reference.reference_id]
        return ServiceValues(self.where.store, self._token, found, found.snapshot or 0)


class _FoundByService:
    """The sums of log-probs that a service returned for the given keys. If only the first tokens of a completion count, this
    class requests the log-probs of the completion's individual tokens and sums those of the first tokens."""

    def __init__(
        self, values: ServiceValues, keys: pa.Array, lengths: npt.NDArray[np.int32], sums: npt.NDArray[np.float64]
    ) -> None:
        self.lengths = lengths
        self._values, self._keys, self._sums = values, keys, sums

    def prefix_sums(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        sums = np.where(self.lengths == lengths, self._sums, np.nan)
        sums[lengths == 0] = 0.0
        wanted = np.flatnonzero((self.lengths > lengths) & (lengths > 0))
        for start in range(0, len(wanted), _VALUES_AT_ONCE):
            places = wanted[start : start + _VALUES_AT_ONCE]
            found = self._values.look_up(self._keys.take(pa.array(places)), values=True)
            for place, token_logps in zip(places, found.token_logps or [], strict=True):
                if token_logps is not None:
                    sums[place] = token_logps[: lengths[place]].sum(dtype=np.float64)
        return sums


class FileValues:
    """The sums of log-probs in a Parquet file that `reflogp join` or a service's job wrote. They are valid only for the
    settings of that join or job."""

    def __init__(self, file: str, note: dict[str, Any], table: pa.Table) -> None:
        self.where = Where(file, note["reference_id"], note["reference_dtype"], note["snapshot"])
        self._settings = TrainerSettings(note["max_length"], note["truncation_mode"], note["ld_alpha"])
        self._table = table

    @classmethod
    def open(cls, location: str, reference_id: str | None, snapshot: int | None) -> FileValues:
        try:
            schema = pq.read_schema(location)
            note = json.loads((schema.metadata or {})[b"reflogp"])
            columns = [name for name in schema.names if name.endswith("_key") or name.startswith("ref_")]
            rows = pq.read_table(location, columns=columns)
            values = cls(location, note, rows.filter(_with_values(rows)))
        except FileNotFoundError as error:
            raise UsageError(f"there is no file {location}") from error
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise UsageError(
                f"{location} cannot be read as a Parquet file that `reflogp join` or a service's job wrote: {error!r}"
            ) from error
        if reference_id not in (None, values.where.reference_id):
            raise UsageError(f"{location} contains values of reference {values.where.reference_id}, not {reference_id}")
        if snapshot not in (None, values.where.snapshot):
            raise UsageError(f"{location} was joined at snapshot {values.where.snapshot}, not {snapshot}")
        return values

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        check_ld_alpha(asked.columns, settings.ld_alpha)
        if settings != self._settings:
            raise UsageError(
                f"{self.where.store} was joined with the settings {self._settings}, but this run uses {settings}: "
                "join again with the settings of this run"
            )
        missing_columns = [name for name in self._names(asked) if name not in self._table.column_names]
        if missing_columns and not set(self._table.column_names) & set(asked.columns.values()):
            raise UsageError(
                f"{self.where.store} lacks columns that this run's type of dataset needs ({', '.join(missing_columns)}): run "
                "`reflogp join` on the dataset of this run"
            )
        sums = self._of_pairs(asked) if asked.columns is PAIR_COLUMNS else self._of_sequences(asked)
        there = np.logical_and.reduce([places >= 0 for places, _ in sums.values()])
        logps = {ref: np.where(places >= 0, values, np.nan).astype(np.float32) for ref, (places, values) in sums.items()}
        finite = np.logical_and.reduce([np.isfinite(values) for values in logps.values()])
        return Join(logps, asked.keys, asked.needed, ~there & ~asked.dropped, there & ~finite & ~asked.dropped, asked.dropped)

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        raise UsageError(
            f"{self.where.store} contains only sums, but the values of individual tokens are needed: use a store or a service"
        )

    def command(self, model: str | None, data: str, settings: TrainerSettings) -> str:
        return ""

    def _names(self, asked: Asked) -> list[str]:
        return [name for column, ref in asked.columns.items() for name in (_key_column(column), ref)]

    def _of_pairs(self, asked: Asked) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Look up each row's two sums by the keys of both completions together, because with ld_alpha each sum depends on both
        completions.

        Returns:
            a dict from each reference column to a tuple of two arrays: the rows' indices in the file's table (-1 for a missing
            row) and their sums.
        """
        places = _places(
            _joined([asked.keys[column] for column in asked.columns]),
            _joined([_keys(self._table, _key_column(column)) for column in asked.columns]),
        )
        return {ref: (places, _at(self._table[ref], places)) for ref in asked.columns.values()}

    def _of_sequences(self, asked: Asked) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Look up each sum by the key of its sequence. The sums cannot be looked up by row, because a KTO run pairs prompts
        with the completions of other rows.

        Returns:
            a dict from each reference column to a tuple of two arrays: the keys' indices among the file's keys (-1 for a
            missing key) and their sums.
        """
        stored = [(c, r) for c, r in asked.columns.items() if _key_column(c) in self._table.column_names]
        keys = pa.concat_arrays([_keys(self._table, _key_column(column)) for column, _ in stored])
        values = pa.chunked_array([chunk for _, ref in stored for chunk in self._table[ref].chunks], pa.float32())
        found = {ref: _places(asked.keys[column], keys) for column, ref in asked.columns.items()}
        return {ref: (places, _at(values, places)) for ref, places in found.items()}


def _with_values(rows: pa.Table) -> pa.Array:
    """Return a mask of the rows that have values. In a job's result, the values of rows that could not be scored are null."""
    masks = [pc.is_valid(rows[name]) for name in rows.column_names]
    return functools.reduce(pc.and_, masks) if masks else pa.array([], pa.bool_())


def _key_column(token_column: str) -> str:
    return token_column.replace("_ids", "_key")


def _keys(table: pa.Table, name: str) -> pa.FixedSizeBinaryArray:
    return pa.concat_arrays([pa.array([], pa.binary(16)), *(chunk.cast(pa.binary(16)) for chunk in table[name].chunks)])


def _joined(keys: list[pa.Array]) -> pa.Array:
    """Concatenate the 16-byte keys of each row into one key per row."""
    parts = [np.frombuffer(part.buffers()[1], np.uint8)[part.offset * 16 :][: len(part) * 16].reshape(-1, 16) for part in keys]
    whole = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16 * len(keys)), len(whole), [None, pa.py_buffer(whole)])


def _places(wanted: pa.Array, stored: pa.Array) -> npt.NDArray[np.int64]:
    """Return the index of each wanted key in `stored`, or -1 for a missing key."""
    places = pc.index_in(wanted, value_set=stored)
    return np.asarray(places.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _at(values: pa.ChunkedArray, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    if not len(values):
        return np.full(len(places), np.nan, np.float32)
    return np.asarray(values.to_numpy()[np.maximum(places, 0)], np.float32)
