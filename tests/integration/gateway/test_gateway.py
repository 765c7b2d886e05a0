"""The gateway between real sockets: fronts are servers that tests answer for."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from epd_portable import gateway
from epd_portable.demo.servers import free_port
from epd_portable.gateway import Gateway
from epd_portable.placement.profiles.selection_types import SESSION_HEADER
from epd_portable.responses import MAX_HEAD_BYTES
from tests.certificates import make_certificate, served_certificate
from tests.kit.ambiguous import AMBIGUOUS, SMUGGLED
from tests.waiting import until_async

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY = b'{"model": "m",   "messages": [], "nan": NaN}'


class PlayedFront:
    """A server that a test answers for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        self.is_healthy = True
        self.handler: Handler = self._say_name

    async def _say_name(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=self.name)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.is_healthy else 503)
        self.requests.append(request)
        self.bodies.append(await request.read())
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def open(self) -> None:
        self._runner = web.ServerRunner(
            web.Server(
                self.serve,
                handler_cancellation=True,
                auto_decompress=False,
                max_field_size=MAX_HEAD_BYTES,
            ),
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        await self._runner.cleanup()


class Played:
    """A gateway, its fronts and a client of it."""

    def __init__(self, *fronts: PlayedFront) -> None:
        self.fronts = {each.name: each for each in fronts}

    async def open(self, urls: list[str]) -> None:
        self.gateway = Gateway(urls)
        self._runner = gateway.runner_of(self.gateway, drain_s=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.client = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.port}", auto_decompress=False, max_field_size=MAX_HEAD_BYTES
        )

    async def until_up(self, *names: str) -> None:
        await until_async(lambda: names == tuple(
            name for name, front in zip(self.fronts, self.gateway.fronts, strict=True)
            if not front.problem
        ))  # fmt: skip

    async def ask(self, body: bytes = BODY, **headers: str) -> tuple[int, str]:
        async with self.client.post("/v1/chat/completions", data=body, headers=headers) as answer:
            return answer.status, (await answer.read()).decode()

    async def metric(self, line: str) -> float:
        async with self.client.get("/metrics") as answer:
            page = (await answer.read()).decode()
        return sum(float(x.rpartition(" ")[2]) for x in page.splitlines() if x.startswith(line))

    async def close(self) -> None:
        await self.client.close()
        await self._runner.cleanup()


@asynccontextmanager
async def played(*names: str) -> AsyncIterator[Played]:
    found = Played(*(PlayedFront(name) for name in names))
    for each in found.fronts.values():
        await each.open()
    try:
        await found.open([each.url for each in found.fronts.values()])
        try:
            await found.until_up(*names)
            yield found
        finally:
            await found.close()
    finally:
        for each in found.fronts.values():
            await each.close()


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "PROBE_INTERVAL_S", 0.01)


async def test_bytes_and_headers_pass_unread() -> None:
    packed = gzip.compress(b"data: x\n\n")

    async def answer(_: web.Request) -> web.StreamResponse:
        headers = {"content-encoding": "gzip", "x-request-id": "r", "set-cookie": "a=b"}
        return web.Response(status=418, reason="why", body=packed, headers=headers)

    async with played("a") as t:
        t.fronts["a"].handler = answer
        headers = {
            "authorization": "Bearer k",
            "connection": "x-once",
            "x-once": "1",
            "te": "trailers",
        }
        path = "/v1/files/a%2Fb?q=%20&q=2"
        url = URL(path, encoded=True)
        async with t.client.put(url, data=BODY, headers=headers) as said:
            assert (said.status, said.reason, await said.read()) == (418, "why", packed)
            assert (
                said.headers["content-encoding"] == "gzip" and said.headers["set-cookie"] == "a=b"
            )
        seen = t.fronts["a"].requests[0]
        assert (seen.method, seen.raw_path, t.fronts["a"].bodies) == ("PUT", path, [BODY])
        assert seen.headers["authorization"] == "Bearer k"
        assert not {"te", "x-once"} & {name.lower() for name in seen.headers}
        assert seen.headers["x-forwarded-for"] == "127.0.0.1"
        assert seen.headers["host"] == f"127.0.0.1:{t.port}"


async def test_long_headers_pass_both_ways_and_all_proxies_are_named() -> None:
    long = "x" * 50_000

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(headers={"x-long": long})

    async with played("a") as t:
        t.fronts["a"].handler = answer
        sent = CIMultiDict({"x-long": long})
        sent.extend([("x-forwarded-for", "192.0.2.1"), ("x-forwarded-for", "192.0.2.2")])
        async with t.client.get(f"http://127.0.0.1:{t.port}/a", headers=sent) as said:
            assert said.headers["x-long"] == long
        seen = t.fronts["a"].requests[0].headers
        assert seen["x-long"] == long
        assert seen.getall("x-forwarded-for") == ["192.0.2.1, 192.0.2.2, 127.0.0.1"]


