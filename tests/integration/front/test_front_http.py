"""Middleware around vLLM's application in the front, before an application of the tests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from epd_portable.front.client import SplitClient
from epd_portable.front.exchange import GracefulHTTPError
from epd_portable.front.http import FrontMiddleware
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import ItemOutcome, PrefillOutcome, to_params
from tests.integration.front.played_front import (
    CHAT,
    Played,
    Serve,
    client_of,
    keys_file,
    request,
    sent_by,
    stalled,
    unread,
    within,
)
from tests.integration.front.web import Site, plain
from tests.metrics_page import total
from tests.unit.media.samples import STILLS
from tests.waiting import until_async


def up(client: SplitClient, *names: str) -> None:
    for name in names:
        client.engines.by_name[name].instance.health.seen_up()


async def test_bodies_beyond_the_sum_wait_for_others_to_end(serve: Serve) -> None:
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
    assert refused.headers["retry-after"] == "2"
    assert "max_bodies_bytes of 100" in refused.json()["error"]["message"]
    small = await http.post(CHAT, content=b"x" * 40)
    go_on.set()
    assert [small.text, (await first).text] == ["40", "90"]
    assert (await http.post(CHAT, content=b"x" * 100)).text == "100"


async def test_stalled_body_releases_its_memory(serve: Serve) -> None:
    http, _ = serve(max_bodies_bytes=100, max_body_bytes=100, body_timeout_s=0.05)

    late = await asyncio.wait_for(http.post(CHAT, content=stalled(b"x" * 60)), 10)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "body_timeout")
    assert (await http.post(CHAT, content=b"x" * 100)).text == "100"


async def test_generate_endpoint_of_scale_out_is_not_served(serve: Serve) -> None:
    """vLLM's ``--enable-scale-out`` takes items under names that its clients give them."""
    http, _ = serve()
    refused = await http.post("/inference/v1/generate", content=b"{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_served")
    assert "name media" in refused.json()["error"]["message"]


async def test_body_without_key_is_not_read(serve: Serve) -> None:
    guard = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    http, _ = serve(lambda app, _: guard.AuthenticationMiddleware(app, ["k"]))

    assert (await http.post(CHAT, content=unread())).status_code == 401
    headers = {"authorization": "Bearer k"}
    assert (await http.post(CHAT, content=b"x", headers=headers)).text == "1"


KEY, OTHER_KEY = "k" * 20, "o" * 20


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_requests_without_a_key_are_401_as_vllms(serve: Serve, tmp_path: Path) -> None:
    guard = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    vllms, _ = serve(lambda app, _: guard.AuthenticationMiddleware(app, [KEY]))
    expected = await vllms.post(CHAT, content=b"x")
    http, client = serve(api_keys_file=keys_file(tmp_path, KEY, OTHER_KEY))

    for headers in ({}, bearer("wrong"), bearer(KEY + "x"), {"x-api-key": "wrong"}):
        refused = await http.post(CHAT, content=unread(), headers=headers)
        assert (refused.status_code, refused.json()) == (401, expected.json())
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/tokenize", "/invocations", "/v1/models", "/epd", "/healthy", "/metrics/"):
        assert (await http.get(path)).status_code == 401
    for headers in (bearer(KEY), bearer(OTHER_KEY), {"x-api-key": KEY}):
        assert (await http.post(CHAT, content=b"x", headers=headers)).status_code == 200
    up(client, "pd-0")
    # Paths that need no key, preflights, and requests that the secret signs.
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/metrics")).status_code == 200
    assert (await http.options(CHAT)).status_code == 200
    signed = {"authorization": client.secret.sign("GET", "/epd/instances")}
    assert (await http.get("/epd/instances", headers=signed)).status_code == 200


