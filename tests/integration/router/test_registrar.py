"""The registrar of a launcher whose instances join the router of another, against a real router."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from epd_portable.launch.notices import Notice
from epd_portable.launch.run.registrar import Registrar
from epd_portable.launch.run.router_client import RouterClient, RouterClients
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, StandIn
from tests.keyring import secret

STOP = threading.Event()


class Joining:
    """A registrar of some instances, at some routers, and what it says."""

    def __init__(self, instances: list[StandIn], routers: tuple[Topology, ...]) -> None:
        self._notices: list[Notice] = []
        self.names = [each.name for each in instances]
        self.registrar = Registrar(
            [{"name": each.name, "role": "encode", "url": each.serving.url} for each in instances],
            [each.router.url for each in routers],
            secret(),
            is_up=lambda name: True,
            join_timeout_s=30,
            leave_timeout_s=30,
            say=self._notices.append,
        )
        self.registrar.start()

    async def says(self, words: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(words in notice.text for notice in self._notices):
                await asyncio.sleep(0.02)
        self._notices.clear()

    async def until(self, state: str) -> None:
        """Wait until that is the state of the first instance."""
        async with asyncio.timeout(DEADLINE_S):
            while self.registrar.states()[self.names[0]] != state:
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        self.registrar.leaving.set()
        async with asyncio.timeout(DEADLINE_S):
            while not self.registrar.has_ended():
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def registrar(*routers: Topology, count: int = 1) -> AsyncIterator[Joining]:
    """Run one whose instances are of another host."""
    instances = [StandIn(f"encode-{number}@10.0.0.2", "encode") for number in range(count)]
    for each in instances:
        await each.serving.start()
    joining = Joining(instances, routers)
    try:
        yield joining
    finally:
        joining.registrar.leaving.set()
        for each in instances:
            await each.serving.stop()


async def test_instances_join_stay_and_leave_with_their_launcher(build: Build) -> None:
    t = await build(registration=True)
    async with registrar(t) as joined:
        [name] = joined.names
        await joined.says(f"{name} has joined")
        await joined.until("up")
        await t.until_health(lambda seen: seen[name]["state"] == "up")
        client = RouterClient(t.router.url, secret())
        await asyncio.to_thread(client.drain, name, timeout_s=DEADLINE_S, until=STOP)
        await joined.until("draining")
        await asyncio.to_thread(client.resume, name)
        await joined.until("up")
        await t.router.stop()
        await joined.says("cannot be reached")
        await t.start_router_again()
        await joined.says("again: the router has restarted")
        # Somebody lets it go: it stays away until its launcher is started again.
        await asyncio.to_thread(client.leave, name, timeout_s=DEADLINE_S)
        await joined.says("joins again when its launcher is started again")
        await joined.until("gone")
        assert name not in (await t.health()).json()["instances"]
        await joined.end()


async def test_instances_join_drain_and_leave_several_routers_alike(build: Build) -> None:
    routers = [await build(registration=True) for _ in range(2)]
    async with registrar(*routers, count=2) as joined:
        names = joined.names
        for each in routers:
            await each.until_health(
                lambda seen: all(seen.get(name, {}).get("state") == "up" for name in names)
            )
        await joined.until("up")
        clients = [RouterClient(each.router.url, secret()) for each in routers]
        both = RouterClients([each.router.url for each in routers], secret())
        assert await asyncio.to_thread(
            both.each, lambda one: one.drain(names[0], timeout_s=DEADLINE_S, until=STOP)
        ) == [True, True]
        for each in routers:
            health = await each.health()
            assert health.json()["instances"][names[0]]["state"] == "draining"
        await joined.until("draining")
        await asyncio.to_thread(both.each, lambda one: one.resume(names[0]))
        await joined.until("up")
        # At one of them it is not up: that one's answer is told.
        await asyncio.to_thread(clients[1].drain, names[0], timeout_s=DEADLINE_S, until=STOP)
        await joined.until("draining")
        await joined.end()
        for each in routers:
            assert not set(names) & (await each.health()).json()["instances"].keys()