async def test_each_piece_of_a_stream_passes_when_it_comes() -> None:
    read = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await read.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with played("a") as t:
        t.fronts["a"].handler = answer
        async with t.client.post("/v1/chat/completions", data=BODY) as said:
            assert await said.content.readany() == b"data: 1\n\n"
            read.set()
            assert await said.content.read() == b"data: 2\n\n"


async def test_request_goes_to_the_front_with_the_fewest_open_requests() -> None:
    async with played("a", "b") as t:
        go_on = asyncio.Event()

        async def wait(_: web.Request) -> web.StreamResponse:
            await go_on.wait()
            return web.Response(text="waited")

        t.fronts["a"].handler = wait
        first = asyncio.create_task(t.ask())
        await until_async(lambda: bool(t.fronts["a"].requests))
        assert await t.metric('epd_gateway_open_requests{front="' + t.gateway.fronts[0].name) == 1
        assert [await t.ask() for _ in range(3)] == [(200, "b")] * 3
        go_on.set()
        assert await first == (200, "waited")


async def test_session_moves_only_when_its_front_ends() -> None:
    async with played("a", "b", "c") as t:
        sessions = [f"s{n}" for n in range(30)]
        before = {s: await t.ask(**{SESSION_HEADER: s}) for s in sessions}
        assert {name for _, name in before.values()} == {"a", "b", "c"}
        assert before == {s: await t.ask(**{SESSION_HEADER: s}) for s in sessions}
        t.fronts["b"].is_healthy = False
        await t.until_up("a", "c")
        after = {s: await t.ask(**{SESSION_HEADER: s}) for s in sessions}
        assert all(after[s] == before[s] for s in sessions if before[s][1] != "b")


@pytest.mark.parametrize("how", ["refuses", "ends", "busy", "full"])
async def test_request_goes_to_another_front_before_its_first_byte(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played("a", "b") as t:
        front = t.fronts["a"]

        async def end(request: web.Request) -> web.StreamResponse:
            if how in ("busy", "full"):
                return web.Response(status=503 if how == "busy" else 429)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        front.handler = end
        if how == "refuses":
            # Before a probe has seen it.
            monkeypatch.setattr(t.gateway, "_note", lambda *_: None)
            t.gateway.fronts[0].url = t.gateway.fronts[0].url.with_port(1)
            t.gateway.fronts[0].problem = ""
        assert await t.ask() == (200, "b")
        assert t.fronts["b"].bodies == [BODY] and len(front.bodies) == (how != "refuses")
        assert await t.metric("epd_gateway_retries_total") == 1


async def test_last_refusal_is_the_response_when_all_fronts_are_busy() -> None:
    async def busy(_: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"retry-after": "7"}, text="full")

    async with played("a", "b") as t:
        for each in t.fronts.values():
            each.handler = busy
        async with t.client.post("/v1/chat/completions", data=BODY) as said:
            assert (said.status, said.headers["retry-after"], await said.read()) == (
                429,
                "7",
                b"full",
            )
        assert [len(each.bodies) for each in t.fronts.values()] == [1, 1]


async def test_broken_stream_breaks_the_connection_without_retry() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with played("a", "b") as t:
        t.fronts["a"].handler = answer
        with pytest.raises(aiohttp.ClientPayloadError):
            await t.ask()
        assert not t.fronts["b"].bodies
        assert t.gateway.fronts[0].load == 0


async def test_without_a_front_clients_are_told_when_to_come_back() -> None:
    async with played("a") as t:
        t.fronts["a"].is_healthy = False
        await t.until_up()
        async with t.client.post("/v1/messages", data=BODY) as said:
            error = await said.json()
            assert said.status == 503 and int(said.headers["retry-after"]) > 0
            assert (
                error["error"]["type"] == "overloaded_error" and "503" in error["error"]["message"]
            )
        async with t.client.get("/health") as said:
            assert said.status == 503
        t.fronts["a"].is_healthy = True
        await t.until_up("a")
        assert await t.ask() == (200, "a")


async def test_gateway_that_drains_says_so_and_serves_on() -> None:
    async with played("a") as t:
        t.gateway.drain()
        async with t.client.get("/health") as said:
            assert said.status == 503
        assert await t.ask() == (200, "a")


