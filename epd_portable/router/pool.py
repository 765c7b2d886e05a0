"""The instances as the router sees them: health, load and HTTP connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Literal

import anyio
import httpx

from epd_portable.config.secret import INSTANCE_TOKEN_HEADER, Secret
from epd_portable.router.policy import choose_encoder, choose_pd
from epd_portable.router.settings import InstanceSettings, Role, RouterSettings

logger = logging.getLogger(__name__)

PROBES_UNTIL_DOWN = 3
"""Silent probes in a row after which an instance counts as down: a busy one may miss one."""

KEEPALIVE_S = 2.0
"""Idle connections are dropped well before the five seconds after which servers close them."""


class _Connections(httpx.AsyncHTTPTransport):
    """Connections whose failures are all ``httpx.RequestError``."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request.

        Raises:
            httpx.RequestError: Also for a connection that is reset in the moment in which it is
                made: anyio (4.16) then has no socket any more to ask for its address.
        """
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError(f"reset while connecting: {error}", request=request) from error


State = Literal["joining", "up", "down", "draining"]
"""``joining``: healthy, but not warmed up yet. ``draining``: gets nothing more, and leaves when
what it works on has ended."""


class Instance:
    """One instance; down until a probe succeeds, joining until it was introduced.

    Args:
        settings: Where it is and what it serves.
        client: Connections to its OpenAI server.
        registered: See below.
        warm_up: It has to be introduced, whenever its process has been started.

    Attributes:
        settings: Where it is and what it serves.
        name: From the settings.
        role: From the settings.
        control: ZMQ address of its control channel, or empty.
        client: Connections to its OpenAI server.
        registered: It came while the router ran, and is forgotten when it stays away.
        in_flight: Requests or jobs it works on for this router.
        reason: Why it is down.
        problem: What went wrong when it was warmed up, or empty.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        client: httpx.AsyncClient,
        *,
        registered: bool = False,
        warm_up: bool = False,
    ) -> None:
        self.settings = settings
        self.name: str = settings.name
        self.role: str = settings.role
        self.control = settings.control
        self.client = client
        self.registered = registered
        self.in_flight = 0
        self.reason = "not probed yet"
        self.problem = ""
        self._holds = 0
        self._warm_up = warm_up
        self._introduced = not warm_up
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._probe_now = asyncio.Event()
        self._silent_probes = 0

    @property
    def healthy(self) -> bool:
        """Whether it answers probes."""
        return self._up.is_set()

    @property
    def state(self) -> State:
        """What it is to this router."""
        if self._draining:
            return "draining"
        if not self.healthy:
            return "down"
        return "up" if self._introduced else "joining"

    @property
    def usable(self) -> bool:
        """Whether clients' requests may be sent to it."""
        return self.state == "up"

    @property
    def is_introduced(self) -> bool:
        """Whether clients' requests may be sent to this life of it."""
        return self._introduced

    def introduced(self) -> None:
        """Let clients' requests be sent to it until it is gone; nothing if that is so already."""
        self._introduced = self._introduced or self.healthy

    def drain(self) -> None:
        """Send it nothing more."""
        self._draining = True

    def stay(self) -> None:
        """Take back `drain`."""
        self._draining = False

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count one request or job as in flight."""
        self.in_flight += 1
        try:
            with self.held():
                yield
        finally:
            self.in_flight -= 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep it from leaving: something of it is still needed."""
        self._holds += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return as soon as nothing of it is needed."""
        await self._idle.wait()

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
        self._set_down(reason)
        self._probe_now.set()

    async def close(self) -> None:
        """Close its connections; it is down for good."""
        self._set_down("has left")
        await self.client.aclose()

    def _set_down(self, reason: str) -> None:
        self.reason = reason
        self._up.clear()
        self._down.set()

    def _gone(self, reason: str) -> None:
        """Take it for ended: who answers next is a new process."""
        self._introduced = not self._warm_up
        self.mark_down(reason)

    def suspect(self) -> None:
        """Probe it at once: something it did was odd."""
        self._probe_now.set()

    async def comes_up(self, timeout_s: float) -> bool:
        """Wait until it is healthy; tell whether that was within the limit."""
        with anyio.move_on_after(timeout_s):
            await self._up.wait()
        return self.healthy

    async def wait_up(self) -> None:
        """Return as soon as it is healthy."""
        await self._up.wait()

    async def wait_down(self) -> None:
        """Return as soon as it is not healthy."""
        await self._down.wait()

    async def probe(self, timeout_s: float) -> None:
        """Ask for ``/health`` once and mark the instance accordingly."""
        if self.client.is_closed:
            return
        try:
            response = await self.client.get("/health", timeout=timeout_s)
        except httpx.TimeoutException:
            self._silent_probes += 1
            if self._silent_probes >= PROBES_UNTIL_DOWN:
                self.mark_down(f"{self._silent_probes} health probes without answer")
        except httpx.RequestError as error:
            self._gone(f"health probe: {describe(error)}")
        else:
            if response.is_success:
                self.mark_up()
            else:
                self._gone(f"health probe answered {response.status_code}")

    async def keep_probing(self, interval_s: float, timeout_s: float) -> None:
        """Probe until cancelled: every interval, and early when something was odd."""
        while True:
            self._probe_now.clear()
            await self.probe(timeout_s)
            if not self.healthy:
                self._probe_now.clear()
            with anyio.move_on_after(interval_s):
                await self._probe_now.wait()


class Pool:
    """The instances that there are, each probed from `add` to `remove`."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._instances: dict[str, Instance] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, in the order in which they came."""
        return tuple(self._instances.values())

    def get(self, name: str) -> Instance | None:
        """Return the instance of that name."""
        return self._instances.get(name)

    def add(self, settings: InstanceSettings, *, registered: bool = False) -> Instance:
        """Take in an instance and probe it in the background; from within the event loop."""
        assert settings.name not in self._instances
        client = _client(settings, self._settings)
        instance = Instance(settings, client, registered=registered, warm_up=self._settings.warm_up)
        self._instances[instance.name] = instance
        interval_s, timeout_s = self._settings.probe_interval_s, self._settings.probe_timeout_s
        self._probing[instance.name] = asyncio.create_task(
            instance.keep_probing(interval_s, timeout_s)
        )
        return instance

    async def remove(self, name: str) -> None:
        """Forget an instance; its connections are closed."""
        instance = self._instances.pop(name)
        probing = self._probing.pop(name)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        await instance.close()

    def of_role(self, role: Role) -> list[Instance]:
        """Return all instances of one role."""
        return [instance for instance in self.instances if instance.role == role]

    def encoder(self, mm_hash: str, *, exclude: Collection[str] = ()) -> Instance | None:
        """Return the usable encode instance that should have an item."""
        usable = self._usable("encode", exclude)
        loads = {name: instance.in_flight for name, instance in usable.items()}
        name = choose_encoder(mm_hash, loads)
        return None if name is None else usable[name]

    def prefill_decode(self, key: str, *, exclude: Collection[str] = ()) -> Instance | None:
        """Return the usable prefill+decode instance that should have a request."""
        usable = self._usable("prefill-decode", exclude)
        loads = {name: instance.in_flight for name, instance in usable.items()}
        name = choose_pd(key, loads)
        return None if name is None else usable[name]

    def _usable(self, role: Role, exclude: Collection[str]) -> dict[str, Instance]:
        return {
            instance.name: instance
            for instance in self.of_role(role)
            if instance.usable and instance.name not in exclude
        }


def describe(error: Exception) -> str:
    """Return an error's class and, if it has one, its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _token(settings: RouterSettings) -> dict[str, str]:
    """Return the header that opens the instances' own servers."""
    if not settings.secret_file:
        return {}
    return {INSTANCE_TOKEN_HEADER: Secret.read(settings.secret_file).instance_token()}


def _client(instance: InstanceSettings, settings: RouterSettings) -> httpx.AsyncClient:
    # The engine bounds its own concurrency; a bound here would only hide its queue.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S
    )
    return httpx.AsyncClient(
        base_url=instance.url,
        # Instances are named one by one: no proxy of the environment may come between.
        trust_env=False,
        transport=_Connections(limits=limits, trust_env=False),
        timeout=httpx.Timeout(settings.idle_timeout_s, connect=settings.connect_timeout_s),
        headers={"accept-encoding": "identity", **_token(settings)},
    )
