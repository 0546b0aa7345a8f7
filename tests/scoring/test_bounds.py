"""Files that stand for far more than they are: read in bounded memory, or refused. Peaks are measured in separate processes."""

import gzip
import json
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError

MIB = 1 << 20
BOUNDS = ReadBounds(row_bytes=1 * MIB, dataset_bytes=64 * MIB, group_bytes=16 * MIB)
#: Beyond what the interpreter and Arrow take: buffers of a few groups, decompressors, allocators' slack.
MOST_GROWTH = 160 * MIB
#: For text, whose rows cost more time.
TEXT = ReadBounds(row_bytes=1 * MIB, dataset_bytes=20 * MIB, group_bytes=16 * MIB)
GOOD = {"prompt": "p", "chosen": "yes", "rejected": "no"}

_READ = """
import json, resource, sys
from itertools import islice
from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
def peak(of=resource.RUSAGE_SELF):
    return resource.getrusage(of).ru_maxrss * 1024
file, bounds, most = sys.argv[1], ReadBounds(*map(int, sys.argv[2:5])), int(sys.argv[5])
before, good, bad, last, said = peak(), 0, 0, None, None
try:
    for row in islice(RowSource(file, bounds=bounds), most):
        good, bad, last = good + (row.columns is not None), bad + (row.columns is None), row.problem
except DatasetError as error:
    said = str(error)
grew = peak() - before, max(0, peak(resource.RUSAGE_CHILDREN) - before)
print(json.dumps({"good": good, "bad": bad, "problem": last, "said": said, "grew": sum(grew)}))
"""


def read_apart(file, bounds=BOUNDS, most=10_000) -> dict:
    """Read a file in a process of its own: rows, the error, and by how many bytes the peaks of it and its children grew."""
    command = [sys.executable, "-c", _READ, file, bounds.row_bytes, bounds.dataset_bytes, bounds.group_bytes, most]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["grew"] < MOST_GROWTH, outcome
    return outcome


def lines_of(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def packed(file, *parts, times: int = 1) -> None:
    with gzip.open(file, "wb", compresslevel=1) as sink:
        for part in parts:
            for _ in range(times if len(part) >= MIB else 1):
                sink.write(part)


def varint(value: int, width: int = 0) -> bytes:
    """A number as Thrift writes it (zigzag), in at least `width` bytes."""
    value, digits = value << 1, bytearray()
    while value > 0x7F or len(digits) + 1 < width:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(digits) + bytes([value])


def replaced(file, old: bytes, new: bytes, times: int | None = None) -> None:
    """Exchange bytes of a file; `times`: how often they must be there."""
    content = file.read_bytes()
    assert len(old) == len(new) and content.count(old) >= 1 and content.count(old) in (times, times or content.count(old))
    file.write_bytes(content.replace(old, new))


def write_parquet(file, columns: dict, **options) -> None:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(
        table, file, **{"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "write_statistics": False, **options}
    )


def write_ipc(file, table, compression=None, stream=False) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression, allow_64bit=True, unify_dictionaries=not stream)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(file), table.schema, options=options) as writer:
        (writer.write_batch if isinstance(table, pa.RecordBatch) else writer.write_table)(table)


# What is within the bounds reads as it does without any


