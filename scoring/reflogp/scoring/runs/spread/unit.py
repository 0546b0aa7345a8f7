"""Encode units as bytes: a compressed Arrow IPC stream, so that a prompt that many sequences share takes little space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.runs.pending import Miss
from reflogp.scoring.torch_engine.sequences import Ids, Sequence
from reflogp.store.schema import one_array

_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("completion_ids", pa.list_(pa.int64())),
        ("completion_len", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Sent:
    """A decoded unit.

    Attributes:
        keys: keys of the whole sequences, binary (n,).
        sequences: the sequences to score, n.
        completion_lens: number of tokens of each whole completion, (n,).
    """

    keys: pa.Array
    sequences: list[Sequence]
    completion_lens: npt.NDArray[np.int32]


def encode(misses: list[Miss]) -> bytes:
    """Encode misses for a worker."""
    columns = [
        pa.array([miss.key for miss in misses], pa.binary()),
        _lists([miss.sequence.prompt_ids for miss in misses]),
        _lists([miss.sequence.completion_ids for miss in misses]),
        pa.array([miss.completion_len for miss in misses], pa.int32()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(pa.table(columns, schema=_SCHEMA))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode(content: bytes) -> Sent:
    """Decode the bytes that `encode` returned."""
    table = pa.ipc.open_stream(content).read_all()
    prompts, completions = (_arrays(one_array(table[name])) for name in ("prompt_ids", "completion_ids"))
    sequences = [Sequence(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    return Sent(one_array(table["key"]), sequences, table["completion_len"].to_numpy())


def _lists(ids: list[Ids]) -> pa.Array:
    offsets = np.zeros(len(ids) + 1, np.int32)
    np.cumsum([len(entry) for entry in ids], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(ids).astype(np.int64)))


def _arrays(lists: pa.ListArray) -> list[npt.NDArray[np.int64]]:
    return np.split(lists.values.to_numpy(), lists.offsets.to_numpy()[1:-1])