async def test_keys_change_with_their_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_portable.config.api_keys.LOOK_EVERY_S", 0.0)
    http, _ = serve(api_keys_file=keys_file(tmp_path, KEY))
    old, new = bearer(KEY), bearer(OTHER_KEY + "longer")
    assert (await http.post(CHAT, content=b"x", headers=new)).status_code == 401
    keys_file(tmp_path, OTHER_KEY + "longer")
    assert (await http.post(CHAT, content=b"x", headers=new)).status_code == 200
    assert (await http.post(CHAT, content=b"x", headers=old)).status_code == 401
    (tmp_path / "keys").write_text("")  # An invalid file changes nothing.
    assert (await http.post(CHAT, content=b"x", headers=new)).status_code == 200


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", "TEXT/PLAIN"])
async def test_forms_of_other_origins_are_refused(serve: Serve, kind: str) -> None:
    page, other = "https://page.example", "https://other.example"
    http, _ = serve(cors_origins=[page])
    for origin, status in ((page, 200), (other, 403), ("null", 403)):
        headers = {"origin": origin, "content-type": kind}
        answer = await http.post("/v1/audio/transcriptions", content=b"x", headers=headers)
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    # Browsers ask before they send JSON; other clients have no origin.
    for headers in ({"origin": other, "content-type": "application/json"}, {"content-type": kind}):
        assert (await http.post(CHAT, content=b"{}", headers=headers)).status_code == 200


@pytest.mark.parametrize("keys", [True, False])
async def test_websocket_of_a_stranger_is_closed(serve: Serve, tmp_path: Path, keys: bool) -> None:
    given = {"api_keys_file": keys_file(tmp_path, KEY)} if keys else {}
    http, client = serve(cors_origins=["https://page.example"], **given)
    await http.get("/health")
    served: list[str] = []

    async def serves(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])

    middleware = within(FrontMiddleware(serves), client)

    async def connect(**headers: str) -> list[Any]:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": raw}
        return await sent_by(middleware, scope, type="websocket.connect")

    closed = [{"type": "websocket.close", "code": 1008}]
    assert await connect(origin="https://other.example", **bearer(KEY)) == closed
    assert not keys or await connect() == closed
    assert not served
    await connect(origin="https://page.example", **bearer(KEY))
    await connect(**bearer(KEY))
    assert len(served) == 2


