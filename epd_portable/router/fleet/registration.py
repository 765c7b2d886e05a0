"""Instances that join, drain and leave, over HTTP at ``/epd/instances``, and are forgotten."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import re
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
from pydantic import ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.config.secret import Secret, SignatureCheck
from epd_portable.errors import ConfigError, RequestError
from epd_portable.log import say_failure
from epd_portable.media.addresses import Address, Network
from epd_portable.placement.instances import MAX_INSTANCES, EndpointPool, Instance
from epd_portable.placement.replies import Reply, json_reply
from epd_portable.router.fleet.control import ControlChannels, follow_load
from epd_portable.router.fleet.health_probes import HealthProbes
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.settings import InstanceSettings, RouterSettings

logger = logging.getLogger(__name__)
_said = say_failure(logger, "watching an instance failed")

INSTANCES_PATH = "/epd/instances"
_PATH = re.compile(rf"{INSTANCES_PATH}(?:/(?P<name>[^/]+)(?:/(?P<verb>drain|resume))?)?")
MAX_BODY_BYTES = 64 * 1024
"""Of a request at ``/epd/``."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between two warm-ups of an instance that is lost in the middle of them."""

_NETWORKS: Mapping[str, tuple[str, ...]] = {
    "loopback": ("127.0.0.0/8", "::1/128"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
}


class Registration:
    """Takes instances in and lets them go, while requests are served.

    Every instance has its tasks here, which end when it has left.

    Args:
        warm_up: Warms up a healthy instance, see `WarmUp`; called for each life of its process
            until `Instance.mark_warmed_up`. The instance may be lost meanwhile.
        secret: Of the deployment; its holders may ask at ``/epd/``.
        wants_loads: Whether instances are asked to report their load.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: EndpointPool,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        warm_up: Callable[[Instance], Awaitable[None]],
        secret: Secret,
        *,
        wants_loads: bool = False,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._control = control
        self._metrics = metrics
        self._warm_up = warm_up
        self._wants_loads = wants_loads
        control.on_load = instances.take_report
        self._upstream = upstream
        self._probes = HealthProbes(settings, instances, upstream)
        self._networks = _networks(settings.instance_networks)
        self._check = SignatureCheck(secret)
        self._name = uuid.uuid4().hex
        self._changing = weakref.WeakValueDictionary[str, asyncio.Lock]()
        self._tasks: dict[Instance, dict[str, asyncio.Task[None]]] = {}

    async def open(self) -> None:
        """Take in the instances of the settings and look once whether they are there.

        Raises:
            ConfigError: A control address cannot be used.
        """
        admitted = [self._admit(instance) for instance in self._settings.instances]
        await asyncio.gather(*map(self._probes.look, admitted))

    async def close(self) -> None:
        """Forget all instances at once."""
        for instance in self._instances.all:
            async with self._changing_of(instance.name):
                await self._forget(instance)

    def states(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
        """Return how each instance is, by name; ``None`` to a client without the secret."""
        try:
            self._check.check(headers.get("authorization", ""), method, target)
        except RequestError:
            return None
        return {
            instance.name: {key: value for key, value in instance.shown().items() if value != ""}
            for instance in self._instances.all
        }

    async def handle(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Answer a request at ``/epd/``, for holders of the secret.

        Answers carry a name of this router: another one does not know what has registered.

        Raises:
            RequestError: It is refused.
        """
        self._check.check(headers.get("authorization", ""), method, target, body)
        name, verb = _served(method, target.partition("?")[0])
        if method == "GET":
            shown = [instance.shown() for instance in self._instances.all]
            return json_reply({"router": self._name, "instances": shown})
        if verb == "drain":
            return json_reply(self._drain(name).shown(), 202)
        if verb == "resume":
            return json_reply((await self._resume(name)).shown())
        if not self._settings.registration:
            raise RequestError(
                "this router registers no instances: name a secret_file in its topology file",
                status=404,
                code="registration_off",
            )
        if method == "DELETE":
            return json_reply(self._leave(name).shown(), 202)
        try:
            instance, new = await self._join(InstanceSettings.model_validate_json(body))
        except (ValidationError, ConfigError) as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                problem = f"instance to register: {in_one_line(error, whole='body')}"
            raise RequestError(problem, status=400, code="invalid_instance") from error
        return json_reply({"router": self._name, **instance.shown()}, 201 if new else 200)

    async def _check_networks(self, settings: InstanceSettings) -> None:
        """Refuse an instance at which this router has nothing to ask."""
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

    # What may be asked for.

    async def _join(self, settings: InstanceSettings) -> tuple[Instance, bool]:
        """Take in an instance; one that is there already stays, also if it was about to leave.

        Returns:
            The instance, and whether it is new.
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

    def _drain(self, name: str) -> Instance:
        """Send an instance nothing more; it stays known."""
        instance = self._named(name)
        if instance.state != "draining":
            logger.info("instance %s drains", name)
            self._send_no_more(instance)
        return instance

    def _leave(self, name: str) -> Instance:
        """Send an instance nothing more, and forget it when what it works on has ended."""
        instance = self._named(name)
        if "leaving" not in self._tasks[instance]:
            logger.info("instance %s leaves", name)
            self._send_no_more(instance)
            self._start(instance, "leaving", self._see_off(instance))
        return instance

    async def _resume(self, name: str) -> Instance:
        """Take back `_drain` and `_leave`, and look at the instance."""
        async with self._changing_of(name):
            instance = self._named(name)
            await self._probes.look(instance)
            self._take_back(instance)
            return instance

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
        self._start(instance, "probing", self._probes.watch(instance))
        if self._wants_loads:
            following = follow_load(instance, self._control, self._upstream)
            self._start(instance, "asking for its load", following)
        self._start_warm_up(instance)
        if registered:
            self._start(instance, "forgetting", self._forget_when_away(instance))
        return instance

    def _start_warm_up(self, instance: Instance) -> None:
        if self._settings.warm_up and "warming up" not in self._tasks[instance]:
            self._start(instance, "warming up", self._keep_warm(instance))

    def _send_no_more(self, instance: Instance) -> None:
        self._stop(instance, "warming up")
        instance.drain()

    def _take_back(self, instance: Instance) -> None:
        self._stop(instance, "leaving")
        instance.resume()
        self._start_warm_up(instance)

    def _stop(self, instance: Instance, what: str) -> None:
        if task := self._tasks[instance].pop(what, None):
            task.cancel()

    def _start(self, instance: Instance, what: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[instance][what] = task
        task.add_done_callback(_said)

    async def _keep_warm(self, instance: Instance) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            await instance.wait_up()
            if not instance.is_warmed_up:
                await self._warm_up(instance)
            if instance.is_warmed_up:
                await instance.wait_down()
                pause_s = FIRST_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _forget_when_away(self, instance: Instance) -> None:
        limit_s = self._settings.forget_after_s
        away = False
        while not away:
            await instance.wait_down()
            with anyio.move_on_after(limit_s):
                await instance.wait_up()
            away = not instance.healthy
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
        """Drop an instance and end what watches it; the lock of its name is held."""
        if instance not in self._instances:
            return
        # Before anything is awaited: who asks for it meanwhile hears that it is not there.
        self._instances.remove(instance.name)
        tasks = set(self._tasks.pop(instance).values()) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if instance.control:
            await self._control.disconnect(instance.name)
        self._metrics.forget(instance.name)


def _served(method: str, path: str) -> tuple[str, str]:
    """Return the name and the verb in a path; empty for all instances, and to let one leave.

    Raises:
        RequestError: There is no such path, or it is not served by this method.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise RequestError(
            f"there is no {path[:256]!r}; there are {INSTANCES_PATH} (GET, POST) and "
            f"{INSTANCES_PATH}/NAME (DELETE) with /drain and /resume (POST)",
            status=404,
            code="unknown_path",
        )
    name, verb = found["name"] or "", found["verb"] or ""
    allowed = ("POST",) if verb else ("DELETE",) if name else ("GET", "POST")
    if method not in allowed:
        raise RequestError(
            f"{method} is not served at this path, only {' and '.join(allowed)}",
            status=405,
            code="method_not_allowed",
        )
    return name, verb


def _networks(names: Sequence[str]) -> list[Network]:
    written = itertools.chain.from_iterable(_NETWORKS.get(name, (name,)) for name in names)
    return [ipaddress.ip_network(network) for network in written]


# This host, the link (where clouds tell secrets of a machine), groups, and reserved ones.
_SPECIAL = _networks(
    ("0.0.0.0/8", "::/128", "169.254.0.0/16", "fe80::/10", "224.0.0.0/4", "ff00::/8", "240.0.0.0/4")
)


def _lies_in(address: Address, networks: Sequence[Network]) -> bool:
    """Return whether an address is in a network; a special one only in one that names no others."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    special = next((network for network in _SPECIAL if address in network), None)
    return any(
        address in network
        and (special is None or (network[0] in special and network[-1] in special))
        for network in networks
    )


async def _resolved(name: str, url: str) -> set[Address]:
    """Return every address of a URL's host."""
    try:
        parts = urlsplit(url)
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port)
    except (OSError, ValueError) as error:
        raise ConfigError(f"instance {name!r}: {url!r} cannot be used: {error}") from error
    return {ipaddress.ip_address(str(each[4][0])) for each in found}
