"""Several processes on one port serve as one router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.responses import Response, StreamingResponse

from epd_portable.router.serving import Stopping, reserve
from epd_portable.router.settings import RouterSettings
from epd_portable.router.workers import keep
from tests.integration.router.stand_in import (
    CHAT,
    Behaviour,
    ControlEnd,
    Received,
    StandIn,
    answer,
    refuse,
)
from tests.integration.router.test_requests import RED, TEXT
from tests.keyring import Signed, keys, secret, secret_file

TIMEOUT_S = 60.0
INSTANCES = "/epd/instances"


class Together:
    """A router of several processes between stand-ins. Every request has its own connection."""

    def __init__(self, encoders: list[StandIn], pds: list[StandIn], **settings: Any) -> None:
        self.encoders, self.pds = encoders, pds
        self.controls = [ControlEnd(keys()) for _ in pds]
        addresses = [*("" for _ in encoders), *(control.address for control in self.controls)]
        self.settings: dict[str, Any] = {
            "port": 0,
            "model": "demo",
            "workers": 2,
            "secret_file": secret_file(),
            "registration": True,
            "probe_interval_s": 0.2,
            # A stand-in answers before its item is encoded; jobs that are left seem to be a queue.
            "elastic_encode": False,
            "unknown_media": "pass",
            "instances": [
                {"name": i.name, "role": i.role, "url": i.serving.url, "control": address}
                for i, address in zip(encoders + pds, addresses, strict=True)
            ],
            **settings,
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.client: httpx.AsyncClient

    async def start(self) -> None:
        command = [sys.executable, "-m", "epd_portable.router", "--settings"]
        self.process = subprocess.Popen(
            [*command, json.dumps(self.settings)], stderr=self.log, text=True
        )
        await self.until(lambda: "http" in self.logged())
        found = re.search(r"http://127\.0\.0\.1:\d+", self.logged())
        assert found
        self.ask_at(found[0])
        await self.until(lambda: all_listen(self.workers))
        await self.until_up()

    def ask_at(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits
        )

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    @property
    def workers(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children()

    async def until(self, condition: Callable[[], bool]) -> None:
        async def fulfilled() -> None:
            while not condition():
                assert self.process is None or self.process.poll() is None, self.logged()
                await asyncio.sleep(0.02)

        await asyncio.wait_for(fulfilled(), TIMEOUT_S)

    async def until_up(self) -> None:
        async def up() -> None:
            alike = 0
            while alike < 8:  # So often that every worker was asked.
                with contextlib.suppress(httpx.TransportError):
                    health = await self.client.get("/health", auth=Signed())
                    states = health.json()["instances"].values()
                    alike = alike + 1 if all(s["state"] == "up" for s in states) else 0
                await asyncio.sleep(0.02)

        await asyncio.wait_for(up(), TIMEOUT_S)

    async def chat(self, *parts: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": list(parts)}]}
        return await self.client.post("/v1/chat/completions", json=body)

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until_metric(self, line: str, value: float) -> None:
        async def reached() -> None:
            while await self.metric(line) != value:
                await asyncio.sleep(0.02)

        await asyncio.wait_for(reached(), TIMEOUT_S)

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, TIMEOUT_S)

    async def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            processes = [*self.workers, psutil.Process(self.process.pid)]
            for _ in range(2):  # It removes its folder, which it could not if it were killed.
                self.process.terminate()
                await asyncio.sleep(0.1)
            _, alive = await asyncio.to_thread(psutil.wait_procs, processes, TIMEOUT_S)
            for process in alive:
                process.kill()
            self.process.wait()
        await self.client.aclose()
        await asyncio.gather(*(each.serving.stop() for each in self.encoders + self.pds))
        for control in self.controls:
            control.close()
        self.log.close()


Make = Callable[..., Awaitable[Together]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Together] = []

    async def build(
        encoders: int = 0,
        pds: int = 1,
        behaviour: Behaviour = answer,
        start: bool = True,
        **settings: Any,
    ) -> Together:
        e = [StandIn(f"encode-{n}", "encode") for n in range(encoders)]
        pd = [StandIn(f"pd-{n}", "prefill-decode", behaviour) for n in range(pds)]
        await asyncio.gather(*(instance.serving.start() for instance in e + pd))
        made.append(Together(e, pd, **settings))
        if start:
            await made[-1].start()
        return made[-1]

    yield build
    for each in made:
        await each.stop()


class Held:
    """A behaviour whose answers are streams that go on until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, received: Received) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b'data: {"begun": 1}\n\n'
            await self.go.wait()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")


