"""Runs of several processes that need not import torch, transformers and TRL each: one process has, and forks them.

What `python -m torch.distributed.run` starts is its elastic agent, which starts the ranks; with imports, ranks of a small run
need several times as long as for their training. Here agent and ranks are the same, forked by `main` below, which holds no
thread of Python's, no device and no connection. Knows nothing of what runs. Used by tests of several processes.
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
        environment: of the process; a run's own is given to `start`.
    """

    def __init__(self, python: str, path: Path, modules: list[str], environment: dict[str, str]) -> None:
        command = [python, str(Path(__file__).resolve()), str(path), *modules]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def start(
        self,
        function: str,
        arguments: list[str],
        environment: dict[str, str],
        output: Path,
        processes: int = 2,
        node: int = 0,
        nodes: int = 1,
        port: int = 0,
    ) -> int:
        """Start a node of a run; gives its process group. Every rank calls `function` ("module:name") with `arguments`.

        Args:
            environment: all of it.
            output: file that what is printed is added to.
            processes: ranks of this node.
            port: where the nodes meet; any free one for a single node.
        """
        return int(
            self._ask(
                function=function,
                arguments=arguments,
                environment=environment,
                output=str(output),
                processes=processes,
                node=node,
                nodes=nodes,
                port=port,
            )
        )

    def wait(self, group: int, timeout: float) -> int:
        """The exit status of a node. Raises TimeoutError after so many seconds; what runs goes on then."""
        end = time.monotonic() + timeout
        while (status := self._ask(wait=group)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"a run was not done in {timeout:.0f} s")
            time.sleep(0.05)
        return int(status)

    def kill(self, group: int) -> None:
        """End a node and its ranks at once, if they have not ended."""
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, **request: Any) -> Any:
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
    """A node's agent, in a process of its own."""
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

    one = request["nodes"] == 1
    config = LaunchConfig(
        min_nodes=request["nodes"],
        max_nodes=request["nodes"],
        nproc_per_node=request["processes"],
        run_id=f"run-{os.getpid()}" if one else f"port-{request['port']}",
        rdzv_backend="c10d" if one else "static",
        rdzv_endpoint=f"localhost:{request['port']}",
        rdzv_configs={} if one else {"rank": request["node"], "timeout": 120},
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
