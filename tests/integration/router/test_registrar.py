"""The registrar of a launcher whose instances join the router of another, against a real router."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.router_client import RouterClient, RouterClients
from tests import warm
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, StandIn, start_process
from tests.keyring import secret, secret_file

STOP = threading.Event()


@dataclass
class Registrar:
    """A registrar of some instances, at some routers."""

    process: warm.Child
    port: int
    instances: list[StandIn]

    async def says(self, words: str) -> None:
        assert self.process.stdout is not None
        seen = ""
        async with asyncio.timeout(DEADLINE_S):
            while words not in seen:
                line = await asyncio.to_thread(self.process.stdout.readline)
                assert line, f"{words!r} was not said: {seen}"
                seen += line

    async def told(self) -> tuple[int, str, str]:
        """Return the status of what it tells, and state and reason of its first instance."""
        async with httpx.AsyncClient(trust_env=False) as client:
            health = await client.get(f"http://127.0.0.1:{self.port}/health")
        seen = health.json()["instances"][self.instances[0].name]
        return health.status_code, seen["state"], seen["reason"]

    async def until_told(self, status: int, state: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.told())[:2] != (status, state):
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self.process.wait, DEADLINE_S) == 0


@contextlib.asynccontextmanager
async def registrar(*routers: Topology, port: int, count: int = 1) -> AsyncIterator[Registrar]:
    """Run one whose instances are of another host."""
    instances = [StandIn(f"encode-{number}@10.0.0.2", "encode") for number in range(count)]
    for each in instances:
        await each.serving.start()
    settings = RegistrarSettings(
        routers=tuple(each.router.url for each in routers),
        secret_file=secret_file(),
        port=port,
        instances=tuple(
            {"name": each.name, "role": "encode", "url": each.serving.url} for each in instances
        ),
        join_timeout_s=30,
        leave_timeout_s=30,
    )
    words = ("-m", "epd_portable.launch.run.registrar", "--settings", settings.as_json())
    process = start_process(*words, stdout=subprocess.PIPE)
    try:
        yield Registrar(process, port, instances)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait, DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()
        for each in instances:
            await each.serving.stop()


async def test_instances_join_stay_and_leave_with_their_launcher(build: Build) -> None:
    t = await build(registration=True)
    async with registrar(t, port=port_source("0000002b")()) as joined:
        name = joined.instances[0].name
        await joined.says(f"{name} has joined")
        assert await joined.told() == (200, "up", "")
        await t.until_health(lambda seen: seen[name]["state"] == "up")
        # It tells what the router says, not what it was once told.
        client = RouterClient(t.router.url, secret())
        await asyncio.to_thread(client.drain, name, timeout_s=DEADLINE_S, until=STOP)
        await joined.until_told(503, "draining")
        await asyncio.to_thread(client.resume, name)
        await joined.until_told(200, "up")
        await t.router.stop()
        await joined.says("cannot be reached")
        await t.start_router_again()
        await joined.says("again: the router has restarted")
        # Somebody lets it go: it stays away until its launcher is started again.
        await asyncio.to_thread(client.leave, name, timeout_s=DEADLINE_S)
        await joined.says("joins again when it is started again")
        assert name not in (await t.health()).json()["instances"]
        status, state, reason = await joined.told()
        assert (status, state) == (503, "gone") and "has removed" in reason
        await joined.end()


async def test_instances_join_drain_and_leave_several_routers_alike(build: Build) -> None:
    routers = [await build(registration=True) for _ in range(2)]
    async with registrar(*routers, port=port_source("0000002d")(), count=2) as joined:
        names = [each.name for each in joined.instances]
        for each in routers:
            await each.until_health(
                lambda seen: all(seen.get(name, {}).get("state") == "up" for name in names)
            )
        await joined.until_told(200, "up")
        clients = [RouterClient(each.router.url, secret()) for each in routers]
        both = RouterClients([each.router.url for each in routers], secret())
        assert await asyncio.to_thread(
            both.each, lambda one: one.drain(names[0], timeout_s=DEADLINE_S, until=STOP)
        ) == [True, True]
        for each in routers:
            health = await each.health()
            assert health.json()["instances"][names[0]]["state"] == "draining"
        await joined.until_told(503, "draining")
        await asyncio.to_thread(both.each, lambda one: one.resume(names[0]))
        await joined.until_told(200, "up")
        # At one of them it is not up: that one's answer is told.
        await asyncio.to_thread(clients[1].drain, names[0], timeout_s=DEADLINE_S, until=STOP)
        await joined.until_told(503, "draining")
        await joined.end()
        for each in routers:
            assert not set(names) & (await each.health()).json()["instances"].keys()
