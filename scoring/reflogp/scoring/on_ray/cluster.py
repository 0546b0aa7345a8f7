"""Connect to a Ray cluster or start Ray on this machine, and describe the cluster's resources and errors as text."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import ray
from ray.exceptions import ActorDiedError, RayError

from reflogp.scoring.engines import EngineChoice
from reflogp.store import UsageError
from reflogp.store.texts import counted, first_line

#: The address for which `connect` starts Ray on this machine. Ray stops when this process disconnects.
LOCAL = "local"
_CONNECT_SECONDS = 5.0


def connect(address: str | None) -> bool:
    """Connect to the cluster at an address, and return True.

    If this process is already connected to a cluster, keep that connection and return False.

    Args:
        address: "auto", host:port, ray://host:port, or "local" to start Ray on this machine; None means the address in
            $RAY_ADDRESS, or "local" if the variable is not set.

    Raises UsageError if there is no cluster at the address.
    """
    if ray.is_initialized():
        return False
    where = address or os.environ.get("RAY_ADDRESS") or LOCAL
    own = {"include_dashboard": False} if where == LOCAL else {}
    try:
        if (named := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", where)) is not None:  # Ray itself would keep trying for minutes
            socket.create_connection((named[1], int(named[2])), _CONNECT_SECONDS).close()
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        hint = "`ray start --head` starts a cluster; if the cluster requires a token, set RAY_AUTH_MODE=token"
        raise UsageError(f"cannot connect to a Ray cluster at {where}: {first_line(error)} ({hint})") from error
    return True


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a cluster for the duration of the block; see `connect`.

    If this function opens the connection, it closes the connection at the end of the block, and Ray then stops the actors.
    """
    ours = connect(address)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def on_workers(choice: EngineChoice) -> EngineChoice:
    """Return the engine choice for Ray's workers.

    The device "auto" is replaced by "cuda" if the cluster has a GPU, otherwise by "cpu". All other settings are kept.

    Raises UsageError for a device with a number, because Ray assigns the GPUs.
    """
    if choice.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {choice.device}: Ray assigns a GPU to each worker; use 'auto', 'cpu' or 'cuda'")
    gpu = ray.cluster_resources().get("GPU", 0) >= 1
    return replace(choice, device="cuda" if gpu else "cpu") if choice.device == "auto" else choice


def default_workers(choice: EngineChoice) -> int:
    """Return how many workers the whole cluster has resources for, including resources that are in use.

    The result is at least 1, because Ray may add a node later.
    """
    resources = ray.cluster_resources()
    room = resources.get("GPU", 0) // choice.gpus() if choice.gpus() else resources.get("CPU", 0)
    return max(1, int(room))


def resources_of(choice: EngineChoice) -> dict[str, float]:
    return {"num_gpus": choice.gpus(), "num_cpus": 0} if choice.gpus() else {"num_gpus": 0, "num_cpus": 1}


def describe_cluster() -> str:
    resources, alive = ray.cluster_resources(), [node for node in ray.nodes() if node["Alive"]]
    gpus, cpus = (counted(int(resources.get(name, 0)), name) for name in ("GPU", "CPU"))
    return f"{gpus} and {cpus} on {counted(len(alive), 'node')}"


def this_node() -> str:
    return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"


def reason_of(error: RayError) -> str:
    text = str(error)
    if "its node has died" in text or "node was terminated" in text:
        return "the worker's node died"
    if isinstance(error, ActorDiedError) and not error.actor_init_failed:
        return "the worker's process was killed or crashed"
    return first_line(error)
