"""What goes wrong at the router's borders: instances that hang, cut or die slowly, and clients that
send slowly, take slowly, or send what is no request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from starlette.responses import Response

from epd_portable.placement.balance import Switching
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, listen, serve
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    CHAT,
    DEADLINE_S,
    Received,
    RouterServing,
    forever,
    stream,
    until,
)
from tests.integration.router.test_requests import RED, TEXT


async def opened(t: Topology) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", t.router.port)


@pytest.mark.parametrize("ticks", [True, False])
async def test_a_body_that_does_not_come_is_refused_in_time(
    build: Build, ticks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not ticks:
        # What the router does every second beside that fails.
        monkeypatch.setattr(Switching, "tick", lambda *_: 1 / 0)
    t = await build(encoders=0, body_timeout_s=0.3, switch_roles=not ticks)
    reader, writer = await opened(t)
    writer.write(CHAT + b"content-length: 100\r\n\r\n{")
    answered = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert answered.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answered
    writer.close()
    assert (await t.chat(TEXT)).status_code == 200
    if isinstance(t.router, RouterServing):  # And no process of its own.
        assert ("ZeroDivisionError" in caplog.text) is not ticks


@pytest.fixture
async def port(build: Build) -> AsyncIterator[tuple[Topology, int]]:
    t = await build(encoders=0, send_timeout_s=0.5)
    listener = listen("127.0.0.1", 0)
    stop = Stopping()
    serving = asyncio.create_task(serve(Router(t.settings), [listener], stop))
    yield t, listener.getsockname()[1]
    stop.request_stop()
    await serving


async def test_a_client_that_takes_nothing_loses_its_connection(port: Any) -> None:
    t, number = port

    async def endless(received: Received) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + b"a" * 65536 + b"\n\n"
                await asyncio.sleep(0.001)

        return await stream(pieces)(received)

    t.pd.behaviour = endless
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", number))
        client.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
        ours = client.getsockname()[1]
        await t.pd.until(lambda pd: len(pd.received) == 1)

        def is_open() -> bool:
            found = psutil.Process().net_connections("tcp")
            return any(each.raddr and each.raddr.port == ours for each in found)

        await until(lambda: not is_open())


@pytest.mark.parametrize("path", ["/epd/instances", "/epd/nothing"])
async def test_bodies_for_the_operators_addresses_are_small_and_come_in_time(
    build: Build, path: str
) -> None:
    t = await build(encoders=0, body_timeout_s=0.5, registration=True)
    large = await t.client.post(path, content=b"a" * (1 << 20))
    assert large.status_code == 413
    reader, writer = await opened(t)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{" % path.encode())
    answered = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert answered.startswith(b"HTTP/1.1 408")
    writer.close()


def inside(t: Topology) -> Router:
    assert isinstance(t.router, RouterServing)
    return t.router.router


@pytest.mark.parametrize("order", ["client first", "instance first"])
@pytest.mark.parametrize("role", ["encode", "prefill-decode"])
async def test_who_leaves_while_an_instance_goes_down_is_not_served_again(
    build: Build, role: str, order: str
) -> None:
    t = await build(encoders=2, pds=2, behaviour=forever, encoding=forever, probe_interval_s=60)
    router = inside(t)
    asked = asyncio.create_task(t.chat(RED))
    instances = t.encoders if role == "encode" else t.pds
    both = t.encoders + t.pds
    await until(lambda: sum(len(each.received) for each in both) == 2)
    [client] = router.in_flight
    [busy] = [each for each in instances if each.received]
    instance = router.instances.get(busy.name)
    assert instance is not None
    endings = [client.give_up, lambda: instance.seen_gone("test")]
    for ending in endings if order == "client first" else reversed(endings):
        ending()
    await until(lambda: not (router.in_flight or router.exchange._tasks))
    await asyncio.sleep(0.1)
    # An encode job may just have been given to the other encoder.
    assert sum(len(each.received) for each in t.pds) == 1
    assert sum(len(each.received) - each.aborted for each in both) == 0
    assert all(each.idle for each in router.instances.all)
    asked.cancel()
