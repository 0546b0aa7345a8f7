"""A real OTLP collector for the time of a test: an HTTP server that takes protobuf at /v1/traces and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class SentSpan:
    """A span as the collector got it. `parent` is "" for the first span of a trace; times are in nanoseconds."""

    def __init__(self, span: Span, resource: Resource) -> None:
        self.name, self.message = span.name, span.status.message
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.is_error = span.status.code == span.status.STATUS_CODE_ERROR
        self.attributes, self.resource = _values(span.attributes), _values(resource.attributes)


class Collector:
    """What arrived so far."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[SentSpan] = []

    def named(self, name: str) -> list[SentSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def children(self, parent: SentSpan) -> list[SentSpan]:
        return [span for span in list(self.spans) if span.parent == parent.id]


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a free port."""
    app, found = FastAPI(), Collector()

    @app.post("/v1/traces")
    async def take(request: Request) -> Response:
        assert request.headers["content-type"] == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.body())
        for of_resource in message.resource_spans:
            for of_scope in of_resource.scope_spans:
                found.spans += [SentSpan(span, of_resource.resource) for span in of_scope.spans]
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.should_exit = True
        thread.join()


def _values(attributes) -> dict:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}
