"""Measure the memory that this process may use, and return freed memory to the system.

A process may use the machine's memory, or less if its control group (cgroup v1 or v2) has a limit. Containers, systemd units
and batch schedulers set such limits. The kernel kills a process of a group that exceeds its limit.

glibc and Arrow keep freed memory for reuse, in an arena for each of a few dozen threads. Over many small jobs the arenas grow,
although none of their memory is in use any more.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil
import pyarrow as pa

_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
#: For cgroup versions 2 and 1: the file with the memory use of a group and its subgroups, and the prefix of the page cache's
#: fields in memory.stat.
_USAGE_FILES = (("memory.current", ""), ("memory.usage_in_bytes", "total_"))


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process and its workers may use together.

    Args:
        root: root of the file system that has /proc and the cgroup file systems.
    """
    return min([int(psutil.virtual_memory().total), *(limit for _, limit in _limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: the machine's free memory, or what a cgroup's limit leaves of it.

    The page cache counts as free, because the kernel drops it when memory is needed.

    Args:
        root: see `total_memory`.
    """
    left = [limit - used for folder, limit in _limits(root) if (used := _used(folder)) is not None]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, limit in bytes) of each limit of this process's cgroup and of the cgroups that contain it."""
    groups = _own_groups(root)
    for kind, mounted_group, mount_point in _memory_mounts(root):
        folder = root / mount_point.lstrip("/")
        group = PurePosixPath(groups.get(kind, "/"))
        # In a container without a cgroup namespace the path is the host's, and the mount shows a part of its tree.
        inside = group.relative_to(mounted_group) if group.is_relative_to(mounted_group) else PurePosixPath(".")
        for place in [inside, *inside.parents]:
            for name in _LIMIT_FILES[kind]:
                for limit in _limit(folder / place / name):
                    yield folder / place, limit


def _used(group: Path) -> int | None:
    """Return the bytes that a group uses, without its page cache; None if its files do not say."""
    for usage, prefix in _USAGE_FILES:
        taken = list(_limit(group / usage))
        if taken:
            counts = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
            cached = (counts.get(f"{prefix}{name}", "") for name in ("inactive_file", "active_file"))
            return taken[0] - sum(int(number) for number in cached if number.isdigit())
    return None


def _own_groups(root: Path) -> dict[str, str]:
    """Return this process's memory cgroup by kind: "cgroup2" and "cgroup" (version 1)."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    return found


def _memory_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, group at the top of the mount, mount point) of each cgroup file system with memory limits."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(" ")[-1].split(",")):
            fields = before.split(" ")
            yield kind, _plain(fields[3]), _plain(fields[4])


def _plain(text: str) -> str:
    """Decode a path of mountinfo, in which spaces and similar characters are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _limit(file: Path) -> Iterator[int]:
    """Yield the number of bytes in a file, if any; "max" and 0 mean no limit."""
    for line in _lines(file)[:1]:
        if line.strip().isdigit() and int(line) > 0:
            yield int(line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def return_freed_memory() -> None:
    """Return unused memory to the system, if the C library can do so (glibc); takes milliseconds."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
