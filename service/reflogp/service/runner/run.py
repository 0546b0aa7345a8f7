"""The runner's process: run one job, and exchange frames with the service over a socket.

    service -> runner   lend (a worker), take_back, gone (a worker's process has ended), stop
    runner -> service   progress, job (its end)

When the runner must stop, or gets SIGTERM, or the service exits, what is computed is committed, and the runner exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import traceback
from typing import Any

from reflogp.scoring import tracing
from reflogp.scoring.frames import encode, read_frame
from reflogp.service.log_lines import set_up_process
from reflogp.service.runner.devices import LentWorkers
from reflogp.service.runner.job import JobStoppedError, run_job
from reflogp.service.runner.limited import NoProcessError
from reflogp.service.runner.order import JobOrder
from reflogp.store import ReflogpError, StoreUnavailableError
from reflogp.store.texts import shortened_without_secrets

logger = logging.getLogger("reflogp.runner")

#: Seconds after the service has exited in which the runner commits what is computed. After that, it exits in any case.
_LAST_SECONDS = 40.0


def main(connection: socket.socket, order: JobOrder) -> None:
    """Run a job in this process, and exit."""
    runner = _Runner(connection, order)
    set_up_process()
    signal.signal(signal.SIGTERM, lambda *_: runner.stop("end"))
    runner.send(runner.run())
    tracing.flush()
    os._exit(0)


class _Runner:
    def __init__(self, connection: socket.socket, order: JobOrder) -> None:
        self._stopped_for: str | None = None
        self._connection = connection
        self._order = order
        self._workers = LentWorkers(order.reference.reference_id, self._check)

    def stop(self, why: str) -> None:
        self._stopped_for = self._stopped_for or why

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # raised if the service has exited, which `_read` notices
            self._connection.sendall(encode({**message, "job": self._order.claim.id}))

    def run(self) -> dict[str, Any]:
        """Run the job and return the frame that reports how it ended."""
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        try:
            summary = run_job(self._order, self._workers, self._report, self._check)
            return {"op": "job", "end": "done", "summary": summary}
        except JobStoppedError:
            return {"op": "job", "end": "stopped", "error": None}
        except NoProcessError as error:
            logger.error("%s", error, extra={"job": self._order.claim.id})
            os._exit(1)  # the service runs the job again
        except StoreUnavailableError as error:
            return {"op": "job", "end": "stopped", "error": str(error)}
        except Exception as error:
            if self._stopped_for is not None:  # what the job needs may end together with it
                return {"op": "job", "end": "stopped", "error": None}
            if isinstance(error, ReflogpError | OSError):
                return {"op": "job", "end": "failed", "error": shortened_without_secrets(str(error))}
            text = shortened_without_secrets(f"{type(error).__name__}: {error}")  # a bug in reflogp or in a library
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("unexpected error: %s\n%s", text, where, extra={"job": self._order.claim.id})
            return {"op": "job", "end": "failed", "error": text}

    def _report(self, progress: dict[str, Any], committed: bool) -> None:
        self.send({"op": "progress", "progress": progress, "committed": committed})

    def _check(self) -> None:
        if self._stopped_for is not None:
            raise JobStoppedError(self._stopped_for)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("rb") as frames:
            while (frame := read_frame(frames)) is not None:
                message, _ = frame
                match message["op"]:
                    case "lend":
                        self._workers.lend(message["worker"], message["address"])
                    case "take_back":
                        self._workers.take_back(message["worker"])
                    case "gone":
                        self._workers.gone(message["worker"], message["reason"], message["blamed"])
                    case "stop":
                        self.stop(message["why"])
        self.stop("end")  # the service has exited
        threading.Event().wait(_LAST_SECONDS)
        os._exit(1)
