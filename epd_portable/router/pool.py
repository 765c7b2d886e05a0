"""The instances as the router sees them: health, load and HTTP connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator

import httpx

from epd_portable.router.policy import choose_encoder, choose_pd
from epd_portable.router.settings import InstanceSettings, Role, RouterSettings

logger = logging.getLogger(__name__)

PROBES_UNTIL_DOWN = 3
"""Silent probes in a row after which an instance counts as down: a busy one may miss one."""

KEEPALIVE_S = 2.0
"""Idle connections are dropped well before the five seconds after which servers close them."""


class Instance:
    """One instance; down until a probe succeeds.

    Attributes:
        name: From the settings.
        role: From the settings.
        control: ZMQ address of its control channel, or empty.
        client: Connections to its OpenAI server.
        in_flight: Requests or jobs it works on for this router.
    """

    def __init__(self, settings: InstanceSettings, client: httpx.AsyncClient) -> None:
        self.name: str = settings.name
        self.role: str = settings.role
        self.control = settings.control
        self.client = client
        self.in_flight = 0
        self.reason = "not probed yet"
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._probe_now = asyncio.Event()
        self._silent_probes = 0

    @property
    def healthy(self) -> bool:
        """Whether requests may be sent to it."""
        return self._up.is_set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count one request or job as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def mark_up(self) -> None:
        """Let requests be sent to it."""
        self._silent_probes = 0
        if not self.healthy:
            logger.info("instance %s is up", self.name)
        self.reason = ""
        self._down.clear()
        self._up.set()

    def mark_down(self, reason: str) -> None:
        """Send it nothing more until a probe succeeds, which is tried at once."""
        if self.healthy:
            logger.warning("instance %s is down: %s", self.name, reason)
        self.reason = reason
        self._up.clear()
        self._down.set()
        self._probe_now.set()

    def suspect(self) -> None:
        """Probe it at once: something it did was odd."""
        self._probe_now.set()

    async def wait_up(self) -> None:
        """Return as soon as it is healthy."""
        await self._up.wait()

    async def wait_down(self) -> None:
        """Return as soon as it is not healthy."""
        await self._down.wait()

    async def probe(self, timeout_s: float) -> None:
        """Ask for ``/health`` once and mark the instance accordingly."""
        try:
            response = await self.client.get("/health", timeout=timeout_s)
        except httpx.TimeoutException:
            self._silent_probes += 1
            if self._silent_probes >= PROBES_UNTIL_DOWN:
                self.mark_down(f"{self._silent_probes} health probes without answer")
        except httpx.RequestError as error:
            self.mark_down(f"health probe: {describe(error)}")
        else:
            if response.is_success:
                self.mark_up()
            else:
                self.mark_down(f"health probe answered {response.status_code}")

    async def keep_probing(self, interval_s: float, timeout_s: float) -> None:
        """Probe until cancelled: every interval, and early when something was odd."""
        while True:
            self._probe_now.clear()
            await self.probe(timeout_s)
            if not self.healthy:
                self._probe_now.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._probe_now.wait(), interval_s)


class Pool:
    """All instances, probed while the pool is open."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.instances = tuple(
            Instance(instance, _client(instance, settings)) for instance in settings.instances
        )
        self._probing: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Probe every instance once, then go on in the background."""
        interval_s, timeout_s = self._settings.probe_interval_s, self._settings.probe_timeout_s
        await asyncio.gather(*(instance.probe(timeout_s) for instance in self.instances))
        self._probing = [
            asyncio.create_task(instance.keep_probing(interval_s, timeout_s))
            for instance in self.instances
        ]

    async def close(self) -> None:
        """Stop probing and close every connection."""
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)
        for instance in self.instances:
            await instance.client.aclose()

    def of_role(self, role: Role) -> list[Instance]:
        """Return all instances of one role."""
        return [instance for instance in self.instances if instance.role == role]

    def encoder(self, mm_hash: str, *, exclude: Collection[str] = ()) -> Instance | None:
        """Return the healthy encode instance that should have an item."""
        usable = self._usable("encode", exclude)
        loads = {name: instance.in_flight for name, instance in usable.items()}
        name = choose_encoder(mm_hash, loads)
        return None if name is None else usable[name]

    def prefill_decode(self, key: str, *, exclude: Collection[str] = ()) -> Instance | None:
        """Return the healthy prefill+decode instance that should have a request."""
        usable = self._usable("prefill-decode", exclude)
        loads = {name: instance.in_flight for name, instance in usable.items()}
        name = choose_pd(key, loads)
        return None if name is None else usable[name]

    def _usable(self, role: Role, exclude: Collection[str]) -> dict[str, Instance]:
        return {
            instance.name: instance
            for instance in self.of_role(role)
            if instance.healthy and instance.name not in exclude
        }


def describe(error: Exception) -> str:
    """Return an error's class and, if it has one, its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _client(instance: InstanceSettings, settings: RouterSettings) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=instance.url,
        # Instances are named one by one: no proxy of the environment may come between.
        trust_env=False,
        # The engine bounds its own concurrency; a bound here would only hide its queue.
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S
        ),
        timeout=httpx.Timeout(settings.idle_timeout_s, connect=settings.connect_timeout_s),
        headers={"accept-encoding": "identity"},
    )
