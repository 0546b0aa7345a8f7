"""The process that reads strangers' datasets: whatever a file does to it, the job gets one sentence or the other rows."""

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace

import psutil
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.scoring.data.tokenizer_files import read_tokenizer_files
from reflogp.scoring.errors import DatasetError
from reflogp.service.runner.job_dataset import JobDataset
from reflogp.service.runner.reader import Reading, count_rows, read_rows
from tests.conftest import REPOSITORY, write_rows
from tests.scoring.hostile_rows import obedient, pair
from tests.service.serving import wait_until

MIB = 1 << 20
#: By how much this process may grow while another one reads a bomb.
MOST_GROWTH = 200 * MIB
#: A tokenizer whose own code kills the process that uses it, in reality.
_DEADLY = """
import os, signal
from transformers import PreTrainedTokenizerFast

class DeadlyTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, conversation, **kwargs):
        match conversation[0]["content"]:
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(7)
            case "memory":
                kept = [bytes(64 << 20) for _ in range(1000)]
        return super().apply_chat_template(conversation, **kwargs)
"""


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("obedient")
    obedient(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deadly(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deadly")
    load_tokenizer(str(model)).save_pretrained(folder)
    (folder / "deadly.py").write_text(_DEADLY)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "DeadlyTokenizer", "auto_map": {"AutoTokenizer": [None, "deadly.DeadlyTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def reading(file, model, **changes) -> Reading:
    digest = read_tokenizer_files(str(model)).digest
    found = Reading(str(file), "train", None, None, str(file), str(model), True, digest, row_seconds=1.0, memory=2 << 30)
    return replace(found, **changes)


def rows_of(windows) -> tuple[dict, dict]:
    """(row -> its token lists, row -> what is wrong)."""
    tokens, problems = {}, {}
    for window in windows:
        problems |= window.problems
        for row in window.table.to_pylist():
            tokens[row.pop("row")] = row
    return tokens, problems


def read(what: Reading, check=lambda: None) -> tuple[dict, dict]:
    return rows_of(read_rows(what, check, lambda: None))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def readers() -> list[psutil.Process]:
    """The processes that the fork server has forked for this process."""
    return [child for server in psutil.Process().children() for child in server.children() if is_alive(child)]


def lines_of(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def packed(file, *parts, times: int = 1) -> None:
    with gzip.open(file, "wb", compresslevel=1) as sink:
        for part in parts:
            for _ in range(times if len(part) >= MIB else 1):
                sink.write(part)


def write_ipc(file, table, compression=None, stream=False) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression, allow_64bit=True, unify_dictionaries=not stream)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(file), table.schema, options=options) as writer:
        (writer.write_batch if isinstance(table, pa.RecordBatch) else writer.write_table)(table)


@pytest.mark.slow
def test_every_format_reads_as_on_the_command_line(model, tmp_path):
    import datasets

    rows = [pair(f"p{i}", note=None if i % 3 else "n\n") for i in range(1500)]
    flat = [{"prompt": f"p{i}", "chosen": "a,b", "rejected": 'q"\r\n\n' * (i % 3) or "x"} for i in range(1500)]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl").write_bytes(lines_of(*rows[:700]) + b"not JSON\n" + lines_of(*rows[700:]))
    packed(tmp_path / "b.jsonl.gz", lines_of(*rows))
    (tmp_path / "c.json").write_text("\n  " + json.dumps(rows, indent=1))
    datasets.Dataset.from_list(flat).to_csv(tmp_path / "e.csv")
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=999)
    write_ipc(tmp_path / "g.arrow", table, "zstd")
    pyarrow.feather.write_feather(table, tmp_path / "i.feather", compression="lz4")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "split")
    tokenizer = load_tokenizer(str(model))
    for path in sorted(tmp_path.iterdir()):
        found = read(reading(path, model))
        assert found == rows_of(tokenize_dataset(RowSource(str(path)), tokenizer)), path
        count = None if path.suffix == ".json" else len(found[0]) + len(found[1])
        assert count_rows(reading(path, model), lambda: None) == count, path


# Files that stand for far more than they are


def _one_line(folder):
    packed(folder / "a.jsonl.gz", lines_of(pair()), b"x" * (64 * MIB), b"\n", times=24)
    return folder / "a.jsonl.gz"


def _open_quotation_mark(folder):
    packed(folder / "a.csv.gz", b'prompt,chosen,rejected\n"', b"line\n" * (8 * MIB), times=40)
    return folder / "a.csv.gz"


def _repeated_value(folder):
    """A dictionary repeats one value of 8 MiB in every row."""
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int8()), pa.array(["x" * (8 * MIB)]))
    table = pa.table(dict.fromkeys(("prompt", "chosen", "rejected"), same))
    pq.write_table(table, folder / "a.parquet", dictionary_pagesize_limit=1 << 30)
    return folder / "a.parquet"


