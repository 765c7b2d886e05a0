"""Spans of OpenTelemetry for requests: what the router sees of each, sent to a collector by OTLP.

A request is a span of kind SERVER, a child of the client's own if ``traceparent`` names one. Below
it is one of kind CLIENT for every try at an instance (``prefill``, ``answer``) and for every encode
job (``encode``). Each instance gets the ``traceparent`` of its span, so what it traces by itself
lies below that. A try has a link to each encode job whose item it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd_portable.router.observability.record import ItemRecord, Leg, Listener, RequestRecord

SERVICE = "epd-router"
"""``service.name``, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` has another."""

_propagator = TraceContextTextMapPropagator()


def provider(endpoint: str | None) -> TracerProvider:
    """Return what sends spans to a collector, in a thread of its own.

    Variables of OpenTelemetry hold: headers, limits, sampling, attributes of the resource.

    Args:
        endpoint: Of the collector, ``http://host:4318``; ``None`` where the variables name it.
    """
    resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
    made = TracerProvider(resource=resource)
    target = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target)))
    return made


class Tracing(Listener):
    """Makes spans of what it hears."""

    def __init__(self, made: TracerProvider) -> None:
        self._provider = made
        self._tracer = made.get_tracer("epd_portable.router")
        self._open: dict[RequestRecord | Leg, Span] = {}

    def begun(self, record: RequestRecord) -> None:
        """Begin the request's span, and note its name in the record; see `Listener`."""
        attributes = {"url.path": record.endpoint, "epd.request_id": record.id}
        self._begin(record, record, record.endpoint, SpanKind.SERVER, attributes)

    def leg_began(self, record: RequestRecord, leg: Leg, item: ItemRecord | None) -> None:
        """Begin the span of a try at an instance."""
        attributes: dict[str, str | int] = {"epd.instance": leg.instance}
        if item is not None:
            attributes |= {
                "epd.item.modality": item.modality,
                "epd.item.pixels": item.pixels,
                "epd.item.bytes": item.nbytes,
            }
        self._begin(record, leg, leg.stage, SpanKind.CLIENT, attributes)

    def job_ended(self, record: RequestRecord, job: Leg, item: ItemRecord) -> None:
        """End the span of an encode job."""
        span = self._open.pop(job)
        span.set_attribute("epd.end", job.end)
        if job.failed:
            span.set_status(Status(StatusCode.ERROR, job.end))
        span.end(_ns(record, job.ended_at))

    def ended(self, record: RequestRecord) -> None:
        """End the other spans of a request."""
        jobs = [job for item in record.items for job in item.jobs]
        for leg in record.legs:
            span = self._open.pop(leg)
            for job in jobs:
                if leg.began_at <= job.began_at <= leg.ended_at:
                    span.add_link(get_current_span(_context(job)).get_span_context())
            if leg.failed:
                span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(record, leg.ended_at))
        span = self._open.pop(record)
        for step in record.steps:
            noted = {
                "epd.phase": step.phase,
                "epd.failure": step.failure,
                "epd.fallback": step.fallback,
            }
            span.add_event("fallback", noted, _ns(record, step.at))
        for name, at in (("admitted", record.admitted_at), ("first byte", record.first_at)):
            if at:
                span.add_event(name, timestamp=_ns(record, at))
        span.set_attributes(_attributes(record))
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(record, record.ended_at))

    async def close(self) -> None:
        """Send what there is; a collector that does not answer has its time."""
        await asyncio.to_thread(self._provider.shutdown)

    def _begin(
        self,
        record: RequestRecord,
        what: RequestRecord | Leg,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str | int],
    ) -> None:
        began = _ns(record, what.began_at)
        span = self._tracer.start_span(name, _context(record), kind, attributes, start_time=began)
        self._open[what] = span
        made = span.get_span_context()
        what.traceparent = f"00-{made.trace_id:032x}-{made.span_id:016x}-{made.trace_flags:02x}"


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.response.status_code": record.status,
        "epd.topology": record.topology,
        "epd.stream": record.stream,
        "epd.gone": record.gone,
        "epd.items": len(record.items),
        "http.request.body.size": record.nbytes,
        "http.response.body.size": record.nbytes_out,
        "gen_ai.request.model": record.model,
    }
    if record.output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.output_tokens
    return attributes


def _context(of: RequestRecord | Leg) -> Context:
    return _propagator.extract({"traceparent": of.traceparent})


def _ns(record: RequestRecord, at: float) -> int:
    return int(record.wall_s(at) * 1e9)