@pytest.mark.slow
def test_within_bounds_every_format_reads_the_same(tmp_path):
    import datasets

    rows = [
        {
            "prompt": [{"role": "user", "content": f"p{i}"}],
            "chosen": "ja" * i,
            "rejected": None if i % 3 else "n\n",
            "ids": [1] * (i % 4),
        }
        for i in range(2500)
    ]
    flat = [{"prompt": f"p{i}", "chosen": "a,b", "rejected": 'q"\r\n\n' * (i % 3) or "x"} for i in range(2500)]
    (tmp_path / "a.jsonl").write_bytes(lines_of(*rows))
    packed(tmp_path / "b.jsonl.gz", lines_of(*rows))
    (tmp_path / "c.json").write_text("\n  " + json.dumps(rows, indent=1))
    (tmp_path / "d.json").write_text(" \n" * 3 + lines_of(*rows).decode())
    datasets.Dataset.from_list(flat).to_csv(tmp_path / "e.csv")
    table = pa.Table.from_pylist(rows)
    for name, options in {
        "plain": {"use_dictionary": False, "compression": "none"},
        "dictionary": {"row_group_size": 999},
        "snappy2": {"compression": "snappy", "data_page_version": "2.0", "data_page_size": 1000},
        "lengths": {"use_dictionary": False, "column_encoding": {"chosen": "DELTA_LENGTH_BYTE_ARRAY"}},
        "statistics": {"write_statistics": True, "write_page_index": True},
    }.items():
        write_parquet(tmp_path / f"{name}.parquet", table, **options)
    kept = pa.table({"m": pa.array([[("a", 1)], None, [], [("b", 2), ("c", None)]], pa.map_(pa.string(), pa.int32()))})
    write_parquet(tmp_path / "map.parquet", kept)
    write_ipc(tmp_path / "map.arrow", kept.slice(1))
    odd = pa.table(
        {
            "view": pa.array(["short", None, "longer than twelve bytes"] * 9, pa.string_view()),
            "large": pa.array(["x", "y", None] * 9, pa.large_string()),
            "fixed": pa.array([[1, 2], None, [3, 4]] * 9, pa.list_(pa.int8(), 2)),
            "dict": pa.array(["u", None, "v"] * 9).dictionary_encode(),
            "bool": [True, None, False] * 9,
            "binary": pa.array([b"1", b"22", None] * 9, pa.binary()),
            "digest": pa.array([b"1234", None, b"5678"] * 9, pa.binary(4)),
            "none": pa.nulls(27),
        }
    )
    write_ipc(tmp_path / "odd.arrow", odd.slice(5, 11))
    write_ipc(tmp_path / "f.arrow", table)
    write_ipc(tmp_path / "g.arrow", table, "zstd")
    write_ipc(tmp_path / "h.arrow", table, stream=True)
    pyarrow.feather.write_feather(table, tmp_path / "i.feather", compression="lz4")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "split")
    for path in sorted(tmp_path.iterdir()):
        free, bounded = RowSource(str(path)), RowSource(str(path), bounds=BOUNDS)
        assert [(row.number, row.columns) for row in bounded] == [(row.number, row.columns) for row in free], path
        assert len(list(bounded)) == bounded.count() == free.count(), path
        if path.name != "map.arrow":  # its schema is inferred from rows, where a map is a list of pairs
            assert bounded.schema().names == free.schema().names, path


# Text


