"""Describe where a trainer gets its reference log-probs, and look them up: in a store's snapshot, in a service, or in a file
that `reflogp join` or a service's job wrote.

This module loads no model.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import CONFIG_MAPPING

from reflogp.client import Client, Job, Lookup, ReferenceInfo
from reflogp.store import (
    Reference as ReferenceModel,
)
from reflogp.store import (
    ReferenceNotFoundError,
    Snapshot,
    Store,
    StoreNotFoundError,
    UsageError,
    describe_reference,
)
from reflogp.store.commands import ScoreArguments
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS, Asked, FoundLogps, Join, answer, tokens_column
from reflogp.store.reference import AUTO, Dtype, describe_all_numerics
from reflogp.store.windows import TrainerSettings

OnMiss = Literal["error", "score", "compute"]

#: Dtypes in which the same model's log-probs may be stored, the most precise first.
_MOST_PRECISE_FIRST = ("float32", "float16-autocast", "float16", "bfloat16-autocast", "bfloat16")
#: Maximum number of keys per lookup over HTTP. The response has 12 bytes per key.
_KEYS_AT_ONCE = 1_000_000
#: Maximum number of sequences whose token values are requested from a service at once. The response has 80 MB if each sequence
#: has 2,000 tokens.
_VALUES_AT_ONCE = 10_000


@dataclass(frozen=True)
class Reference:
    """Where a trainer gets reference log-probs, and which model computed them.

    Attributes:
        location: a store (a folder, or s3://…, gs://…, az://…), a running service (http://…), or a file that `reflogp join` or
            a service's job wrote (….parquet).
        model: the reference model: its folder or hub id, its reference id (as printed by `reflogp store ls`), or its name in
            the service. None for the checkpoint from which the policy was loaded, as in TRL. The model is not loaded, but
            identified by digests of its files, which are cached.
        dtype: dtype in which the reference log-probs were computed, spelled as in `reflogp score --dtype`. "auto" is the dtype
            of the model's stored log-probs. If there are several, "auto" is the policy's dtype if it is among them, and else
            the most precise.
        snapshot: number of the snapshot to read, or None for the latest.
        on_miss: what to do about rows without values. With "error", the run stops before training, and the error contains the
            command that scores the rows. With "score", the service scores the rows before training begins. With "compute",
            TRL's own trainer computes the values before training begins, as with precompute_ref_log_probs=True; the policy must
            start from the reference's weights. For a stream, the rows are seen during training.
        token: bearer token for a service; $REFLOGP_TOKEN by default.

    Raises UsageError if the values contradict each other.

    Examples:
        >>> from reflogp.trainer import Reference
        >>> Reference("./logps", model="./sft-model")
        Reference(location='./logps', model='./sft-model', dtype='auto', snapshot=None, on_miss='error')
    """

    location: str
    model: str | None = None
    dtype: str = AUTO
    snapshot: int | None = None
    on_miss: OnMiss = "error"
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))
        if self.model is not None:
            object.__setattr__(self, "model", os.fspath(self.model))
        if self.dtype not in (AUTO, "checkpoint", *get_args(Dtype)):
            raise UsageError(f"dtype={self.dtype!r} is not allowed: use 'auto' or one of {', '.join(get_args(Dtype))}")
        if self.on_miss not in get_args(OnMiss):
            raise UsageError(f"on_miss={self.on_miss!r} is not allowed: use 'error', 'score' or 'compute'")
        if self.on_miss == "score" and not self.is_service:
            raise UsageError(
                f"on_miss='score' needs a running service, but {self.location} is not a service: pass an http:// address"
            )
        if self.on_miss == "score" and self.snapshot is not None:
            raise UsageError(f"snapshot {self.snapshot} cannot contain newly scored values: omit the snapshot")

    @classmethod
    def of(cls, given: Reference | str | os.PathLike[str] | None, user: str) -> Reference:
        """Return the Reference for an argument of `user`: a Reference, or its location alone."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str | os.PathLike):
            return cls(os.fspath(given))
        raise UsageError(
            f'{user} needs to know where the reference log-probs are: pass reference="./logps" (a store, a service\'s URL or a '
            f"Parquet file) or a Reference, not {given!r}"
        )

    @property
    def is_service(self) -> bool:
        return self.location.startswith(("http://", "https://"))

    @property
    def is_file(self) -> bool:
        return not self.is_service and self.location.endswith(".parquet")

    def open(self, policy: str | None = None, policy_dtype: str = "bfloat16") -> Values:
        """Open the location, and return the reference's values at one snapshot.

        Args:
            policy: folder or hub id of the checkpoint that the policy was loaded from: the reference if `model` is None.
            policy_dtype: dtype in which the policy computes; see `dtype`.

        Raises:
            ReferenceNotFoundError: the store has no reference with the given id, or the service does not serve the reference.
            SnapshotNotFoundError, UsageError, StoreError, ServiceError: the location cannot be opened.
        """
        if self.is_file:
            return FileValues.open(self)
        model = self.model or policy
        if not model:
            raise UsageError(
                "the policy was not loaded from a checkpoint, so it is not known which model is the reference: pass "
                f'reference=Reference("{self.location}", model=…) with the model that was passed to `reflogp score`'
            )
        return ServiceValues.open(self, model, policy_dtype) if self.is_service else StoreValues.open(self, model, policy_dtype)

    def choose(
        self, model: str, held: Callable[[list[ReferenceModel]], list[ReferenceModel]], otherwise: str
    ) -> ReferenceModel:
        """Choose the dtype of the values to read, as `dtype` describes. `held` returns those of the given references whose
        values are at the location; if the choice is free, `otherwise` (the policy's dtype) is chosen."""
        possible = describe_all_numerics(model)
        if self.dtype == AUTO:
            wanted = possible
        else:
            dtype = self.dtype if self.dtype in get_args(Dtype) else describe_reference(model, self.dtype).dtype
            wanted = [reference for reference in possible if reference.dtype == dtype]
        there = held(wanted) or wanted
        order = [otherwise, *_MOST_PRECISE_FIRST]
        return min(there, key=lambda reference: (order.index(reference.dtype), reference.lm_head_dtype != reference.dtype))


@dataclass(frozen=True)
class Where:
    """The origin of reference values, described precisely enough to request the same values again.

    Attributes:
        store: the store's URI, the service's URL, or the file's path.
        reference_id: the reference model's id.
        reference_dtype: dtype in which the reference model computed the values.
        snapshot: number of the snapshot; 0 if nothing has been scored yet.
    """

    store: str
    reference_id: str
    reference_dtype: str
    snapshot: int


class Values:
    """The reference log-probs in one snapshot of a store or service, or in a file."""

    where: Where
    note: str = ""  # why there are no values at all

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        """Look up the keys of a dataset's rows, and return a Join with the sums of the rows' log-probs.

        Raises UsageError if the source is a file that was written for other settings or another type of dataset.
        """
        return answer(asked, self, settings.ld_alpha)

    def find(self, keys: pa.Array, /) -> FoundLogps:
        raise NotImplementedError

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        """Return one list<float32> per key, with the log-probs of the completion's tokens, or null if its values are missing or
        damaged. Raises UsageError if only sums are available."""
        raise NotImplementedError

    def command(self, data: str, settings: TrainerSettings, dtype: str | None = None) -> str:
        """Return the command that scores `data` in a dtype (by default, that of these values) and adds the results to this
        source, or an empty string if the source is a file."""
        return ""


@dataclass
class _Sums:
    """The sums of the completions that some keys identify."""

    lengths: npt.NDArray[np.int32]  # number of tokens in each sum, -1 for a miss
    sums: npt.NDArray[np.float64]
    token_lists: Callable[[npt.NDArray[np.int64]], pa.ListArray] | None = None  # of the keys at some places, if there are any

    def prefix_sums(self, lengths: npt.NDArray[np.int64], /) -> npt.NDArray[np.float64]:
        sums = np.where(lengths == 0, 0.0, np.where(self.lengths == lengths, self.sums, np.nan))
        if self.token_lists is not None:
            parts = np.flatnonzero((self.lengths > lengths) & (lengths > 0))
            for place, token_logps in zip(parts, self.token_lists(parts), strict=True):
                if token_logps.is_valid:
                    sums[place] = token_logps.values.to_numpy()[: lengths[place]].sum(dtype=np.float64)
        return sums


def _nothing(keys: pa.Array) -> _Sums:
    return _Sums(np.full(len(keys), -1, np.int32), np.full(len(keys), np.nan))


class StoreValues(Values):
    """The reference log-probs in a store's table. Without a snapshot, the table does not exist yet."""

    def __init__(self, store: Store, model: str, reference: ReferenceModel, snapshot: Snapshot | None, note: str = "") -> None:
        self.where = Where(store.uri, reference.reference_id, reference.dtype, snapshot.number if snapshot else 0)
        self.note = note
        self._model, self._reference, self._snapshot = model, reference, snapshot

    @classmethod
    def open(cls, source: Reference, model: str, policy_dtype: str) -> StoreValues:
        store = Store(source.location)
        if _is_id(model):
            table = store[model]
            return cls(store, table.reference.name, table.reference, table.snapshot(source.snapshot))
        reference = source.choose(model, store.held, policy_dtype)
        try:
            return cls(store, model, reference, store[reference].snapshot(source.snapshot))
        except (ReferenceNotFoundError, StoreNotFoundError) as error:
            return cls(store, model, reference, None, note=str(error))

    def find(self, keys: pa.Array, /) -> FoundLogps:
        return self._snapshot.find(keys) if self._snapshot else _nothing(keys)

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        if self._snapshot is None:
            return pa.nulls(len(keys), pa.list_(pa.float32()))
        return self._snapshot.find(keys).token_lists()

    def command(self, data: str, settings: TrainerSettings, dtype: str | None = None) -> str:
        reference, own_head = self._reference, self._reference.lm_head_dtype != self._reference.dtype
        return ScoreArguments(
            self._model,
            data,
            self.where.store,
            dtype or reference.dtype,
            TrainerSettings(**settings.scored_apart),
            lm_head_dtype=reference.lm_head_dtype if own_head and dtype is None else None,
            trust_remote_code=_needs_remote_code(self._model),
        ).command()


class ServiceValues(Values):
    """The reference log-probs in a running service, which can also score missing rows."""

    def __init__(self, url: str, token: str | None, reference: ReferenceInfo, snapshot: int) -> None:
        self.where = Where(url, reference.reference_id, reference.dtype, snapshot)
        self.note = "" if snapshot else "nothing has been scored with it yet"
        self.reference = reference
        self._token = token

    @property
    def client(self) -> Client:
        return _client(self.where.store, self._token, os.getpid())

    @classmethod
    def open(cls, source: Reference, model: str, policy_dtype: str) -> ServiceValues:
        url = source.location.rstrip("/")
        with Client(url, source.token) as client:
            served = client.references()
        found = next((known for known in served if model in (known.name, known.reference_id)), None)
        if found is None and not _is_id(model) and (source.model is None or Path(model).exists() or "/" in model):
            ids = {known.reference_id for known in served}
            chosen = source.choose(model, lambda possible: [one for one in possible if one.reference_id in ids], policy_dtype)
            found = next((known for known in served if known.reference_id == chosen.reference_id), None)
        if found is None:
            names = ", ".join(f"{known.name or '-'} ({known.reference_id}, {known.dtype})" for known in served) or "none"
            raise ReferenceNotFoundError(f"{url} does not serve {model}; its references: {names}")
        return cls(url, source.token, found, (found.snapshot or 0) if source.snapshot is None else source.snapshot)

    def find(self, keys: pa.Array, /) -> FoundLogps:
        found = _nothing(keys)
        if self.where.snapshot:  # snapshot 0: nothing has been scored yet
            for start in range(0, len(keys), _KEYS_AT_ONCE):
                part = slice(start, start + _KEYS_AT_ONCE)
                there = self._look_up(keys[part])
                found.lengths[part], found.sums[part] = there.lengths, there.sums
        found.token_lists = lambda places: self.token_lists(keys.take(pa.array(places)))
        return found

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        if not self.where.snapshot:
            return pa.nulls(len(keys), pa.list_(pa.float32()))
        parts = [pa.array([], pa.list_(pa.float32()))]
        for start in range(0, len(keys), _VALUES_AT_ONCE):
            found = self._look_up(keys[start : start + _VALUES_AT_ONCE], values=True)
            parts.append(pa.array(found.token_logps, pa.list_(pa.float32())))
        return pa.concat_arrays(parts)

    def _look_up(self, keys: pa.Array, values: bool = False) -> Lookup:
        return self.client.lookup(self.where.reference_id, keys, values=values, snapshot=self.where.snapshot)

    def command(self, data: str, settings: TrainerSettings, dtype: str | None = None) -> str:
        reference = self.reference.name or self.reference.reference_id
        words = ["reflogp", "submit", self.where.store, data, "--reference", reference, "--format", "tokens", "--watch"]
        for name, value in settings.scored_apart.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        set_dtype = "" if dtype is None else f' (after setting dtype = "{dtype}" for the reference in the service\'s settings)'
        return shlex.join(words) + set_dtype

    def score(self, rows: pa.Table, settings: TrainerSettings, on_change: Callable[[Job], None]) -> ServiceValues:
        """Have the service score tokenized rows in a job, and wait for it. Return the snapshot with the job's results.

        Raises JobFailedError, or ServiceUnreachableError if the service remained unreachable while the client retried.
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
        self.client.watch(job.id, on_change, check=True)
        [found] = [found for found in self.client.references() if found.reference_id == self.reference.reference_id]
        return ServiceValues(self.where.store, self._token, found, found.snapshot or 0)


@functools.cache
def _client(url: str, token: str | None, process: int) -> Client:
    """Return a process's client. A data loader's worker needs its own, because a forked process cannot use its parent's
    connections."""
    return Client(url, token)


class FileValues(Values):
    """The sums of log-probs in a Parquet file that `reflogp join` or a service's job wrote. A sum is valid for a run that cuts
    the completion at the same token."""

    def __init__(self, file: str, note: dict[str, Any], table: pa.Table) -> None:
        self.where = Where(file, note["reference_id"], note["reference_dtype"], note["snapshot"])
        self._settings = TrainerSettings(note["max_length"], note["truncation_mode"], note["ld_alpha"])
        columns = {**PAIR_COLUMNS, **KTO_COLUMNS}
        parts = [(column.replace("_ids", "_key"), ref) for column, ref in columns.items() if ref in table.column_names]
        self._keys = pa.chunked_array([chunk.cast(pa.binary(16)) for key, _ in parts for chunk in table[key].chunks])
        self._sums = np.concatenate([table[ref].to_numpy() for _, ref in parts])
        self._tokens = np.concatenate([table[tokens_column(ref)].to_numpy() for _, ref in parts])

    @classmethod
    def open(cls, source: Reference) -> FileValues:
        location = source.location
        try:
            schema = pq.read_schema(location)
            columns = [name for name in schema.names if name.endswith("_key") or name.startswith("ref_")]
            rows = pq.read_table(location, columns=columns).drop_null()  # rows without values are null
            values = cls(location, json.loads((schema.metadata or {})[b"reflogp"]), rows)
        except FileNotFoundError as error:
            raise UsageError(f"there is no file {location}") from error
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise UsageError(
                f"{location} cannot be read as a Parquet file that `reflogp join` or a service's job wrote: {error!r}"
            ) from error
        there = values.where.reference_id
        if source.model is not None:
            ids = [source.model] if _is_id(source.model) else [one.reference_id for one in describe_all_numerics(source.model)]
            if there not in ids:
                raise UsageError(f"{location} contains values of reference {there}, which is not {source.model}")
        if source.snapshot not in (None, values.where.snapshot):
            raise UsageError(f"{location} was joined at snapshot {values.where.snapshot}, not {source.snapshot}")
        return values

    def answer(self, asked: Asked, settings: TrainerSettings) -> Join:
        if settings.ld_alpha is not None or self._settings.ld_alpha is not None:
            raise UsageError(
                f"with ld_alpha, the sums in {self.where.store} cannot be used: pass the store instead of the file"
            )
        stored = self.find(pa.concat_arrays(list(asked.keys.values()))).lengths
        needed = np.concatenate(list(asked.needed.values()))
        if ((stored >= 0) & (stored != needed) & (needed > 0)).any():
            raise UsageError(
                f"{self.where.store} was joined with the settings {self._settings}, but this run uses {settings}, which cut "
                "rows at other tokens: join again with the settings of this run"
            )
        return answer(asked, self)

    def find(self, keys: pa.Array, /) -> FoundLogps:
        places = pc.index_in(keys, value_set=self._keys).fill_null(-1).to_numpy(zero_copy_only=False)
        return _Sums(np.append(self._tokens, -1)[places].astype(np.int32), np.append(self._sums, np.nan)[places])

    def token_lists(self, keys: pa.Array) -> pa.ListArray:
        raise UsageError(
            f"{self.where.store} contains only sums, but the values of individual tokens are needed: use a store or a service"
        )


def _needs_remote_code(model: str) -> bool:
    """Return True if transformers needs code from a model's folder to load it."""
    file = Path(model, "config.json")
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING


def _is_id(model: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", model) is not None
