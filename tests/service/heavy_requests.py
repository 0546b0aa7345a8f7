"""Requests that are made to take as much memory as a service's bounds allow, of every route that reads a body.

Each body is about `size` bytes or at the route's own bound, whichever is less. Used by test_memory.py and benchmarks/memory.py.
"""

import json
import threading
import time
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
_INT32 = pa.int32()


@dataclass(frozen=True)
class Bounds:
    """What the service that is asked allows.

    Attributes:
        size: bytes of a body where the route has no narrower bound.
        json: bytes of a JSON body.
        keys: of a lookup.
        sequences, tokens: of a score request.
    """

    size: int
    json: int
    keys: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Heavy:
    """One request.

    Attributes:
        path: with parameters.
        body: makes the content; it is made once, and sent often.
        statuses: what the service may answer.
    """

    path: str
    body: Callable[[], bytes] = bytes
    statuses: tuple[int, ...] = (200,)
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False


def stream_of(table: pa.Table, **options) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _keys(count: int, seed: int = 0) -> pa.Array:
    data = np.random.default_rng(seed).bytes(16 * count)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(data)])


def _batches(schema: pa.Schema, batch: pa.RecordBatch, size: int) -> bytes:
    """A stream of one batch again and again, about `size` bytes."""
    message = batch.serialize().to_pybytes()
    return schema.serialize().to_pybytes() + message * (size // len(message)) + b"\xff\xff\xff\xff\0\0\0\0"


def _lists(count: int, each: int, kind: pa.DataType = _INT32, value: int = 9) -> pa.Array:
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * each)
    return pa.ListArray.from_arrays(offsets, pa.array(np.full(count * each, value), kind))


