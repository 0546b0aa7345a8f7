"""Run workers in processes on this machine, one per Place (a device, or the GPUs of one engine).

The workers exit when the run's process exits, even if that process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import torch

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import WorkerGoneError
from reflogp.scoring.machine import Place, exit_reason, quiet_libraries
from reflogp.scoring.runs.calls import CalledWorker, answer_calls
from reflogp.scoring.runs.scheduler import Worker
from reflogp.scoring.runs.units import ScoringWorker
from reflogp.store import Reference
from reflogp.store.storage import split_table_uri
from reflogp.store.top import ValuesTable

#: Modules that the forkserver imports once. Workers are forked from the forkserver, so a worker that replaces a lost worker
#: does not have to import these modules again.
_PRELOADED = ["reflogp.scoring.runs.processes", "reflogp.scoring.torch_engine.engine", "transformers.modeling_utils"]
#: Maximum number of seconds to wait for a killed process.
_LAST_SECONDS = 20.0


class LocalWorkers:
    def __init__(self, folder: str, reference: Reference, choice: EngineChoice, places: list[Place]) -> None:
        self.count = len(places)
        self._folder = folder
        self._reference = reference
        self._choice = choice
        self._free = list(places)
        on_the_processor = sum(place.device == "cpu" for place in places)
        self._threads = max(1, torch.get_num_threads() // max(1, on_the_processor))
        self._store = ""

    def open(self, table: ValuesTable) -> None:
        self._store, _ = split_table_uri(table.uri)

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        workers: list[Worker] = []
        while self._free:
            place = self._free.pop(0)
            choice = replace(self._choice, device=place.device)
            made_of = (self._folder, None, self._reference, choice, self._store, self._threads)
            workers.append(_LocalWorker(place, made_of, self._free))
        return workers


class _LocalWorker(CalledWorker):
    def __init__(self, place: Place, made_of: tuple[Any, ...], free: list[Place]) -> None:
        self.place = place.name
        self._place = place
        self._free = free
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        connection, theirs = socket.socketpair()
        arguments = (theirs, made_of, place.visible)
        self._process = context.Process(target=_serve, args=arguments, name=f"reflogp-{place.name}", daemon=True)
        self._process.start()
        theirs.close()
        super().__init__(connection, self._ended)

    def end(self) -> None:
        """Kill the process, wait until it has exited and its memory is free, and free the worker's Place; see Worker.end.

        A process that waits for a lost file system cannot be killed. Its Place stays in use.
        """
        self._process.kill()
        self._process.join(_LAST_SECONDS)
        if self._process.exitcode is not None:
            self._free.append(self._place)

    def _ended(self) -> WorkerGoneError:
        self._process.join()
        return WorkerGoneError(exit_reason(self._process.exitcode or 0, "standard error"))


def _serve(connection: socket.socket, made_of: tuple[Any, ...], visible: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the run decides when workers end
    os.dup2(2, 1)  # text that the worker prints goes to standard error, because it must not end up in the run's output
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    quiet_libraries()
    answer_calls(connection, ScoringWorker(*made_of), lambda: os._exit(0))
