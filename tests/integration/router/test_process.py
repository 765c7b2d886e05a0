"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from epd_portable.demo.servers import free_port
from epd_portable.router import serving
from epd_portable.router.server import Router
from tests import warm
from tests.certificates import make_certificate
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import (
    DEADLINE_S,
    IMPORTED,
    Behaviour,
    RouterServing,
    StandIn,
    answer,
    forever,
    start_process,
    streamed,
)
from tests.integration.router.test_requests import RED, TEXT
from tests.keyring import secret, secret_file

TIMEOUT_S = 60

SETTINGS: dict[str, Any] = {
    "port": 0,
    "model": "demo",
    "secret_file": secret_file(),
    "instances": [
        {
            "name": "pd",
            "role": "prefill-decode",
            "url": "http://127.0.0.1:9",
            "control": "tcp://127.0.0.1:9",
        }
    ],
}


def start(settings: dict[str, Any]) -> warm.Child:
    words = ("-m", "epd_portable.router", "--settings", json.dumps(settings))
    return start_process(*words, stderr=subprocess.PIPE)


class Running:
    """A router process in front of one stand-in."""

    def __init__(self, pd: StandIn, **settings: Any) -> None:
        instance = {**SETTINGS["instances"][0], "url": pd.serving.url}
        self.pd = pd
        self.process = start(
            {**SETTINGS, "instances": [instance], "probe_interval_s": 0.1, **settings}
        )
        assert self.process.stderr is not None
        found = re.search(r"https?://127\.0\.0\.1:\d+", self.process.stderr.readline())
        assert found
        self.url = found[0]

    async def until_up(self, client: httpx.AsyncClient) -> None:
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)

    async def errors(self) -> str:
        """Wait for a clean end; return what was logged."""
        assert self.process.stderr is not None
        errors = await asyncio.to_thread(self.process.stderr.read)
        assert await asyncio.to_thread(self.process.wait, TIMEOUT_S) == 0
        assert "Traceback" not in errors
        return errors


@pytest.fixture
async def run() -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    started: list[Running] = []

    async def make(behaviour: Behaviour, **settings: Any) -> Running:
        pd = StandIn("pd", "prefill-decode", behaviour)
        await pd.serving.start()
        started.append(Running(pd, **settings))
        return started[-1]

    yield make
    for running in started:
        running.process.kill()
        running.process.wait(TIMEOUT_S)
        assert running.process.stderr is not None
        running.process.stderr.close()
        await running.pd.serving.stop()


Run = Callable[..., Awaitable[Running]]
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def asking(url: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, **options)


async def test_what_does_not_end_in_time_when_it_stops_is_refused_in_openai_form(run: Run) -> None:
    router = await run(forever, drain_s=0.3)
    async with asking(router.url) as client:
        await router.until_up(client)
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await router.pd.until(lambda pd: bool(pd.received))
        router.process.send_signal(signal.SIGINT)
        answer = await asked
    errors = await router.errors()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["message"] == "the router is stopping"
    assert "cut off after router.drain_s" in errors


