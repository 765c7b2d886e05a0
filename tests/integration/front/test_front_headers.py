"""Placement headers of trusted gateways at the front; those of clients have no effect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import FinishReason

from epd_portable.front.exchange import LEFT_OUT
from epd_portable.front.headers import (
    CACHE_KEY,
    ENCODER_MODEL_LABEL,
    ENCODERS,
    ENCODERS_TOO,
    KEY,
    MAPPING,
    MODEL,
    REFS,
)
from epd_portable.front.http import FrontMiddleware
from tests.integration.front.played_front import Front, Make, http_to, keys_file, settle, within

ENDED = FinishReason.STOP
GATEWAY_KEY = "h" * 20
ROUNDS = 6


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each front of a test have metrics of its own."""
    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())


class Served:
    """A front behind its middleware, in the place of whose application a test sends requests.

    A request's query has the names of its items.
    """

    def __init__(self, front: Front) -> None:
        self.front = front
        self.jobs: dict[str, list[str]] = {each: [] for each in front.engines}
        self._number = 0
        self.http = http_to(within(FrontMiddleware(self._vllm), front.client))

    async def ask(
        self,
        items: str,
        headers: Mapping[str, str],
        key: str | None = GATEWAY_KEY,
        path: str = "/whole",
        **body: Any,
    ) -> httpx.Response:
        shown = {KEY: key, **headers} if key else headers
        return await self.http.post(f"{path}?{items}", headers=shown, json=body)

    async def _vllm(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then call the engine client as vLLM does: streams have begun by then."""
        request = Request(scope, receive)
        await request.body()
        if request.url.path == "/streamed":
            await StreamingResponse(self._events(request.url.query))(scope, receive, send)
            return
        try:
            # In a task of its own, as what vLLM answers later.
            await asyncio.create_task(self._serve(request.url.query))
            await JSONResponse({})(scope, receive, send)
        except GracefulHTTPError as error:
            await JSONResponse(str(error), error.http_status)(scope, receive, send)

    async def _events(self, items: str) -> Any:
        await self._serve(items)
        yield b"data: {}\n\n"

    async def _serve(self, items: str) -> None:
        front, self._number = self.front, self._number + 1
        name = f"r{self._number}"
        await front.ask(*items, name=name)
        while any(each.startswith("e") for each in self.open()):
            for engine, job in [*self.open().items()]:
                core = front.engines[engine].requests[job]
                self.jobs[engine].append(core.mm_features[0].identifier)
                await front.says(engine, job, end=ENDED)
        sent = [each for each in front.engines["pd-0"].requests if each.startswith(name)][-1]
        await front.says("pd-0", sent, 7, end=ENDED)
        await settle()

    def open(self) -> dict[str, str]:
        """Return a job that has not ended, of each engine that has one."""
        left = self.front.client._jobs.open
        return {
            name: job
            for name, engine in self.front.engines.items()
            for job in engine.requests
            if job in left
        }


def served(make: Make, tmp_path: Path, **settings: Any) -> Served:
    names = ("e-0", "e-1", "e-2", "pd-0")
    front = make(
        *names, gateway_keys_file=keys_file(tmp_path, GATEWAY_KEY), max_queued_items=99, **settings
    )
    return Served(front)


@pytest.mark.parametrize("path", ["/whole", "/streamed"])
async def test_named_encoders_get_the_items(make: Make, tmp_path: Path, path: str) -> None:
    one = served(make, tmp_path)
    for number in range(ROUNDS):
        mapping = {"0": f"e-{number % 3}", "1": f"e-{2 - number % 3}"}
        response = await one.ask("ab", {MAPPING: json.dumps(mapping)}, path=path)
        assert response.status_code == 200
        assert one.jobs[mapping["0"]][-1] in "ab" and one.jobs[mapping["1"]][-1] in "ab"
        assert json.loads(response.headers[MAPPING]) == mapping
        assert {*response.headers[ENCODERS].split(",")} == {*mapping.values()}
        refs = json.loads(response.headers[REFS])
        hosts = [each["encoder_host"] for each in refs]
        assert (hosts, [each["tensor_id"] for each in refs]) == ([*mapping.values()], ["a", "b"])
        assert len(response.headers[CACHE_KEY]) == 32
    assert sum(map(len, one.jobs.values())) == 2 * ROUNDS


async def test_encoder_is_named_though_its_reply_is_late(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path)
    one.open = dict  # no job gets a reply
    response = await one.ask("a", {MAPPING: '{"0": "e-1"}'}, path="/streamed")
    assert json.loads(response.headers[MAPPING]) == {"0": "e-1"}


@pytest.mark.parametrize("name", [ENCODERS, ENCODERS_TOO])
async def test_items_are_distributed_among_named_encoders(
    make: Make, tmp_path: Path, name: str
) -> None:
    one = served(make, tmp_path)
    for _ in range(ROUNDS):
        assert (await one.ask("ab", {name: "e-1, e-2"})).status_code == 200
    assert not one.jobs["e-0"]
    for encoder in ("e-1", "e-2"):
        assert len(one.jobs[encoder]) in (0, ROUNDS, 2 * ROUNDS)


@pytest.mark.parametrize("trusts", [True, False])
async def test_headers_of_clients_have_no_effect(make: Make, tmp_path: Path, trusts: bool) -> None:
    one = served(make, tmp_path)
    key = None
    if not trusts:
        one.front.client.gateway_keys, key = None, GATEWAY_KEY
    names = (ENCODERS, ENCODERS_TOO, MAPPING, REFS, CACHE_KEY, MODEL)
    response = await one.ask("a", dict.fromkeys(names, "forged:1"), key=key)
    assert response.status_code == 200
    assert not {*names} & response.headers.keys()


async def test_invalid_headers_are_refused(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path)
    cases: list[tuple[dict[str, str], int, str]] = [
        ({ENCODERS: "e-0,10.0.0.1:80"}, 403, "not_an_instance"),
        ({ENCODERS: "127.0.0.1:1"}, 400, "invalid_hop_header"),
        ({MAPPING: '{"x": "y"}'}, 400, "invalid_hop_header"),
        ({MAPPING: "{"}, 400, "invalid_hop_header"),
        ({REFS: "{}"}, 400, "invalid_hop_header"),
        ({MODEL: "unknown"}, 200, ""),
    ]
    for headers, status, code in cases:
        refused = await one.ask("a", headers)
        assert refused.status_code == status, headers
        assert not code or refused.json()["error"]["code"] == code
    for headers in (
        {MAPPING: '{"1": "e-0"}'},
        {REFS: '[{"image_index": 3, "encoder_host": "e-0"}]'},
    ):
        refused = await one.ask("a", headers)
        assert refused.status_code == 400 and "of 1 distinct ones" in refused.text
    wrong = await one.ask("a", {}, key="w" * 20)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_hop_key")
    assert one.front.is_empty()


async def test_output_is_taken_from_where_it_is(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path)
    for number in range(3):
        refs = json.dumps([{"encoder_host": f"e-{number}"}])
        assert (await one.ask("a", {REFS: refs})).status_code == 200
    assert [len(each) for each in one.jobs.values()] == [1, 1, 1, 0]
    first = await one.ask("b", {ENCODERS: "e-2"})
    # The headers of a response may be those of the next request, whose items have other numbers.
    assert (await one.ask("ab", {REFS: first.headers[REFS]})).status_code == 200
    assert one.jobs["e-2"].count("b") == 2


async def test_cache_key_stands_for_content(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path)
    for item in "ab" * 3:
        assert (await one.ask(item, {CACHE_KEY: "album-7"})).status_code == 200
    assert sorted(map(len, one.jobs.values())) == [0, 0, 0, 6]


async def test_encoder_model_is_a_label(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path)
    for encoder, model in zip(one.front.client.engines.pool.of_duty("encode"), "aab", strict=True):
        encoder.labels = {**encoder.labels, ENCODER_MODEL_LABEL: model}
    for _ in range(ROUNDS):
        response = await one.ask("ab", {MODEL: "b"})
        assert response.headers[MODEL] == "b"
    assert [len(each) for each in one.jobs.values()] == [0, 0, 2 * ROUNDS, 0]
    one.front.goes("e-2")
    await one.ask("c", {MODEL: "b"})
    # The engine that generates encodes it: no other encoder may.
    assert [len(each) for each in one.jobs.values()] == [0, 0, 2 * ROUNDS, 0]
    for headers in ({MODEL: "c"}, {MODEL: "b", ENCODERS: "e-0"}):
        refused = await one.ask("a", headers)
        assert refused.json()["error"]["code"] == "invalid_hop_header"


async def test_choices_are_logged_with_their_reasons(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[dict[str, Any]]:
        found = [each.args for each in caplog.records if each.msg == "request %s: %s"]
        caplog.clear()
        return [json.loads(str(args[1])) for args in found if isinstance(args, tuple)]

    caplog.set_level("DEBUG", "epd_portable.front.request")
    one = served(make, tmp_path)
    await one.ask("ab", {MAPPING: '{"0": "e-2"}'})
    decode, *encode = logged()
    assert (decode["stage"], decode["winner"], decode["profile"]) == ("decode", "pd-0", "default")
    named = {"stage": "encode", "item": "a", "header": MAPPING, "winner": "e-2", "reason": "named"}
    assert encode[0] == named and encode[1]["item"] == "b"
    one.front.client.engines.by_name["e-2"].instance.health.drain()
    await one.ask("a", {MAPPING: '{"0": "e-2"}'})
    _, named, chosen, *_ = logged()
    assert named["winner"] is None and "e-2 is named and is draining" in named["reason"]
    assert chosen["winner"] in ("e-0", "e-1")


async def test_session_is_in_a_header_or_in_the_body(make: Make, tmp_path: Path) -> None:
    plugin = "session-affinity-scorer"
    choice = {
        "plugins": [{"type": plugin}],
        "schedulingProfiles": [
            {"name": stage, "plugins": [{"pluginRef": plugin}]} for stage in ("encode", "decode")
        ],
    }
    one = served(make, tmp_path, choice=choice)
    for number in range(8):
        assert (await one.ask("abcdef"[number % 6], {}, session_id="s")).status_code == 200
        assert (await one.ask("abcdef"[number % 6], {"x-session-id": "s"})).status_code == 200
    assert sorted(map(len, one.jobs.values())) == [0, 0, 0, 16]


async def test_missing_items_are_counted_in_a_header(make: Make, tmp_path: Path) -> None:
    one = served(make, tmp_path, can_encode=False, partial_results=True)
    one.front.client.words = lambda text: [1]
    for number in range(3):
        one.front.goes(f"e-{number}")
    response = await one.ask("aba", {}, key=None)
    assert (response.status_code, response.headers[LEFT_OUT]) == (200, "2")
