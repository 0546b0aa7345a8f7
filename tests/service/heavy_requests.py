"""Requests that are made to take as much memory as a service's bounds allow, of every route that reads a body.

Each body is about `size` bytes or at the route's own bound, whichever is less. Used by test_memory.py and benchmarks/memory.py.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow as pa

from reflogp.store import sequence_keys
from tests.store.rows import REFERENCE

ARROW_STREAM = "application/vnd.apache.arrow.stream"
JSON = "application/json"


@dataclass(frozen=True)
class Bounds:
    """What the service that is asked allows: `size` bytes of a body where the route has no narrower bound."""

    size: int
    json: int
    keys: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Heavy:
    """One request, with what the service may answer."""

    path: str
    body: bytes = b""
    statuses: tuple[int, ...] = (200,)
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False


def stream_of(table: pa.Table, **options) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _keys(count: int) -> pa.Array:
    data = np.random.default_rng(0).bytes(16 * count)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(data)])


def _batches(batch: pa.RecordBatch, size: int) -> bytes:
    """A stream of one batch again and again, about `size` bytes."""
    message = batch.serialize().to_pybytes()
    return batch.schema.serialize().to_pybytes() + message * (size // len(message)) + b"\xff\xff\xff\xff\0\0\0\0"


def _lists(count: int, each: int, kind: pa.DataType, value: int = 9) -> pa.Array:
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * each)
    return pa.ListArray.from_arrays(offsets, pa.array(np.full(count * each, value), kind))


def lookups(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    path, arrow = f"/v1/lookup?reference={REFERENCE.reference_id}", {"content-type": ARROW_STREAM}
    key = pa.schema([pa.field("key", pa.binary(16), nullable=False)])
    one, none = pa.record_batch([_keys(1)], schema=key), pa.record_batch([_keys(0)], schema=key)
    every = stream_of(pa.table([_keys(bounds.keys)], schema=key))
    same = pa.table([pa.array([bytes(16)] * min(bounds.keys, 200_000), pa.binary(16))], schema=key)
    metadata = pa.table([_keys(1)], schema=key.with_metadata({"x": "y" * (16 * bounds.keys)}))
    times = min(2_500, bounds.keys // 400)
    again = stream_of(pa.table([pa.array([long_key] * times, pa.binary(16))], schema=key))
    hexes = json.dumps({"keys": [long_key.hex()] * times, "values": True}).encode()
    return {
        "as many keys as allowed": Heavy(path, every, (200,), arrow),
        "one key too many": Heavy(path, stream_of(pa.table([_keys(bounds.keys + 1)], schema=key)), (413,), arrow),
        "a batch for each key": Heavy(path, _batches(one, 16 * bounds.keys), (200, 413), arrow),
        "batches without keys": Heavy(path, _batches(none, 16 * bounds.keys), (200, 413), arrow),
        "compressed keys": Heavy(path, stream_of(same, compression="zstd"), (422,), arrow),
        "metadata": Heavy(path, stream_of(metadata), (413,), arrow),
        "one key again and again, with values": Heavy(path + "&values=true", again, (200, 413, 503), arrow),
        "every key, chunked": Heavy(path, every, (200, 503), arrow, chunked=True),
        "the same as JSON": Heavy(path, hexes, (200, 413, 503), {"content-type": JSON}),
    }


def scores(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    """Token ids are outside every vocabulary, so that nothing is computed and all else happens."""
    path, arrow, json_kind = "/v1/score?reference=ref&cache_read=false", {"content-type": ARROW_STREAM}, {"content-type": JSON}
    n, half = bounds.sequences, bounds.tokens // bounds.sequences // 2

    def body(kind: pa.DataType, value: int, each: int = half, mask_each: int = 0) -> bytes:
        ids = _lists(n, each, kind, value)
        mask = {"attention_mask": _lists(n, mask_each, kind, 1)} if mask_each else {}
        return stream_of(pa.table({"prompt_ids": ids, "completion_ids": ids, **mask}))

    offsets = _lists(n, half, pa.int8()).buffers()[1].to_pybytes()[: 4 * n + 4]
    unused = body(pa.int8(), 9).replace(offsets, bytes(4 * n + 4))  # every list is empty, and values are there all the same
    small = pa.record_batch([_lists(1, 1, pa.int32())] * 2, names=["prompt_ids", "completion_ids"])
    whole, scored = body(pa.int64(), 1_000_000_000, mask_each=2 * half), (200, 429, 503)
    found = {
        "as many tokens as allowed, with masks": Heavy(path, whole, scored, arrow),
        "the same in bytes": Heavy(path, body(pa.int8(), -1, mask_each=2 * half), scored, arrow),
        "a mask of bytes that is long": Heavy(path, body(pa.int8(), -1, mask_each=14 * half), (413,), arrow),
        "too many tokens in bytes": Heavy(path, body(pa.int8(), 9, each=8 * half), (413,), arrow),
        "values that no list holds": Heavy(path, unused, scored, arrow),
        "a batch for each sequence": Heavy(path, _batches(small, 8 * bounds.tokens), (413,), arrow),
    }
    for what, part in {"lists": b"[],", "objects": b"{},", "numbers": b"1,", "escapes": b'"\\u00e9",'}.items():
        parts = b'{"sequences":[' + part * ((bounds.json - 40) // len(part)) + b"0]}"
        found[f"JSON of {what}"] = Heavy(path, parts, (413, 422), json_kind)
    fields = b"{" + b"".join(b'"%x":1,' % number for number in range(bounds.json // 12)) + b'"z":1}'
    found["JSON of fields"] = Heavy(path, fields, (413, 422), json_kind)
    run = b"999999999," * ((bounds.json - 90) // 20)
    tokens = b'{"sequences":[{"prompt_ids":[%s0],"completion_ids":[%s0]}]}' % (run, run)
    found["JSON of as many tokens as fit"] = Heavy(path, tokens, (200, 413, 429, 503), json_kind)
    return found


def completions(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    """As many prompts and tokens as one request may have, and more, without most probable tokens."""

    def body(prompts: int, tokens: int) -> bytes:
        prompt = [[7] * tokens] * prompts
        return json.dumps({"model": "ref", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}).encode()

    kind = {"content-type": JSON}
    return {
        "many prompts": Heavy("/v1/completions", body(1_024, 60), (200, 429), kind),
        "too many prompts": Heavy("/v1/completions", body(1_025, 2), (422,), kind),
        "too many tokens": Heavy("/v1/completions", body(1_000, 5_000), (413, 422), kind),
    }


def jobs(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    kind = {"content-type": "text/csv"}
    return {"a dataset": Heavy("/v1/jobs?reference=ref", b"x" * bounds.size, (200, 201, 422), kind)}


def uploads(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    content, file = b"x" * bounds.size, {"content-type": "application/octet-stream"}
    return {
        "a file": Heavy("/v1/uploads/a.jsonl", content, (200, 201), file),
        "a chunked file": Heavy("/v1/uploads/b.parquet", content, (200, 201), file, chunked=True),
    }


def results(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    ranges = {"range": "bytes=" + ",".join(f"{n}-" for n in range(4_000))}
    return {"many ranges": Heavy(f"/v1/jobs/{job}/result", statuses=(200, 206, 400, 416), headers=ranges)}


def one_job(bounds: Bounds, long_key: bytes, job: str) -> dict[str, Heavy]:
    return {"a body that is not read": Heavy(f"/v1/jobs/{job}", b"x" * bounds.size)}


#: (method, route) -> makes its requests, by name, for a service's bounds, the key of a row of tests.store.rows.REFERENCE with
#: many values, and a job that is done.
ROUTES: dict[tuple[str, str], Callable[[Bounds, bytes, str], dict[str, Heavy]]] = {
    ("POST", "/v1/lookup"): lookups,
    ("POST", "/v1/score"): scores,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/jobs"): jobs,
    ("PUT", "/v1/uploads/{name}"): uploads,
    ("GET", "/v1/jobs/{job_id}/result"): results,
    ("GET", "/v1/jobs/{job_id}"): one_job,
}


def long_rows(count: int, values: int) -> tuple[pa.Array, pa.Table]:
    """(keys, shard rows) with many values each."""
    from reflogp.store.schema import shard_table

    completions = [np.full(values, n, np.int64) for n in range(count)]
    keys = sequence_keys([[n, 1] for n in range(count)], completions)
    logps = pa.array(list(-np.random.default_rng(0).random((count, values), np.float32)), pa.list_(pa.float32()))
    return keys, shard_table(keys, np.full(count, 2, np.int32), np.full(count, values, np.int32), logps, {"engine": "test"})


class Peak:
    """The most memory that processes hold in the time of a `with` block, by process id.

    The kernel's own mark (VmHWM), which is set back at the beginning, so that no moment is missed.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self.bytes: dict[int, int] = {}
        self.before: dict[int, int] = {}

    def __enter__(self) -> "Peak":
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            self.before[pid] = psutil.Process(pid).memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            self.bytes[pid] = int(lines["VmHWM"].split()[0]) << 10

    def grown(self) -> int:
        """Bytes that the first process's peak was beyond what it held at the beginning."""
        return self.bytes[self._pids[0]] - self.before[self._pids[0]]


def send(url: str, method: str, heavy: Heavy, count: int, at_once: int = 4) -> Counter[int]:
    """Send a request so often, several at a time; status -> how many. Answers are read and thrown away.

    0 stands for a connection that the service closed.
    """

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(heavy.body), 1 << 20):
            yield heavy.body[start : start + (1 << 20)]

    def ask(client: httpx.Client) -> int:
        try:
            content = pieces() if heavy.chunked else heavy.body
            with client.stream(method, url + heavy.path, content=content, headers=heavy.headers) as answer:
                for _ in answer.iter_raw():
                    pass
                return answer.status_code
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            return 0  # the service hung up on a body that it does not read

    with httpx.Client(timeout=300) as client, ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(ask, [client] * count))


def settle(pid: int, seconds: float = 3.0) -> None:
    """Wait until a process is idle, so that one request's work is not counted as the next one's."""
    process, stop = psutil.Process(pid), time.monotonic() + seconds
    while time.monotonic() < stop:
        before = sum(process.cpu_times()[:2])
        time.sleep(0.1)
        if sum(process.cpu_times()[:2]) == before:
            return
