"""Create the spans of a run with OpenTelemetry's SDK, and send them to a collector over HTTP.

The SDK's batch processor is not used, because it starts a thread in every forked child process, including the processes that
read untrusted data. The batch processor also waits for the collector without a time limit.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reflogp.store.texts import shortened_without_secrets

#: Maximum number of spans with the same name that a run sends. Further spans are not sent, but are included in the counts and
#: durations that the root span has as attributes.
MOST_SPANS = 1000
#: Maximum number of spans waiting to be sent to the collector; further spans are dropped. A run creates at most a few thousand
#: spans.
_MOST_WAITING = 8192
#: Maximum number of spans in a request to the collector, and maximum number of seconds before a request with fewer spans is
#: sent.
_BATCH, _BATCH_SECONDS = 512, 1.0

Attributes = Mapping[str, str | int | float | None]


class Sender(SpanProcessor):
    """A span processor that sends ended spans from a separate thread, so that a run does not wait for the collector."""

    def __init__(self) -> None:
        self._exporter = OTLPSpanExporter()
        self._reasons = _Reasons()
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(self._reasons)
        self._waiting: deque[ReadableSpan] = deque()
        self._sending = self._hurrying = self._complained = False
        self._changed = threading.Condition()
        named = Resource.create({"service.name": "reflogp", "service.version": version("reflogp")})
        provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("reflogp", version("reflogp"))
        threading.Thread(target=self._send, name="reflogp-traces", daemon=True).start()

    def begin(self, name: str, parent: str | None, stops: tuple[type[BaseException], ...], ids: Attributes) -> TracedRun:
        """Start a traced run; see `tracing.run_span`."""
        context = None if parent is None else TraceContextTextMapPropagator().extract({"traceparent": parent})
        return TracedRun(self._tracer, self._tracer.start_span(name, context), stops, ids)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span for sending. The SDK calls this method when the span has ended.

        Drop the span if it is not sampled, or if too many spans are waiting.
        """
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(span)
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` seconds for all ended spans to be sent or dropped. Warn if the time is not enough."""
        with self._changed:
            self._hurrying = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: not self._waiting and not self._sending, seconds)
            self._hurrying = False
        if not is_done:
            self._complain()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                self._changed.wait_for(lambda: self._hurrying or len(self._waiting) >= _BATCH, _BATCH_SECONDS)
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._sending = True
            self._reasons.first = ""
            try:
                is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception as error:  # older exporters raise the HTTP library's errors
                is_taken, self._reasons.first = False, self._reasons.first or str(error)
            if is_taken:
                self._complained = False
            else:
                self._complain()

    def _complain(self) -> None:
        """Warn that spans are lost. Do not repeat the warning until the collector has accepted spans again."""
        with self._changed:
            if self._complained:
                return
            self._complained = True
        reason = shortened_without_secrets(self._reasons.first or "the collector is not responding")
        warnings.warn(
            f"the OpenTelemetry collector does not accept traces ({reason}), so spans are lost; the run continues", stacklevel=1
        )


class _Reasons(logging.Filter):
    """A filter that keeps the exporter's messages out of the log, because there are many if the collector is unreachable.

    Attributes:
        first: the first message that the exporter logged about the latest request to the collector; empty if there is none.
    """

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.first = self.first or record.getMessage()
        return False


class StartedSpan:
    """A span that has started; see `tracing.Span`.

    Attributes:
        span: the SDK's span, or INVALID_SPAN if the run already has MOST_SPANS spans of this name. An INVALID_SPAN is not sent,
            but its stage is included in the counts and durations that the root span has as attributes.
        discarded: True after a call to `discard`.

    Args:
        span: the SDK's span; see the attribute `span`.
        started: start time of the span, in nanoseconds since 1970.
    """

    def __init__(self, span: trace.Span, started: int) -> None:
        self.span = span
        self.discarded = False
        self._started = started
        self._lock = threading.Lock()
        self._ended = False

    def set(self, **attributes: str | int | float | None) -> None:
        """Set attributes, prefixing each name with `reflogp.`. Attributes whose value is None are skipped."""
        self.span.set_attributes({f"reflogp.{name}": value for name, value in attributes.items() if value is not None})

    def discard(self) -> None:
        """Do not send this span."""
        self.discarded = True

    def end(self, ended: int | None = None) -> float:
        """End the span and return its duration in seconds. If the span has already ended or was discarded, return 0."""
        with self._lock:
            if self._ended or self.discarded:
                return 0.0
            self._ended = True
        ended = time.time_ns() if ended is None else ended
        self.span.end(ended)
        return (ended - self._started) / 1e9


class TracedRun:
    """The root span of a traced run and the spans of its stages. Stages may run in several threads.

    Args:
        tracer: the SDK's object that creates spans.
        root: the SDK's root span.
        stops: types of exceptions that end the run but do not count as errors.
        ids: attributes to set on every span.

    Attributes:
        root: the root span, as a StartedSpan.
    """

    def __init__(self, tracer: trace.Tracer, root: trace.Span, stops: tuple[type[BaseException], ...], ids: Attributes) -> None:
        self.root = StartedSpan(root, time.time_ns())
        self._tracer = tracer
        self._stops = stops
        self._ids = ids
        self._lock = threading.Lock()
        self._open: set[StartedSpan] = set()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.root.set(**ids)

    @contextmanager
    def is_current(self) -> Iterator[None]:
        """Make the root span the parent of the spans that this thread starts in the block."""
        with trace.use_span(self.root.span, record_exception=False, set_status_on_exception=False):
            yield

    @contextmanager
    def stage(self, name: str, attributes: Attributes) -> Iterator[StartedSpan]:
        """Trace the `with` block as a stage."""
        stage = self._begin(name, attributes)
        above = stage.span if stage.span is not trace.INVALID_SPAN else trace.get_current_span()
        try:
            with trace.use_span(above, record_exception=False, set_status_on_exception=False):
                yield stage
        except BaseException as error:
            self._describe(stage, error)
            raise
        finally:
            self._close(name, stage)

    def record(self, name: str, started: int, ended: int, attributes: Attributes) -> None:
        """Record a stage with the given start and end times, in nanoseconds since 1970."""
        self._close(name, self._begin(name, attributes, started), ended)

    def end(self, error: BaseException | None) -> None:
        """End the root span and the spans of stages that are still running. If the run has already ended, do nothing."""
        with self._lock:
            left, self._open = [*self._open, self.root], set()
            for name, count in (+self._counts).items():  # `+` removes names whose spans were all discarded
                key = name.replace(" ", "_")
                self.root.set(**{f"{key}.count": count, f"{key}.seconds": self._seconds[name]})
        for stage in left:
            if error is not None:
                self._describe(stage, error)
            stage.end()

    def _begin(self, name: str, attributes: Attributes, started: int | None = None) -> StartedSpan:
        with self._lock:
            is_sent = self._counts[name] < MOST_SPANS
            self._counts[name] += 1
            begun = time.time_ns() if started is None else started
            stage = StartedSpan(self._tracer.start_span(name, start_time=begun) if is_sent else trace.INVALID_SPAN, begun)
            self._open.add(stage)
        stage.set(**self._ids)
        stage.set(**attributes)
        return stage

    def _close(self, name: str, stage: StartedSpan, ended: int | None = None) -> None:
        seconds = stage.end(ended)
        with self._lock:
            self._open.discard(stage)
            self._counts[name] -= stage.discarded
            self._seconds[name] += seconds

    def _describe(self, stage: StartedSpan, error: BaseException) -> None:
        """Set the attributes and status of a span according to the exception that ended its stage or run.

        For an exception of a type in the run's `stops`, set the attribute `reflogp.stopped` to the message. For any other
        exception, set the attribute `error.type` to the type's name, and the status to ERROR with the message.
        """
        text = shortened_without_secrets(str(error) or type(error).__name__)
        if isinstance(error, self._stops):
            stage.set(stopped=text)
        else:
            stage.span.set_attribute("error.type", type(error).__name__)
            stage.span.set_status(trace.Status(trace.StatusCode.ERROR, text))