async def test_client_that_leaves_ends_its_request_at_the_front() -> None:
    async with played("a") as t:

        async def wait(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        t.fronts["a"].handler = wait
        asking = asyncio.create_task(t.ask())
        await until_async(lambda: bool(t.fronts["a"].bodies))
        asking.cancel()
        async with asyncio.timeout(60):
            await t.fronts["a"].left.wait()
        await until_async(lambda: t.gateway.fronts[0].load == 0)


async def test_long_body_is_streamed_and_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "HELD_BYTES", 1000)

    async def end(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with played("a", "b") as t:
        body = os.urandom(300_000)
        assert (await t.ask(body))[0] == 200
        assert t.fronts["a"].bodies == [body]
        t.fronts["a"].handler = end
        status, text = await t.ask(body)
        assert status == 503 and not t.fronts["b"].bodies, text
        assert t.gateway._held_bytes == 0


async def test_bodies_that_come_count_before_they_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "ALL_HELD_BYTES", 1000)
    async with played("a") as t:
        front, go_on = t.fronts["a"], asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"x" * 600
            await go_on.wait()
            yield b"y"

        asking = [asyncio.create_task(t.ask(slow())) for _ in range(2)]
        # The second one is not held until it is whole: the front has its request already.
        await until_async(lambda: len(front.requests) == 1)
        assert t.gateway._held_bytes == 1200
        go_on.set()
        assert await asyncio.gather(*asking) == [(200, "a")] * 2
        await until_async(lambda: t.gateway._held_bytes == 0)


@pytest.mark.parametrize("target", [b"http://other.example/v1/models?a=1", b"/v1/models?a=1"])
async def test_target_with_a_host_is_served_by_its_path(target: bytes) -> None:
    async with played("a") as t:
        reader, writer = await asyncio.open_connection("127.0.0.1", t.port)
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
        async with asyncio.timeout(60):
            assert b" 200 " in await reader.readline()
            await reader.read()
        writer.close()
        await writer.wait_closed()
        assert [each.raw_path for each in t.fronts["a"].requests] == ["/v1/models?a=1"]


async def test_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "BODY_TIMEOUT_S", 0.05)
    async with played("a") as t:
        reader, writer = await asyncio.open_connection("127.0.0.1", t.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        async with asyncio.timeout(60):
            assert b" 408 " in await reader.readline()
            await reader.read()  # The connection ends.
        writer.close()
        await writer.wait_closed()
        assert not t.fronts["a"].bodies


async def test_request_that_could_hide_another_reaches_no_front() -> None:
    async with played("a") as t:
        for name, data in AMBIGUOUS.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", t.port)
            writer.write(data + SMUGGLED)
            async with asyncio.timeout(60):
                assert b" 400 " in await reader.readline(), name
            writer.close()
            await writer.wait_closed()
        assert not t.fronts["a"].requests


async def test_upgraded_connections_are_refused() -> None:
    async with played("a") as t:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await t.client.ws_connect("/v1/realtime")
        assert refused.value.status == 501


async def test_command_serves_tls_renews_certificate_and_drains(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    front = PlayedFront("a")
    await front.open()
    go_on = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.Response(text="ended")

    front.handler = wait
    port = free_port()
    command = [sys.executable, "-m", "epd_portable.launch.cli", "gateway", "--front", front.url]
    command += ["--port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    assert process.stderr is not None and process.stdout is not None
    assert b"ready: https" in await process.stdout.readline()
    log = b""
    while b"gets requests" not in log:
        line = await process.stderr.readline()
        assert line, log
        log += line
    for number in range(2):
        renewed = make_certificate(tmp_path, f"renewed-{number}")
        for new, used in zip(renewed, (cert, key), strict=True):
            new.replace(used)
        assert await served_certificate(port) == ssl.PEM_cert_to_DER_cert(cert.read_text())
    trusted = ssl.create_default_context(cafile=cert)
    async with aiohttp.ClientSession(f"https://127.0.0.1:{port}") as client:
        asking = asyncio.create_task(_text(client, trusted))
        await until_async(lambda: bool(front.bodies))
        process.send_signal(signal.SIGTERM)
        assert b"open requests have" in await process.stdout.readline()
        go_on.set()
        assert await asking == "ended"
    assert await asyncio.wait_for(process.wait(), 60) == 0
    await front.close()


async def _text(client: aiohttp.ClientSession, tls: ssl.SSLContext) -> str:
    async with client.post("/v1/completions", data=BODY, ssl=tls) as answer:
        return await answer.text()