@pytest.mark.parametrize("end", [b"x" * MIB, b'{"a": "' + b"\\u0000" * (MIB // 6 + 2)])
def test_one_line_that_never_ends_is_a_bad_row_and_the_next_is_read(tmp_path, end):
    file = tmp_path / "a.jsonl.gz"
    packed(file, lines_of(GOOD), end, b"\n" + lines_of(GOOD), times=400)
    assert file.stat().st_size < 5 * MIB
    outcome = read_apart(file, ReadBounds(MIB, 1 << 40, MIB))
    assert (outcome["good"], outcome["bad"], outcome["said"]) == (2, 1, None)
    assert RowSource(str(file), bounds=ReadBounds(MIB, 1 << 40, MIB)).count() == 3


TEXT_BOMBS = {
    "one line": ("a.jsonl.gz", [b"x" * MIB], "longer than 20,971,520 bytes when decoded"),
    "many lines": ("a.jsonl.gz", [(b'{"a": "' + b"x" * 90 + b'"}\n') * 10_486], "longer than 20,971,520 bytes when decoded"),
    "blank lines": ("a.jsonl.gz", [b"\n" * MIB], "longer than 20,971,520 bytes when decoded"),
    "an array": ("a.json.gz", [b"[", b"0," * MIB], "JSON array of more than 16,777,216 bytes"),
    "an array of arrays": ("a.json.gz", [b"[", b"[]," * MIB], "JSON array of more than 16,777,216 bytes"),
    "blanks before an array": ("a.json.gz", [b" \n" * MIB, b"[]"], "longer than 20,971,520 bytes when decoded"),
    "lines under the wrong name": ("a.json.gz", [b'{"a": "', b"x" * MIB], "longer than 20,971,520 bytes when decoded"),
    "a CSV field": ("a.csv.gz", [b"a,b\n", b"x" * MIB], "record longer than 1,048,576"),
    "a CSV line of cells": ("a.csv.gz", [b"a,b\n", b"ab," * MIB], "record longer than 1,048,576"),
    "an open quotation mark": ("a.csv.gz", [b'a,b\n"', b"line\n" * MIB], "record longer than 1,048,576"),
    "a CSV header": ("a.csv.gz", [b"ab," * MIB], "record longer than 1,048,576"),
    "CSV records": ("a.csv.gz", [b"a,b\n", b"1,2\n" * MIB], "longer than 20,971,520 bytes when decoded"),
    "old Macintosh line ends": ("a.csv.gz", [b"a,b\r", b"1,2\r" * MIB], "longer than 20,971,520 bytes when decoded"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT_BOMBS)
def test_text_bombs_are_refused(tmp_path, name):
    file_name, parts, says = TEXT_BOMBS[name]
    packed(tmp_path / file_name, *parts, times=200)
    outcome = read_apart(tmp_path / file_name, TEXT, most=1 << 40)
    assert says in (outcome["said"] or ""), outcome


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["zst", "bz2", "lz4"])
def test_bombs_of_every_compression_are_refused(tmp_path, suffix):
    file = tmp_path / f"a.jsonl.{suffix}"
    with pa.output_stream(str(file), compression="detect") as sink:
        for _ in range(200):
            sink.write(b"\n" * MIB)
    assert "when decoded" in read_apart(file, TEXT, most=1 << 40)["said"]


@pytest.mark.slow
def test_all_files_of_a_folder_count_together(tmp_path):
    for number in range(9):
        packed(tmp_path / f"{number}.jsonl.gz", b"\n" * (5 * MIB))
    assert "when decoded" in read_apart(tmp_path, TEXT, most=1 << 40)["said"]


@pytest.mark.parametrize("text", ["[" * 500_000, '{"a":' * 100_000, "[" * 400_000 + "]" * 400_000])
def test_deep_json_is_a_bad_row_or_a_bad_file(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text + "\n" + json.dumps(GOOD) + "\n")
    outcome = read_apart(tmp_path / "a.jsonl")
    assert (outcome["good"], outcome["bad"]) == (1, 1)
    (tmp_path / "b.json").write_text("[" + text)
    assert "not JSON" in read_apart(tmp_path / "b.json")["said"]


def test_columns_of_mixed_types_have_no_schema(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of({"a": 1}, {"a": "x"}))
    with pytest.raises(DatasetError, match="values do not fit a single Arrow type"):
        RowSource(str(tmp_path / "a.jsonl"), bounds=BOUNDS).schema()


def test_a_number_of_a_million_digits_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": ' + "9" * 1_000_000 + "}\n" + json.dumps(GOOD) + "\n")
    outcome = read_apart(tmp_path / "a.jsonl")
    assert (outcome["good"], outcome["bad"]) == (1, 1)


def test_lists_of_rows_end_early_where_rows_are_long(tmp_path, monkeypatch):
    from reflogp.scoring.data import read

    monkeypatch.setattr(read, "_BATCH_BYTES", 10_000)
    rows = [{"a": "x" * 3000}] * 10
    (tmp_path / "a.jsonl").write_bytes(lines_of(*rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.csv").write_text("a\n" + "x" * 3000 + "\n" * 1 + ("x" * 3000 + "\n") * 9)
    write_parquet(tmp_path / "d.parquet", pa.Table.from_pylist(rows))
    for file in sorted(tmp_path.iterdir()):
        assert [len(part) for part in read.batched(RowSource(str(file), bounds=BOUNDS), 1024)] == [4, 4, 2], file


# Parquet


def _one_huge_value(file):
    write_parquet(file, {"a": [b"\0" * (200 * MIB)]}, use_dictionary=False)


def _honest_group(file):
    _one_huge_value(file)


def _lying_group(file):
    """The footer says 100 bytes everywhere; the page says what it is."""
    _one_huge_value(file)
    for size in {
        pq.read_metadata(file).row_group(0).total_byte_size,
        pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size,
    }:
        replaced(file, varint(size), varint(100, 5))


def _page_says(file, size: int):
    """Exchange what the first page says that it is of when decompressed."""
    content = bytearray(file.read_bytes())
    assert content[4:7] == b"\x15\0\x15"  # a page of data
    end = next(at for at in range(7, 20) if content[at] < 0x80) + 1
    content[7:end] = varint(size, end - 7)
    assert content[end] == 0x15
    file.write_bytes(content)


def _lying_page(file):
    """The page says 100 bytes too, so that it cannot be decompressed."""
    _lying_group(file)
    _page_says(file, 100)


def _boasting_page(file):
    """A small page that says that it is of much more."""
    write_parquet(file, {"a": ["x" * 3 * MIB]}, use_dictionary=False)
    _page_says(file, (1 << 27) - 1)


def _boasting_dictionary(file):
    """A dictionary of a few bytes that says that it has a million entries."""
    write_parquet(file, {"a": [f"{i:05}" for i in range(20_000)]}, compression="none")
    content = file.read_bytes()
    at = content.index(b"\x15" + varint(20_000), 4, 60)
    file.write_bytes(content[:at] + b"\x15" + varint(1_000_000) + content[at + 4 :])


def _one_list_of_all(file):
    write_parquet(file, {"a": pa.array([[7] * 5_000_000])})


def _million_rows_of_nothing(file):
    write_parquet(file, {"a": pa.nulls(20_000_000, pa.int32())})


def _prefixes(file):
    write_parquet(
        file, {"a": ["x" * MIB + str(i) for i in range(20)]}, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"}
    )


def _many_columns(file):
    write_parquet(file, {f"c{i}": [1] for i in range(2000)})


def _long_footer(file):
    write_parquet(file, pa.table({"a": [1]}).replace_schema_metadata({"x": "y" * MIB}))


def _no_columns(file):
    write_parquet(file, pa.table({"a": [1, 2]}).select([]))


def _wide_values(file):
    write_parquet(file, {"a": pa.array([b"\0" * (2 * MIB)] * 5, pa.binary(2 * MIB))})


def _many_rows_claimed(file):
    write_parquet(file, {"a": range(8300)}, use_dictionary=False)
    replaced(file, varint(8300), varint(1_000_000))


def _boasting_footer(file):
    file.write_bytes(b"PAR1" + b"\0" * 100 + b"\xff\xff\xff\x7fPAR1")


PARQUET_BOMBS = {
    _honest_group: ": 209,7",
    _lying_group: "cannot be read in 100,663,296 bytes of memory",
    _lying_page: "cannot be read as parquet",
    _boasting_page: "cannot be read",
    _boasting_dictionary: "cannot be read as parquet",
    _one_list_of_all: "cannot be read in 100,663,296 bytes of memory",
    _million_rows_of_nothing: "claims 20,000,000 rows",
    _many_columns: "2,000 columns",
    _long_footer: "cannot be read as parquet",
    _no_columns: "0 columns",
    _many_rows_claimed: None,
    _boasting_footer: "cannot be read as parquet",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", PARQUET_BOMBS, ids=lambda make: make.__name__)
def test_parquet_bombs_are_refused(tmp_path, make):
    file = tmp_path / "a.parquet"
    make(file)
    assert file.stat().st_size < 4 * MIB
    outcome = read_apart(file, most=1 << 40)
    assert outcome["said"] and (PARQUET_BOMBS[make] or "") in outcome["said"], outcome


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b"\0" * 1000, b"PAR1" + b"\0\0\0\0PAR1", b"ARROW1\0\0", b"ARROW1"]
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_files_of_nothing_are_refused(tmp_path, suffix, content):
    (tmp_path / f"a.{suffix}").write_bytes(content)
    with pytest.raises(DatasetError):
        list(RowSource(str(tmp_path / f"a.{suffix}"), bounds=BOUNDS))


@pytest.mark.slow
def test_values_that_a_dictionary_repeats_are_read_few_at_a_time(tmp_path):
    """2,000 rows of half a megabyte in a file of a few kilobytes: each is fine, all at once are a gigabyte."""
    bounds = ReadBounds(MIB, 1 << 40, 16 * MIB)
    half, file = "x" * (MIB // 2), tmp_path / "a.parquet"
    write_parquet(file, {"a": pa.array([half]).take(pa.array([0] * 2000)), "n": range(2000)})
    write_parquet(tmp_path / "b.parquet", {"a": pa.array([[half]]).take(pa.array([0] * 2000)), "n": range(2000)})
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array([half]))
    write_ipc(tmp_path / "c.arrow", pa.table({"a": dictionary}), "zstd")
    for name in ("a.parquet", "b.parquet", "c.arrow"):
        outcome = read_apart(tmp_path / name, bounds)
        assert (outcome["good"], outcome["bad"], outcome["said"]) == (2000, 0, None), name
        assert "when decoded" in read_apart(tmp_path / name)["said"]


def test_rows_that_are_too_long_are_bad_and_the_others_are_read(tmp_path):
    long, short = "x" * (2 * MIB), "y"
    table = pa.table({"a": [short, long, short, long, short], "n": range(5)})
    lists = pa.table({"a": [[short], [short * 10] * 100_000, [short]], "n": range(3)})
    write_parquet(tmp_path / "a.parquet", table)
    write_parquet(tmp_path / "b.parquet", table, use_dictionary=False)
    write_ipc(tmp_path / "c.arrow", table)
    write_parquet(tmp_path / "d.parquet", lists)
    write_ipc(tmp_path / "e.arrow", lists)
    for name in ("a.parquet", "b.parquet", "c.arrow", "d.parquet", "e.arrow"):
        rows = list(RowSource(str(tmp_path / name), bounds=BOUNDS))
        assert [row.columns is None for row in rows] == [bool(i % 2) for i in range(len(rows))], name
        assert "longer than 1,048,576 bytes" in rows[1].problem


@pytest.mark.parametrize(("make", "rows"), [(_prefixes, 20), (_wide_values, 5)])
def test_rows_beyond_the_bound_are_bad_rows_however_they_are_encoded(tmp_path, make, rows):
    make(tmp_path / "a.parquet")
    outcome = read_apart(tmp_path / "a.parquet")
    assert (outcome["good"], outcome["bad"], outcome["said"]) == (0, rows, None)
    assert "longer than 1,048,576 bytes" in outcome["problem"]


# Arrow


def _compressed_batch(file):
    write_ipc(file, pa.table({"a": [b"\0" * (200 * MIB)]}), "zstd")


def _compressed_dictionary(file):
    values = pa.array([b"\0" * (200 * MIB)])
    write_ipc(file, pa.table({"a": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)}), "lz4")


def _many_dictionaries(file):
    make = pa.DictionaryArray.from_arrays
    parts = [make(pa.array([0], pa.int8()), pa.array([bytes([n]) * 4 * MIB])) for n in range(9)]
    write_ipc(file, pa.table({"a": pa.chunked_array(parts)}), "zstd", stream=True)


def _boasting_buffer(file):
    write_ipc(file, pa.table({"a": ["x" * 100_000]}), "zstd")
    replaced(file, (100_000).to_bytes(8, "little"), (1 << 45).to_bytes(8, "little"))


def _negative_buffer(file):
    write_ipc(file, pa.table({"a": ["x" * 100_000]}), "zstd")
    replaced(file, (100_000).to_bytes(8, "little"), (-5).to_bytes(8, "little", signed=True))


def _lying_offsets(file):
    write_ipc(file, pa.table({"a": ["abc", "defg", "hijkl"]}))
    replaced(file, b"\x03\0\0\0\x07\0\0\0\x0c\0\0\0", b"\x03\0\0\0\x07\0\0\0\xff\xff\xff\x3f", 1)


def _falling_offsets(file):
    write_ipc(file, pa.table({"a": ["abc", "defg", "hijkl"]}))
    replaced(file, b"\x03\0\0\0\x07\0\0\0\x0c\0\0\0", b"\x03\0\0\0\0\0\0\xf0\x0c\0\0\0", 1)


def _indices_beyond_the_dictionary(file):
    indices = pa.array([0x11223344], pa.int32())
    write_ipc(file, pa.table({"a": pa.DictionaryArray.from_arrays(indices, pa.array(["x"]), safe=False)}))


def _rows_of_nothing(file):
    write_ipc(file, pa.record_batch([pa.Array.from_buffers(pa.null(), 1 << 40, [None])], ["a"]))


def _structs_of_nothing(file):
    write_ipc(file, pa.record_batch([pa.Array.from_buffers(pa.struct([]), 1 << 40, [None], children=[])], ["a"]))


def _unions(file):
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["x"])])
    write_ipc(file, pa.table({"a": union}))


