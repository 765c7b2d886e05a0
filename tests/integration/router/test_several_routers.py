"""Routers side by side, which share nothing, and the instances that join all of them by a name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from epd_portable.connector.curve import read_keys
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.run.registrar import Registrar
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, ControlEnd, StandIn
from tests.integration.router.test_requests import TEXT
from tests.keyring import secret, secret_file

NAME = "http://routers.example"


class Names:
    """Addresses of one name, as of a headless Service."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def __call__(self, url: str) -> list[str]:
        assert url.startswith(NAME)
        if not self.addresses:
            raise LaunchError("routers.example has no address: Name or service not known")
        return self.addresses


@pytest.fixture
async def routers(build: Build) -> list[Topology]:
    """Two routers of no instances of their own, at one port of two addresses."""
    common = {"encoders": 0, "pds": 0, "registration": True, "port": port_source("0000004b")()}
    return [await build(host=host, **common) for host in ("127.0.0.1", "127.0.0.2")]


@pytest.fixture
async def pd() -> AsyncIterator[StandIn]:
    """An instance of another host."""
    made = StandIn("pd-0@10.0.0.2", "prefill-decode")
    await made.serving.start()
    yield made
    await made.serving.stop()


class Leaving(threading.Event):
    """Lets all leave; notes who waits for it, and how long."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[int, float | None]] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append((threading.get_ident(), timeout))
        return super().wait(timeout)


class Joined:
    """An instance that answers, registered at every address of a name."""

    def __init__(self, instance: StandIn, port: int, names: Names) -> None:
        self._control = ControlEnd(read_keys(secret_file()))
        self._name = instance.name
        self.leaving = Leaving()
        self.said: list[str] = []
        settings = {
            "name": instance.name,
            "role": "prefill-decode",
            "url": instance.serving.url,
            "control": self._control.address,
        }
        self.registrar = Registrar(
            [settings],
            [f"{NAME}:{port}"],
            secret(),
            is_up=lambda name: True,
            join_timeout_s=DEADLINE_S,
            leave_timeout_s=DEADLINE_S,
            say=lambda notice: self.said.append(notice.text),
            resolve=names,
        )
        self.registrar.leaving = self.leaving
        self.registrar.start()

    def looks(self, router: Topology, since: int) -> list[float]:
        """Return how long was waited between looks at a router, once it did not wait for it."""
        key = f"{NAME}:{router.settings.port}", router.settings.host, self._name
        thread = self.registrar._memberships[key].ident
        waits = self.leaving.waits[since:]
        return [each for ident, each in waits if ident == thread and each and each > 0.5]

    async def leave(self) -> None:
        self.leaving.set()
        async with asyncio.timeout(DEADLINE_S):
            while not self.registrar.has_ended():
                await asyncio.sleep(0.02)
        self._control.close()


async def until_status(router: Topology, status: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await router.health()).status_code != status:
            await asyncio.sleep(0.02)


async def test_a_router_that_was_killed_learns_its_members_again_and_the_other_serves_meanwhile(
    routers: list[Topology], pd: StandIn
) -> None:
    stays, killed = routers
    joined = Joined(pd, stays.settings.port, Names("127.0.0.1", "127.0.0.2"))
    for each in routers:
        await until_status(each, 200)
    await killed.router.stop()
    assert (await stays.chat(TEXT)).status_code == 200
    await killed.start_router_again()
    back = len(joined.leaving.waits)
    async with asyncio.timeout(DEADLINE_S):
        while not any("again: the router has restarted" in text for text in joined.said):
            await asyncio.sleep(0.02)
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
    routers: list[Topology], pd: StandIn
) -> None:
    names = Names()
    first, second = routers
    joined = Joined(pd, first.settings.port, names)
    assert joined.registrar.states() == {pd.name: "starting"}
    names.addresses = ["127.0.0.1"]
    await until_status(first, 200)
    assert (await second.health()).status_code == 503
    names.addresses = ["127.0.0.1", "127.0.0.2"]
    await until_status(second, 200)
    # A router that is there keeps its members, whatever the name says.
    names.addresses = ["127.0.0.1"]
    assert (await second.chat(TEXT)).status_code == 200
    await second.router.stop()
    gone = f"{pd.name}: router {NAME}:{second.settings.port} at 127.0.0.2 has gone"
    async with asyncio.timeout(DEADLINE_S):
        while gone not in joined.said:
            await asyncio.sleep(0.02)
    assert any("routers.example has no address" in text for text in joined.said)
    assert (await first.chat(TEXT)).status_code == 200
    await joined.leave()
    await until_status(first, 503)
