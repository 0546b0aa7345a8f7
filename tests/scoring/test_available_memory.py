"""How much memory a service thinks it has: the machine's, or what its control group allows."""

from pathlib import Path

import psutil
import pytest

from reflogp.scoring.machine import free_memory, total_memory

V1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "29 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
TREES = {
    "v2: the group's own limit": (V2, "/", "0::/a.slice/b.scope\n", {"a.slice/b.scope/memory.max": "3000000\n"}, 3_000_000),
    "v2: a group around it": (V2, "/", "0::/a/b/c\n", {"a/b/c/memory.max": "max\n", "a/memory.max": "5000000\n"}, 5_000_000),
    "v2: memory.high": (V2, "/", "0::/a\n", {"a/memory.max": "9000000\n", "a/memory.high": "4000000\n"}, 4_000_000),
    "v2: a container with a namespace": (V2, "/", "0::/\n", {"memory.max": "2000000\n"}, 2_000_000),
    "v2: the host's path": (V2, "/docker/x", "0::/docker/x\n", {"memory.max": "2000000\n"}, 2_000_000),
    "v1: its own limit": (V1, "/", "4:memory:/job\n1:cpu:/\n", {"memory/job/memory.limit_in_bytes": "7000000\n"}, 7_000_000),
    "v1: the host's path": (
        V1,
        "/docker/x",
        "4:memory:/docker/x\n",
        {"memory/memory.limit_in_bytes": "6000000\n"},
        6_000_000,
    ),
    "v1 beside v2": (HYBRID, "/", "4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "7000000\n"}, 7_000_000),
    "v1 without a limit": (V1, "/", "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    "no cgroups": ("1 0 8:1 / / rw - ext4 /dev/sda rw\n", "/", "", {}, None),
    "v2 without a memory controller": (V2, "/", "0::/a\n", {"a/cgroup.procs": "1\n"}, None),
    "strange text": (V2, "/", "0::/a\n", {"a/memory.max": "\x00\n"}, None),
}


def machine(folder: Path, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """The files of /proc and /sys of a machine."""
    tree = {
        "proc/self/mountinfo": mounts,
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": files[name] for name in files},
    }
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_around_the_process_counts(tmp_path, name):
    mounts, top, groups, files, expected = TREES[name]
    found = total_memory(machine(tmp_path, mounts.format(top=top), groups, files))
    assert found == (expected or psutil.virtual_memory().total)


PAGES = "inactive_file 2000000\nactive_file 500000\n"
V1_PAGES = "active_file 7\ntotal_inactive_file 2000000\ntotal_active_file 500000\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "folder", "limit", "usage", "pages"),
    [
        (V2, "0::/a\n", "a", "memory.max", "memory.current", PAGES),
        (V1, "4:memory:/a\n", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", V1_PAGES),
    ],
    ids=["v2", "v1"],
)
def test_what_a_limit_leaves_is_free_and_so_is_the_groups_page_cache(tmp_path, mounts, groups, folder, limit, usage, pages):
    for most, stat, free in ((9_000_000, pages, 3_500_000), (9_000_000, "", 1_000_000), (7_000_000, "", 0)):
        files = {f"{folder}/{limit}": str(most), f"{folder}/{usage}": "8000000", f"{folder}/memory.stat": stat}
        assert free_memory(machine(tmp_path, mounts.format(top="/"), groups, files)) == free
    assert 0 < free_memory(tmp_path / "no groups") <= psutil.virtual_memory().total
