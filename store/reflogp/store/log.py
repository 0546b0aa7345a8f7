"""Read a table's Delta log without delta-rs, to detect and repair damaged entries.

Each commit is one entry of the log. In a commit by reflogp, the changes are recorded twice: in the actions, and in the
commitInfo (see the function `redundant`). Damage to an entry is therefore detected even if its JSON can still be parsed, and
most damage can be repaired. Only the parts of the log format (github.com/delta-io/delta, PROTOCOL.md) that reflogp writes are
supported.
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
#: Name of the setting in which a Delta table records the store's format number.
FORMAT_SETTING = "reflogp.format"
_FIELD = "reflogp"
_POINTER = "_last_checkpoint"
#: The problem that is reported for a log entry that does not exist.
GONE = "the entry is missing"
_ENTRY = re.compile(r"(\d{20})\.json")
#: For each action, the types of its required fields; `_OPTIONAL` has those of its optional fields. delta-rs refuses a whole log
#: if a field has another type.
_REQUIRED: dict[str, dict[str, type]] = {
    "protocol": {"minReaderVersion": int, "minWriterVersion": int},
    "metaData": {"id": str, "format": dict, "schemaString": str, "partitionColumns": list, "configuration": dict},
    "add": {"path": str, "partitionValues": dict, "size": int, "modificationTime": int, "dataChange": bool, "stats": str},
    "remove": {"path": str, "dataChange": bool},
    "commitInfo": {},
}
_OPTIONAL: dict[str, dict[str, type]] = {
    "protocol": {"readerFeatures": list, "writerFeatures": list},
    "metaData": {"name": str, "description": str, "createdTime": int},
    "add": {"tags": dict, "baseRowId": int, "defaultRowCommitVersion": int, "clusteringProvider": str},
    "remove": {"deletionTimestamp": int, "extendedFileMetadata": bool, "partitionValues": dict, "size": int, "tags": dict},
    "commitInfo": {
        "timestamp": int,
        "operation": str,
        "operationParameters": dict,
        "engineInfo": str,
        "clientVersion": str,
        _FIELD: dict,
    },
}
_SHARD = re.compile(rb"shard-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet")


@dataclass(frozen=True)
class Written:
    """A shard, as described by the commit that added it.

    Attributes:
        path: path of the shard's file, relative to the table's folder.
        size: size of the file in bytes.
        rows: number of rows.
        digest: blake2b of the file, 32 hex digits, or None if the log does not record the digest.
    """

    path: str
    size: int
    rows: int
    digest: str | None = None


def redundant(added: Sequence[Written], removed: Sequence[str]) -> dict[str, Any]:
    """Return the field to add to a commit's commitInfo. The field repeats the commit's changes: the added shards with their
    digests, and the paths of the removed shards."""
    return {_FIELD: {"added": [[s.path, s.size, s.rows, s.digest] for s in added], "removed": list(removed)}}


@dataclass
class Entry:
    """One entry of the log.

    Attributes:
        version: number of the entry.
        added: dict from path to shard, for the shards that the entry adds according to its actions or its commitInfo.
        removed: paths of the shards that the entry removes according to its actions or its commitInfo.
        lines: the entry's readable lines, parsed from JSON.
        problem: what is wrong with the entry, or None if the entry is undamaged.
        named: all shard names in the entry's bytes, in order, even those in unreadable lines.
    """

    version: int
    added: dict[str, Written] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    named: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """The state of the table according to the log's readable entries.

    Attributes:
        version: number of the last entry.
        shards: dict from path to shard, for the table's shards.
        problems: dict from the path of each damaged entry or checkpoint to a description of what is wrong with it.
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
    """Return the numbers of the existing entries in ascending order."""
    names = (path.rsplit("/", 1)[-1] for path in storage.list_files(filesystem, FOLDER))
    return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))


def checkpoints(filesystem: pafs.FileSystem) -> list[str]:
    """Return the paths of the checkpoint files, preceded by the path of `_last_checkpoint` (the pointer to the latest
    checkpoint) if that file exists.

    A checkpoint summarizes all entries up to a certain version, so all these files can be rebuilt from the entries.
    """
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
            # List the files again: since the first listing, a writer may have added a checkpoint and updated the pointer.
            named = any(version in other for other in checkpoints(filesystem))
            return None if named else f"the checkpoint {version}, to which this file points, is missing"
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        return storage.sentence(error)
    return None