def json_bodies(size: int, name: str) -> dict[str, Callable[[], bytes]]:
    """JSON of `size` bytes whose decoded form is large, under a field's name."""
    parts = {"lists": b"[],", "objects": b"{},", "numbers": b"1,", "escapes": b'"\\u00e9",'}
    made = {
        what: lambda part=part: b'{"%s":[' % name.encode() + part * ((size - 40) // len(part)) + b"0]}"
        for what, part in parts.items()
    }
    made["fields"] = lambda: b"{" + b"".join(b'"%x":1,' % n for n in range(size // 12)) + b'"z":1}'
    return made


def lookups(bounds: Bounds, long_key: bytes) -> dict[str, Heavy]:
    """Of /v1/lookup.

    Args:
        long_key: key of a row with many values.
    """
    path = f"/v1/lookup?reference={REFERENCE.reference_id}"
    arrow = {"content-type": ARROW_STREAM}
    key = pa.schema([pa.field("key", pa.binary(16), nullable=False)])
    one, none = pa.record_batch([_keys(1)], schema=key), pa.record_batch([_keys(0)], schema=key)
    few = min(bounds.keys, 200_000)
    arrow_bodies: dict[str, tuple[Callable[[], bytes], tuple[int, ...]]] = {
        "as many keys as allowed": (lambda: stream_of(pa.table([_keys(bounds.keys)], schema=key)), (200,)),
        "one key too many": (lambda: stream_of(pa.table([_keys(bounds.keys + 1)], schema=key)), (413,)),
        "a batch for each key": (lambda: _batches(key, one, 16 * bounds.keys), (200, 413)),
        "batches without keys": (lambda: _batches(key, none, 16 * bounds.keys), (200, 413)),
        "compressed keys": (
            lambda: stream_of(pa.table([pa.array([bytes(16)] * few, pa.binary(16))], schema=key), compression="zstd"),
            (422,),
        ),
        "metadata": (
            lambda: stream_of(pa.table([_keys(1)], schema=key.with_metadata({"x": "y" * (16 * bounds.keys)}))),
            (413,),
        ),
    }
    found = {what: Heavy(path, body, statuses, arrow) for what, (body, statuses) in arrow_bodies.items()}
    times = min(2_500, bounds.keys // 400)
    again = stream_of(pa.table([pa.array([long_key] * times, pa.binary(16))], schema=key))
    found["one key again and again, with values"] = Heavy(path + "&values=true", lambda: again, (200, 413, 503), arrow)
    found["every key, chunked"] = Heavy(path, arrow_bodies["as many keys as allowed"][0], (200, 503), arrow, chunked=True)
    hexes = json.dumps({"keys": [long_key.hex()] * times, "values": True}).encode()
    found["the same as JSON"] = Heavy(path, lambda: hexes, (200, 413, 503), {"content-type": JSON})
    return found


def scores(bounds: Bounds) -> dict[str, Heavy]:
    """Of /v1/score. Token ids are outside every vocabulary, so that nothing is computed and all else happens."""
    path, arrow = "/v1/score?reference=ref&cache_read=false", {"content-type": ARROW_STREAM}
    n, tokens = bounds.sequences, bounds.tokens
    half = tokens // n // 2
    beyond = 1_000_000_000

    def padded(kind: pa.DataType, value: int, mask_each: int) -> bytes:
        ids = _lists(n, half, kind, value)
        return stream_of(pa.table({"prompt_ids": ids, "completion_ids": ids, "attention_mask": _lists(n, mask_each, kind, 1)}))

    def two(make: Callable[[], pa.Array]) -> Callable[[], bytes]:
        def body() -> bytes:
            lists = make()
            return stream_of(pa.table({"prompt_ids": lists, "completion_ids": lists}))

        return body

    def unused() -> bytes:
        """Offsets that say that every list is empty, and values all the same."""
        lists = _lists(n, half, pa.int8())
        body = stream_of(pa.table({"prompt_ids": lists, "completion_ids": lists}))
        return body.replace(lists.buffers()[1].to_pybytes()[: 4 * n + 4], bytes(4 * n + 4))

    small = pa.record_batch([_lists(1, 1), _lists(1, 1)], names=["prompt_ids", "completion_ids"])
    bodies: dict[str, tuple[Callable[[], bytes], tuple[int, ...]]] = {
        "as many tokens as allowed, with masks": (lambda: padded(pa.int64(), beyond, 2 * half), (200, 429, 503)),
        "the same in bytes": (lambda: padded(pa.int8(), -1, 2 * half), (200, 429, 503)),
        "a mask of bytes that is long": (lambda: padded(pa.int8(), -1, 14 * half), (413,)),
        "too many tokens in bytes": (two(lambda: _lists(n, 8 * half, pa.int8())), (413,)),
        "values that no list holds": (unused, (200, 429, 503)),
        "a batch for each sequence": (lambda: _batches(small.schema, small, 8 * tokens), (413,)),
    }
    found = {what: Heavy(path, body, statuses, arrow) for what, (body, statuses) in bodies.items()}
    for what, body in json_bodies(bounds.json, "sequences").items():
        found[f"JSON of {what}"] = Heavy(path, body, (413, 422), {"content-type": JSON})

    def numbers() -> bytes:
        each = b'{"prompt_ids":[%s0],"completion_ids":[%s0]},'
        run = b"999999999," * ((bounds.json - 90) // 20)
        return (b'{"sequences":[' + each % (run, run))[:-1] + b"]}"

    found["JSON of as many tokens as fit"] = Heavy(path, numbers, (200, 413, 429, 503), {"content-type": JSON})
    return found


def heavy_requests(bounds: Bounds, long_key: bytes, job: str) -> dict[tuple[str, str], dict[str, Heavy]]:
    """(method, route) -> its requests, by name.

    Args:
        bounds: of the service.
        long_key: key of a row with many values, of tests.store.rows.REFERENCE.
        job: id of a job that is done.
    """

    def full() -> bytes:
        return b"x" * bounds.size

    ranges = {"range": "bytes=" + ",".join(f"{n}-" for n in range(4_000))}
    file = {"content-type": "application/octet-stream"}
    return {
        ("POST", "/v1/lookup"): lookups(bounds, long_key),
        ("POST", "/v1/score"): scores(bounds),
        ("POST", "/v1/completions"): completions(),
        ("POST", "/v1/jobs"): {
            "a dataset": Heavy("/v1/jobs?reference=ref", full, (200, 201, 422), {"content-type": "text/csv"})
        },
        ("PUT", "/v1/uploads/{name}"): {
            "a file": Heavy("/v1/uploads/a.jsonl", full, (200, 201), file),
            "a chunked file": Heavy("/v1/uploads/b.parquet", full, (200, 201), file, chunked=True),
        },
        ("GET", "/v1/jobs/{job_id}/result"): {
            "many ranges": Heavy(f"/v1/jobs/{job}/result", statuses=(200, 206, 400, 416), headers=ranges)
        },
        ("GET", "/v1/jobs/{job_id}"): {"a body that is not read": Heavy(f"/v1/jobs/{job}", full)},
    }


def completions() -> dict[str, Heavy]:
    """As many prompts and tokens as one request may have, and more, without most probable tokens."""

    def body(prompts: int, tokens: int) -> Callable[[], bytes]:
        ids = [7] * tokens
        return lambda: json.dumps({"model": "ref", "prompt": [ids] * prompts, "max_tokens": 1, "prompt_logprobs": 0}).encode()

    kind = {"content-type": JSON}
    return {
        "many prompts": Heavy("/v1/completions", body(1_024, 60), (200, 429), kind),
        "too many prompts": Heavy("/v1/completions", body(1_025, 2), (422,), kind),
        "too many tokens": Heavy("/v1/completions", body(1_000, 5_000), (413, 422), kind),
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


def send(url: str, method: str, heavy: Heavy, count: int, at_once: int = 4) -> dict[int, int]:
    """Send a request so often, several at a time; status -> how many. Answers are read and thrown away.

    Raises AssertionError for a status that the request does not allow; 0 stands for a connection that the service closed.
    """
    body = heavy.body()
    statuses: dict[int, int] = {}
    lock = threading.Lock()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    def ask(client: httpx.Client) -> int:
        try:
            content = pieces() if heavy.chunked else body
            with client.stream(method, url + heavy.path, content=content, headers=heavy.headers) as answer:
                for _ in answer.iter_raw():
                    pass
                return answer.status_code
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            return 0  # the service hung up on a body that it does not read

    def work(share: int) -> None:
        with httpx.Client(timeout=300) as client:
            for _ in range(share):
                status = ask(client)
                with lock:
                    statuses[status] = statuses.get(status, 0) + 1

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(work, [count // at_once + (n < count % at_once) for n in range(at_once)]))
    return statuses


def settle(pid: int, seconds: float = 3.0) -> None:
    """Wait until a process is idle, so that one request's work is not counted as the next one's."""
    process, stop = psutil.Process(pid), time.monotonic() + seconds
    while time.monotonic() < stop:
        before = sum(process.cpu_times()[:2])
        time.sleep(0.1)
        if sum(process.cpu_times()[:2]) == before:
            return