def _runs(file):
    write_ipc(file, pa.table({"a": pa.RunEndEncodedArray.from_arrays([1 << 30], ["x" * 1000])}))


def _views_of_one_list(file):
    views = pa.ListViewArray.from_arrays(
        pa.array([0] * 1000, pa.int32()), pa.array([9] * 1000, pa.int32()), pa.array(["x"] * 9)
    )
    write_ipc(file, pa.table({"a": views}))


ARROW_BOMBS = {
    _compressed_batch: ": 209,7",
    _compressed_dictionary: ": 209,7",
    _many_dictionaries: ": 16,7",
    _boasting_buffer: ": 35,184,37",
    _negative_buffer: "message is damaged",
    _lying_offsets: "cannot be read as arrow",
    _falling_offsets: "cannot be read as arrow",
    _indices_beyond_the_dictionary: "cannot be read as arrow",
    _rows_of_nothing: "when decoded",
    _structs_of_nothing: "when decoded",
    _unions: "is not supported",
    _runs: "is not supported",
    _views_of_one_list: "is not supported",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", ARROW_BOMBS, ids=lambda make: make.__name__)
def test_arrow_bombs_are_refused(tmp_path, make):
    file = tmp_path / "a.arrow"
    make(file)
    assert file.stat().st_size < 4 * MIB
    outcome = read_apart(file, most=1 << 40)
    assert outcome["said"] and ARROW_BOMBS[make] in outcome["said"], outcome


def test_one_row_of_two_billion_nulls_is_a_bad_row(tmp_path):
    nulls = pa.Array.from_buffers(pa.null(), 2**31 - 1, [None])
    write_ipc(tmp_path / "a.arrow", pa.table({"a": pa.FixedSizeListArray.from_arrays(nulls, 2**31 - 1)}))
    outcome = read_apart(tmp_path / "a.arrow")
    assert (outcome["good"], outcome["bad"]) == (0, 1)


def test_a_batch_beyond_the_bound_is_refused_even_as_it_lies_there(tmp_path):
    write_ipc(tmp_path / "a.arrow", pa.table({"a": ["x" * 1000] * 20_000}))
    assert "20,080,008 bytes must be read at once" in read_apart(tmp_path / "a.arrow")["said"]


# Saved datasets and hub names


def _saved(folder, names, split=None):
    at = folder / split if split else folder
    at.mkdir(parents=True)
    (at / "dataset_info.json").write_text("{}")
    (at / "state.json").write_text(json.dumps({"_data_files": names}))
    write_ipc(folder.parent / "secret.arrow", pa.table({"a": ["secret"]}), stream=True)


@pytest.mark.parametrize(
    "names",
    [
        [{"filename": "../secret.arrow"}],
        [{"filename": "{place}/secret.arrow"}],
        [{"filename": ".."}],
        [{"filename": ".hidden.arrow"}],
        [{"filename": ""}],
        [{"filename": "a\0.arrow"}],
        [{"filename": "..\\secret.arrow"}],
        [{"filename": 7}],
        [{"filename": None}],
        [{"filename": ["a"]}],
        [{}],
        ["../secret.arrow"],
        [None],
        {"filename": "x"},
        "secret.arrow",
        7,
    ],
)
def test_a_saved_dataset_names_no_file_outside_its_folder(tmp_path, names):
    names = json.loads(json.dumps(names).replace("{place}", str(tmp_path)))
    _saved(tmp_path / "saved", names)
    with pytest.raises(DatasetError):
        list(RowSource(str(tmp_path / "saved"), bounds=BOUNDS))


@pytest.mark.parametrize("split", ["..", "../saved", "/", "", "train/../.."])
def test_a_split_is_a_plain_name(tmp_path, split):
    _saved(tmp_path / "saved", [{"filename": "secret.arrow"}], "train")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", split]}))
    with pytest.raises(DatasetError):
        RowSource(str(tmp_path / "saved"), split, bounds=BOUNDS)


@pytest.mark.parametrize("content", ["", "7", "[]", "[" * 100_000, '{"splits": "train"}', '{"splits": [["train"]]}'])
def test_a_description_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DatasetError):
        RowSource(str(tmp_path), bounds=BOUNDS)