class Stream:
    """A stream that a client reads, on a connection of its own."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> str:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        text = ""
        async with self._together.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as response:
            async for piece in response.aiter_text():
                self.begun.set()
                text += piece
        return text


def all_listen(workers: list[psutil.Process]) -> bool:
    """Tell whether there are two workers, each with its socket."""
    listening = [
        worker
        for worker in workers
        for each in worker.net_connections("tcp")
        if each.status == "LISTEN"
    ]
    return len(listening) == len(workers) == 2


async def streams(together: Together, count: int) -> list[Stream]:
    opened = []
    for _ in range(count):
        opened.append(Stream(together))
        await asyncio.wait_for(opened[-1].begun.wait(), TIMEOUT_S)
    return opened


def serves(worker: psutil.Process, port: int) -> int:
    """Return how many connections of clients a worker has."""
    return sum(
        each.laddr.port == port and each.status == "ESTABLISHED"
        for each in worker.net_connections("tcp")
    )


async def test_every_worker_serves_and_all_count_on_one_page(make: Make) -> None:
    together = await make(encoders=1)
    for _ in range(24):
        assert (await together.chat(RED)).status_code == 200
    assert len({r.params["reply_to"] for r in together.pds[0].received}) == 2
    counted = 'epd_router_requests_total{endpoint="/v1/chat/completions",status="200"}'
    assert [await together.metric(counted) for _ in range(6)] == 6 * [24]
    encoded = 'epd_router_encode_job_seconds_count{instance="encode-0"}'
    assert await together.metric(encoded) == 24
    assert await together.metric('epd_router_instance_up{instance="pd-0",role="prefill-decode"}')
    await together.client.delete(f"{INSTANCES}/encode-0", auth=Signed())
    await together.until_metric(encoded, 0)
    assert 'instance="encode-0"' not in (await together.client.get("/metrics")).text
    assert await together.metric(counted) == 24


async def test_the_least_busy_instance_is_the_least_busy_of_all_workers(make: Make) -> None:
    held = Held()
    together = await make(pds=4, behaviour=held)
    port = int(together.url.rpartition(":")[2])
    opened = await streams(together, 32)
    assert all(serves(worker, port) for worker in together.workers)
    assert Counter(len(pd.received) for pd in together.pds) == {8: 4}
    for pd in together.pds:
        line = f'epd_router_instance_in_flight{{instance="{pd.name}",role="prefill-decode"}}'
        assert await together.metric(line) == 8
    assert await together.metric("epd_router_requests_in_flight") == 32
    held.go.set()
    texts = await asyncio.gather(*(each.task for each in opened))
    assert all(text.endswith("[DONE]\n\n") for text in texts)
    await together.until_metric("epd_router_requests_in_flight", 0)


async def test_unfinished_bodies_of_all_workers_are_bounded_together(make: Make) -> None:
    together = await make(max_body_bytes="1MiB", max_bodies_bytes="1MiB")
    host, _, port = together.url.removeprefix("http://").rpartition(":")
    head = CHAT + b"content-length: 700000\r\n\r\n"

    async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b" " * 600_000)
        await writer.drain()
        return reader, writer

    first = await begin()
    await asyncio.sleep(0.5)
    others = [await begin() for _ in range(12)]
    for _, writer in others:
        writer.write(b" " * 100_000)
        await writer.drain()
    refused = [await asyncio.wait_for(reader.readline(), TIMEOUT_S) for reader, _ in others]
    assert all(b" 503 " in line for line in refused)
    first[1].write(b" " * 100_000)
    assert b" 400 " in await asyncio.wait_for(first[0].readline(), TIMEOUT_S)
    last = await begin()
    last[1].write(b" " * 100_000)
    assert b" 400 " in await asyncio.wait_for(last[0].readline(), TIMEOUT_S)
    for _, writer in (first, last, *others):
        writer.close()


async def test_a_worker_that_is_killed_takes_only_its_own_streams_along(make: Make) -> None:
    held = Held()
    together = await make(pds=2, behaviour=held)
    port = int(together.url.rpartition(":")[2])
    opened = await streams(together, 16)
    killed, other = together.workers
    lost = serves(killed, port)
    assert 0 < lost < 16
    assert lost + serves(other, port) == 16
    killed.kill()
    await together.until(lambda: sum(each.task.done() for each in opened) == lost)
    assert all(isinstance(e.task.exception(), httpx.HTTPError) for e in opened if e.task.done())
    await together.until_metric("epd_router_requests_in_flight", 16 - lost)
    loads = [
        await together.metric(
            f'epd_router_instance_in_flight{{instance="pd-{n}",role="prefill-decode"}}'
        )
        for n in range(2)
    ]
    assert sum(loads) == 16 - lost

    again = await streams(together, 4)
    held.go.set()
    rest = [each.task for each in (*opened, *again) if not each.task.done()]
    assert all(text.endswith("[DONE]\n\n") for text in await asyncio.gather(*rest))
    await together.until(lambda: all_listen(together.workers))
    assert killed.pid not in {worker.pid for worker in together.workers}
    await together.until_up()
    assert "is started again" in together.logged()


async def test_what_operators_ask_any_worker_holds_for_all(make: Make) -> None:
    held = Held()
    together = await make(pds=2, behaviour=held)
    assert (await together.client.get("/health")).json()["status"] == "ok"
    assert "instances" not in (await together.client.get("/health")).json()
    assert (await together.client.get(INSTANCES)).status_code == 401
    opened = await streams(together, 8)
    left = await together.client.delete(f"{INSTANCES}/pd-0", auth=Signed())
    assert (left.status_code, left.json()["state"]) == (202, "draining")
    assert (left.json()["in_flight"], left.json()["idle"]) == (4, False)
    together.pds[1].behaviour = answer
    for _ in range(12):
        assert (await together.chat(TEXT)).status_code == 200
    assert len(together.pds[0].received) == 4
    await asyncio.sleep(0.3)
    listed = (await together.client.get(INSTANCES, auth=Signed())).json()
    assert {each["name"] for each in listed["instances"]} == {"pd-0", "pd-1"}
    held.go.set()
    await asyncio.gather(*(each.task for each in opened))

    async def gone() -> None:
        while len((await together.client.get(INSTANCES, auth=Signed())).json()["instances"]) == 2:
            await asyncio.sleep(0.02)

    await asyncio.wait_for(gone(), TIMEOUT_S)
    body = together.settings["instances"][0]
    joined = [await together.client.post(INSTANCES, json=body, auth=Signed()) for _ in range(6)]
    assert [each.status_code for each in joined] == [201, *5 * [200]]
    assert {each.json()["router"] for each in joined} == {listed["router"]}
    before = len(together.pds[0].received)
    for _ in range(24):
        assert (await together.chat(RED)).status_code == 200
    assert len(together.pds[0].received) > before


async def test_a_signature_is_good_for_one_worker_only_once(make: Make) -> None:
    together = await make()
    request = together.client.build_request("GET", INSTANCES)
    signed = next(Signed().auth_flow(request)).headers["authorization"]
    headers = {"authorization": signed}
    answers = [await together.client.get(INSTANCES, headers=headers) for _ in range(8)]
    assert [each.status_code for each in answers] == [200, *7 * [401]]


async def test_an_instance_that_ends_is_down_for_all_and_up_again_when_it_is_back(
    make: Make,
) -> None:
    together = await make(pds=2)
    for pd in together.pds:
        pd.behaviour = refuse(500)
        await pd.serving.stop()
        for _ in range(12):
            response = await together.chat(TEXT)
            assert response.status_code == (200 if pd is together.pds[0] else 503)
        pd.behaviour = answer
        if pd is together.pds[0]:
            together.pds[1].behaviour = answer
    for pd in together.pds:
        await pd.serving.start()
    await together.until_up()
    for _ in range(24):
        assert (await together.chat(TEXT)).status_code == 200
    assert all(pd.received for pd in together.pds)


async def test_what_one_worker_sees_fail_is_looked_at_at_once_for_all(make: Make) -> None:
    together = await make(pds=2, probe_interval_s=600)
    await together.pds[0].serving.stop()
    for _ in range(6):
        assert (await together.chat(TEXT)).status_code == 200

    async def down() -> None:
        while True:
            health = await together.client.get("/health", auth=Signed())
            if health.json()["instances"]["pd-0"]["state"] == "down":
                return
            await asyncio.sleep(0.02)

    await asyncio.wait_for(down(), TIMEOUT_S)


async def test_it_drains_in_all_workers_and_leaves_nothing(make: Make) -> None:
    held = Held()
    together = await make(behaviour=held)
    opened = await streams(together, 8)
    workers = together.workers
    assert all(os.getpgid(worker.pid) == worker.pid for worker in workers)  # For terminals.
    folder = Path(workers[0].environ()["PROMETHEUS_MULTIPROC_DIR"])
    assert together.process is not None
    for process in (together.process, *workers):
        process.send_signal(signal.SIGTERM)

    async def draining() -> None:
        for _ in range(8):
            while (await together.client.get("/health")).json()["status"] != "draining":
                await asyncio.sleep(0.02)

    await asyncio.wait_for(draining(), TIMEOUT_S)
    assert (await together.chat(TEXT)).status_code == 503
    held.go.set()
    texts = await asyncio.gather(*(each.task for each in opened))
    assert all(text.endswith("[DONE]\n\n") for text in texts)
    assert await together.ended() == 0
    assert not any(worker.is_running() for worker in workers)
    assert "Traceback" not in together.logged()
    assert not folder.exists()


async def test_a_signal_while_workers_start_ends_it_cleanly(make: Make) -> None:
    together = await make(start=False)
    together.ask_at("http://127.0.0.1:1")
    for seconds in (0.0, 0.4):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "epd_portable.router", "--settings"),
                json.dumps(together.settings),
            ],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        assert "router for demo" in process.stderr.readline()
        await asyncio.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
        _, errors = await asyncio.to_thread(process.communicate, timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert "Traceback" not in errors


async def test_a_second_signal_ends_all_workers_at_once(make: Make) -> None:
    together = await make(behaviour=Held())
    opened = await streams(together, 4)
    workers = together.workers
    assert together.process is not None
    together.process.terminate()
    await asyncio.sleep(0.5)
    assert not any(each.task.done() for each in opened)
    together.process.terminate()
    assert await together.ended() == 0
    assert not any(worker.is_running() for worker in workers)
    assert "killed" not in together.logged()
    await asyncio.gather(*(each.task for each in opened), return_exceptions=True)


async def test_workers_without_their_keeper_leave_the_port_and_end(make: Make) -> None:
    held = Held()
    together = await make(behaviour=held, drain_s=2 * TIMEOUT_S)
    opened = await streams(together, 4)
    workers = together.workers
    folder = Path(workers[0].environ()["PROMETHEUS_MULTIPROC_DIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert together.process is not None
    together.process.kill()
    port = int(together.url.rpartition(":")[2])

    async def free() -> None:
        while True:
            try:
                reserve("127.0.0.1", port).close()
                return
            except Exception:
                await asyncio.sleep(0.05)

    await asyncio.wait_for(free(), TIMEOUT_S)
    held.go.set()
    texts = await asyncio.gather(*(each.task for each in opened))
    assert all(text.endswith("[DONE]\n\n") for text in texts)
    await asyncio.to_thread(psutil.wait_procs, workers, TIMEOUT_S)
    assert not any(worker.is_running() for worker in workers)
    assert not folder.exists()


async def test_what_a_worker_cannot_use_ends_the_router_with_its_reason(
    make: Make, tmp_path: Path
) -> None:
    bad = str(tmp_path / "none.pem")
    together = await make(start=False, tls_cert_file=bad, tls_key_file=bad)
    together.ask_at("http://127.0.0.1:1")
    process = subprocess.run(
        [
            *(sys.executable, "-m", "epd_portable.router", "--settings"),
            json.dumps(together.settings),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 2
    assert "router.tls_cert_file" in process.stderr
    assert "Traceback" not in process.stderr


async def test_a_port_in_use_is_refused_to_several_workers_too(make: Make) -> None:
    together = await make(start=False)
    together.ask_at("http://127.0.0.1:1")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = {**together.settings, "port": taken.getsockname()[1]}
        process = subprocess.run(
            [sys.executable, "-m", "epd_portable.router", "--settings", json.dumps(settings)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert process.returncode == 2
    assert "taken by another process" in process.stderr


async def test_operators_have_a_port_of_their_own_at_the_keeper(make: Make) -> None:
    with reserve("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    together = await make(admin_port=port)
    for path in (INSTANCES, "/metrics"):
        assert (await together.client.get(path)).status_code == 404
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=TIMEOUT_S
    ) as admin:
        listed = await admin.get(INSTANCES, auth=Signed())
        assert [each["name"] for each in listed.json()["instances"]] == ["pd-0"]
        assert (await together.chat(TEXT)).status_code == 200
        line = 'epd_router_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0'

        async def counted() -> None:
            # A worker counts when the client has its answer already.
            while line not in (await admin.get("/metrics")).text:
                await asyncio.sleep(0.02)

        await asyncio.wait_for(counted(), TIMEOUT_S)
    assert together.process is not None
    together.process.terminate()
    assert await together.ended() == 0
    assert "Traceback" not in together.logged()


@pytest.mark.full
async def test_a_worker_that_hangs_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_portable.router.workers.HUNG_AFTER_S", 10.0)
    together = await make(start=False)
    stop = Stopping()
    with reserve("127.0.0.1", 0) as address:
        together.ask_at(f"http://127.0.0.1:{address.getsockname()[1]}")
        settings = RouterSettings.model_validate(together.settings)
        keeping = asyncio.create_task(keep(settings, address, [], stop))
        try:
            await together.until(lambda: all_listen(psutil.Process().children()))
            await together.until_up()
            workers = {each.pid for each in psutil.Process().children()}
            hung = psutil.Process(min(workers))
            hung.suspend()
            await together.until(lambda: not hung.is_running() or keeping.done())
            await together.until(lambda: all_listen(psutil.Process().children()))
            await together.until_up()
        finally:
            stop.ask()
            await asyncio.wait_for(keeping, TIMEOUT_S)


async def test_all_workers_lead_a_session_to_the_same_instance(make: Make) -> None:
    scorers = [("session-affinity-scorer", 4), ("queue-scorer", 1)]
    choice = {
        "plugins": [{"type": name} for name, _ in scorers],
        "schedulingProfiles": [
            {
                "name": "decode",
                "plugins": [{"pluginRef": name, "weight": weight} for name, weight in scorers],
            }
        ],
    }
    t = await make(pds=3, choice=choice)
    body = {"messages": [{"role": "user", "content": "hi"}]}

    async def ask(**headers: str) -> None:
        response = await t.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200

    for _ in range(24):
        await ask(**{"x-session-id": "s"})
    assert sorted(len(pd.received) for pd in t.pds) == [0, 0, 24]
    for _ in range(24):
        await ask()
    assert min(len(pd.received) for pd in t.pds) > 0


@pytest.mark.parametrize("admin", [False, True])
async def test_the_status_page_shows_what_all_processes_know(make: Make, admin: bool) -> None:
    with reserve("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    together = await make(encoders=1, **({"admin_port": port} if admin else {}))
    url = f"http://127.0.0.1:{port}" if admin else together.url
    key = secret().page_key(until=time.time() + 3600)

    async def told() -> Any:
        headers = {"authorization": f"Bearer {key}"}
        answer = await together.client.get(f"{url}/status.json", headers=headers)
        return answer.json()

    for _ in range(8):
        await together.chat(TEXT, RED)
    found = await told()
    assert found["processes"] == {"shown": 2, "silent": 0}
    assert sum(pair["count"] for pair in found["pairs"]) == 8
