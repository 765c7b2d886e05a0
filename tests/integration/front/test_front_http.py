"""What stands around vLLM's application in the engine front, before an application of the tests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_portable.config.instance import InstanceConfig
from epd_portable.front.client import SplitClient
from epd_portable.front.http import FrontMiddleware
from tests.integration.front.played_front import client_of

pytestmark = pytest.mark.needs_vllm

CHAT = "/v1/chat/completions"
Serve = Callable[..., tuple[httpx.AsyncClient, SplitClient]]


@pytest.fixture
def serve(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return what puts a front with some settings before the application."""
    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    made: list[FrontMiddleware] = []

    def begin(
        guarded: Callable[[ASGIApp], ASGIApp] = lambda app: app, **settings: Any
    ) -> tuple[httpx.AsyncClient, SplitClient]:
        client = client_of(config, tmp_path, "e-0", "pd-0", **settings)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = await Request(scope, receive).body()
            await PlainTextResponse(str(len(body)))(scope, receive, send)

        middleware = FrontMiddleware(guarded(app))
        made.append(middleware)
        server = server_of(client)

        async def within(scope: Scope, receive: Receive, send: Send) -> None:
            await middleware({**scope, "app": server}, receive, send)

        # Without a socket: there is nothing to close.
        transport = httpx.ASGITransport(within)
        return httpx.AsyncClient(transport=transport, base_url="http://front"), client

    yield begin
    for middleware in made:
        for handler in middleware._log.handlers if middleware._log else ():
            handler.close()


def server_of(client: SplitClient) -> SimpleNamespace:
    """Return what the middleware sees of vLLM's application."""
    told = InstanceConfig(instance="pd-0", platform="cpu").as_json()
    transfer = SimpleNamespace(ec_connector_extra_config=told)
    state = SimpleNamespace(
        engine_client=SimpleNamespace(engine_core=client),
        vllm_config=SimpleNamespace(ec_transfer_config=transfer),
    )
    return SimpleNamespace(state=state)


def up(client: SplitClient, *names: str) -> None:
    for name in names:
        client.engines.by_name[name].instance.seen_well()


async def test_bodies_beyond_the_sum_wait_outside_until_others_are_gone(serve: Serve) -> None:
    http, _ = serve(max_bodies_bytes=100, max_body_bytes=100)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * 60
        begun.set()
        await go_on.wait()
        yield b"x" * 30

    first = asyncio.create_task(http.post(CHAT, content=slow()))
    await begun.wait()
    refused = await http.post(CHAT, content=b"x" * 50)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
    assert "max_bodies_bytes of 100" in refused.json()["error"]["message"]
    small = await http.post(CHAT, content=b"x" * 40)
    go_on.set()
    assert [small.text, (await first).text] == ["40", "90"]
    assert (await http.post(CHAT, content=b"x" * 100)).text == "100"
    large = await http.post(CHAT, content=b"x" * 101)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_body_that_does_not_come_takes_no_room_of_others_for_long(serve: Serve) -> None:
    http, _ = serve(max_bodies_bytes=100, max_body_bytes=100, body_timeout_s=0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x" * 60
        await asyncio.Event().wait()

    late = await asyncio.wait_for(http.post(CHAT, content=stalled()), 10)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "body_timeout")
    assert (await http.post(CHAT, content=b"x" * 100)).text == "100"


async def test_nobody_names_the_media_of_others(serve: Serve) -> None:
    """vLLM's ``--enable-scale-out`` takes items under names that its clients give them."""
    http, _ = serve()
    refused = await http.post("/inference/v1/generate", content=b"{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_served")
    assert "names of media" in refused.json()["error"]["message"]


async def test_of_a_body_without_the_key_nothing_is_read(serve: Serve) -> None:
    guard = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    http, _ = serve(lambda app: guard.AuthenticationMiddleware(app, ["k"]))

    async def body() -> AsyncIterator[bytes]:
        pytest.fail("it is read")
        yield b""

    assert (await http.post(CHAT, content=body())).status_code == 401
    headers = {"authorization": "Bearer k"}
    assert (await http.post(CHAT, content=b"x", headers=headers)).text == "1"


