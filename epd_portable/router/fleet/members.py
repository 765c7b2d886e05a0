"""Instances that come and go: who may join, when one gets work or no more, when it is forgotten.

How each of them is between that, probes say.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import logging
import random
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from pydantic import ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.config.secret import Secret, SignatureCheck
from epd_portable.errors import ConfigError, RequestError
from epd_portable.log import say_failure
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.instances import Fleet, Instance
from epd_portable.router.fleet.tally import MAX_INSTANCES
from epd_portable.router.http.replies import Reply, json_reply
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.http.upstream_connection import Fault, UpstreamError
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.settings import InstanceSettings, RouterSettings

logger = logging.getLogger(__name__)
_said = say_failure(logger, "watching an instance failed")

INSTANCES_PATH = "/epd/instances"
MAX_BODY_BYTES = 64 * 1024
"""Of a request at ``/epd/``."""

PROBES_PER_S = 100.0
"""Of all instances together: many of them are asked less often than ``probe_interval_s`` says."""
PROBES_AT_ONCE = 64
TOGETHER_S = 0.1
"""HealthProbes that are due within this are sent together: to wake up costs more than a probe."""
JITTER = 0.1
"""Part of an interval by which probes are moved, so that they do not come in bursts."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between two introductions of an instance that is lost in the middle of them."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Introduce = Callable[[Instance], Awaitable[None]]
"""Lets a healthy instance meet the others, and says by `Instance.introduced` when it gets clients'
requests; returns when nothing is left to do for it. It may be lost meanwhile."""

States: TypeAlias = dict[str, dict[str, Any]]
"""How each instance is, by name."""

_NETWORKS: Mapping[str, tuple[str, ...]] = {
    "loopback": ("127.0.0.0/8", "::1/128"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
}
_SPECIAL: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        # This host, the link (where clouds tell secrets of a machine), groups, and reserved ones.
        *("0.0.0.0/8", "::/128", "169.254.0.0/16", "fe80::/10"),
        *("224.0.0.0/4", "ff00::/8", "240.0.0.0/4"),
    )
)


