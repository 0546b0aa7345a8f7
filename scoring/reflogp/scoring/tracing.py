"""Send OpenTelemetry traces of scoring runs, if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set.

A thread's stages belong to a run if the thread was started in a copy of the run's context (contextvars.copy_context).
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from reflogp.store.texts import shortened_without_secrets

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

#: The attributes of a span. In a trace, each name has the prefix `reflogp.`; values that are None are left out.
Attributes = dict[str, str | int | float | None]
#: Maximum number of seconds to wait for the collector when a run or a process ends.
FLUSH_SECONDS = 5.0
_run: ContextVar[Attributes | None] = ContextVar("traced_run", default=None)


@contextmanager
def run_span(
    name: str,
    parent: str | None = None,
    stops: tuple[type[BaseException], ...] = (),
    flush_at_end: bool = False,
    **ids: str | None,
) -> Iterator[Attributes]:
    """Trace the `with` block as a run, and yield the span's attributes, to be updated. In another run, yield that run's.

    Args:
        parent: W3C traceparent of the span that caused the run. If None, the caller's current span, if any, is the parent.
        stops: types of exceptions that end the run but are no errors.
        flush_at_end: whether to wait for the collector at the end; see `flush`.
    """
    attributes = _run.get()
    provider = _provider() if attributes is None else None
    if provider is None:
        yield {} if attributes is None else attributes
        return
    from opentelemetry.trace import StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = None if parent is None else TraceContextTextMapPropagator().extract({"traceparent": parent})
    tracer, attributes = provider.get_tracer("reflogp"), {**ids}
    outside = _run.set(attributes)
    try:
        with tracer.start_as_current_span(name, context, record_exception=False, set_status_on_exception=False) as root:
            try:
                yield attributes
            except BaseException as error:
                text = shortened_without_secrets(str(error) or type(error).__name__)
                if isinstance(error, stops):
                    attributes["stopped"] = text
                else:
                    root.set_status(StatusCode.ERROR, text)
                    root.set_attribute("error.type", type(error).__name__)
                raise
            finally:
                root.set_attributes(_prefixed(attributes))
    finally:
        _run.reset(outside)
        if flush_at_end:
            flush()


@contextmanager
def span(name: str, **attributes: str | int | float | None) -> Iterator[Attributes]:
    """Record the `with` block as a stage of the run, and yield the stage's attributes, to be updated."""
    began = time.monotonic()
    try:
        yield attributes
    finally:
        record(name, time.monotonic() - began, **attributes)


def record(name: str, seconds: float, **attributes: str | int | float | None) -> None:
    """Record a stage of the run that took `seconds` seconds and ends now. Outside a run, do nothing."""
    provider = _provider() if _run.get() is not None else None
    if provider is not None:
        ended = time.time_ns()
        stage = provider.get_tracer("reflogp").start_span(name, start_time=ended - int(seconds * 1e9))
        stage.set_attributes(_prefixed(attributes))
        stage.end(ended)


def flush() -> None:
    """Wait up to FLUSH_SECONDS until all spans that have ended are sent."""
    provider = _provider()
    if provider is not None:
        # a thread, because the SDK's batch processor ignores the time limit of force_flush
        sending = threading.Thread(target=provider.force_flush, name="reflogp-flush", daemon=True)
        sending.start()
        sending.join(FLUSH_SECONDS)


def _prefixed(attributes: Attributes) -> dict[str, str | int | float]:
    return {f"reflogp.{name}": value for name, value in attributes.items() if value is not None}


def _provider() -> TracerProvider | None:
    is_configured = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("ENDPOINT", "TRACES_ENDPOINT"))
    return _process_provider() if is_configured else None


@cache
def _process_provider() -> TracerProvider | None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        warnings.warn(f"no traces are sent: run pip install 'reflogp[otel]' ({error})", stacklevel=2)
        return None
    resource = Resource.create({"service.name": "reflogp", "service.version": version("reflogp")})
    # at exit, the provider's own shutdown would wait up to 30 seconds for a collector that hangs
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def in_child() -> None:
        provider.shutdown()  # the processor's own handler, which runs first, has started a thread
        _process_provider.cache_clear()

    os.register_at_fork(after_in_child=in_child)
    return provider
