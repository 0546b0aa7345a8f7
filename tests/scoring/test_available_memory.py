"""How much memory a service thinks it has: the machine's, or what its control group allows."""

from pathlib import Path

import psutil
import pytest

from reflogp.scoring.machine import free_memory, total_memory

TREES = {
    "v2: the group's own limit": ("0::/a.slice/b.scope\n", {"a.slice/b.scope/memory.max": "3000000\n"}, 3_000_000),
    "v2: a group around it": ("0::/a/b/c\n", {"a/b/c/memory.max": "max\n", "a/memory.max": "5000000\n"}, 5_000_000),
    "v2: memory.high": ("0::/a\n", {"a/memory.max": "9000000\n", "a/memory.high": "4000000\n"}, 4_000_000),
    "v2: a container with a namespace": ("0::/\n", {"memory.max": "2000000\n"}, 2_000_000),
    "v2: the host's path": ("0::/docker/x\n", {"memory.max": "2000000\n"}, 2_000_000),
    "v1 beside v2": ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "7000000\n"}, 7_000_000),
    "v1 without a limit": ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    "no cgroups": ("", {}, None),
}


def machine(folder: Path, groups: str, files: dict[str, str]) -> Path:
    """The files of /proc and /sys of a machine."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_around_the_process_counts(tmp_path, name):
    groups, files, expected = TREES[name]
    assert total_memory(machine(tmp_path, groups, files)) == (expected or psutil.virtual_memory().total)


PAGES = "inactive_file 2000000\nactive_file 500000\n"
V1_PAGES = "active_file 7\ntotal_inactive_file 2000000\ntotal_active_file 500000\n"


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "usage", "pages"),
    [
        ("0::/a\n", "a", "memory.max", "memory.current", PAGES),
        ("4:memory:/a\n", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", V1_PAGES),
    ],
    ids=["v2", "v1"],
)
def test_what_a_limit_leaves_is_free_and_so_is_the_groups_page_cache(tmp_path, groups, folder, limit, usage, pages):
    for most, stat, free in ((9_000_000, pages, 3_500_000), (9_000_000, "", 1_000_000), (7_000_000, "", 0)):
        files = {f"{folder}/{limit}": str(most), f"{folder}/{usage}": "8000000", f"{folder}/memory.stat": stat}
        assert free_memory(machine(tmp_path, groups, files)) == free
    assert 0 < free_memory(tmp_path / "no groups") <= psutil.virtual_memory().total
