"""What the router tells of requests: metrics by stage, an access line, spans."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.responses import Response

from epd_portable.config.routing import TracingSection
from epd_portable.errors import ConfigError
from epd_portable.router.observability.llmd_names import NAMES
from epd_portable.router.observability.record import Listener, RequestRecord
from epd_portable.router.observability.tracing import Tracing
from epd_portable.router.server import Router, observers
from epd_portable.router.settings import RouterSettings
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    JSON,
    Behaviour,
    Received,
    RouterServing,
    StandIn,
    answer,
    forever,
    refuse,
    stream,
    until,
)
from tests.integration.router.test_access import KEY, bearer, keys_file
from tests.integration.router.test_prefill import SPLIT, split
from tests.integration.router.test_requests import BLUE, RED, TEXT
from tests.unit.test_observability_files import EXPRESSIONS, selectors

CLIENTS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENTS_SPAN = "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def no_variables_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def tokens(count: int, *, usage: int | None = None) -> Any:
    """Answer as a chat's stream: the role, tokens, perhaps what was used, the end."""

    async def pieces() -> AsyncIterator[bytes]:
        for text in ("", *map(str, range(count))):
            yield b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text.encode()
            # Each in a piece of its own, and some time between the first and the last.
            await asyncio.sleep(0.002)
        if usage is not None:
            yield b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % usage
        yield b"data: [DONE]\n\n"

    return stream(pieces)


def of(topology: str, name: str) -> str:
    return f'epd_router_{name}{{topology="{topology}"}}'


async def test_usage_says_how_many_tokens_there_are_before_events_do(build: Build) -> None:
    t = await build(encoders=0, behaviour=tokens(4, usage=40))
    done = Records.of(t).done
    assert (await t.chat(TEXT, stream=True)).status_code == 200
    await t.until_metric(of("text", "time_per_token_seconds_count"), 1)
    (record,) = done
    assert (record.events, record.output_tokens, record.tokens) == (7, 40, 40)
    assert await t.metric(of("text", "first_token_seconds_count")) == 1
    assert 0 < await t.metric(of("text", "time_per_token_seconds_sum")) < 1.0
    t.pd.behaviour = tokens(4)
    assert (await t.chat(TEXT, stream=True)).status_code == 200
    await t.until_metric(of("text", "time_per_token_seconds_count"), 2)
    assert (done[-1].output_tokens, done[-1].tokens) == (None, 4)


@pytest.mark.parametrize(
    ("status", "end", "reason"), [(500, "error", "error"), (429, "full", "retry")]
)
async def test_the_proposals_names_show_the_same_counts(
    build: Build, status: int, end: str, reason: str
) -> None:
    t = await build(encoders=1, encoding=refuse(status), metrics_names="llmd", wait_timeout_s=3.0)
    after_encoders(t)
    assert (await t.chat(RED)).status_code == 200
    t.encoders[0].behaviour = answer
    assert (await t.chat(BLUE)).status_code == 200
    text = (await t.client.get("/metrics")).text
    shown = set(re.findall(r"^# TYPE (llmd_\w+) ", text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in shown} == set(NAMES)
    failed = await t.metric(f'epd_router_encode_jobs_total{{end="{end}"}}')
    assert failed >= 1
    assert await t.metric(f'llmd_encode_failures_total{{reason="{reason}"}}') == failed
    good = await t.metric('epd_router_encode_jobs_total{end="encoded"}')
    assert await t.metric("llmd_encode_requests_total") == failed + good
    assert await t.metric("llmd_encode_duration_seconds_count") == good
    assert await t.metric('llmd_epd_requests_total{stage="decode"}') == 2
    assert await t.metric("llmd_encode_images_per_request_sum") == 2
    assert await t.metric("llmd_encode_queue_depth") == 0
    assert await t.metric("llmd_encode_parallel_workers_count") == 2
    local = await t.metric('llmd_epd_stage_selection{decision="local"}')
    assert local == await t.metric('epd_router_items_total{outcome="local"}') == 1


async def test_a_router_shows_all_that_the_dashboard_and_the_alert_rules_read_of_it(
    build: Build,
) -> None:
    t = await build(encoders=1)
    page = (await t.client.get("/metrics")).text
    assert "llmd_" not in page  # Unless it is asked for.
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE))
    parts = ("_bucket", "_sum", "_count")
    shown = families.keys() | {
        name + part for name, kind in families.items() if kind == "histogram" for part in parts
    }
    read = {
        selector.name
        for expression in EXPRESSIONS
        for selector in selectors(promql_parser.parse(expression))
    }
    assert {name for name in read if name.startswith("epd_router_")} <= shown
    assert len(read & shown) > 10


