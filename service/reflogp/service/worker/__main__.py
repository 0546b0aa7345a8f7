"""Run a worker process.

The process reads frames from stdin and writes frames to stdout. It runs until the service sends the frame `exit`, or until the
service itself exits.

Three threads run as long as the process: the main thread owns the engines and alternates between online requests and a job, the
second thread reads frames, and the third commits the values of online requests. The runners of jobs connect to a socket; each
connection has further threads (see `units`). Logs go to stderr. The process is started with `python -m reflogp.service.worker`.

The service and its workers exchange the following frames. Parentheses state what the body of a frame contains.

    service -> worker   configure, score (+ sequences), forget, ping, exit
    worker -> service   ready, loaded, round, scored (+ outcomes), pong, dying
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from typing import Any, BinaryIO

import torch

from reflogp.scoring import tracing
from reflogp.scoring.engines import EngineChoice, PassEngine
from reflogp.scoring.frames import encode, read_frame
from reflogp.scoring.runs.units import VisionCache
from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.torch_engine.load import choose_device
from reflogp.service.log_lines import set_up_process
from reflogp.service.settings import ReferenceSettings
from reflogp.service.worker.engine_loop import Answer, EngineLoop, Engines, OnlineRequest
from reflogp.service.worker.protocol import WorkerConfiguration, outcomes_table, table_of
from reflogp.service.worker.units import UnitServer
from reflogp.service.worker.write_back import WriteBack
from reflogp.store import (
    ContentMismatchError,
    Reference,
    ReflogpError,
    Store,
)
from reflogp.store.schema import stream_bytes
from reflogp.store.texts import counted, shortened_without_secrets
from reflogp.store.top import ValuesTable

logger = logging.getLogger("reflogp.worker")

#: Maximum number of seconds for each of the two parts of a shutdown: first, values of jobs are committed; then, the current
#: round of online requests is finished and the process exits. A process that is still running after both exits with status 1.
_LAST_SECONDS = 20.0


class Worker:
    def __init__(self, configuration: WorkerConfiguration, out: BinaryIO) -> None:
        self._configuration = configuration
        self._out = out
        self._sending = threading.Lock()
        self._references: dict[str, Reference] = {}
        self._visions: dict[str, VisionCache] = {}
        self._store = Store(configuration.store)
        engines = Engines(
            self._load,
            configuration.capacity,
            configuration.pinned,
            lambda ids: self.send({"op": "loaded", "references": ids}),
            self._admit,
        )
        self.loop = EngineLoop(
            engines, lambda ids: self.send({"op": "round", "ids": ids}), self._answer, configuration.window_seconds
        )
        self._write_back = WriteBack(self._table)
        self._units = UnitServer(configuration.address, self.loop, self._table, self._vision, configuration.commit_seconds)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame to the service. If the service has exited, `_read` shuts down the worker."""
        with self._sending, contextlib.suppress(BrokenPipeError):
            self._out.write(encode(message, body))
            self._out.flush()

    def run(self, source: BinaryIO) -> None:
        """Run until the service sends the frame `exit`, or until the service itself exits."""
        choose_device(self._configuration.device)
        if self._configuration.device == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self._configuration.sharing))
        self._units.start()
        threading.Thread(target=self._read, args=(source,), name="frames", daemon=True).start()
        if self._configuration.pinned is not None:
            try:
                self.loop.preload(self._configuration.pinned)
            except ContentMismatchError as error:  # requests for this reference will get the same error
                logger.error("%s", error)
        self.send({"op": "ready"})
        self.loop.run()
        self._write_back.close()

    def _close(self) -> None:
        """Shut down: jobs commit what is computed, then the current round is finished, and `run` returns."""
        committing = threading.Thread(target=self._units.end, daemon=True)
        committing.start()
        committing.join(_LAST_SECONDS)
        self.loop.close()
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    def _read(self, source: BinaryIO) -> None:
        while (frame := read_frame(source)) is not None and frame[0]["op"] != "exit":
            message, body = frame
            match message["op"]:
                case "score":
                    self._ask(message, body)
                case "forget":
                    self.loop.forget(message["id"])
                case "ping":
                    doing, seconds = self.loop.doing() or (None, 0.0)
                    self.send({"op": "pong", "doing": doing, "seconds": seconds})
        self._close()

    def _ask(self, message: dict[str, Any], body: bytes) -> None:
        table = table_of(body)
        rows = zip(*(table[name] for name in table.column_names), strict=True)
        sequences = [Sequence(*(_ids(entry) for entry in row)) for row in rows]
        self.loop.ask(
            OnlineRequest(
                message["id"],
                message["reference_id"],
                sequences,
                message["temperature"],
                message["alone"],
                request=message["request"],
                top_k=message["top_k"],
                write=message["write"],
            )
        )

    def _answer(self, answer: Answer) -> None:
        request = answer.request
        about = {"request": request.request}
        if answer.error is None:
            seconds = answer.queue_seconds + answer.engine_seconds
            logger.info(
                "scored %s, %s, in %.3f s",
                counted(len(request.sequences), "sequence"),
                counted(request.tokens(), "token"),
                seconds,
                extra=about,
            )
        else:
            logger.warning("could not score %s: %s", counted(len(request.sequences), "sequence"), answer.error, extra=about)
        message = {
            "op": "scored",
            "id": request.id,
            "error": answer.error,
            "is_permanent": answer.is_permanent,
            "engine_seconds": answer.engine_seconds,
            "queue_seconds": answer.queue_seconds,
        }
        body = b"" if answer.error is not None else stream_bytes(outcomes_table(request.outcomes, request.top_k))
        self.send(message, body)
        if request.write and answer.engine is not None:
            pairs = zip(request.sequences, request.outcomes, strict=True)
            good = [(sequence, outcome) for sequence, outcome in pairs if not isinstance(outcome, str | None)]
            if good:
                self._write_back.put(request.reference_id, {"online": True, **answer.engine.provenance()}, good)

    def _table(self, reference_id: str) -> ValuesTable:
        return self._store.values_table(self._reference(reference_id), self._models(reference_id).top_k)

    def _models(self, reference_id: str) -> ReferenceSettings:
        return self._configuration.models[reference_id]

    def _reference(self, reference_id: str) -> Reference:
        """Return the reference with the given id.

        The first call computes it from the model's folder, and raises ContentMismatchError if the folder has another id. Later
        calls need no check, because `_admit` and EngineChoice.make check it whenever the model is loaded.
        """
        if reference_id not in self._references:
            entry = self._models(reference_id)
            found = entry.reference()
            if found.reference_id != reference_id:
                raise ContentMismatchError(
                    f"{entry.model} has changed since the service started: its reference id is now {found.reference_id}, not "
                    f"{reference_id}; restore the old files, or restart the service"
                )
            self._references[reference_id] = found
        return self._references[reference_id]

    def _vision(self, reference_id: str) -> VisionCache:
        folder = self._models(reference_id).folder()
        if folder not in self._visions:
            self._visions[folder] = VisionCache(folder, self._models(reference_id).trust_remote_code)
        return self._visions[folder]

    def _admit(self, reference_id: str) -> None:
        """Check that a model can be loaded, before other models are unloaded to make room.

        Raises ContentMismatchError if the model's folder has changed, and OutOfMemoryError if the model does not fit on the
        device even when no other model is loaded.
        """
        self._choice(reference_id).require_loadable(self._models(reference_id).folder(), self._reference(reference_id))

    def _load(self, reference_id: str) -> PassEngine:
        return self._choice(reference_id).make(self._models(reference_id).folder(), self._reference(reference_id))

    def _choice(self, reference_id: str) -> EngineChoice:
        configuration = self._configuration
        return self._models(reference_id).choice(device=configuration.device, token_budget=configuration.token_budget)


def _ids(scalar: Any) -> Any:
    return scalar.values.to_numpy(zero_copy_only=False)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the service decides when workers end
    # the parent process may ignore SIGCHLD; if this process inherited that, the exit status of child processes would be lost
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    set_up_process()
    frame = read_frame(source)
    if frame is None:
        return
    configuration = WorkerConfiguration(**frame[0]["configuration"])
    if configuration.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = configuration.visible  # CUDA reads this variable on first use
    worker = Worker(configuration, out)
    try:
        worker.run(source)
    except Exception as error:  # the service reports the error and restarts the worker
        known = isinstance(error, ReflogpError)
        text = shortened_without_secrets(str(error) if known else f"{type(error).__name__}: {error}")
        worker.send({"op": "dying", "error": text})
        logger.error("%s", text if known else text + "\n" + "".join(traceback.format_tb(error.__traceback__)))
        tracing.flush()
        os._exit(1)
    tracing.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
