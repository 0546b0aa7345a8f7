"""The data exchanged between the service and its workers: messages as JSON, sequences and values as Arrow IPC streams.

The service and its workers import this module, so it imports neither torch nor fastapi.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from reflogp.scoring.torch_engine.sequences import token_logps_of
from reflogp.service.settings import ReferenceSettings
from reflogp.store.schema import one_array


class WorkerConfiguration(BaseModel):
    device: str  # of the engines, such as "auto", "cpu" or "cuda:1"
    visible: str | None  # CUDA_VISIBLE_DEVICES in the worker's process, or None to leave the variable unchanged
    address: str  # path of the Unix socket to which the runners of jobs connect
    sharing: int  # number of workers among which the machine's CPU cores are divided; used only if `device` is "cpu"
    token_budget: int | Literal["auto"]
    models: dict[str, ReferenceSettings]  # by reference id
    capacity: int  # maximum number of loaded engines
    pinned: str | None  # id of the reference whose engine is loaded at startup and never unloaded
    store: str
    commit_seconds: float  # maximum time between computing a job's values and committing them
    window_seconds: float  # see EngineLoop


#: Schemas of the table in a request (SEQUENCES) and of the table in its response (OUTCOMES). Both tables have the same row
#: order. If a sequence has an error, its `token_logps` is null. MASKED_SEQUENCES is the schema for rows of padded batches,
#: whose token ids include padding. Token ids are 32-bit, which is enough for every vocabulary and halves the memory that queued
#: requests need.
SEQUENCES = pa.schema([("prompt_ids", pa.list_(pa.int32())), ("completion_ids", pa.list_(pa.int32()))])
MASKED_SEQUENCES = SEQUENCES.append(pa.field("attention_mask", pa.list_(pa.int32())))
OUTCOMES = pa.schema([("token_logps", pa.list_(pa.float32())), ("error", pa.string())])
#: More columns of the response to a request for the k most probable tokens of each position: k entries for each value in
#: `token_logps`, one position after the other (see TopLogps).
TOP_OUTCOMES = OUTCOMES.append(pa.field("top_ids", pa.list_(pa.int32()))).append(pa.field("top_logps", pa.list_(pa.float32())))


def token_count(sequences: pa.Table) -> int:
    return sum(len(one_array(sequences[name]).flatten()) for name in SEQUENCES.names)


def table_of(body: bytes) -> pa.Table:
    return pa.ipc.open_stream(body).read_all()


def outcomes_table(outcomes: list[Any], top_k: int = 0) -> pa.Table:
    """Return the outcomes as a table with schema OUTCOMES or, with `top_k`, TOP_OUTCOMES.

    Each outcome is the values of one sequence, or an error message. With `top_k`, the values are a TopLogps of at least as many
    most probable tokens.
    """
    columns = [
        _lists([None if isinstance(outcome, str) else token_logps_of(outcome) for outcome in outcomes], np.float32),
        pa.array([outcome if isinstance(outcome, str) else None for outcome in outcomes], pa.string()),
    ]
    for name, kind in (("ids", np.int32), ("logps", np.float32)) if top_k else ():
        lists = [None if isinstance(outcome, str) else getattr(outcome, name)[:, :top_k].ravel() for outcome in outcomes]
        columns.append(_lists(lists, kind))
    return pa.table(columns, schema=TOP_OUTCOMES if top_k else OUTCOMES)


def _lists(arrays: list[Any], kind: Any) -> pa.ListArray:
    """Return arrays of numbers as one list array, with null for None."""
    offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int32)
    values = np.concatenate([np.zeros(0, kind), *(array for array in arrays if array is not None)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array([array is None for array in arrays]))
