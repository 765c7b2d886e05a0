"""How the router finds out how its instances are, without asking more than it has to."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from epd_portable.placement.instances import PROBES_UNTIL_DOWN, EndpointPool, Instance
from epd_portable.router.fleet.health_probes import JITTER, HealthProbes
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.settings import InstanceSettings, RouterSettings
from epd_portable.wire.outcomes import FailureKind
from tests.integration.front.web import Answer, Site, once, plain
from tests.integration.router.stand_in import DEADLINE_S, until

WELL = plain(b"", "connection: close")
UNAVAILABLE = WELL.replace(b"200 OK", b"503 No")


class Asked(Site):
    """A server that is asked how it is."""

    def answers(self, how: bytes | Answer) -> None:
        self.pages["/health"] = how

    @property
    def count(self) -> int:
        return len(self.heads)

    async def until_asked(self, count: int) -> None:
        await until(lambda: self.count >= count)


class Probed:
    """Instances that are probed, at servers that count."""

    def __init__(self) -> None:
        self.instances = EndpointPool()
        self.upstream = Upstream()
        self.probes: HealthProbes | None = None
        self.servers: list[Asked] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, count: int = 1, *, interval_s: float, timeout_s: float = 5.0) -> None:
        settings = RouterSettings.model_validate(
            {
                "port": 0,
                "model": "demo",
                "instances": (),
                "probe_interval_s": interval_s,
                "probe_timeout_s": timeout_s,
            }
        )
        self.probes = HealthProbes(settings, self.instances, self.upstream)
        for _ in range(count):
            await self.come()

    async def come(self) -> tuple[Instance, Asked]:
        server = Asked()
        server.answers(WELL)
        await server.start()
        self.servers.append(server)
        return self.add(f"http://127.0.0.1:{server.port}"), server

    def add(self, url: str) -> Instance:
        name = f"i-{len(self.instances)}"
        instance = self.instances.add(InstanceSettings(name=name, role="encode", url=url))
        assert self.probes is not None
        self.tasks.append(asyncio.create_task(self.probes.watch(instance)))
        return instance

    @property
    def first(self) -> Instance:
        return self.instances.all[0]

    async def until(self, condition: Callable[[Instance], bool]) -> None:
        """Wait until something is true of the first instance."""
        await until(lambda: condition(self.first))


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    made = Probed()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)
    await made.upstream.close()
    for server in made.servers:
        await server.stop()


async def look(probed: Probed, instance: Instance) -> None:
    assert probed.probes is not None
    await probed.probes.look(instance)


async def test_one_that_answers_requests_is_not_asked(probed: Probed) -> None:
    now = [100.0]
    probed.instances = EndpointPool(clock=lambda: now[0])
    await probed.start(2, interval_s=0.1)
    busy, other = probed.servers
    for server in probed.servers:
        await server.until_asked(1)
    probed.first.answered()
    # Both are looked at as often, and for the pool no time passes.
    await other.until_asked(other.count + 2)
    before = busy.count
    await other.until_asked(other.count + 4)
    assert busy.count == before
    now[0] += 1
    await busy.until_asked(before + 1)


async def test_one_that_failed_is_asked_at_once(probed: Probed) -> None:
    await probed.start(interval_s=3600)
    await look(probed, probed.first)
    assert probed.servers[0].count == 1
    probed.first.failed(FailureKind.LOST)
    await probed.until(lambda instance: not instance.suspected)
    assert probed.servers[0].count == 2


async def test_one_that_fails_while_it_is_asked_is_asked_once_more(probed: Probed) -> None:
    await probed.start(interval_s=3600)
    go_on = asyncio.Event()
    await look(probed, probed.first)
    probed.servers[0].answers(once(go_on, WELL))
    probed.first.failed(FailureKind.LOST)
    await probed.servers[0].until_asked(2)
    probed.first.failed(FailureKind.LOST)
    go_on.set()
    await probed.servers[0].until_asked(3)


FAILING = [b"", b"no HTTP at all\r\n\r\n", UNAVAILABLE, UNAVAILABLE.replace(b"503", b"500")]


@pytest.mark.parametrize("answer", FAILING)
async def test_one_that_fails_probes_is_avoided_and_down_after_some(
    probed: Probed, answer: bytes
) -> None:
    await probed.start(interval_s=3600)
    server = probed.servers[0]
    await look(probed, probed.first)
    server.answers(answer)
    for _ in range(PROBES_UNTIL_DOWN - 1):
        await look(probed, probed.first)
    assert (probed.first.healthy, probed.first.preferred) == (True, False)
    assert "health probe" in probed.first.reason
    server.answers(WELL)
    await look(probed, probed.first)
    assert probed.first.preferred
    server.answers(answer)
    for _ in range(PROBES_UNTIL_DOWN):
        assert probed.first.healthy
        await look(probed, probed.first)
    assert not probed.first.healthy


async def test_the_probe_after_one_that_failed_comes_in_its_time(probed: Probed) -> None:
    await probed.start(interval_s=3600)
    await look(probed, probed.first)
    probed.servers[0].answers(UNAVAILABLE)
    probed.first.failed("error")
    await probed.until(lambda instance: "503" in instance.reason)
    await asyncio.sleep(0.3)
    assert probed.servers[0].count == 2
    assert probed.first.healthy


async def test_one_whose_queue_of_connections_is_full_is_silent_and_not_gone(
    probed: Probed,
) -> None:
    await probed.start(0, interval_s=3600, timeout_s=0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        instance = probed.add(f"http://127.0.0.1:{full.getsockname()[1]}")
        instance.seen_well()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        await look(probed, instance)
        assert instance.healthy
        for _ in range(PROBES_UNTIL_DOWN - 1):
            await look(probed, instance)
        assert not instance.healthy
        for each in waiting:
            each.close()


async def test_many_are_asked_less_often(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_portable.router.fleet.health_probes.PROBES_PER_S", 20.0)
    begin_s = time.monotonic()
    await probed.start(10, interval_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while (asked := sum(server.count for server in probed.servers)) < 30:
            await asyncio.sleep(0.01)
    # Each at once, and then every half of a second, less what probes are moved by.
    assert asked <= 10 * (1 + (time.monotonic() - begin_s) / (0.5 * (1 - JITTER)))
