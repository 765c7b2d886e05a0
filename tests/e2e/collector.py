"""A collector of spans, by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.servers import serving


@dataclass(frozen=True, kw_only=True)
class Collector:
    """A running collector.

    Attributes:
        endpoint: Its address, as `front.tracing.endpoint` takes it.
        traces: Services that have sent spans of a name, by name and trace.
    """

    endpoint: str
    traces: dict[tuple[str, bytes], set[str]] = field(default_factory=dict)

    def services(self, name: str) -> list[set[str]]:
        """Return, for each trace with spans of that name, the services that sent them."""
        return [services for (found, _), services in [*self.traces.items()] if found == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on the loopback address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            for each in ExportTraceServiceRequest.FromString(sent).resource_spans:
                (service,) = (
                    one.value.string_value
                    for one in each.resource.attributes
                    if one.key == "service.name"
                )
                for span in (span for one in each.scope_spans for span in one.spans):
                    collector.traces.setdefault((span.name, span.trace_id), set()).add(service)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        collector = Collector(endpoint=url)
        yield collector
