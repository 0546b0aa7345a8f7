"""Trace scoring runs with OpenTelemetry. `run_span` records a run as a root span, and the other functions record its stages.

Traces are sent if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set. If neither is set, the
functions in this module record nothing and do not import opentelemetry. Stages outside a run are not recorded.

Start each thread of a run in a copy of the parent thread's context (contextvars.copy_context). The new thread's spans are then
children of the parent thread's span.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from reflogp.scoring.otel import Sender, TracedRun

T = TypeVar("T")

#: Maximum number of seconds to wait for the collector when a run or a process ends.
FLUSH_SECONDS = 5.0
#: The only protocol that the `otel` extra supports.
_PROTOCOL = "http/protobuf"


class Span(Protocol):
    """A span of a trace, or a no-op object when tracing is off."""

    def set(self, **attributes: str | int | float | None) -> None:
        """Set attributes, prefixing each name with `reflogp.`. Attributes whose value is None are skipped."""

    def discard(self) -> None:
        """Do not send this span."""


class _NoSpan:
    def set(self, **attributes: str | int | float | None) -> None: ...

    def discard(self) -> None: ...


_NO_SPAN = _NoSpan()
_run: ContextVar[TracedRun | None] = ContextVar("traced_run", default=None)
_connecting = threading.Lock()
# Empty until the first run for which a collector is configured. Then it has one entry, which is None if spans cannot be sent.
_senders: list[Sender | None] = []


@contextmanager
def run_span(
    name: str,
    parent: str | None = None,
    stops: tuple[type[BaseException], ...] = (),
    flush_at_end: bool = False,
    **ids: str | int | None,
) -> Iterator[Span]:
    """Trace the `with` block as a run, and yield the root span. If a run is already being traced, only yield its root span.

    Args:
        name: name of the root span.
        parent: W3C traceparent of the span that caused the run. If None, the caller's current span, if any, is the parent.
        stops: types of exceptions that end the run but do not count as errors.
        flush_at_end: if True, wait up to FLUSH_SECONDS at the end of the run for the collector to receive the spans. If SIGTERM
            arrives during the run, wait in the same way before the process exits. SIGTERM is handled only if the run is in the
            main thread and the program has not set its own SIGTERM handler.
        ids: attributes to set on every span of the run.
    """
    around = _run.get()
    if around is not None:
        yield around.root
        return
    sender = _sender()
    if sender is None:
        yield _NO_SPAN
        return
    run = sender.begin(name, parent, stops, ids)
    token = _run.set(run)
    try:
        with run.is_current(), _sigterm(run, sender) if flush_at_end else nullcontext():
            yield run.root
    except BaseException as error:
        run.end(error)
        raise
    else:
        run.end(None)
    finally:
        _run.reset(token)
        if flush_at_end:
            sender.flush(FLUSH_SECONDS)


@contextmanager
def span(name: str, **attributes: str | int | float | None) -> Iterator[Span]:
    """Trace the `with` block as a stage of the run. If the block raises an exception, record it in the span."""
    run = _run.get()
    if run is None:
        yield _NO_SPAN
        return
    with run.stage(name, attributes) as stage:
        yield stage


def traced(name: str, items: Iterable[T], describe: Callable[[T], dict[str, str | int | float | None]]) -> Iterator[T]:
    """Yield the items of an iterable, and record a span for each item.

    The span covers the time in which the iterable produces the item. The span's attributes are the result of `describe(item)`.
    """
    iterator = iter(items)
    while True:
        with span(name) as making:
            try:
                item = next(iterator)
            except StopIteration:
                making.discard()
                return
            making.set(**describe(item))
        yield item


def record(name: str, seconds: float, **attributes: str | int | float | None) -> None:
    """Record a stage of the run: the stage took `seconds` seconds and ends now."""
    run = _run.get()
    if run is not None:
        ended = time.time_ns()
        run.record(name, ended - int(seconds * 1e9), ended, attributes)


def flush() -> None:
    """Wait up to FLUSH_SECONDS for all ended spans to be sent to the collector."""
    for sender in _senders:
        if sender is not None:
            sender.flush(FLUSH_SECONDS)


def _sender() -> Sender | None:
    """Return the object that sends spans, or None if no collector is configured or spans cannot be sent.

    Warn once if spans cannot be sent.
    """
    named = [name for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT") if os.environ.get(name)]
    if not named:
        return None
    with _connecting:
        if not _senders:
            _senders.append(_connect(named[0]))
        return _senders[0]


def _connect(named: str) -> Sender | None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name)
        if protocol and protocol != _PROTOCOL:
            warnings.warn(
                f"{name} is {protocol}, but reflogp supports only {_PROTOCOL}, so no traces are sent; "
                f"set {name} to {_PROTOCOL}, and point {named} to the collector's HTTP port (4318 by default)",
                stacklevel=2,
            )
            return None
        if protocol:
            break
    try:
        from reflogp.scoring.otel import Sender
    except ImportError as error:
        warnings.warn(
            f"{named} is set, but no traces are sent, because the otel extra is not installed; run pip install 'reflogp[otel]' "
            f"({error})",
            stacklevel=2,
        )
        return None
    try:
        return Sender()
    except (ValueError, OSError) as error:
        warnings.warn(f"no traces are sent, because an OTEL_… variable has an invalid value: {error}", stacklevel=2)
        return None


@contextmanager
def _sigterm(run: TracedRun, sender: Sender) -> Iterator[None]:
    """If SIGTERM arrives during the block, end the run's spans and send them before the process exits.

    Do nothing in threads other than the main thread, or if SIGTERM does not have its default action.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def send() -> None:
        run.end(InterruptedError("SIGTERM ended the process"))
        sender.flush(FLUSH_SECONDS)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        # `send` runs in a separate thread, because the interrupted code may hold a lock that `send` needs.
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(FLUSH_SECONDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is on_sigterm:  # otherwise, the block has installed another handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