def read_entry(filesystem: pafs.FileSystem, version: int) -> Entry:
    """Read an entry and compare its actions with its commitInfo. If the entry is missing, its `problem` is GONE."""
    data = storage.read_file(filesystem, entry_path(version))
    if data is None:
        return Entry(version, problem=GONE)
    entry = Entry(version, named=[name.decode() for name in dict.fromkeys(_SHARD.findall(data))])
    said: Mapping[str, Any] | None = None
    for line in data.splitlines():
        try:
            parsed = json.loads(line)
            _check_types(parsed)
            entry.lines.append(parsed)
            if "add" in parsed:
                action = parsed["add"]
                entry.added[action["path"]] = Written(action["path"], action["size"], json.loads(action["stats"])["numRecords"])
            elif "remove" in parsed:
                entry.removed.append(parsed["remove"]["path"])
            elif "commitInfo" in parsed:
                said = parsed["commitInfo"].get(_FIELD, {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            entry.problem = f"a line cannot be read ({error})"
    if said is None:
        entry.problem = entry.problem or "the entry has no commitInfo"
    elif said:
        try:
            _compare(entry, [Written(*fields) for fields in said.get("added", [])], said.get("removed", []))
        except (TypeError, AttributeError) as error:
            entry.problem = f"its commitInfo cannot be read ({error})"
    if version == 0 and not _has_metadata(entry):
        entry.problem = entry.problem or "the protocol, schema or format number is missing or wrong"
    return entry


def _check_types(line: Any) -> None:
    """Raise KeyError or TypeError if a line is not a JSON object, or if a field of an action is missing or of a wrong type."""
    if not isinstance(line, dict):
        raise TypeError("it is not a JSON object")
    for action, required in _REQUIRED.items():
        if action in line:
            found = line[action]
            given = {name: kind for name, kind in _OPTIONAL[action].items() if found.get(name) is not None}
            for name, kind in (required | given).items():
                if type(found[name]) is not kind:
                    raise TypeError(f"the value of {name!r} in {action!r} is not of type {kind.__name__}")
            if action == "metaData" and not (
                isinstance(found["format"].get("provider"), str)
                and isinstance(found["format"].get("options", {}), dict)
                and not found["partitionColumns"]
                and all(isinstance(value, str) for value in found["configuration"].values())
            ):
                raise TypeError("the format, partition columns or configuration of the table is wrong")
            if action == "add" and found["partitionValues"]:
                raise TypeError("a shard has partition values")


def _compare(entry: Entry, added: Sequence[Written], removed: Sequence[str]) -> None:
    """Compare an entry's actions with its commitInfo, and set the entry's `problem` if they differ.

    In the entry's `added`, the shards' descriptions from the commitInfo replace those from the actions, because only the
    commitInfo has digests.
    """
    same_shards = {replace(shard, digest=None) for shard in added} == set(entry.added.values())
    if not same_shards or sorted(removed) != sorted(entry.removed):
        entry.problem = entry.problem or "the shards that the log entry adds or removes differ from those in its commitInfo"
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
    """Replay the entries of the log, skipping unreadable parts.

    Args:
        filesystem: a filesystem whose root is the table's folder.
        last: number of the last entry to replay, or None for all entries.
        progress: called with (entries read, total entries).
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
    """Replay the log, and compare the resulting shards with those that delta-rs finds.

    delta-rs starts from a checkpoint, whereas `replay` starts from the first entry. If the shards differ although the replay
    found no damage, the checkpoints are therefore reported as damaged.

    Args:
        filesystem, last, progress: passed to `replay`.
        shards: dict from the path of each shard that delta-rs finds to the shard's size in bytes.
    """
    replayed = replay(filesystem, last, progress)
    if not replayed.problems and {path: shard.size for path, shard in replayed.shards.items()} != shards:
        replayed.problems.update(dict.fromkeys(checkpoints(filesystem), "the checkpoint does not match the log's entries"))
    return replayed


def repaired(entry: Entry, whole: Callable[[str, str | None], Written | None], now: int) -> bytes:
    """Return new content for a damaged entry.

    The new entry adds every undamaged shard whose name is in the old entry's bytes, except the shards that the old entry
    removes. These removals are kept, and so are the readable lines that neither add nor remove shards. The commitInfo is new.

    Args:
        entry: the damaged entry.
        whole: a function that takes a shard's path and its expected digest (None if unknown), and returns the shard's
            description, or None if the shard is missing or damaged.
        now: time of the repair, in milliseconds since 1970.
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
