"""Run workers in processes on this machine, one per Place (a device, or the GPUs of one engine).

The workers exit when the run's process exits, even if that process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.machine import Place, exit_reason, quiet_libraries
from reflogp.scoring.runs.scheduler import Worker, settle, settled
from reflogp.scoring.runs.units import IN_FLIGHT, ScoringWorker
from reflogp.store import LogprobTable, Reference, ReflogpError, UsageError
from reflogp.store.storage import split_table_uri

#: Modules that the forkserver imports once. Workers are forked from the forkserver, so a worker that replaces a lost worker
#: does not have to import these modules again.
_PRELOADED = ["reflogp.scoring.runs.processes", "reflogp.scoring.torch_engine.engine", "transformers.modeling_utils"]
#: Maximum number of seconds to wait for a killed process.
_LAST_SECONDS = 20.0


class LocalWorkers:
    """Starts workers in processes on this machine, one per Place; see Workers.

    Args:
        choice: the engine that each worker loads; its `device` is replaced by the device of the worker's Place.
    """

    may_come = True

    def __init__(self, folder: str, reference: Reference, choice: EngineChoice, places: list[Place]) -> None:
        self.count = len(places)
        self._folder = folder
        self._reference = reference
        self._choice = choice
        self._free = list(places)
        on_the_processor = sum(place.device == "cpu" for place in places)
        self._threads = max(1, torch.get_num_threads() // max(1, on_the_processor))
        self._store = ""

    def open(self, table: LogprobTable) -> None:
        self._store, _ = split_table_uri(table.uri)

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        workers: list[Worker] = []
        while self._free:
            place = self._free.pop(0)
            choice = replace(self._choice, device=place.device)
            made_of = (self._folder, None, self._reference, choice, self._store, self._threads)
            workers.append(_LocalWorker(place, made_of, self._free))
        return workers


class _LocalWorker:
    """A ScoringWorker in its own process. The method `end` frees the worker's Place."""

    def __init__(self, place: Place, made_of: tuple[Any, ...], free: list[Place]) -> None:
        self._place = place
        self._free = free
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, made_of, place.visible)
        self._process = context.Process(target=_serve, args=arguments, name=f"reflogp-{place.name}", daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._lost: EngineError | None = None
        threading.Thread(target=self._read, name="reflogp-worker-answers", daemon=True).start()

    def place(self) -> Future[str]:
        return settled(self._place.name)

    def prepare(self) -> Future[dict[str, Any]]:
        return self._ask("prepare")

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        return self._ask("score", content, again)

    def stop(self) -> Future[None]:
        return self._ask("stop")

    def progress(self) -> Future[int]:
        return self._ask("progress")

    def end(self) -> None:
        """Kill the process, wait until it has exited and its memory is free, and free the worker's Place; see Worker.end.

        A process that waits for a lost file system cannot be killed. Its Place stays in use.
        """
        self._process.kill()
        self._process.join(_LAST_SECONDS)
        if self._process.exitcode is not None:
            self._free.append(self._place)

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
            with contextlib.suppress(OSError):  # if the process is gone, `_read` sets the future's error
                self._pipe.send((number, method, arguments))
        return answer

    def _read(self) -> None:
        try:
            while True:
                number, value, error = self._pipe.recv()
                with self._lock:
                    answer = self._asked.pop(number)
                settle(answer, value, error)
        except Exception as error:  # the pipe was closed, or a message was malformed
            if not isinstance(error, EOFError | OSError):
                self._process.kill()
        self._process.join()
        with self._lock:
            self._lost = WorkerGoneError(exit_reason(self._process.exitcode or 0, "standard error"))
            asked, self._asked = self._asked, {}
        for answer in asked.values():
            settle(answer, None, self._lost)


def _serve(pipe: Connection, made_of: tuple[Any, ...], visible: str | None) -> None:
    """Answer the calls that arrive in a worker's process, several at a time.

    The worker's process exits when the run's process closes the pipe or exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the run decides when workers end
    os.dup2(2, 1)  # text that the worker prints goes to standard error, because it must not end up in the run's output
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    quiet_libraries()
    worker = ScoringWorker(*made_of)
    sending = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        value, raised = None, None
        try:
            value = getattr(worker, method)(*arguments)
        except ReflogpError as error:
            raised = next(kind for kind in (UsageError, EngineError, ReflogpError) if isinstance(error, kind))(str(error))
        except BaseException as error:  # a library's error, whose class may not be picklable
            raised = ReflogpError(f"{type(error).__name__}: {error}")
        with sending, contextlib.suppress(OSError):  # raised if the run's process has exited
            pipe.send((number, value, raised))

    with ThreadPoolExecutor(IN_FLIGHT + 2) as pool:  # one call of `stop` and one of `progress` beside the units
        while True:
            try:
                asked = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            pool.submit(answer, *asked)
