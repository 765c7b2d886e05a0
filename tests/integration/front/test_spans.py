"""Spans of requests, encode jobs and prefill jobs at a front over played engines."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.front.played_front import ENDED, FAILED, Front, request, settle

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_jobs_are_below_the_span_of_their_request(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", partial(TracerProvider.get_tracer, provider))
    traced = copy.copy(config)
    traced.observability_config = dataclasses.replace(
        config.observability_config, otlp_traces_endpoint="http://127.0.0.1:1"
    )
    front = Front(traced, tmp_path, "e-0", "e-1", "p-0", "d-0")
    one = request("r", ["a"])
    one.trace_headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
    await front.client.add_request_async(one)
    await settle()
    first = front.with_job()
    await front.says(first, front.jobs(first)[0].request_id, end=FAILED)
    second = front.with_job()
    await front.says(second, front.jobs(second)[0].request_id, end=ENDED)
    job = front.engines["p-0"].last
    await front.says("p-0", job.request_id, 1, end=ENDED, kv={"remote": 1})
    sent = front.engines["d-0"].last
    await front.says("d-0", sent.request_id, 5, end=ENDED)
    spans = exporter.get_finished_spans()
    assert [(each.name, shown(each)) for each in spans] == [
        ("encode", {"engine": first, "tokens": 4, "item": "a", "end": "error"}),
        ("encode", {"engine": second, "tokens": 4, "item": "a", "end": "encoded"}),
        ("prefill", {"engine": "p-0", "tokens": 7, "end": "prefilled"}),
        ("request", {"request_id": "r", "items": 1, "engine": "d-0"}),
    ]
    whole = spans[-1].get_span_context()
    assert whole is not None and f"{whole.trace_id:032x}" == TRACE
    parents = [f"{each.parent.span_id:016x}" for each in spans if each.parent]
    assert parents == [f"{whole.span_id:016x}"] * 3 + [CLIENT]
    assert [each.status.is_ok for each in spans] == [False, True, True, True]
    # vLLM's own span has the parent that comes back with the engine's outputs.
    assert (sent.trace_headers or {})["traceparent"] == f"00-{TRACE}-{whole.span_id:016x}-01"


def shown(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("epd."): each for name, each in (span.attributes or {}).items()}
