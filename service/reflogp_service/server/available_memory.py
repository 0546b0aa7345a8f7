"""The memory that this process may use: the machine's, or less where its control group (cgroup v1 or v2) has a limit.

Containers, systemd units and batch schedulers set such limits; the kernel kills a process of a group that goes beyond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process and its workers may use together.

    Args:
        root: the file system in which /proc and the cgroup file systems are looked for.
    """
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The memory limits of this process's cgroup and of every group around it, in bytes."""
    groups = _own_groups(root)
    for kind, mounted_group, mount_point in _memory_mounts(root):
        folder = root / mount_point.lstrip("/")
        group = PurePosixPath(groups.get(kind, "/"))
        # In a container without a cgroup namespace the path is the host's, and the mount shows a part of its tree.
        inside = group.relative_to(mounted_group) if group.is_relative_to(mounted_group) else PurePosixPath(".")
        for place in [inside, *inside.parents]:
            for name in _LIMIT_FILES[kind]:
                yield from _limit(folder / place / name)


def _own_groups(root: Path) -> dict[str, str]:
    """This process's memory cgroup by kind: "cgroup2" and "cgroup" (version 1)."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    return found


def _memory_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """(kind, group at the top of the mount, mount point) of each cgroup file system with memory limits."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(" ")[-1].split(",")):
            fields = before.split(" ")
            yield kind, _plain(fields[3]), _plain(fields[4])


def _plain(text: str) -> str:
    """A path of mountinfo, where spaces and the like are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _limit(file: Path) -> Iterator[int]:
    """A limit where the file holds one; "max" and 0 mean none."""
    for line in _lines(file)[:1]:
        if line.strip().isdigit() and int(line) > 0:
            yield int(line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