def generating(_: ASGIApp, client: SplitClient) -> ASGIApp:
    """Return an application that streams as vLLM's: its head comes before its request begins."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()

        async def stream() -> AsyncIterator[bytes]:
            try:
                await client.add_request_async(request(str(time.time()), ["a"]))
            except GracefulHTTPError as error:
                yield f"data: {error}".encode()
                return
            yield b"data: begun"

        await StreamingResponse(stream())(scope, receive, send)

    return app


async def test_stream_that_is_refused_gets_429_and_retry_after(serve: Serve) -> None:
    http, client = serve(generating, max_queued_items=0, can_encode=False)
    for names, status, code in (
        ((), 503, "service_unavailable"),
        (("e-0", "pd-0"), 429, "engines_full"),
    ):
        up(client, *names)
        refused = await http.post(CHAT, content=b"x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert refused.headers["retry-after"] == "2"
    anthropic = await http.post("/v1/messages", content=b"x")
    assert anthropic.json()["error"]["type"] == "rate_limit_error"
    page = generate_latest(client.metrics.registry).decode()
    counts = [
        total(page, f'epd_front_requests_total{{status="{each}"}}') for each in (200, 503, 429)
    ]
    assert counts == [0, 1, 2]


async def test_admission_refuses_with_429_and_the_key(serve: Serve, tmp_path: Path) -> None:
    http, client = serve(generating, admission={"max_requests": 1, "max_waiting": 0})
    up(client, "e-0", "pd-0")
    for name, engine in client.engines.by_name.items():
        engine.client = Played(name)
    assert (await http.post(CHAT, content=b"x")).text == "data: begun"
    refused = await http.post(CHAT, content=b"x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "front_busy")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "front.admission.max_requests of 1" in refused.json()["error"]["message"]
    client.give_up([*client._open])
    while (await http.post(CHAT, content=b"x")).status_code != 200:
        await asyncio.sleep(0.01)
    client.give_up([*client._open])


def fetching(*_: Any) -> ASGIApp:
    """Return an application that reads the image of which a body has the URL."""

    async def fetch(scope: Scope, receive: Receive, send: Send) -> None:
        url = (await Request(scope, receive).body()).decode()
        connector = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=["none.invalid"])
        try:
            image = await connector.fetch_image_async(url)
            await asyncio.to_thread(connector.fetch_image, url)
        except Exception as error:
            await PlainTextResponse(repr(error), 500)(scope, receive, send)
        else:
            await PlainTextResponse(str(image.size))(scope, receive, send)

    return fetch


async def test_media_urls_are_fetched_by_vllms_connector(serve: Serve) -> None:
    site = Site(pages={"/a.png": plain(STILLS["png"])})
    await site.start()
    names = {"allowed_domains": [f"127.0.0.1:{site.port}"], "allowed_networks": ["127.0.0.0/8"]}
    http, _ = serve(fetching, media={"urls": names})
    closed, _ = serve(fetching)
    few, _ = serve(fetching, media={"urls": names, "max_items": 1})
    try:
        await closed.get("/health")
        refused = await closed.post(CHAT, content=f"http://127.0.0.1:{site.port}/a.png".encode())
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "media_url_refused")
        assert "front.media.urls.allowed_domains" in refused.json()["error"]["message"]
        await http.get("/health")
        served = await http.post(CHAT, content=f"HTTP://127.0.0.1:{site.port}/a.png".encode())
        assert served.text.startswith("(")
        missing = await http.post(CHAT, content=f"http://127.0.0.1:{site.port}/b.png".encode())
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "media_url_failed")
        await few.get("/health")  # What is fetched counts: the application fetches twice.
        beyond = await few.post(CHAT, content=f"http://127.0.0.1:{site.port}/a.png".encode())
        assert "front.media.max_items" in beyond.text
    finally:
        await site.stop()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (b"file:///etc/passwd", "engine_args.allowed_local_media_path"),
        (b"data:image/png,abc", "only base64 is read"),
    ],
    ids=["file", "data"],
)
async def test_media_url_that_vllm_cannot_read_gets_400(
    serve: Serve, url: bytes, words: str
) -> None:
    """Plain vLLM responds 500 and 501."""
    http, _ = serve(fetching)
    refused = await http.post(CHAT, content=url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert words in refused.json()["error"]["message"]


async def test_access_log_is_private_and_survives_a_full_disk(
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


async def test_access_line_has_engine_tokens_and_items(serve: Serve, tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await client.add_request_async(request("r", ["a"]))
        (output,) = (await client.get_output_async()).outputs
        await PlainTextResponse(output.request_id)(scope, receive, send)

    log = tmp_path / "log"
    http, client = serve(lambda *_: app, access_log=str(log))
    up(client, "e-0", "pd-0")
    engines = {name: Played(name) for name in client.engines.by_name}
    for name, engine in client.engines.by_name.items():
        engine.client = engines[name]
    asked = asyncio.create_task(http.post(CHAT, content=b"xyz"))
    await until_async(lambda: engines["pd-0"].requests)
    item = ItemOutcome(mm_hash="a", source="transfer", encoder="e-0", path="shm", nbytes=9)
    output = EngineCoreOutput("r", [5, 6], finish_reason=FinishReason.STOP)
    put_params(output, to_params(PrefillOutcome(instance="pd-0", items=(item,))))
    outputs = EngineCoreOutputs(outputs=[output])
    client._take_outputs(client.engines.by_name["pd-0"], outputs)
    assert (await asked).text == "r"
    line = json.loads(log.read_text())
    assert (line["engine"], line["tokens"], line["bytes_in"], line["bytes_out"]) == (
        "pd-0",
        2,
        3,
        1,
    )
    assert line["items"] == [msgspec.to_builtins(item)]
    assert 0 < line["first_byte_s"] <= line["duration_s"]


async def test_a_front_whose_log_cannot_be_written_does_not_start(
    config: Any, tmp_path: Path
) -> None:
    client = client_of(config, tmp_path, "e-0", "pd-0", access_log=str(tmp_path / "nowhere/log"))
    app = within(FrontMiddleware(lambda *_: pytest.fail("it starts")), client)
    (failed,) = await sent_by(app, {"type": "lifespan"}, type="lifespan.startup")
    assert failed["type"] == "lifespan.startup.failed"
    assert "front.access_log" in failed["message"] and "nowhere" in failed["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_kwargs", {"max_pixels": 10**12}),
        ("mm_processor_kwargs", {"size": {"height": 10**6, "width": 10**6}}),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}),
        ("media_io_kwargs", {"video": {"fps": float("nan")}}),
    ],
)
async def test_settings_that_enlarge_media_are_refused_early(
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


async def test_unresponsive_engine_is_reported_in_the_requested_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, client = serve()
    up(client, "pd-0")
    client.engines.by_name["pd-0"].client = stopped = Played("pd-0")
    stopped.silent = True
    begun = time.monotonic()
    answer = await http.get("/epd/instances/pd-0/health?within_s=0.1")
    assert (answer.status_code, time.monotonic() - begun < 20) == (503, True)
    with monkeypatch.context() as patch:
        patch.setattr("epd_portable.front.http._RESPONDS_WITHIN_S", 0.1)
        for query in ("", "?within_s=x", "?within_s=nan", "?within_s=1e9"):
            answer = await http.get(f"/epd/instances/pd-0/health{query}")
            assert answer.status_code == 503
    stopped.silent = False
    assert (await http.get("/epd/instances/pd-0/health")).status_code == 200


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
    assert (await http.get("/epd/instances")).status_code == 401
    seen = await http.get("/epd/instances", headers=signed("GET", "/epd/instances"))
    assert {each["name"]: each["state"] for each in seen.json()["instances"]} == {
        "e-0": "up",
        "pd-0": "up",
    }
    drain, resume = (f"/epd/instances/pd-0/{verb}" for verb in ("drain", "resume"))
    assert (await http.post(drain)).status_code == 401
    other = signed("POST", resume)
    assert (await http.post(drain, headers=other)).status_code == 401
    assert client.engines.by_name["pd-0"].instance.health.usable
    assert (await http.post(drain, headers=signed("POST", drain))).json()["idle"]
    assert (await http.get("/health")).status_code == 503
    assert (await http.post(resume, headers=other)).status_code == 200
    assert (await http.get("/health")).status_code == 200


async def test_requests_about_engines_are_timed_and_used_once(serve: Serve) -> None:
    http, client = serve(body_timeout_s=0.05)

    for path in ("/epd/instances", "/epd/instances/pd-0/drain"):
        late = await asyncio.wait_for(http.post(path, content=stalled()), 10)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "body_timeout")
    up(client, "pd-0")
    drain, resume = (f"/epd/instances/pd-0/{verb}" for verb in ("drain", "resume"))
    overheard = {"authorization": client.secret.sign("POST", drain)}
    assert (await http.post(drain, headers=overheard)).status_code == 200
    signed = {"authorization": client.secret.sign("POST", resume)}
    assert (await http.post(resume, headers=signed)).status_code == 200
    assert (await http.post(drain, headers=overheard)).status_code == 401
    assert client.engines.by_name["pd-0"].instance.health.usable


@pytest.mark.parametrize(("begins", "status"), [(False, 500), (True, 200)])
async def test_failed_application_counts_with_the_status_that_was_sent(
    serve: Serve, begins: bool, status: int
) -> None:
    def failing(*_: Any) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if begins:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"data", "more_body": True})
            raise OSError("a fault of the application")

        return app

    http, client = serve(failing)
    with pytest.raises(OSError, match="a fault"):
        await http.post(CHAT, content=b"{}")
    page = generate_latest(client.metrics.registry).decode()
    assert total(page, f'epd_front_requests_total{{status="{status}"}}') == 1


@pytest.mark.parametrize("raises", [False, True])
async def test_fault_of_the_application_during_a_stop_is_503(
    serve: Serve, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The renderer of prompts has ended then."""

    def failing(*_: Any) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if raises:
                raise RuntimeError("cannot schedule new futures after shutdown")
            await PlainTextResponse("a fault", 500)(scope, receive, send)

        return app

    http, client = serve(failing)
    client.is_draining = True
    reply = await http.post(CHAT, content=b"{}")
    assert ("cannot schedule new futures" in caplog.text) is raises
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    assert "this server is being stopped" in reply.json()["error"]["message"]
    page = generate_latest(client.metrics.registry).decode()
    assert total(page, 'epd_front_requests_total{status="503"}') == 1


async def test_path_with_the_prefix_of_engines_goes_to_vllm(serve: Serve) -> None:
    http, _ = serve()
    assert (await http.post("/epd/instancespd-0", content=b"abc")).text == "3"
