"""The Delta log as files: read entry by entry where delta-rs refuses the whole, and mended.

Each of our commits says twice what it does: in its actions, and in its commitInfo (`redundant`). A damaged entry is thus
noticed even where its JSON still parses, and can mostly be restored. Knows the log's format (github.com/delta-io/delta,
PROTOCOL.md) as far as reflogp writes it. Called by the table, when delta-rs cannot open the log, and by repair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from reflogp.store import storage
from reflogp.store.schema import SCHEMA

FOLDER = "_delta_log"
#: The table's own setting that says its format.
FORMAT_SETTING = "reflogp.format"
_FIELD = "reflogp"
_POINTER = "_last_checkpoint"
#: The problem of an entry that is not there.
GONE = "it is gone"
_ENTRY = re.compile(r"(\d{20})\.json")
_SHARD = re.compile(rb"shard-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet")


@dataclass(frozen=True)
class Written:
    """A shard as its commit describes it.

    Attributes:
        path: its file in the table's folder.
        size: bytes.
        rows: rows.
        digest: blake2b of the file, 32 hex digits; None where the log does not say.
    """

    path: str
    size: int
    rows: int
    digest: str | None = None


def redundant(added: Sequence[Written], removed: Sequence[str]) -> dict[str, Any]:
    """What goes into commitInfo: the commit's shards with their digests, and the paths that it removes."""
    return {_FIELD: {"added": [[s.path, s.size, s.rows, s.digest] for s in added], "removed": list(removed)}}


@dataclass
class Entry:
    """One entry of the log.

    Attributes:
        version: its number.
        added, removed: what it does; of a damaged entry, what either of its statements says.
        lines: its lines that are JSON.
        problem: what is wrong with it, or None.
        named: every shard that its bytes name, in order.
    """

    version: int
    added: dict[str, Written] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    named: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """What the log's readable entries add up to.

    Attributes:
        version: number of the last entry.
        shards: by path.
        problems: file -> what is wrong with it, of entries and checkpoints.
    """

    version: int
    shards: dict[str, Written]
    problems: dict[str, str]

    def first_problem(self) -> str:
        file = min(self.problems)
        return f"{file}: {self.problems[file]}"


def entry_path(version: int) -> str:
    return f"{FOLDER}/{version:020}.json"


def versions(filesystem: pafs.FileSystem) -> list[int]:
    """Numbers of the entries that are there, ascending."""
    names = (path.rsplit("/", 1)[-1] for path in storage.list_files(filesystem, FOLDER))
    return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))


def checkpoints(filesystem: pafs.FileSystem) -> list[str]:
    """The pointer to the last checkpoint, first, and the files that sum the log up to some entry. All can be made again."""
    files = storage.list_files(filesystem, FOLDER)
    return sorted(
        (path for path in files if ".checkpoint" in path or path.endswith(_POINTER)), key=lambda p: not p.endswith(_POINTER)
    )


def _problem_of_checkpoint(filesystem: pafs.FileSystem, path: str) -> str | None:
    data = storage.read_file(filesystem, path) or b""
    try:
        if path.endswith(".parquet"):
            pq.read_table(pa.BufferReader(data))
        elif path.endswith(_POINTER):
            version = f"{int(json.loads(data)['version']):020}.checkpoint"
            named = any(version in other for other in checkpoints(filesystem))  # listed now: it is written before its pointer
            return None if named else f"it names {version}, which is gone"
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        return storage.sentence(error)
    return None


def read_entry(filesystem: pafs.FileSystem, version: int) -> Entry:
    """An entry, its two statements compared. A missing entry has a problem too."""
    data = storage.read_file(filesystem, entry_path(version))
    if data is None:
        return Entry(version, problem=GONE)
    entry = Entry(version, named=[name.decode() for name in dict.fromkeys(_SHARD.findall(data))])
    said: Mapping[str, Any] | None = None
    for line in data.splitlines():
        try:
            parsed = json.loads(line)
            entry.lines.append(parsed)
            if "add" in parsed:
                action = parsed["add"]
                entry.added[action["path"]] = Written(action["path"], action["size"], json.loads(action["stats"])["numRecords"])
            elif "remove" in parsed:
                entry.removed.append(parsed["remove"]["path"])
            elif "commitInfo" in parsed:
                said = parsed["commitInfo"].get(_FIELD, {})
        except (ValueError, KeyError, TypeError) as error:
            entry.problem = f"a line cannot be read ({error})"
    if said is None:
        entry.problem = entry.problem or "it has no commitInfo"
    elif said:
        _compare(entry, [Written(*fields) for fields in said.get("added", [])], said.get("removed", []))
    if version == 0 and not _has_metadata(entry):
        entry.problem = entry.problem or "it does not say protocol and schema"
    return entry


