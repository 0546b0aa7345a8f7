"""Runs of several processes that need not import torch, transformers and TRL each: one process has, and forks them.

What `python -m torch.distributed.run` starts is its elastic agent, which starts the ranks; with imports, ranks of a small run
need several times as long as for their training. Here agent and ranks are the same, forked by `main` below, which holds no
thread of Python's, no device and no connection. Knows nothing of what runs, and runs in the frameworks' environments too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any


class Warm:
    """A process that has imported modules, and starts runs.

    Args:
        python: of the environment.
        path: folder of the modules, beside that environment's own.
        modules: imported at the start, in this order.
        environment: of the process and of its runs.
    """

    def __init__(self, python: str, path: Path, modules: list[str], environment: dict[str, str]) -> None:
        self._environment = environment
        command = [python, str(Path(__file__).resolve()), str(path), *modules]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def run(self, function: str, arguments: list[str], output: Path, processes: int, timeout: float) -> int:
        """Have each of some processes call `function` ("module:name") with `arguments`, and return the exit status. What they
        print is added to `output`. What is not done in time is killed, and fails."""
        request = {"function": function, "arguments": arguments, "output": str(output), "processes": processes}
        group = self._ask({**request, "environment": self._environment})
        end = time.monotonic() + timeout
        try:
            while (status := self._ask({"wait": group})) is None:
                assert time.monotonic() < end, f"a run was not done in {timeout:.0f} s\n{output.read_text()[-6000:]}"
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        return int(status)

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def main(path: str, modules: list[str]) -> None:
    """Answer requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    sys.path[0] = path  # not this script's folder
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # or each garbage collection of a run would walk what was imported, and copy its pages
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            group = request["wait"]
            if group not in ended and (found := os.waitpid(group, os.WNOHANG))[0]:
                ended[group] = os.waitstatus_to_exitcode(found[1])
            answer = ended.get(group)
        elif not (answer := os.fork()):
            _run_and_exit(request)
        print(json.dumps(answer), file=answers, flush=True)


def _run_and_exit(request: dict[str, Any]) -> None:
    """The agent of a run, in a process of its own."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    status = 1
    try:
        _agent(request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _agent(request: dict[str, Any]) -> None:
    """As torch.distributed.run does it."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["processes"],
        run_id=f"run-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _rank)(request["function"], *request["arguments"])


def _rank(function: str, *arguments: str) -> None:
    import torch

    # After a fork, torch replaces its thread pool when it is first used. Two threads that use it first at once fail ("Invalid
    # thread pool!"), and transformers loads weights in several threads.
    torch.set_num_threads(torch.get_num_threads())
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