async def test_each_request_gets_one_line_that_says_nothing_of_its_content(
    build: Build, tmp_path: Path
) -> None:
    log = tmp_path / "access.jsonl"
    t = await build(encoders=1, api_keys_file=keys_file(tmp_path, KEY), access_log=str(log))
    after_encoders(t)
    t.client.headers.update(bearer(KEY))
    words = {"type": "text", "text": "my secret prompt"}
    response = await t.chat(RED, words, user="somebody")
    assert response.status_code == 200
    (await t.client.get("/health")).raise_for_status()
    bad = await t.client.post(
        "/v1/chat/completions", content=b"{", headers=JSON | {"x-request-id": "bad"}
    )
    assert bad.status_code == 400
    text = await lines(log, 2)
    for said in ("secret", "base64", "somebody", KEY, RED["image_url"]["url"][-16:]):
        assert said not in text
    first, second = map(json.loads, text.splitlines())
    assert first["request_id"] == response.headers["x-request-id"]
    assert (first["status"], first["topology"], first["endpoint"]) == (
        200,
        "e+pd",
        "/v1/chat/completions",
    )
    assert re.fullmatch("[0-9a-f]{8}", first["client"])
    assert first["bytes_out"] == len(response.content)
    (instance,) = first["instances"]
    assert (instance["stage"], instance["name"]) == ("answer", "pd-0")
    (item,) = first["items"]
    assert (item["modality"], item["outcome"]) == ("image", "encoded")
    assert item["bytes"] == len(t.encoders[0].received[0].raw)
    (job,) = item["jobs"]
    assert (job["encoder"], job["end"]) == ("encode-0", "encoded")
    assert 0 <= first["read_ms"] <= job["began_ms"] <= job["ended_ms"] <= first["ended_ms"]
    assert (second["request_id"], second["status"]) == ("bad", 400)
    assert "instances" not in second
    assert log.stat().st_mode & 0o777 == 0o600


async def test_a_line_and_spans_say_what_went_wrong_and_that_a_client_left(
    build: Build, tmp_path: Path
) -> None:
    log = tmp_path / "access.jsonl"
    t, exporter = await traced(build, encoders=1, encoding=refuse(500), access_log=str(log))
    assert (await t.chat(RED)).status_code == 200
    spans = await finished(exporter, 3)
    assert not spans["encode"].status.is_ok
    assert attributes(spans["encode"])["epd.end"] == "error"
    (noted,) = [event for event in spans[CHAT].events if event.name == "fallback"]
    assert dict(noted.attributes or {})["epd.fallback"] == "local"
    (line,) = map(json.loads, (await lines(log, 1)).splitlines())
    (step,) = line["fallbacks"]
    assert (step["phase"], step["failure"], step["fallback"]) == ("encode", "error", "local")
    assert line["items"][0]["outcome"] == "local"

    t.pd.behaviour = forever
    asking = asyncio.create_task(t.chat(TEXT))
    await t.pd.until(lambda pd: len(pd.received) == 2)
    asking.cancel()
    line = json.loads((await lines(log, 2)).splitlines()[1])
    assert line["gone"] is True
    assert "status" not in line


def test_a_file_that_cannot_be_written_ends_the_start(build: Build, tmp_path: Path) -> None:
    from epd_portable.router.observability.access_log import AccessLog

    with pytest.raises(ConfigError, match=r"router.access_log .*nowhere/log cannot be written"):
        AccessLog(str(tmp_path / "nowhere/log"))


async def traced(
    build: Build, *roles: str, **options: Any
) -> tuple[Topology, InMemorySpanExporter]:
    """Return a topology whose router makes spans, and where these are."""
    t = await (split(build, *roles, **options) if roles else build(**options))
    after_encoders(t)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    routers(t).listeners.append(Tracing(provider))
    return t, exporter


