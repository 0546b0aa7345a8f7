"""The Delta log as files: read entry by entry where delta-rs refuses the whole, and mended.

Each of our commits says twice what it does: in its actions, and in its commitInfo (`redundant`). A damaged entry is thus
noticed even where its JSON still parses, and can mostly be restored. Knows the log's format (github.com/delta-io/delta,
PROTOCOL.md) as far as reflogp writes it. Called by the table, when delta-rs cannot open the log, and by repair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from reflogp_store import storage

FOLDER = "_delta_log"
_FIELD = "reflogp"
_ENTRY = re.compile(r"(\d{20})\.json")
_SHARD = re.compile(rb"shard-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet")

#: Path -> (rows, bytes).
Shards = dict[str, tuple[int, int]]


def redundant(added: Sequence[tuple[str, int, int]], removed: Sequence[str]) -> dict[str, Any]:
    """What goes into commitInfo: the commit's shards (path, rows, bytes) and the paths that it removes."""
    return {_FIELD: {"added": [list(shard) for shard in added], "removed": list(removed)}}


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
    added: Shards = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    named: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """What the log's readable entries add up to.

    Attributes:
        version: number of the last entry.
        shards: path -> (rows, bytes).
        problems: version -> what is wrong with its entry.
    """

    version: int
    shards: Shards
    problems: dict[int, str]

    def first_problem(self) -> str:
        version = min(self.problems)
        return f"entry {version}: {self.problems[version]}"


def entry_path(version: int) -> str:
    return f"{FOLDER}/{version:020}.json"


def versions(filesystem: pafs.FileSystem) -> list[int]:
    """Numbers of the entries that are there, ascending."""
    names = (path.rsplit("/", 1)[-1] for path in storage.list_files(filesystem, FOLDER))
    return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))


def read_entry(filesystem: pafs.FileSystem, version: int) -> Entry:
    """An entry, its two statements compared. A missing entry has a problem too."""
    data = storage.read_file(filesystem, entry_path(version))
    if data is None:
        return Entry(version, problem="it is gone")
    entry = Entry(version, named=[name.decode() for name in dict.fromkeys(_SHARD.findall(data))])
    said: Mapping[str, Any] | None = None
    for line in data.splitlines():
        try:
            parsed = json.loads(line)
            entry.lines.append(parsed)
            if "add" in parsed:
                action = parsed["add"]
                entry.added[action["path"]] = (json.loads(action["stats"])["numRecords"], action["size"])
            elif "remove" in parsed:
                entry.removed.append(parsed["remove"]["path"])
            elif "commitInfo" in parsed:
                said = parsed["commitInfo"].get(_FIELD, {})
        except (ValueError, KeyError, TypeError) as error:
            entry.problem = f"a line cannot be read ({error})"
    if said is None:
        entry.problem = entry.problem or "it has no commitInfo"
    elif said:
        added = {path: (rows, size) for path, rows, size in said.get("added", [])}
        removed = said.get("removed", [])
        if added != entry.added or sorted(removed) != sorted(entry.removed):
            entry.problem = entry.problem or "its actions are not what its commitInfo says"
            entry.removed = sorted({*entry.removed, *removed})
            entry.added |= {path: what for path, what in added.items() if path not in entry.removed}
    return entry


def replay(filesystem: pafs.FileSystem, progress: Callable[[int, int], None] | None = None) -> Replayed:
    """Add up every entry of the log, passing over what cannot be read."""
    found = versions(filesystem)
    shards: Shards = {}
    problems: dict[int, str] = {}
    last = found[-1] if found else -1
    for version in range(last + 1):
        entry = read_entry(filesystem, version)
        if entry.problem:
            problems[version] = entry.problem
        for path in entry.removed:
            shards.pop(path, None)
        shards |= entry.added
        if progress:
            progress(version + 1, last + 1)
    return Replayed(last, shards, problems)


def mended(entry: Entry, rows_and_size: Callable[[str], tuple[int, int] | None], now: int) -> bytes:
    """A damaged entry's new content: what can be read of it, and each shard that its bytes name and that is whole.

    Args:
        entry: the damaged one.
        rows_and_size: rows and bytes of a shard that is whole; None where it is not.
        now: milliseconds since 1970, of the mending.
    """
    kept = [line for line in entry.lines if not line.keys() & {"commitInfo", "add", "remove"}]
    removed = entry.removed
    added = {path: found for path in entry.named if path not in removed and (found := rows_and_size(path))}
    info = {
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append"},
        "mended": entry.problem,
        **redundant([(path, rows, size) for path, (rows, size) in added.items()], removed),
    }
    lines: list[dict[str, Any]] = [{"commitInfo": info}, *kept]
    for path, (rows, size) in added.items():
        stats = json.dumps({"numRecords": rows})
        action = {
            "path": path,
            "partitionValues": {},
            "size": size,
            "modificationTime": now,
            "dataChange": True,
            "stats": stats,
        }
        lines.append({"add": action})
    lines += [{"remove": {"path": path, "dataChange": False, "deletionTimestamp": now}} for path in removed]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