class MemberList(Protocol):
    """Knows the instances: `Members`, or whoever asks the process in which those are."""

    async def open(self) -> None:
        """Begin: afterwards instances can be chosen."""

    async def close(self) -> None:
        """End."""

    async def states(self, method: str, target: str, headers: Mapping[str, str]) -> States | None:
        """Return how each instance is; ``None`` to who does not hold the secret.

        Args:
            method: Of the request, which has no body.
            target: Path and query, as they came.
            headers: Names in lower case.
        """

    async def handle(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Answer a request at ``/epd/``, for holders of the secret.

        Answers carry a name of this router: another one knows nobody who has registered.

        Args:
            method: Of HTTP.
            target: Path and query, as they came.
            headers: Names in lower case.
            body: Whole.

        Raises:
            RequestError: It is refused.
        """


class HealthProbes:
    """Asks instances for ``/health``: each every interval, and at once when a request failed.

    One that has answered a request since is not asked.

    Args:
        settings: Of the router.
        instances: Who is asked; those that come later too.
        upstream: Connections to them.
    """

    def __init__(self, settings: RouterSettings, instances: Fleet, upstream: Upstream) -> None:
        self._interval_s = settings.probe_interval_s
        self._timeout_s = settings.probe_timeout_s
        self._instances = instances
        self._upstream = upstream
        self._due: dict[Instance, float] = {}
        self._queue: list[tuple[float, int, Instance]] = []
        self._number = itertools.count()
        self._asked: dict[Instance, bool] = {}  # Whether once more, at once.
        self._wake = asyncio.Event()
        self._at_once = asyncio.Semaphore(PROBES_AT_ONCE)
        self._asking: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        instances.watch(self._changed)

    def start(self) -> None:
        """Begin; from within the event loop."""
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End."""
        tasks = [*self._asking, *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, instance: Instance) -> None:
        """Ask an instance once, and let it know what was seen."""
        saw = await self._see(instance)
        if self._is_there(instance):
            self._let_know(instance, saw)

    async def _see(self, instance: Instance) -> Callable[[], None]:
        """Ask an instance once; return what lets it know what was seen."""
        try:
            url = instance.url + "/health"
            status, _, _ = await self._upstream.ask("GET", url, timeout_s=self._timeout_s)
        except UpstreamError as error:
            if error.fault is Fault.OWN:
                return _nothing
            if error.fault is Fault.SILENT:
                return instance.seen_silent
            if isinstance(error.__cause__, ConnectionRefusedError):
                return partial(instance.seen_gone, f"health probe: {error}")
            return partial(instance.seen_failing, str(error))
        if 200 <= status < 300:
            return instance.seen_well
        return partial(instance.seen_failing, f"answered {status}")

    def _is_there(self, instance: Instance) -> bool:
        return self._instances.get(instance.name) is instance

    def _changed(self, instance: Instance) -> None:
        if not self._is_there(instance):
            self._due.pop(instance, None)
            self._asked.pop(instance, None)
        elif instance not in self._due:
            self._set_due(instance, self._next(instance))
        elif instance.suspected and instance in self._asked:
            # The answer that is on its way may be from before the failure.
            self._asked[instance] = True
        elif instance.suspected:
            self._set_due(instance, self._instances.clock())
            self._wake.set()

    def _next(self, instance: Instance) -> float:
        interval_s = self._interval_s
        if not instance.suspected:
            interval_s = max(interval_s, len(self._instances) / PROBES_PER_S)
        return self._instances.clock() + interval_s * random.uniform(1 - JITTER, 1 + JITTER)

    def _set_due(self, instance: Instance, at: float) -> None:
        self._due[instance] = at
        heapq.heappush(self._queue, (at, next(self._number), instance))

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            now = self._instances.clock()
            while self._queue and self._queue[0][0] <= now:
                at, _, instance = heapq.heappop(self._queue)
                if self._due.get(instance) == at:
                    self._ask(instance, now)
            await _set_within(self._wake, TOGETHER_S)

    def _ask(self, instance: Instance, now: float) -> None:
        well = instance.healthy and not instance.suspected
        if well and now - instance.answered_at < self._interval_s:
            self._set_due(instance, self._next(instance))
            return
        if instance in self._asked:
            return
        self._asked[instance] = False
        task = asyncio.create_task(self._probe(instance))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        task.add_done_callback(_said)

    async def _probe(self, instance: Instance) -> None:
        saw: Callable[[], None] = _nothing
        try:
            async with self._at_once:
                saw = await self._see(instance)
        finally:
            again = self._asked.pop(instance, False)
            if self._is_there(instance):
                self._let_know(instance, saw, again=again)

    def _let_know(
        self, instance: Instance, saw: Callable[[], None], *, again: bool = False
    ) -> None:
        saw()
        # Also of one that fails the next probe comes in its time: what ails it may pass.
        self._set_due(instance, self._instances.clock() if again else self._next(instance))
        if again:
            self._wake.set()


class Members:
    """Takes instances in and lets them go, while requests are served.

    Args:
        settings: Of the router; the instances in them come first.
        instances: What the rest of the router chooses from.
        upstream: Connections to them.
        control: Gets a channel to each prefill+decode instance.
        metrics: Forget those that have left.
        introduce: Called for each instance when it is healthy, for each life of its process until
            it is introduced.
        secret: Its holders may ask at ``/epd/``.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: Fleet,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        introduce: Introduce,
        secret: Secret,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._control = control
        self._metrics = metrics
        self._introduce = introduce
        self._probes = HealthProbes(settings, instances, upstream)
        self._networks = _networks(settings.instance_networks)
        self._check = SignatureCheck(secret)
        self._name = uuid.uuid4().hex
        self._changing: weakref.WeakValueDictionary[str, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._tasks: dict[Instance, dict[str, asyncio.Task[None]]] = {}

    async def open(self) -> None:
        """Take in the instances of the settings and look once whether they are there.

        Raises:
            ConfigError: A control address cannot be used.
        """
        admitted = [self._admit(instance) for instance in self._settings.instances]
        await asyncio.gather(*map(self._probes.look, admitted))
        self._probes.start()

    async def close(self) -> None:
        """Let everybody go at once."""
        await self._probes.close()
        for instance in self._instances.all:
            async with self._changing_of(instance.name):
                await self._forget(instance)

    # What may be asked for.

    async def join(self, settings: InstanceSettings) -> tuple[Instance, bool]:
        """Take in an instance; one that is there already stays, also if it was about to leave.

        Returns:
            The instance, and whether it is new.

        Raises:
            ConfigError: Its control address cannot be used.
            RequestError: 403; its addresses are not where instances may be. 409; another one of
                that name is healthy, or there are too many.
        """
        await self._check_networks(settings)
        async with self._changing_of(settings.name):
            known = self._instances.get(settings.name)
            if known is not None:
                await self._probes.look(known)
                if known.healthy and known.settings == settings:
                    self._take_back(known)
                    return known, False
                if known.healthy:
                    raise RequestError(
                        f"instance {settings.name!r} is at {known.url} and healthy: "
                        "take another name, or let that one leave first",
                        status=409,
                        code="name_taken",
                    )
                await self._forget(known)
            if len(self._instances) >= MAX_INSTANCES:
                raise RequestError(
                    f"there are {MAX_INSTANCES} instances, and no more are taken: let some leave",
                    status=409,
                    code="too_many_instances",
                )
            instance = self._admit(settings, registered=True)
            logger.info("instance %s at %s has joined", instance.name, settings.url)
            await self._probes.look(instance)
            return instance, True

    def drain(self, name: str) -> Instance:
        """Send an instance nothing more; it stays known.

        Raises:
            RequestError: 404; there is none of that name.
        """
        instance = self._named(name)
        if instance.state != "draining":
            logger.info("instance %s drains", name)
            self._send_no_more(instance)
        return instance

    def leave(self, name: str) -> Instance:
        """Send an instance nothing more, and forget it when what it works on has ended.

        Raises:
            RequestError: 404; there is none of that name.
        """
        instance = self._named(name)
        if "leaving" not in self._tasks[instance]:
            logger.info("instance %s leaves", name)
            self._send_no_more(instance)
            self._start(instance, "leaving", self._see_off(instance))
        return instance

    async def resume(self, name: str) -> Instance:
        """Take back `drain` and `leave`, and look at the instance.

        Raises:
            RequestError: 404; there is none of that name.
        """
        async with self._changing_of(name):
            instance = self._named(name)
            await self._probes.look(instance)
            self._take_back(instance)
            return instance

    # Over HTTP.

    async def states(self, method: str, target: str, headers: Mapping[str, str]) -> States | None:
        """See `MemberList`."""
        try:
            self._check.check(headers.get("authorization", ""), method, target)
        except RequestError:
            return None
        return {
            instance.name: {
                "role": instance.role,
                "url": instance.url,
                "healthy": instance.healthy,
                "state": instance.state,
                "in_flight": instance.load,
                **({"reason": instance.reason} if instance.reason else {}),
                **({"problem": instance.problem} if instance.problem else {}),
            }
            for instance in self._instances.all
        }

    async def handle(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """See `MemberList`."""
        self._check.check(headers.get("authorization", ""), method, target, body)
        path = target.partition("?")[0]
        if path == INSTANCES_PATH:
            return await self._at_all(method, body)
        if not path.startswith(f"{INSTANCES_PATH}/"):
            raise _no_such(path)
        name, _, what = path.removeprefix(f"{INSTANCES_PATH}/").partition("/")
        return await self._at_one(method, name, what)

    async def _at_all(self, method: str, body: bytes) -> Reply:
        if method == "GET":
            shown = [_shown(instance) for instance in self._instances.all]
            return json_reply({"router": self._name, "instances": shown})
        _check_method(method, "GET", "POST")
        self._check_registration()
        try:
            settings = InstanceSettings.model_validate_json(body)
            instance, new = await self.join(settings)
        except ValidationError as error:
            problems = in_one_line(error, whole="body")
            raise RequestError(
                f"instance to register: {problems}", status=400, code="invalid_instance"
            ) from error
        except ConfigError as error:
            raise RequestError(str(error), status=400, code="invalid_instance") from error
        return json_reply({"router": self._name, **_shown(instance)}, 201 if new else 200)

    async def _at_one(self, method: str, name: str, what: str) -> Reply:
        if what == "":
            _check_method(method, "DELETE")
            self._check_registration()
            return json_reply(_shown(self.leave(name)), 202)
        if what == "drain":
            _check_method(method, "POST")
            return json_reply(_shown(self.drain(name)), 202)
        if what == "resume":
            _check_method(method, "POST")
            return json_reply(_shown(await self.resume(name)))
        raise _no_such(f"{INSTANCES_PATH}/{name}/{what}")

    def _check_registration(self) -> None:
        if not self._settings.registration:
            raise RequestError(
                "this router registers no instances: name a secret_file in its topology file",
                status=404,
                code="registration_off",
            )

    async def _check_networks(self, settings: InstanceSettings) -> None:
        """Refuse an instance at which this router has nothing to ask.

        Raises:
            RequestError: 403; says which address, and the key.
        """
        for address in (settings.url, settings.control):
            if not address or address.startswith("ipc://"):
                continue
            for found in await _resolved(settings.name, address):
                if not _lies_in(found, self._networks):
                    allowed = ", ".join(self._settings.instance_networks)
                    at = "" if str(found) in address else f", which is at {found}"
                    raise RequestError(
                        f"instance {settings.name!r}: {address}{at}, is in no network of "
                        f"router.instance_networks ({allowed}): add the network there if this "
                        "router shall ask it",
                        status=403,
                        code="network_not_allowed",
                    )

    # What is done.

    def _named(self, name: str) -> Instance:
        instance = self._instances.get(name)
        if instance is None:
            known = ", ".join(other.name for other in self._instances.all[:64]) or "none"
            raise RequestError(
                f"there is no instance {name[:128]!r}; there are: {known}",
                status=404,
                code="unknown_instance",
            )
        return instance

    def _changing_of(self, name: str) -> asyncio.Lock:
        """Return what is held while an instance of that name comes or goes."""
        return self._changing.setdefault(name, asyncio.Lock())

    def _admit(self, settings: InstanceSettings, *, registered: bool = False) -> Instance:
        if settings.control:
            self._control.connect(settings.name, settings.control)
        instance = self._instances.add(
            settings, registered=registered, warm_up=self._settings.warm_up
        )
        self._tasks[instance] = {}
        self._let_meet(instance)
        if registered:
            self._start(instance, "forgetting", self._forget_when_away(instance))
        return instance

    def _let_meet(self, instance: Instance) -> None:
        if self._settings.warm_up and "meeting" not in self._tasks[instance]:
            self._start(instance, "meeting", self._meet(instance))

    def _send_no_more(self, instance: Instance) -> None:
        self._stop(instance, "meeting")
        instance.drain()

    def _take_back(self, instance: Instance) -> None:
        self._stop(instance, "leaving")
        instance.resume()
        self._let_meet(instance)

    def _stop(self, instance: Instance, what: str) -> None:
        if task := self._tasks[instance].pop(what, None):
            task.cancel()

    def _start(self, instance: Instance, what: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[instance][what] = task
        task.add_done_callback(_said)

    async def _meet(self, instance: Instance) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            await instance.wait_up()
            if not instance.is_introduced:
                await self._introduce(instance)
            if instance.is_introduced:
                await instance.wait_down()
                pause_s = FIRST_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _forget_when_away(self, instance: Instance) -> None:
        limit_s = self._settings.forget_after_s
        await instance.wait_down()
        while await instance.comes_up(limit_s):
            await instance.wait_down()
        logger.warning("instance %s is forgotten: away for %g s", instance.name, limit_s)
        await self._let_go(instance)

    async def _see_off(self, instance: Instance) -> None:
        await instance.wait_idle()
        logger.info("instance %s has left", instance.name)
        await self._let_go(instance)

    async def _let_go(self, instance: Instance) -> None:
        async with self._changing_of(instance.name):
            await self._forget(instance)

    async def _forget(self, instance: Instance) -> None:
        """Drop an instance and end what watches it; for who holds the lock."""
        tasks = set(self._tasks.pop(instance).values()) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._instances.remove(instance.name)
        if instance.control:
            await self._control.disconnect(instance.name)
        self._metrics.forget(instance.name)


def _shown(instance: Instance) -> dict[str, Any]:
    """Return what callers see of an instance."""
    return {
        "name": instance.name,
        "role": instance.role,
        "url": instance.url,
        "control": instance.control,
        "state": instance.state,
        "idle": instance.idle,
        "registered": instance.registered,
        "in_flight": instance.load,
        "reason": instance.reason,
        "problem": instance.problem,
    }


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise RequestError(
            f"{method} is not served at this path, only {' and '.join(allowed)}",
            status=405,
            code="method_not_allowed",
        )


def _no_such(target: str) -> RequestError:
    return RequestError(
        f"there is no {target[:256]!r}; there are {INSTANCES_PATH} (GET, POST) and "
        f"{INSTANCES_PATH}/NAME (DELETE) with /drain and /resume (POST)",
        status=404,
        code="unknown_path",
    )


def _networks(names: Sequence[str]) -> list[Network]:
    written = itertools.chain.from_iterable(_NETWORKS.get(name, (name,)) for name in names)
    return [ipaddress.ip_network(network) for network in written]


def _lies_in(address: Address, networks: Sequence[Network]) -> bool:
    """Tell whether an address is in a network; a special one only in one that names no others."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    special = next((network for network in _SPECIAL if address in network), None)
    return any(
        address in network and (special is None or _within(network, special))
        for network in networks
    )


def _within(inner: Network, outer: Network) -> bool:
    first, last = inner.network_address, inner.broadcast_address
    return first in outer and last in outer


async def _resolved(name: str, url: str) -> set[Address]:
    """Return every address of a URL's host.

    Raises:
        ConfigError: It has none.
    """
    try:
        parts = urlsplit(url)
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port)
    except (OSError, ValueError) as error:
        raise ConfigError(f"instance {name!r}: {url!r} cannot be used: {error}") from error
    return {ipaddress.ip_address(str(each[4][0])) for each in found}


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Return when an event is set, at the latest after a time."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()


def _nothing() -> None:
    """Let nobody know of anything."""
