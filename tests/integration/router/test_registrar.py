"""The registrar of a launcher whose instances join routers of others, against real routers.

Several routers stand side by side and share nothing: at their own addresses, or at those of a name.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from epd_portable.connector.curve import read_keys
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.run.registrar import Registrar
from epd_portable.launch.run.router_client import RouterClient, RouterClients
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, ControlEnd, StandIn, until
from tests.integration.router.test_requests import TEXT
from tests.keyring import secret, secret_file

NAME = "http://routers.example"
STOP = threading.Event()


class Names:
    """Addresses of one name, as of a headless Service."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def __call__(self, url: str) -> list[str]:
        assert url.startswith(NAME)
        if not self.addresses:
            raise LaunchError("routers.example has no address: Name or service not known")
        return self.addresses


class Leaving(threading.Event):
    """Lets all leave; notes who waits for it, and how long."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[int, float | None]] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append((threading.get_ident(), timeout))
        return super().wait(timeout)


class Joining:
    """A registrar of some instances of another host, at some routers, and what it says."""

    def __init__(self, instances: list[StandIn], urls: Sequence[str], **names: Names) -> None:
        self._control = ControlEnd(read_keys(secret_file()))
        self._url = urls[0]
        self.names = [each.name for each in instances]
        self.said: list[str] = []
        settings: list[dict[str, Any]] = [
            {"name": each.name, "role": each.role, "url": each.serving.url} for each in instances
        ]
        for each in settings:
            each |= {"control": self._control.address} if each["role"] != "encode" else {}
        self.registrar = Registrar(
            settings,
            urls,
            secret(),
            is_up=lambda name: True,
            leave_timeout_s=DEADLINE_S,
            say=lambda notice: self.said.append(notice.text),
            **names,
        )
        self.leaving = self.registrar.leaving = Leaving()
        self.registrar.start()

    async def says(self, words: str) -> None:
        """Wait until it has said something since it was last waited for."""
        await until(lambda: any(words in text for text in self.said))
        self.said.clear()

    async def until(self, state: str) -> None:
        """Wait until that is the state of the first instance."""
        await until(lambda: self.registrar.states()[self.names[0]] == state)

    def looks(self, router: Topology, since: int) -> list[float]:
        """Return how long was waited between looks at a router, once it did not wait for it."""
        key = self._url, router.settings.host, self.names[0]
        thread = self.registrar._memberships[key].ident
        waits = self.leaving.waits[since:]
        return [each for ident, each in waits if ident == thread and each and each > 0.5]

    async def leave(self) -> None:
        self.leaving.set()
        await until(self.registrar.has_ended)
        self._control.close()


Join = Callable[..., Awaitable[Joining]]


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Return what lets an instance, or several, join routers by their URLs."""
    instances: list[StandIn] = []
    joined: list[Joining] = []

    async def begin(*urls: str, role: str = "encode", count: int = 1, **names: Names) -> Joining:
        instances.extend(StandIn(f"{role}-{number}@10.0.0.2", role) for number in range(count))
        await asyncio.gather(*(each.serving.start() for each in instances))
        joined.append(Joining(instances, urls, **names))
        return joined[-1]

    yield begin
    for each in joined:
        each.leaving.set()
    await asyncio.gather(*(each.serving.stop() for each in instances))


@pytest.fixture
async def routers(build: Build) -> list[Topology]:
    """Two routers of no instances of their own, at one port of two addresses."""
    common = {"encoders": 0, "pds": 0, "registration": True, "port": port_source("0000004b")()}
    return [await build(host=host, **common) for host in ("127.0.0.1", "127.0.0.2")]


async def until_status(router: Topology, status: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await router.health()).status_code != status:
            await asyncio.sleep(0.02)


async def test_instances_join_stay_and_leave_with_their_launcher(build: Build, join: Join) -> None:
    t = await build(registration=True)
    joined = await join(t.router.url)
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
    await joined.leave()


async def test_instances_join_drain_and_leave_several_routers_alike(
    build: Build, join: Join
) -> None:
    routers = [await build(registration=True) for _ in range(2)]
    urls = [each.router.url for each in routers]
    joined = await join(*urls, count=2)
    names = joined.names
    for each in routers:
        await each.until_health(
            lambda seen: all(seen.get(name, {}).get("state") == "up" for name in names)
        )
    await joined.until("up")
    both = RouterClients(urls, secret())
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
    second = RouterClient(urls[1], secret())
    await asyncio.to_thread(second.drain, names[0], timeout_s=DEADLINE_S, until=STOP)
    await joined.until("draining")
    await joined.leave()
    for each in routers:
        assert not set(names) & (await each.health()).json()["instances"].keys()


async def test_a_router_that_was_killed_learns_its_members_again_and_the_other_serves_meanwhile(
    routers: list[Topology], join: Join
) -> None:
    stays, killed = routers
    names = Names("127.0.0.1", "127.0.0.2")
    url = f"{NAME}:{stays.settings.port}"
    joined = await join(url, role="prefill-decode", resolve=names)
    for each in routers:
        await until_status(each, 200)
    await killed.router.stop()
    assert (await stays.chat(TEXT)).status_code == 200
    await killed.start_router_again()
    back = len(joined.leaving.waits)
    await joined.says("again: the router has restarted")
    # Within two seconds: at the first or the second look, with one second before each.
    looks = joined.looks(killed, back)
    assert len(looks) <= 2 and set(looks) <= {1.0}
    await until_status(killed, 200)
    assert (await killed.chat(TEXT)).status_code == 200
    await joined.leave()
    # It has left both.
    for each in routers:
        await until_status(each, 503)


async def test_routers_come_and_go_with_the_addresses_of_their_name(
    routers: list[Topology], join: Join
) -> None:
    names = Names()
    first, second = routers
    url = f"{NAME}:{first.settings.port}"
    joined = await join(url, role="prefill-decode", resolve=names)
    [name] = joined.names
    assert joined.registrar.states() == {name: "starting"}
    await joined.says("routers.example has no address")
    names.addresses = ["127.0.0.1"]
    await until_status(first, 200)
    assert (await second.health()).status_code == 503
    names.addresses = ["127.0.0.1", "127.0.0.2"]
    await until_status(second, 200)
    # A router that is there keeps its members, whatever the name says.
    names.addresses = ["127.0.0.1"]
    assert (await second.chat(TEXT)).status_code == 200
    await second.router.stop()
    await joined.says(f"{name}: router {url} at 127.0.0.2 has gone")
    assert (await first.chat(TEXT)).status_code == 200
    await joined.leave()
    await until_status(first, 503)