async def test_lines_about_requests_go_to_a_file_of_this_user_until_its_disk_is_full(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The module nixl clears it for the whole process, where another test has imported that.
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log = tmp_path / "log"
    http, _ = serve(access_log=str(log))
    await http.post(CHAT, content=b"x")
    log.rename(tmp_path / "older")
    await http.post(CHAT, content=b"x")
    for each in (log, tmp_path / "older"):
        (line,) = each.read_text().splitlines()
        assert (json.loads(line)["path"], json.loads(line)["status"]) == (CHAT, 200)
    assert (tmp_path / "older").stat().st_mode & 0o777 == 0o600
    log.unlink()
    log.symlink_to("/dev/full")
    for _ in range(2):  # What could not be written the first time is in the way the second time.
        assert (await http.post(CHAT, content=b"x")).text == "1"
        assert "No space left" in capsys.readouterr().err
    log.rename(tmp_path / "full")
    assert (await http.post(CHAT, content=b"x")).text == "1"


async def test_a_front_whose_log_cannot_be_written_does_not_start(
    config: Any, tmp_path: Path
) -> None:
    client = client_of(config, tmp_path, "e-0", "pd-0", access_log=str(tmp_path / "nowhere/log"))
    said: list[Any] = []

    async def start() -> Any:
        return {"type": "lifespan.startup"}

    async def hear(message: Any) -> None:
        said.append(message)

    scope = {"type": "lifespan", "app": server_of(client)}
    await FrontMiddleware(lambda *_: pytest.fail("it starts"))(scope, start, hear)
    (failed,) = said
    assert failed["type"] == "lifespan.startup.failed"
    assert "router.access_log" in failed["message"] and "nowhere" in failed["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_kwargs", {"max_pixels": 10**12}),
        ("mm_processor_kwargs", {"size": {"height": 10**6, "width": 10**6}}),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}),
        ("media_io_kwargs", {"video": {"fps": float("nan")}}),
    ],
)
async def test_settings_that_enlarge_media_are_refused_before_anything_is_decoded(
    serve: Serve, name: str, value: Any
) -> None:
    http, _ = serve()
    body = json.dumps({"messages": [], name: value})
    # vLLM reads all of these.
    texts = [body.encode(each) for each in ("utf-8", "utf-8-sig", "utf-16", "utf-32")]
    texts.append(body.replace("[]", "[NaN]").encode())
    for content in texts:
        refused = await http.post(CHAT, content=content)
        assert refused.status_code == 400, refused.text
        assert name in refused.json()["error"]["message"]
    allowed = await http.post(CHAT, json={"messages": [], name: {"max_pixels": 10_000}})
    assert allowed.status_code == 200


async def test_an_engine_that_does_not_respond_is_told_of_in_the_time_that_the_launcher_has(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, client = serve()

    class Stopped:
        async def call_utility_async(self, method: str) -> None:
            await asyncio.Event().wait()

    client.engines.by_name["pd-0"].client = Stopped()
    begun = time.monotonic()
    answer = await http.get("/epd/instances/pd-0/health?within_s=0.1")
    assert (answer.status_code, time.monotonic() - begun < 20) == (503, True)
    monkeypatch.setattr("epd_portable.front.http._RESPONDS_WITHIN_S", 0.1)
    for query in ("", "?within_s=x", "?within_s=nan", "?within_s=1e9"):
        answer = await http.get(f"/epd/instances/pd-0/health{query}")
        assert answer.status_code == 503


async def test_other_methods_than_get_of_health_are_vllms(serve: Serve) -> None:
    http, _ = serve()
    assert (await http.post("/health", content=b"xy")).text == "2"


async def test_instances_are_for_holders_of_the_secret(serve: Serve) -> None:
    http, client = serve()

    def signed(method: str, target: str) -> dict[str, str]:
        return {"authorization": client.secret.sign(method, target)}

    assert (await http.get("/health")).status_code == 503
    up(client, "e-0", "pd-0")
    plain = await http.get("/health")
    assert (plain.status_code, plain.json()["status"]) == (200, "ok")
    assert "instances" not in plain.json()
    whole = (await http.get("/health", headers=signed("GET", "/health"))).json()
    assert {name: each["state"] for name, each in whole["instances"].items()} == {
        "e-0": "up",
        "pd-0": "up",
    }
    drain, resume = (f"/epd/instances/pd-0/{verb}" for verb in ("drain", "resume"))
    assert (await http.post(drain)).status_code == 401
    other = signed("POST", resume)
    assert (await http.post(drain, headers=other)).status_code == 401
    assert client.engines.by_name["pd-0"].instance.usable
    assert (await http.post(drain, headers=signed("POST", drain))).json()["idle"]
    assert (await http.get("/health")).status_code == 503
    assert (await http.post(resume, headers=other)).status_code == 200
    assert (await http.get("/health")).status_code == 200
