"""Spans of requests and of their encode and prefill jobs, where ``front.tracing.endpoint`` is set.

vLLM's server sets the provider of OpenTelemetry, and sends a span ``llm_request`` at the end of a
request. The span of the front begins earlier, so that those of jobs and vLLM's lie below it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from vllm.v1.engine import EngineCoreRequest

if TYPE_CHECKING:
    from epd_portable.front.request import OpenRequest

_propagator = TraceContextTextMapPropagator()


class Spans:
    """Makes the spans of one front."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("epd_portable.front")

    def begin(self, one: OpenRequest) -> None:
        """Begin the span of a request whose task has been made, until the task ends."""
        core, task = one.core, one.task
        assert task is not None
        context = _propagator.extract(core.trace_headers or {})
        span = self._tracer.start_span("request", context, start_time=int(core.arrival_time * 1e9))
        span.set_attribute("epd.request_id", core.request_id)
        span.set_attribute("epd.items", len(one.items))
        core.trace_headers = {**(core.trace_headers or {})}
        _propagator.inject(core.trace_headers, trace.set_span_in_context(span))

        def end(_: object) -> None:
            span.set_attribute("epd.engine", one.exchange.engine)
            span.end()

        task.add_done_callback(end)

    def job(
        self, name: str, core: EngineCoreRequest, engine: str, tokens: int, item: str = ""
    ) -> AbstractContextManager[trace.Span]:
        """Return the span of a job for a request; see `set_end`.

        Args:
            tokens: Length of the item, or of the prompt that the engine lacks.
        """
        attributes: dict[str, str | int] = {"epd.engine": engine, "epd.tokens": tokens}
        if item:
            attributes["epd.item"] = item
        return self._tracer.start_as_current_span(
            name,
            _propagator.extract(core.trace_headers or {}),
            trace.SpanKind.CLIENT,
            attributes,
        )


def set_end(span: trace.Span, end: str, *, failed: bool) -> None:
    """Set the end of a job in its span."""
    span.set_attribute("epd.end", end)
    if failed:
        span.set_status(trace.StatusCode.ERROR, end)