async def test_answers_that_have_begun_end_before_it_stops(run: Run) -> None:
    more = asyncio.Event()
    router = await run(streamed(b"data: 1\n\n", more, b"data: 2\n\n"))
    async with asking(router.url) as client, asking(router.url) as other:
        await router.until_up(client)
        # A connection that is there already, as a load balancer's.
        assert (await other.get("/health")).status_code == 200
        request = client.build_request("POST", "/v1/chat/completions", json=BODY)
        answer = await client.send(request, stream=True)
        router.process.send_signal(signal.SIGTERM)
        while (health := await other.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
        refused = await other.post("/v1/chat/completions", json=BODY)
        more.set()
        assert await answer.aread() == b"data: 1\n\ndata: 2\n\n"
    assert health.json()["status"] == "draining"
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert len(router.pd.received) == 1
    assert "cut off" not in await router.errors()


async def test_a_second_signal_ends_it_at_once(run: Run) -> None:
    router = await run(forever)
    async with asking(router.url) as client:
        await router.until_up(client)
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await router.pd.until(lambda pd: bool(pd.received))
        router.process.send_signal(signal.SIGTERM)
        while (await client.get("/health")).json()["status"] != "draining":
            await asyncio.sleep(0.02)
        router.process.send_signal(signal.SIGTERM)
        await router.errors()
        asked.cancel()


async def test_it_speaks_https(run: Run, tmp_path: Path) -> None:
    cert, key = map(str, make_certificate(tmp_path))
    router = await run(answer, tls_cert_file=cert, tls_key_file=key)
    assert router.url.startswith("https://")
    async with asking(router.url, verify=ssl.create_default_context(cafile=cert)) as client:
        await router.until_up(client)
        long = {"messages": [{"role": "user", "content": "a" * (12 << 20)}]}
        for body in (BODY, long, BODY):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert [len(each.raw) > 12 << 20 for each in router.pd.received] == [False, True, False]


async def test_what_concerns_operators_has_a_port_of_its_own(run: Run) -> None:
    admin = free_port()
    router = await run(answer, admin_port=admin)
    async with asking(router.url) as client, asking(f"http://127.0.0.1:{admin}") as operator:
        await router.until_up(client)
        for path in ("/metrics", "/epd/instances"):
            assert (await client.get(path)).status_code == 404
        assert (await operator.get("/metrics")).status_code == 200
        assert (await operator.get("/epd/instances")).status_code == 401
        signed = {"authorization": secret().sign("GET", "/epd/instances")}
        assert (await operator.get("/epd/instances", headers=signed)).status_code == 200
        assert (await operator.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prot": 1}, "prot"),
        (
            {"tls_cert_file": "/nowhere/cert.pem", "tls_key_file": "/nowhere/key"},
            "/nowhere/cert.pem",
        ),
        ({"port": None}, "choose another port"),
    ],
)
def test_what_keeps_it_from_starting_is_named(settings: dict[str, Any], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if "port" in settings:
            settings = {"port": taken.getsockname()[1]}
        given = ("--settings", json.dumps({**SETTINGS, **settings}))
        done = warm.nursery(*IMPORTED).run("-m", "epd_portable.router", *given, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


FEW = 256


@contextlib.asynccontextmanager
async def no_files(router: Router) -> AsyncIterator[None]:
    """Have every file open that this process may have, and no connection to an instance."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        lowest = held.enter_context(socket.socket()).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        try:
            # One that a probe is using rests a moment later.
            while router.upstream._connections:
                for resting in router.upstream._idle.values():
                    for connection in resting:
                        connection.drop()
                await asyncio.sleep(0.01)
                with contextlib.suppress(OSError):
                    while True:
                        held.enter_context(socket.socket())
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("part", [TEXT, RED], ids=["text", "picture"])
async def test_a_router_without_files_says_so_and_takes_no_instance_for_gone(
    build: Build, part: object, caplog: pytest.LogCaptureFixture
) -> None:
    t = await build(probe_interval_s=0.05)
    assert (await t.chat(part)).status_code == 200
    assert isinstance(t.router, RouterServing)
    async with no_files(t.router.router):
        response = await t.chat(part)
        await asyncio.sleep(0.5)
        seen = {each.state for each in t.router.router.instances.all}
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "Too many open files" in message
    assert "ulimit" in message
    assert seen == {"up"}
    said = [each for each in caplog.records if each.name.endswith("upstream")]
    assert len(said) == 1
    assert (await t.chat(part)).status_code == 200


@pytest.mark.parametrize("most", [FEW, 10_000])
def test_a_router_may_have_as_many_files_as_the_system_allows(most: int) -> None:
    hard = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {hard}))\n"
        "import sys; from epd_portable.router.__main__ import main; sys.exit(main())"
    )
    words = ("-c", limited, "--settings", json.dumps(SETTINGS))
    process = start_process(*words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        if hard < serving.ENOUGH_FILES:
            assert re.search(rf"{hard} files open.*LimitNOFILE", process.stderr.readline())
        assert re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        process.terminate()
    with process.stderr as rest:
        assert "files open" not in rest.read()
    process.wait(DEADLINE_S)