def _compare(entry: Entry, added: Sequence[Written], removed: Sequence[str]) -> None:
    """Hold an entry's actions against what its commitInfo says; where they agree, the digests are taken over."""
    same_shards = {replace(shard, digest=None) for shard in added} == set(entry.added.values())
    if not same_shards or sorted(removed) != sorted(entry.removed):
        entry.problem = entry.problem or "its actions are not what its commitInfo says"
        entry.removed = sorted({*entry.removed, *removed})
    entry.added |= {shard.path: shard for shard in added if shard.path not in entry.removed}


def _has_metadata(entry: Entry) -> bool:
    try:
        [metadata] = [line["metaData"] for line in entry.lines if "metaData" in line]
        names = [column["name"] for column in json.loads(metadata["schemaString"])["fields"]]
        setting = metadata["configuration"][FORMAT_SETTING]
        return names == SCHEMA.names and setting.isdecimal() and any("protocol" in line for line in entry.lines)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def replay(
    filesystem: pafs.FileSystem, last: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Replayed:
    """Add up the entries of the log, passing over what cannot be read.

    Args:
        filesystem: rooted at the table's folder.
        last: number of the last entry that counts; None for all.
        progress: called with (entries read, entries in all).
    """
    shards: dict[str, Written] = {}
    problems = {path: problem for path in checkpoints(filesystem) if (problem := _problem_of_checkpoint(filesystem, path))}
    last = max(versions(filesystem), default=-1) if last is None else last
    for version in range(last + 1):
        entry = read_entry(filesystem, version)
        if entry.problem:
            problems[entry_path(version)] = entry.problem
        for path in entry.removed:
            shards.pop(path, None)
        shards |= entry.added
        if progress:
            progress(version + 1, last + 1)
    return Replayed(last, shards, problems)


def checked(
    filesystem: pafs.FileSystem,
    last: int,
    shards: Mapping[str, int],
    progress: Callable[[int, int], None] | None = None,
) -> Replayed:
    """As `replay`; whole entries that add up to other shards than delta-rs reads are a problem of the checkpoints.

    Args:
        filesystem, last, progress: as in `replay`.
        shards: path -> bytes, as delta-rs reads them from checkpoints on.
    """
    replayed = replay(filesystem, last, progress)
    if not replayed.problems and {path: shard.size for path, shard in replayed.shards.items()} != shards:
        replayed.problems.update(dict.fromkeys(checkpoints(filesystem), "it sums up something else than the log's entries"))
    return replayed


def mended(entry: Entry, whole: Callable[[str, str | None], Written | None], now: int) -> bytes:
    """A damaged entry's new content: what can be read of it, and each shard that its bytes name and that is whole.

    Args:
        entry: the damaged one.
        whole: describes the shard of a path, which should have a digest where that is known; None where it is not whole.
        now: milliseconds since 1970, of the mending.
    """
    kept = [line for line in entry.lines if not line.keys() & {"commitInfo", "add", "remove"}]
    removed = entry.removed
    digests = {path: shard.digest for path, shard in entry.added.items()}
    added = [shard for path in entry.named if path not in removed and (shard := whole(path, digests.get(path)))]
    info = {
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append"},
        "mended": entry.problem,
        **redundant(added, removed),
    }
    lines: list[dict[str, Any]] = [{"commitInfo": info}, *kept]
    for shard in added:
        stats = json.dumps({"numRecords": shard.rows})
        action = {"path": shard.path, "partitionValues": {}, "size": shard.size, "modificationTime": now, "dataChange": True}
        lines.append({"add": action | {"stats": stats}})
    lines += [{"remove": {"path": path, "dataChange": False, "deletionTimestamp": now}} for path in removed]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
