"""Run a worker process.

The process reads frames from stdin and writes frames to stdout. It runs until the service sends the frame `exit`, or until the
service itself exits.

Four threads run as long as the process: the main thread owns the engines and alternates between online requests and a job, the
second thread reads frames, the third runs jobs or helps with jobs of other workers, and the fourth commits the values of online
requests. Each job starts further threads. Logs go to stderr. The process is started with `python -m reflogp.service.worker`.

The service and its workers exchange the following frames. The owner of a job is the worker that runs the job. A helper is a
worker that helps with another worker's job. Parentheses state what the body of a frame contains. A unit is a part of a job's
sequences, which the owner sends to a helper through the service.

    service -> worker   configure, score (+ sequences), forget, job, help, stop, ping, exit
    service -> owner    helper, answer, gone
    service -> helper   ask (+ unit)
    worker -> service   ready, loaded, round, scored (+ outcomes), pong, dying
    owner -> service    pass, progress, job, ask (+ unit)
    helper -> service   helping, answer, helped
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from reflogp.scoring import tracing
from reflogp.scoring.data.tokenizer_files import read_tokenizer_files
from reflogp.scoring.engines import EngineChoice, PassEngine
from reflogp.scoring.frames import encode, read_frame
from reflogp.scoring.machine import quiet_libraries, return_freed_memory
from reflogp.scoring.runs.units import VisionCache
from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.torch_engine.load import choose_device
from reflogp.scoring.vision import load_processor
from reflogp.service.log_lines import LogLine
from reflogp.service.worker.engine_loop import Answer, DeviceLostError, EngineLoop, Engines, ModelUnloadedError, OnlineRequest
from reflogp.service.worker.helpers import Asked, Helpers, help_with
from reflogp.service.worker.job import JobCallbacks, JobContext, JobModel, JobStoppedError, run_job
from reflogp.service.worker.protocol import HelpOrder, JobOrder, ModelConfig, WorkerConfiguration, outcomes_table, table_of
from reflogp.service.worker.reader import default_memory
from reflogp.service.worker.write_back import WriteBack
from reflogp.store import (
    ContentMismatchError,
    Reference,
    ReflogpError,
    Store,
    StoreUnavailableError,
    describe_reference,
    resolve_model,
)
from reflogp.store.schema import stream_bytes
from reflogp.store.texts import counted, shortened_without_secrets

logger = logging.getLogger("reflogp.worker")

#: Maximum number of seconds for each of the two parts of a shutdown: first, the worker's job commits values; then, the current
#: round of online requests is finished and the process exits. A process that is still running after both exits with status 1.
_LAST_SECONDS = 20.0


@dataclass(eq=False)
class _Ordered:
    """An order from the service to run a job, or to help with another worker's job.

    Attributes:
        helpers: workers that help with the job; None if the order is to help with another worker's job.
        why: reason why the worker must stop carrying out the order, or None if it may continue.
        asked: requests from the worker that runs the job; used only if the order is to help with another worker's job.
    """

    order: JobOrder | HelpOrder
    helpers: Helpers | None = None
    why: str | None = None
    asked: queue.SimpleQueue[Asked] = field(default_factory=queue.SimpleQueue)

    @property
    def is_help(self) -> bool:
        return self.helpers is None


class Worker:
    """A worker process: the engines on one device, and the online requests and jobs that use the engines.

    Args:
        configuration: configuration received from the service.
        out: stream for frames to the service.
    """

    def __init__(self, configuration: WorkerConfiguration, out: BinaryIO) -> None:
        self._configuration = configuration
        self._out = out
        self._sending = threading.Lock()
        self._references: dict[str, Reference] = {}
        self._visions: dict[str, VisionCache] = {}
        self._store = Store(configuration.store)
        self._place = JobContext(
            self._store,
            Path(configuration.tokens),
            configuration.max_tokens_bytes,
            configuration.commit_seconds,
            configuration.row_seconds,
            default_memory(),
        )
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
        self._write_back = WriteBack(self._store, self._reference)
        self._writes: set[str] = set()
        self._orders: queue.SimpleQueue[_Ordered | None] = queue.SimpleQueue()
        self._ordered: list[_Ordered] = []  # queued and running orders
        self._ending = False
        self._job_thread = threading.Thread(target=self._do_orders, name="jobs", daemon=True)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame to the service. If the service has exited, shut down the worker."""
        try:
            with self._sending:
                self._out.write(encode(message, body))
                self._out.flush()
        except (BrokenPipeError, ValueError):
            self.end()

    def run(self, source: BinaryIO) -> None:
        """Run until the service sends the frame `exit`, or until the service itself exits."""
        choose_device(self._configuration.device)
        if self._configuration.device == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self._configuration.sharing))
        self._job_thread.start()
        threading.Thread(target=self._read, args=(source,), name="frames", daemon=True).start()
        if self._configuration.pinned is not None:
            try:
                self.loop.preload(self._configuration.pinned)
            except ContentMismatchError as error:  # requests for this reference will get the same error
                logger.error("%s", error)
        self.send({"op": "ready"})
        self.loop.run()
        self._write_back.close()

    def end(self) -> None:
        """Begin to shut down the worker, and return at once.

        The job commits the values computed so far and stops. Then the current round of online requests is finished, and `run`
        returns.
        """
        if not self._ending:
            self._ending = True
            self._orders.put(None)
            threading.Thread(target=self._close_after_job, name="end", daemon=True).start()

    def keep_what_is_computed(self) -> None:
        """After a forward pass has failed, wait until the job has committed the values computed before the failure.

        Wait for at most _LAST_SECONDS.
        """
        if self._ordered:
            self._job_thread.join(_LAST_SECONDS)

    def _close_after_job(self) -> None:
        self._job_thread.join(_LAST_SECONDS)
        self.loop.close()
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    def _read(self, source: BinaryIO) -> None:
        while (frame := read_frame(source)) is not None:
            message, body = frame
            match message["op"]:
                case "score":
                    self._ask(message, body)
                case "forget":
                    self._writes.discard(message["id"])
                    self.loop.forget(message["id"])
                case "job":
                    order = JobOrder(**message["order"])
                    self._put(_Ordered(order, Helpers(order.job, self.send, self._configuration.workers > 1)))
                case "help":
                    self._put(_Ordered(HelpOrder(**message["order"])))
                case "stop":
                    for ordered in list(self._ordered):
                        if (ordered.order.job, ordered.is_help) == (message["job"], message.get("help", False)):
                            ordered.why = ordered.why or message["why"]
                case "helper" | "answer" | "gone":
                    for ordered in list(self._ordered):
                        if ordered.helpers is not None:
                            ordered.helpers.take(message)
                case "ask":
                    for ordered in list(self._ordered):
                        if ordered.is_help and ordered.order.job == message["job"]:
                            ordered.asked.put((message, body))
                case "ping":
                    doing, seconds = self.loop.doing() or (None, 0.0)
                    self.send({"op": "pong", "doing": doing, "seconds": seconds})
                case "exit":
                    self.end()
        self.end()

    def _ask(self, message: dict[str, Any], body: bytes) -> None:
        table = table_of(body)
        rows = zip(*(table[name] for name in table.column_names), strict=True)
        sequences = [Sequence(*(_ids(entry) for entry in row)) for row in rows]
        left = message["deadline_seconds"]
        deadline = None if left is None else time.monotonic() + left
        if message["write"]:
            self._writes.add(message["id"])
        self.loop.ask(
            OnlineRequest(
                message["id"],
                message["reference_id"],
                sequences,
                message["temperature"],
                message["alone"],
                deadline,
                request=message["request"],
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
        body = b"" if answer.error is not None else stream_bytes(outcomes_table(request.outcomes))
        self.send(message, body)
        if request.id in self._writes:
            self._writes.discard(request.id)
            if answer.engine is not None:
                pairs = zip(request.sequences, request.outcomes, strict=True)
                good = [(sequence, outcome) for sequence, outcome in pairs if isinstance(outcome, np.ndarray)]
                self._write_back.put(request.reference_id, {"online": True, **answer.engine.provenance()}, good)

    def _put(self, ordered: _Ordered) -> None:
        self._ordered.append(ordered)
        self._orders.put(ordered)

    def _do_orders(self) -> None:
        while (ordered := self._orders.get()) is not None:
            try:
                message = self._help(ordered) if ordered.is_help else self._do_job(ordered)
            except DeviceLostError:
                return
            self._ordered.remove(ordered)
            self.send(message)
            return_freed_memory()

    def _do_job(self, ordered: _Ordered) -> dict[str, Any]:
        """Run a job and return the frame that reports how it ended. Raise DeviceLostError if a forward pass fails."""
        message: dict[str, Any] = {"op": "job", "job": ordered.order.job}
        try:
            return message | {"end": "done", "summary": self._do(ordered)}
        except JobStoppedError as stopped:
            return message | {"end": "stopped", "why": str(stopped)}
        except ModelUnloadedError:
            return message | {"end": "stopped", "why": "displaced"}
        except StoreUnavailableError as error:
            return message | {"end": "stopped", "why": "store", "error": str(error)}
        except (ReflogpError, OSError) as error:
            return message | {"end": "failed", "error": shortened_without_secrets(str(error))}
        except DeviceLostError:
            raise
        except Exception as error:
            return message | {"end": "failed", "error": _unexpected(ordered, error)}

    def _help(self, ordered: _Ordered) -> dict[str, Any]:
        """Help with a job, and return the frame that tells the service that this worker has stopped helping.

        Raise DeviceLostError if a forward pass fails.
        """
        order, text = ordered.order, None
        try:
            reference = self._reference(order.reference_id)
            table = self._store.create_table(reference)
            assert isinstance(order, HelpOrder)
            vision = self._vision(order.reference_id)
            help_with(order, table, self.loop, ordered.asked, self.send, partial(self._check, ordered), vision)
        except (JobStoppedError, ModelUnloadedError):
            pass
        except (ReflogpError, OSError) as error:
            text = shortened_without_secrets(str(error))
        except DeviceLostError:
            raise
        except Exception as error:
            text = _unexpected(ordered, error)
        return {"op": "helped", "job": order.job, "error": text}

    def _check(self, ordered: _Ordered) -> None:
        """Raise JobStoppedError if the worker must stop carrying out the order."""
        why = "end" if self._ending else ordered.why
        if why is not None:
            raise JobStoppedError(why)

    def _do(self, ordered: _Ordered) -> dict[str, Any]:
        order, helpers = ordered.order, ordered.helpers
        assert isinstance(order, JobOrder) and helpers is not None

        def report(progress: dict[str, Any], committed: bool) -> None:
            self.send({"op": "progress", "job": order.job, "progress": progress, "committed": committed})

        def announce(keys: list[str]) -> None:
            self.send({"op": "pass", "job": order.job, "keys": keys})

        trusted = self._models(order.reference_id).trust_remote_code
        folder = str(resolve_model(order.model, order.revision))
        model = JobModel(
            self._reference(order.reference_id),
            partial(read_tokenizer_files, folder, trusted),
            partial(load_processor, folder, folder, None, trusted),
        )
        callbacks = JobCallbacks(report, announce, partial(self._check, ordered))
        return run_job(order, self._place, model, self.loop, helpers, callbacks)

    def _models(self, reference_id: str) -> ModelConfig:
        return self._configuration.models[reference_id]

    def _reference(self, reference_id: str) -> Reference:
        """Return the reference with the given id.

        The first call for an id computes the reference from the model's folder, and raises ContentMismatchError if the folder's
        content does not match the id. Later calls return the cached reference without reading the folder. They need no check,
        because `_admit` and EngineChoice.make check whenever the model is loaded that the folder still has the same content.
        """
        if reference_id not in self._references:
            place = self._models(reference_id)
            found = describe_reference(place.model, place.dtype, lm_head_dtype=place.lm_head_dtype, revision=place.revision)
            if found.reference_id != reference_id:
                raise ContentMismatchError(
                    f"{place.model} has changed since the service started: its reference id is now {found.reference_id}, not "
                    f"{reference_id}; restore the old files, or restart the service"
                )
            self._references[reference_id] = found
        return self._references[reference_id]

    def _vision(self, reference_id: str) -> VisionCache:
        """Return the VisionCache that this worker uses when it helps with a job of the given reference."""
        folder = self._folder(reference_id)
        if folder not in self._visions:
            self._visions[folder] = VisionCache(folder, self._models(reference_id).trust_remote_code)
        return self._visions[folder]

    def _admit(self, reference_id: str) -> None:
        """Check that a model can be loaded. The Engines object calls this method before it unloads other models to make room.

        Raise ContentMismatchError if the content of the model's folder no longer matches the reference, and OutOfMemoryError if
        the model does not fit on the device even when no other model is loaded.
        """
        self._choice(reference_id).require_loadable(self._folder(reference_id), self._reference(reference_id))

    def _folder(self, reference_id: str) -> str:
        place = self._models(reference_id)
        return str(resolve_model(place.model, place.revision))

    def _load(self, reference_id: str) -> PassEngine:
        return self._choice(reference_id).make(self._folder(reference_id), self._reference(reference_id))

    def _choice(self, reference_id: str) -> EngineChoice:
        configuration = self._configuration
        engine = self._models(reference_id).engine
        return EngineChoice(device=configuration.device, token_budget=configuration.token_budget, **engine)


def _unexpected(ordered: _Ordered, error: Exception) -> str:
    """Log an unexpected error (a bug in reflogp or in a library) with its traceback, and return its type and message."""
    where = "".join(traceback.format_tb(error.__traceback__))
    text = shortened_without_secrets(f"{type(error).__name__}: {error}")
    logger.error("unexpected error in job %s: %s\n%s", ordered.order.job, text, where, extra={"job": ordered.order.job})
    return text


def _ids(scalar: Any) -> Any:
    return scalar.values.to_numpy(zero_copy_only=False)


def main() -> None:
    """Read the configuration, then run the worker."""
    # Ctrl-C sends SIGINT to the whole process group, but the service decides when workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # the parent process may ignore SIGCHLD; if this process inherited that, the exit status of child processes would be lost
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # redirect stdout to stderr: what libraries print must not mix with the frames
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
    quiet_libraries()
    frame = read_frame(source)
    if frame is None:
        return
    fields = frame[0]["configuration"]
    models = {key: ModelConfig(**entry) for key, entry in fields.pop("models").items()}
    configuration = WorkerConfiguration(models=models, **fields)
    if configuration.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = configuration.visible  # CUDA reads this variable on first use
    worker = Worker(configuration, out)
    try:
        worker.run(source)
    except Exception as error:  # the service reports the error and restarts the worker
        known = isinstance(error, ReflogpError)
        text = shortened_without_secrets(str(error) if known else f"{type(error).__name__}: {error}")
        worker.keep_what_is_computed()
        worker.send({"op": "dying", "error": text})
        logger.error("%s", text if known else text + "\n" + "".join(traceback.format_tb(error.__traceback__)))
        tracing.flush()
        os._exit(1)
    out.flush()
    tracing.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
