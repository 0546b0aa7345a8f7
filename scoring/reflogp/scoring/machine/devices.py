"""Assign devices, or groups of GPUs, to engines by name.

Does not import torch, so that a service's process need not load it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reflogp.store import UsageError

#: Files in /dev of a machine with a GPU: NVIDIA's driver, WSL's, AMD's.
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd")
_ASK = "import torch; print(torch.cuda.device_count())"
_ASK_SECONDS = 300.0
_NAME = re.compile(r"all|auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Place:
    """The device or the GPUs of one engine.

    Attributes:
        name: name for messages.
        device: the `device` of its EngineChoice.
        visible: CUDA_VISIBLE_DEVICES of its process if it must see only its own GPUs; None for no change.
    """

    name: str
    device: str
    visible: str | None = None


def places(
    devices: Sequence[str], count_gpus: Callable[[], int], gpus_each: int = 1, chooses_itself: bool = False
) -> list[Place]:
    """Return the place of each engine.

    Args:
        devices: torch's device names; "all" stands for all GPUs, or the CPU if there is no GPU. "auto" stands for one device.
        count_gpus: returns the number of GPUs that are visible to this process; called only if the names need it.
        gpus_each: number of GPUs that an engine is spread over.
        chooses_itself: True if the engine chooses among the GPUs that its process sees, as vLLM does.

    Raises UsageError for an unknown name, for a GPU that does not exist, and for GPUs that do not fill their last group.
    """
    if unknown := [name for name in devices if not _NAME.fullmatch(name)]:
        raise UsageError(f"device {unknown[0]!r}: use all, auto, cpu, cuda or cuda:NUMBER")
    numbered = "all" in devices or any(":" in name for name in devices)
    count = count_gpus() if numbered else 0
    every = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    names = [name for entry in devices for name in (every if entry == "all" else [entry])]
    for name in names:
        if name.startswith("cuda:") and int(name[5:]) >= count:
            instead = f"use cuda:0 to cuda:{count - 1}" if count else "use cpu"
            raise UsageError(f"device {name}: there are {count} GPUs here; {instead}")
    if not chooses_itself and gpus_each == 1:
        return [Place(name, name) for name in names]
    if names in (["cpu"], ["auto"], ["cuda"]):  # the engine's own default
        return [Place(names[0], names[0])]
    if others := [name for name in names if not name.startswith("cuda:")]:
        raise UsageError(f"device {others[0]}: an engine that chooses its GPUs itself needs them by number: cuda:0,cuda:1")
    groups = [names[at : at + gpus_each] for at in range(0, len(names), gpus_each)]
    if "all" in devices and len(groups) > 1:  # leave out GPUs that fill no group
        groups = [group for group in groups if len(group) == gpus_each]
    if len(groups[-1]) < gpus_each:
        raise UsageError(f"{len(names)} GPUs cannot be split into groups of {gpus_each}: give a multiple of {gpus_each} GPUs")
    return [Place("+".join(group), "cuda", _visible(group, count)) for group in groups]


def gpus_in_a_child() -> int:
    """Return torch's number of GPUs, counted in a process of its own; 0 if /dev has no GPU.

    Raises UsageError if that process fails.
    """
    if not any(True for name in _DEVICE_FILES for _ in Path("/dev").glob(name)):
        return 0
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    counted = asked.stdout.split()
    if asked.returncode or not counted or not counted[-1].isdigit():
        said = (asked.stderr.strip().splitlines() or ["no error message"])[-1]
        raise UsageError(f"the GPUs of this machine could not be counted ({said}): name them, such as cuda:0,cuda:1 or cpu")
    return int(counted[-1])


def _visible(group: Sequence[str], count: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs; this process itself may see only some of the machine's GPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(count)]
    return ",".join(names[int(name[5:])] for name in group)
