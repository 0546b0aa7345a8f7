"""The process that reads an untrusted Parquet file: whatever happens to it, its parent goes on and keeps no child."""

import errno
import gc
import logging
import os
import random
import signal
import struct
import threading
import time
from contextlib import suppress
from functools import partial

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data import parquet_process
from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.confined_process import SOCKET
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
from reflogp.store import ReflogpError

MIB = 1 << 20
BOUNDS = ReadBounds(row_bytes=1 * MIB, dataset_bytes=256 * MIB, group_bytes=16 * MIB)


class StopError(Exception):
    pass


@pytest.fixture(autouse=True)
def no_child_is_left():
    before = set(psutil.Process().children())
    yield
    assert not set(psutil.Process().children()) - before  # a zombie would be one


@pytest.fixture
def parquet(tmp_path):
    """Row groups of plain rows, and one whose rows are small only as entries of a dictionary."""
    plain = [f"row {n}" for n in range(3000)]
    columns = {"n": range(8000), "text": [*plain, *["x" * (MIB // 2)] * 500, *[f"row {n}" for n in range(3500, 8000)]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1500, compression="zstd")
    return tmp_path / "a.parquet"


def in_child(monkeypatch, work):
    """Let the child do `work` in place of reading the file."""

    def replaced(*arguments):
        work()
        os._exit(0)

    monkeypatch.setattr(parquet_process, "_open", replaced)


def refusal(file) -> str:
    with pytest.raises(DatasetError) as refused:
        list(RowSource(str(file), bounds=BOUNDS))
    assert str(file) in str(refused.value)
    return str(refused.value)


def test_rows_are_neither_lost_nor_repeated_when_a_group_takes_too_much_memory(parquet):
    rows = list(RowSource(str(parquet), bounds=BOUNDS))
    assert [row.columns["n"] for row in rows] == list(range(8000))
    assert [len(row.columns["text"]) for row in rows[2999:3501]] == [8, *[MIB // 2] * 500, 8]


def test_rows_are_neither_lost_nor_repeated_when_a_reader_is_killed_from_outside(parquet):
    def kill_once():
        for child in psutil.Process().children() if not killed else ():
            child.kill()
            killed.append(child)

    killed: list[psutil.Process] = []
    rows = list(RowSource(str(parquet), bounds=BOUNDS, check=kill_once))
    assert killed and [row.columns["n"] for row in rows] == list(range(8000))


@pytest.mark.parametrize("times", [1, 8])
def test_rows_are_neither_lost_nor_repeated_when_readers_are_killed_within_a_message(tmp_path, monkeypatch, times):
    """The reader is killed after some bytes of its stream, wherever they are: in a schema, a head or a body."""
    rows = [{"n": n, "text": f"{n}" * 1000} for n in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    draw, left = random.Random(times), [times]
    read = parquet_process._Reader.read

    def killing(self, size):
        if left[0] and draw.random() < 0.2 and self._received > 50_000 * (times - left[0]):
            left[0] -= 1
            self.socket.settimeout(60)  # a busy machine takes a while to send, and to end a killed process
            self.socket.recv(min(size // 2, 1000))
            os.kill(self.pid, signal.SIGKILL)
            while self.socket.recv(1 << 20):
                pass
        return read(self, size)

    monkeypatch.setattr(parquet_process._Reader, "read", killing)
    found = [row.columns for row in RowSource(str(tmp_path / "a.parquet"), bounds=BOUNDS)]
    assert found == rows and left[0] < times


def test_after_a_group_that_takes_much_memory_the_first_plan_reads_again(parquet, monkeypatch):
    plans = []
    begin = parquet_process._Reader.__init__

    def noting(self, file, meter, plan, *rest):
        plans.append((plan.encoded, plan.rows))
        begin(self, file, meter, plan, *rest)

    monkeypatch.setattr(parquet_process._Reader, "__init__", noting)
    assert [row.columns["n"] for row in RowSource(str(parquet), bounds=BOUNDS)] == list(range(8000))
    assert [encoded for encoded, _ in plans][-1] is False and True in [encoded for encoded, _ in plans]


def test_names_of_fields_do_not_decide_how_batches_are_sent(tmp_path):
    text = pa.array([{"review": "x" * (MIB // 4)}] * 200)
    pq.write_table(pa.table({"n": range(200), "overview": text}), tmp_path / "a.parquet")
    rows = list(RowSource(str(tmp_path / "a.parquet"), bounds=BOUNDS))
    assert [row.columns["n"] for row in rows] == list(range(200)) and rows[0].problem is None


def test_ctrl_c_during_forks_leaves_no_child_and_no_lock(parquet, monkeypatch, request):
    fork, parent, draw, late = os.fork, os.getpid(), random.Random(1), []
    others = {child.pid for child in psutil.Process().children()}

    def interrupted():
        if draw.random() < 0.5 and not late:
            os.kill(parent, signal.SIGINT)
        elif not late:
            late.append(threading.Timer(draw.random() / 500, os.kill, (parent, signal.SIGINT)))
            late[0].start()
        return fork()

    def left():
        gc.collect()  # an interrupted child ends with its object, which a traceback may hold
        return {child.pid for child in psutil.Process().children()} - others

    monkeypatch.setattr(os, "fork", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored where a shell runs the tests with `&`
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    dropped = 0
    gc.freeze()  # `left` does not search through what earlier tests imported
    request.addfinalizer(gc.unfreeze)
    for _ in range(100):
        with suppress(KeyboardInterrupt):
            list(RowSource(str(parquet), bounds=BOUNDS))
            time.sleep(10)  # for an interrupt that comes after all
            dropped += 1
        late.clear()
        end = time.monotonic() + 10
        while left() and time.monotonic() < end:
            time.sleep(0.01)
        assert not left()
    taken = threading.Thread(target=lambda: logging.getLogger("reflogp.test").setLevel("INFO"))
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
    assert dropped <= 1  # Python drops an interrupt that arrives in a destructor; a user presses Ctrl-C again


def test_handlers_of_the_parent_do_not_run_in_the_child(parquet, monkeypatch, capfd):
    def handler(*_):
        os.write(2, b"the parent's handler ran")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        in_child(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert "crashed the process that read it" in refusal(parquet)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "the parent's handler" not in capfd.readouterr().err


def test_a_machine_without_room_for_a_process_is_named(parquet, monkeypatch):
    def full():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(ReflogpError, match="cannot start a process") as caught:
        list(RowSource(str(parquet), bounds=BOUNDS))
    assert not isinstance(caught.value, DatasetError)


def test_a_file_whose_readers_are_all_killed_is_an_error(parquet, monkeypatch):
    in_child(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert "crashed the process that read it (Killed)" in refusal(parquet)


def test_a_reader_that_crashes_is_an_error(parquet, monkeypatch):
    in_child(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert "Segmentation fault" in refusal(parquet)


def test_a_reader_that_takes_too_much_memory_is_an_error(parquet, monkeypatch):
    in_child(monkeypatch, lambda: bytearray(1 << 30))
    assert "cannot be read in 100,663,296 bytes of memory" in refusal(parquet)


def test_a_reader_that_does_not_end_is_an_error(parquet, monkeypatch):
    def loop():
        while True:
            pass

    monkeypatch.setattr(parquet_process, "BATCH_SECONDS", 0.3)
    in_child(monkeypatch, loop)
    assert "more than 0.3 s of processor time" in refusal(parquet)
    in_child(monkeypatch, lambda: time.sleep(1000))
    assert "made no progress for 1.8 s" in refusal(parquet)


def test_it_stops_when_told_to_while_the_reader_hangs(parquet, monkeypatch):
    in_child(monkeypatch, lambda: time.sleep(1000))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()

    def check():
        if stop.is_set():
            raise StopError

    with pytest.raises(StopError):
        list(RowSource(str(parquet), bounds=BOUNDS, check=check))


def test_a_reading_that_is_given_up_ends_its_reader(parquet):
    rows = iter(RowSource(str(parquet), bounds=BOUNDS))
    next(rows)
    assert psutil.Process().children()
    rows.close()


def stream_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_a_stream_that_a_taken_over_reader_sends_is_not_believed(parquet, monkeypatch):
    content = stream_of(pa.record_batch({"a": ["abc", "defg", "hijkl"]}))
    (body,) = [message.body.size for message in pa.ipc.MessageReader.open_stream(content) if message.type == "record batch"]
    length, offsets = struct.pack("<q", body), struct.pack("<4i", 0, 3, 7, 12)
    assert content.count(length) >= 1 and content.count(offsets) == 1
    in_child(monkeypatch, lambda: os.write(SOCKET, content.replace(length, struct.pack("<q", 1 << 40))))
    assert "1,099,511,627,776 bytes must be read at once" in refusal(parquet)
    in_child(monkeypatch, lambda: os.write(SOCKET, content.replace(offsets, struct.pack("<4i", 0, 3, 7, 1 << 29))))
    assert "out of bounds" in refusal(parquet)
    in_child(monkeypatch, lambda: os.write(SOCKET, b"\xff" * 7 + b"\x7f"))  # metadata of two gigabytes
    assert "2,147,483,647 bytes must be read at once" in refusal(parquet)
    for garbage in (b"", b"\xff" * 1000, b"\xff" * 4 + b"\x08\0\0\0" + b"\xff" * 100, content[: len(content) // 2]):
        in_child(monkeypatch, partial(os.write, SOCKET, garbage))
        assert "cannot be read as parquet" in refusal(parquet)


def test_count_and_schema_of_a_parquet_file_come_from_a_reader_too(parquet, tmp_path):
    source = RowSource(str(parquet), bounds=BOUNDS)
    assert (source.count(), source.schema().names) == (8000, ["n", "text"])
    (tmp_path / "b.parquet").write_bytes(parquet.read_bytes()[:-100])
    for ask in (RowSource.count, RowSource.schema):
        with pytest.raises(DatasetError, match="cannot be read as parquet"):
            ask(RowSource(str(tmp_path / "b.parquet"), bounds=BOUNDS))