def _compressed_batch(folder):
    write_ipc(folder / "a.arrow", pa.table({"prompt": ["x" * (1500 * MIB)]}), "zstd")
    return folder / "a.arrow"


def _lying_offsets(folder):
    write_ipc(folder / "a.arrow", pa.table({"prompt": ["abc", "defg", "hijkl"]}))
    content = (folder / "a.arrow").read_bytes()
    old, new = b"\x03\0\0\0\x07\0\0\0\x0c\0\0\0", b"\x03\0\0\0\x07\0\0\0\xff\xff\xff\x3f"
    assert content.count(old) == 1
    (folder / "a.arrow").write_bytes(content.replace(old, new))
    return folder / "a.arrow"


def _rows_of_nothing(folder):
    write_ipc(folder / "a.arrow", pa.record_batch([pa.Array.from_buffers(pa.null(), 1 << 40, [None])], ["prompt"]))
    return folder / "a.arrow"


def _deep_array(folder):
    (folder / "a.json").write_text("[" * 500_000)
    return folder / "a.json"


BOMBS = {
    _one_line: "memory",
    _open_quotation_mark: "",
    _repeated_value: "memory",
    _compressed_batch: "memory",
    _lying_offsets: "cannot be read as arrow",
    _rows_of_nothing: "match no known format",
    _deep_array: "not JSON",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", BOMBS, ids=lambda make: make.__name__)
def test_a_bomb_ends_its_job_alone(model, tmp_path, make):
    file = make(tmp_path)
    before = psutil.Process().memory_info().rss
    with pytest.raises(DatasetError, match=BOMBS[make]) as raised:
        read(reading(file, model))
    assert "columns prompt" in str(raised.value) or str(file) in str(raised.value)
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH
    assert not readers()


def test_blank_lines_and_numbers_without_end_are_bad_rows_or_none(model, tmp_path):
    packed(tmp_path / "a.jsonl.gz", lines_of(pair()), b"\n" * (64 * MIB), b"{}", times=2)
    rows = read(reading(tmp_path / "a.jsonl.gz", model))
    assert (set(rows[0]), set(rows[1])) == ({0}, {1})
    deep = b"[" * 500_000 + b"\n" + b'{"prompt": ' + b"9" * 1_000_000 + b"}\n"
    (tmp_path / "b.jsonl").write_bytes(lines_of(pair()) + deep + lines_of(pair()))
    rows = read(reading(tmp_path / "b.jsonl", model))
    assert (set(rows[0]), set(rows[1])) == ({0, 3}, {1, 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain.parquet", "dictionary.parquet", "plain.arrow", "packed.arrow", "stream.arrow"])
def test_damaged_files_are_read_or_refused_and_nothing_else(model, tmp_path, kind):
    draw = random.Random(1)
    rows = [pair(str(draw.random()), i=[i] * 5, s=f"s{i % 7}") for i in range(60)]
    table, file = pa.Table.from_pylist(rows), tmp_path / kind
    if kind.endswith("parquet"):
        pq.write_table(table, file, use_dictionary=kind.startswith("d"), row_group_size=25, compression="zstd")
    else:
        at = table.column_names.index("s")
        table = table.set_column(at, "s", table["s"].dictionary_encode())
        write_ipc(file, table, "zstd" if "packed" in kind else None, stream="stream" in kind)
    whole, outcomes = file.read_bytes(), {"read": 0, "refused": 0}
    for _ in range(25):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        if draw.random() < 0.1:
            del damaged[draw.randrange(len(damaged)) :]
        file.write_bytes(damaged)
        try:
            read(reading(file, model))
            outcomes["read"] += 1
        except DatasetError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


# Rows that end the process


def test_a_row_that_does_not_end_or_ends_its_process_is_a_bad_row(deadly, tmp_path):
    rows = [pair() for _ in range(1500)]
    time_ = "more than 1 s of processor time"
    reasons = {7: ("crash", "SIGSEGV"), 8: ("exit", "status 7"), 20: ("loop", time_), 21: ("power", time_)}
    reasons |= {1100: ("memory", "memory"), 1400: ("crash", "SIGSEGV"), 1498: ("loop", time_)}
    for at, (order, _) in reasons.items():
        rows[at] = pair(order)
    tokens, problems = read(reading(write_rows(tmp_path / "rows.jsonl", rows), deadly))
    assert set(problems) == set(reasons) and set(tokens) == set(range(1500)) - set(reasons)
    for at, (_, reason) in reasons.items():
        assert reason in problems[at]


def test_a_process_that_is_killed_from_outside_costs_no_row(model, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [pair(f"number {n}") for n in range(5000)])
    whole, windows = read(reading(file, model)), []
    for window in read_rows(reading(file, model), lambda: None, lambda: None):
        windows.append(window)
        if len(windows) == 1:
            [process] = readers()
            process.kill()
    assert rows_of(windows) == whole and not whole[1]


@pytest.mark.slow
def test_a_template_that_never_ends_fails_the_dataset(model, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [pair("loop") for _ in range(100)])
    with pytest.raises(DatasetError, match="20 rows took more than"):
        read(reading(file, model, row_seconds=0.2))


@pytest.mark.slow
def test_it_ends_with_a_parent_that_is_killed(model, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [pair("power")])
    program = (
        "from pathlib import Path; from tests.service.test_reader import read, reading;"
        f"read(reading(Path({str(file)!r}), Path({str(model)!r}), row_seconds=3))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    wait_until(lambda: len(psutil.Process(parent.pid).children(recursive=True)) >= 2, 120)
    left = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, left)), 60)


def test_token_ids_are_kept_unless_a_row_reached_a_limit(model, tmp_path):
    for order, is_kept in (("loop", False), ("memory", False), ("speak", True)):
        file = write_rows(tmp_path / f"{order}.jsonl", [pair(), pair(order)])
        kept = tmp_path / f"{order}.arrow"
        dataset = JobDataset(reading(file, model), kept, lambda: None, lambda: None, lambda: None)
        assert [set(window.problems) for window in dataset] == [{1}]
        assert kept.exists() == is_kept, order
        assert [set(window.problems) for window in dataset] == [{1}]
        assert dataset.count() == 2


# Names that lead elsewhere


@pytest.mark.parametrize(
    "names",
    [
        *([{"filename": name}] for name in ("../secret.arrow", "{place}/secret.arrow", ".hidden.arrow", "", "a\0.arrow", 7)),
        *([{}], ["../secret.arrow"], [None], {"filename": "x"}, 7),
    ],
)
def test_a_saved_dataset_names_no_file_outside_its_folder(tmp_path, names):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": names}).replace("{place}", str(tmp_path)))
    for folder in (saved, tmp_path):
        write_ipc(folder / "secret.arrow", pa.table({"a": ["secret"]}), stream=True)
    with pytest.raises(DatasetError):
        list(RowSource(str(saved), confined=True))


@pytest.mark.parametrize("split", ["..", "/", "", "train/../.."])
def test_a_split_is_a_plain_name(tmp_path, split):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", split]}))
    with pytest.raises(DatasetError, match="invalid file or split name"):
        RowSource(str(tmp_path), split, confined=True)


@pytest.mark.parametrize("content", ["", "7", "[" * 100_000, '{"splits": "train"}', '{"splits": [["train"]]}'])
def test_a_description_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DatasetError):
        RowSource(str(tmp_path), confined=True)


@pytest.mark.parametrize("name", ["someone/some-dataset", "imdb", "https://example.org/a.jsonl"])
def test_only_local_files_are_read(name):
    with pytest.raises(DatasetError, match="no such file"):
        RowSource(name, confined=True)
