"""Call the methods of a scoring worker in another process, over a socket.

A call is a frame (see `frames`) with the name of the method; the unit to `score` is the frame's body. Several calls can be open
at a time, and are answered in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.frames import encode, read_frame
from reflogp.scoring.runs.scheduler import settle
from reflogp.scoring.runs.units import IN_FLIGHT
from reflogp.store import ReflogpError, StoreUnavailableError, UsageError

#: Classes of errors that are raised again as they are. Other errors are raised as ReflogpError.
_ERRORS = {kind.__name__: kind for kind in (UsageError, EngineError, StoreUnavailableError, ReflogpError)}


class CalledWorker:
    """A worker at the other end of a connection. Its methods return futures; see scheduler.Worker.

    Args:
        on_end: called in a thread when the connection has ended. It returns the error of the calls that have no answer.
    """

    def __init__(self, connection: socket.socket, on_end: Callable[[], EngineError]) -> None:
        self._connection = connection
        self._on_end = on_end
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._lost: EngineError | None = None
        threading.Thread(target=self._read, name="reflogp-worker-answers", daemon=True).start()

    def prepare(self) -> Future[dict[str, Any]]:
        return self._ask("prepare")

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        return self._ask("score", content, again=again)

    def stop(self) -> Future[None]:
        return self._ask("stop")

    def progress(self) -> Future[int] | None:
        return self._ask("progress")

    def close(self) -> None:
        """Close the connection. The calls that have no answer raise the error of `on_end`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, body: bytes = b"", **arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._lost is not None:  # a unit that did not reach the worker is not to blame
                answer.set_exception(WorkerGoneError(str(self._lost), blamed=False) if method == "score" else self._lost)
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
            with contextlib.suppress(OSError):  # the other process has ended: `_read` sets the future's error
                self._connection.sendall(encode({"op": method, "number": number, "arguments": arguments}, body))
        return answer

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError), self._connection.makefile("rb") as answers:
                while (frame := read_frame(answers)) is not None:
                    message, _ = frame
                    with self._lock:
                        answer = self._asked.pop(message["number"])
                    settle(answer, message["value"], None if message["error"] is None else _error(message))
        finally:
            lost = self._on_end()
            with self._lock:
                self._lost = lost
                asked, self._asked = self._asked, {}
            for answer in asked.values():
                settle(answer, None, lost)
            self._connection.close()


def _error(message: dict[str, Any]) -> ReflogpError:
    if message["kind"] == "gone":
        return WorkerGoneError(message["error"], message["blamed"])
    return _ERRORS[message["kind"]](message["error"])


def answer_calls(connection: socket.socket, worker: Any, on_end: Callable[[], None]) -> None:
    """Answer the calls that arrive over a connection, several at a time, until the connection ends.

    Then call `on_end`, and wait for the calls that are still open. `worker` has the methods of ScoringWorker.
    """
    sending = threading.Lock()

    def answer(message: dict[str, Any], body: bytes) -> None:
        about = {"op": "answer", "number": message["number"], "value": None}
        method, content = getattr(worker, message["op"]), [body] if body else []
        try:
            answered = encode({**about, "value": method(*content, **message["arguments"]), "error": None})
        except WorkerGoneError as error:
            answered = encode({**about, "error": str(error), "kind": "gone", "blamed": error.blamed})
        except ReflogpError as error:
            kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
            answered = encode({**about, "error": str(error), "kind": kind})
        except BaseException as error:  # a library's error
            answered = encode({**about, "error": f"{type(error).__name__}: {error}", "kind": "ReflogpError"})
        with sending, contextlib.suppress(OSError):  # raised if the other process has ended
            connection.sendall(answered)

    most = IN_FLIGHT + 2  # `stop` and `progress` beside the units
    with ThreadPoolExecutor(most) as pool, connection.makefile("rb") as calls:
        with contextlib.suppress(ConnectionError):
            while (frame := read_frame(calls)) is not None:
                pool.submit(answer, *frame)
        on_end()