async def test_a_request_is_a_tree_of_spans_below_the_clients_own(build: Build) -> None:
    t, exporter = await traced(build, *SPLIT, encoders=1)
    traceparent = f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"
    t.client.headers.update({"traceparent": traceparent, "tracestate": "vendor=1"})
    assert (await t.chat(RED, TEXT)).status_code == 200
    spans = await finished(exporter, 4)
    server, prefill, answer = (spans[name] for name in (CHAT, "prefill", "answer"))
    encode = spans["encode"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {CLIENTS_TRACE}
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == CLIENTS_SPAN
    assert server.kind is SpanKind.SERVER
    for child in (prefill, answer, encode):
        assert child.kind is SpanKind.CLIENT
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id
        assert server.start_time <= child.start_time <= child.end_time
    assert attributes(server)["epd.topology"] == "e+p+d"
    assert attributes(server)["http.response.status_code"] == 200
    assert attributes(encode)["epd.item.modality"] == "image"
    # The items are awaited by who prefills, and by nobody else.
    assert [link.context.span_id for link in prefill.links] == [encode.context.span_id]
    assert not answer.links
    # What an instance traces lies below the span that asked it.
    asked = [(t.encoders[0], encode), (t.pds[0], prefill), (t.pds[1], answer)]
    for instance, span in asked:
        (received,) = instance.received
        assert received.headers["traceparent"] == (
            f"00-{CLIENTS_TRACE}-{span.context.span_id:016x}-01"
        )
        assert received.headers["tracestate"] == "vendor=1"


async def test_a_client_that_is_not_sampled_makes_no_spans_and_one_without_a_trace_gets_its_own(
    build: Build,
) -> None:
    t, exporter = await traced(build, encoders=0)
    t.client.headers["traceparent"] = f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-00"
    assert (await t.chat(TEXT)).status_code == 200
    del t.client.headers["traceparent"]
    assert (await t.chat(TEXT)).status_code == 200
    spans = await finished(exporter, 2)
    assert spans[CHAT].parent is None
    first, second = t.pd.received
    assert re.fullmatch(f"00-{CLIENTS_TRACE}-[0-9a-f]{{16}}-00", first.headers["traceparent"])
    assert f"{spans[CHAT].context.trace_id:032x}" in second.headers["traceparent"]


@pytest.fixture
async def collector() -> AsyncIterator[StandIn]:
    """Takes spans in by OTLP over HTTP."""
    stand_in = StandIn("collector", "encode", behaviour=refuse(200))
    await stand_in.serving.start()
    yield stand_in
    await stand_in.serving.stop()


def came_to(collector: StandIn) -> list[ResourceSpans]:
    assert {each.path for each in collector.received} == {"/v1/traces"}
    sent = [ExportTraceServiceRequest.FromString(each.raw) for each in collector.received]
    return [spans for each in sent for spans in each.resource_spans]


async def test_a_variable_of_opentelemetry_turns_spans_on_and_another_one_off(
    build: Build, monkeypatch: pytest.MonkeyPatch, collector: StandIn
) -> None:
    url = collector.serving.url
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    t = await build(encoders=1)
    after_encoders(t)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    silent = [await build(encoders=0), await build(encoders=0, tracing={"endpoint": url})]
    for each in (t, *silent):
        assert (await each.chat(RED)).status_code == 200
        await each.router.stop()
    assert "traceparent" in t.pd.received[0].headers
    for each in silent:
        assert "traceparent" not in each.pd.received[0].headers
    # They reach the collector by HTTP when the router stops.
    came = came_to(collector)
    assert all("epd-router" in str(each.resource) for each in came)
    spans = {one.name: one for each in came for scope in each.scope_spans for one in scope.spans}
    assert sorted(spans) == [CHAT, "answer", "encode"]
    assert [link.span_id for link in spans["answer"].links] == [spans["encode"].span_id]


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "epd_portable.router.observability.tracing", None)
    settings = RouterSettings(
        port=0, model="m", instances=(), tracing=TracingSection(endpoint="http://127.0.0.1:4318")
    )
    with pytest.raises(ConfigError, match=r"router.tracing.endpoint .* epd-portable\[otel\]"):
        observers(settings)


CHAT = "/v1/chat/completions"


def routers(t: Topology) -> Router:
    assert isinstance(t.router, RouterServing)
    return t.router.router


class Records(Listener):
    """The records of a router's requests: those in flight, and those that have ended."""

    def __init__(self) -> None:
        self.in_flight: list[RequestRecord] = []
        self.done: list[RequestRecord] = []

    @classmethod
    def of(cls, t: Topology) -> Records:
        routers(t).listeners.append(records := cls())
        return records

    def begun(self, record: RequestRecord) -> None:
        self.in_flight.append(record)

    def ended(self, record: RequestRecord) -> None:
        self.in_flight.remove(record)
        self.done.append(record)


def after_encoders(t: Topology) -> Records:
    """Let instances wait until it is clear what becomes of items, as real ones do."""
    records = Records.of(t)

    def open_items() -> bool:
        items = [item for record in records.in_flight for item in record.items]
        return any(not item.end and not item.brought for item in items)

    def waiting(behaviour: Behaviour) -> Behaviour:
        async def behave(received: Received) -> Response:
            while open_items():
                await asyncio.sleep(0.002)
            return await behaviour(received)

        return behave

    for pd in t.pds:
        pd.behaviour = waiting(pd.behaviour)
    return records


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def finished(exporter: InMemorySpanExporter, count: int) -> dict[str, Any]:
    """Return that many spans by name, when they are there."""
    await until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    assert len(spans) == count
    return {span.name: span for span in spans}


async def lines(log: Path, count: int) -> str:
    """Return a log when it has that many lines."""
    await until(lambda: log.read_text().count("\n") >= count)
    text = log.read_text()
    assert text.count("\n") == count
    return text
