"""Assign devices to engines, measure and release memory, and prepare processes that load a model.

A service's main process uses this module but does not load torch, so the module never imports torch. psutil, pyarrow and
transformers are imported only in the functions that use them, because they may be missing: the command line, for example, can
be installed without psutil.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reflogp.store import UsageError
from reflogp.store.texts import counted

# Devices

#: Glob patterns of the files in /dev that NVIDIA's driver, WSL or AMD's driver creates on a machine with a GPU.
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd")
_ASK = "import torch; print(torch.cuda.device_count())"
_ASK_SECONDS = 300.0
_NAME = re.compile(r"all|auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Place:
    """The device or GPUs that one engine runs on.

    Attributes:
        device: value of `device` in the engine's EngineChoice.
        visible: value of CUDA_VISIBLE_DEVICES for the engine's process, if the process must see only some of the GPUs; None to
            leave the variable unchanged.
    """

    name: str
    device: str
    visible: str | None = None


def places(
    devices: Sequence[str], count_gpus: Callable[[], int], gpus_each: int = 1, chooses_itself: bool = False
) -> list[Place]:
    """Assign devices or GPUs to engines, and return the Place of each engine.

    Args:
        devices: device names. Each is "cpu", "cuda" or "cuda:NUMBER" as in torch, or "all" or "auto". "all" stands for all
            GPUs, or the CPU if there is no GPU. If the number of GPUs is not a multiple of `gpus_each`, the last ones are not
            used. "auto" stands for a single device, which the engine chooses.
        count_gpus: function that returns the number of GPUs that are visible to this process. It is called only if
            `devices` contains "all" or a name with a GPU's number, such as cuda:1.
        chooses_itself: True if the engine chooses among the GPUs that its process sees, as vLLM does.

    Raises:
        UsageError: a name is unknown, a GPU does not exist, there are fewer than `gpus_each` GPUs, or the listed GPUs cannot be
            divided into groups of `gpus_each`. If an engine needs several GPUs or chooses among GPUs itself, UsageError is also
            raised for a list of several devices in which a name has no GPU number, such as cpu or cuda.
    """
    if unknown := [name for name in devices if not _NAME.fullmatch(name)]:
        raise UsageError(f"unknown device {unknown[0]!r}: use 'all', 'auto', 'cpu', 'cuda' or 'cuda:NUMBER'")
    numbered = "all" in devices or any(":" in name for name in devices)
    count = count_gpus() if numbered else 0
    every = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    names = [name for entry in devices for name in (every if entry == "all" else [entry])]
    for name in names:
        if name.startswith("cuda:") and int(name[5:]) >= count:
            instead = f"the highest number is {count - 1}" if count else "use cpu"
            raise UsageError(f"device {name}: torch detects {counted(count, 'GPU')}; {instead}")
    if not chooses_itself and gpus_each == 1:
        return [Place(name, name) for name in names]
    if names in (["cpu"], ["auto"], ["cuda"]):  # no GPU numbers to divide into groups
        return [Place(names[0], names[0])]
    if others := [name for name in names if not name.startswith("cuda:")]:
        raise UsageError(
            f"device {others[0]}: a list of devices for this engine can contain only GPUs by number, such as cuda:0,cuda:1"
        )
    groups = [names[at : at + gpus_each] for at in range(0, len(names), gpus_each)]
    if "all" in devices and len(groups) > 1:  # drop the GPUs of an incomplete group
        groups = [group for group in groups if len(group) == gpus_each]
    if len(groups[-1]) < gpus_each:
        raise UsageError(
            f"{counted(len(names), 'GPU')} cannot be split into groups of {gpus_each}, one group for each engine: use a "
            f"multiple of {gpus_each} GPUs, or split each model across fewer GPUs"
        )
    return [Place("+".join(group), "cuda", _visible(group, count)) for group in groups]


def gpus_in_a_child() -> int:
    """Return the number of GPUs that torch counts in another process, which is started only if /dev contains a GPU device.
    Raises UsageError if that process fails."""
    if not any(True for name in _DEVICE_FILES for _ in Path("/dev").glob(name)):
        return 0
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise _not_counted(f"no answer within {_ASK_SECONDS:g} seconds") from None
    counted = asked.stdout.split()
    if asked.returncode or not counted or not counted[-1].isdigit():
        raise _not_counted((asked.stderr.strip().splitlines() or ["no error message"])[-1])
    return int(counted[-1])


def _not_counted(reason: str) -> UsageError:
    return UsageError(f"this machine's GPUs could not be counted ({reason}); use 'cuda' or 'cpu', which need no count")


def _visible(group: Sequence[str], count: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES value for these GPUs, whose numbers refer to those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(count)]
    return ",".join(names[int(name[5:])] for name in group)


# Memory
#
# A process can use all of the machine's memory, or less if its control group (cgroup v1 or v2) has a limit. Containers, systemd
# units and batch schedulers set such limits. If a group exceeds its limit, the kernel kills one of the group's processes. If
# the limit is memory.high of cgroup v2, the kernel slows the processes down instead.
#
# glibc and Arrow keep freed memory for reuse, in separate arenas for different threads. Over many small jobs, these arenas grow
# even though their memory is no longer in use.

#: For versions 2 and 1 of control groups: where their file system is mounted, the names of the files with a group's limits and
#: with the memory use of the group and its subgroups, and the prefix of the page cache's fields in memory.stat.
_V2 = ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "")
_V1 = ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def total_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes of memory that this process and its workers may use together."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process can still allocate.

    This is the machine's free memory, or less if a cgroup has a limit. The page cache counts as free, because the kernel drops
    it when memory is needed.
    """
    import psutil

    left = [limit - used for limit, used in _limits(root) if used is not None]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _limits(root: Path) -> Iterator[tuple[int, int | None]]:
    """Yield the limits of the control groups around this process, each with the number of bytes that the group uses, excluding
    its page cache; None if the group's files do not contain it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limits, usage, prefix = _V1 if controllers else _V2
        top = root / mounted
        # In a container, the path may be that on the host, where the container has only its own groups.
        group = top / path.lstrip("/") if (top / path.lstrip("/")).is_dir() else top
        for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(top))]:
            counts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            cached = sum(int(counts.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
            used = _number(folder / usage)
            for limit in map(_number, (folder / name for name in limits)):
                if limit:
                    yield limit, None if used is None else used - cached


def _number(file: Path) -> int | None:
    """Return a file's number, or None if there is no such file, or no number in it (`max` is no limit)."""
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # there is no such control group, or it may not be read
        return []


def return_freed_memory() -> None:
    """Return the unused memory of Arrow and of the C library to the operating system. This takes milliseconds."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Processes
#
# torch's CUDA allocator is configured to use expandable segments, instead of many segments that are too small for a large
# tensor. torch reads this setting from an environment variable when a process first uses a GPU, so the variable must be set
# before that. Progress bars and notices from transformers are turned off to keep them out of workers' logs.

#: Environment variables that configure the allocator. All of torch's backends read the first one.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    return {} if any(name in environment for name in _VARIABLES) else {_VARIABLES[0]: _GROWING}


def without_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for vLLM, whose shared memory does not work with expandable segments."""
    return {name: value for name, value in environment.items() if (name, value) != (_VARIABLES[0], _GROWING)}


def quiet_libraries() -> None:
    """Hide FutureWarnings, and the progress bars and log messages (except errors) of the libraries that load models."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("accelerate", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


def exit_reason(status: int, log: str) -> str:
    """Return why a process exited. `status` is its exit status, or the negative number of the signal that killed it."""
    if status < 0:
        name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else str(-status)
        return f"killed by {name}" + (" (perhaps out of memory)" if -status == signal.SIGKILL else "")
    return f"the process exited with status {status}; its last messages are in {log}"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
