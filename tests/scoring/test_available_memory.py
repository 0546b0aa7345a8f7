"""How much memory a service thinks it has: the machine's, or what its control group allows."""

import os
import subprocess
import sys
import uuid
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


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_around_the_process_counts(tmp_path, name):
    mounts, top, groups, files, expected = TREES[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts.format(top=top))
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert total_memory(tmp_path) == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("mounts", "groups", "files"),
    [
        (
            V2,
            "0::/a\n",
            {
                "memory.max": "9000000",
                "memory.current": "8000000",
                "memory.stat": "inactive_file 2000000\nactive_file 500000\n",
            },
        ),
        (
            V1,
            "4:memory:/a\n",
            {
                "memory.limit_in_bytes": "9000000",
                "memory.usage_in_bytes": "8000000",
                "memory.stat": "active_file 7\ntotal_inactive_file 2000000\ntotal_active_file 500000\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_what_a_limit_leaves_is_free_and_so_is_the_groups_page_cache(tmp_path, mounts, groups, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts.format(top="/"))
    (tmp_path / "proc/self/cgroup").write_text(groups)
    group = tmp_path / "sys/fs/cgroup" / ("a" if mounts is V2 else "memory/a")
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    assert free_memory(tmp_path) == 3_500_000
    (group / "memory.stat").write_text("")
    assert free_memory(tmp_path) == 1_000_000
    next(file for file in group.iterdir() if "limit" in file.name or "max" in file.name).write_text("7000000")
    assert free_memory(tmp_path) == 0


def test_without_a_limit_the_machines_memory_is_free(tmp_path):
    assert 0 < free_memory(tmp_path) <= psutil.virtual_memory().total


def test_a_real_group_with_a_limit():
    group = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    name = "memory.limit_in_bytes" if group.name == "memory" else "memory.max"
    group /= f"reflogp-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / name).write_text(str(1 << 30))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"this user may not make a cgroup: {error}")
    program = (
        f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from reflogp.scoring.machine import total_memory\n"
        "print(total_memory())"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ)
        assert done.stdout.strip() == str(1 << 30), done.stderr
    finally:
        group.rmdir()