@pytest.mark.parametrize("name", ["someone/some-dataset", "imdb", "~nobody/x.jsonl", "https://example.org/a.jsonl", "json"])
def test_there_is_no_hub_within_bounds(name):
    with pytest.raises(DatasetError, match="no such file"):
        RowSource(name, bounds=BOUNDS)


# Damage of any kind

_DAMAGE = """
import random, resource, sys
from pathlib import Path
from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
file, bounds, draw = Path(sys.argv[1]), ReadBounds(1 << 20, 64 << 20, 16 << 20), random.Random(0)
whole, outcomes = file.read_bytes(), {"read": 0, "refused": 0}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(400):
    damaged = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 8))):
        damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    if draw.random() < 0.1:
        del damaged[draw.randrange(len(damaged)):]
    file.write_bytes(damaged)
    try:
        for _ in RowSource(str(file), bounds=bounds):
            pass
        outcomes["read"] += 1
    except DatasetError:
        outcomes["refused"] += 1
print(outcomes)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain.parquet", "dictionary.parquet", "plain.arrow", "packed.arrow", "stream.arrow"])
def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path, kind):
    draw = random.Random(1)
    rows = [{"m": [{"r": "u", "c": str(draw.random())}] * draw.randrange(3), "i": [i] * 5, "s": f"s{i % 7}"} for i in range(60)]
    table, file = pa.Table.from_pylist(rows), tmp_path / kind
    if kind.endswith("parquet"):
        write_parquet(file, table, use_dictionary=kind.startswith("d"), row_group_size=25)
    else:
        table = table.set_column(2, "s", table["s"].dictionary_encode())
        write_ipc(file, table, "zstd" if kind.startswith("p") and "packed" in kind else None, stream="stream" in kind)
    done = subprocess.run([sys.executable, "-c", _DAMAGE, str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:] or f"signal {-done.returncode}"
