"""Instances that come and go: when one gets work, when it gets no more, when it is forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from epd_portable.errors import RequestError
from epd_portable.router.control import ControlChannels
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, Pool
from epd_portable.router.settings import InstanceSettings, RouterSettings

logger = logging.getLogger(__name__)

MAX_INSTANCES = 1024

Introduce = Callable[[Instance], Awaitable[None]]
"""Lets a healthy instance meet the others; afterwards it gets clients' requests."""


class Membership:
    """Takes instances in and lets them go, while requests are served.

    Args:
        settings: Of the router; the instances in them come first.
        pool: What the rest of the router chooses from.
        control: Gets a channel to each prefill+decode instance.
        metrics: Forget those that have left.
        introduce: Called for each instance when it is healthy, once for each life of its process.
    """

    def __init__(
        self,
        settings: RouterSettings,
        pool: Pool,
        control: ControlChannels,
        metrics: Metrics,
        introduce: Introduce,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._control = control
        self._metrics = metrics
        self._introduce = introduce
        self._changing = asyncio.Lock()
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    async def open(self) -> None:
        """Take in the instances of the settings and look once whether they are there.

        Raises:
            ConfigError: A control address cannot be used.
        """
        admitted = [self._admit(instance) for instance in self._settings.instances]
        await asyncio.gather(*map(self._look, admitted))

    async def close(self) -> None:
        """Let everybody go at once."""
        async with self._changing:
            for instance in self._pool.instances:
                await self._forget(instance)

    async def join(self, settings: InstanceSettings) -> tuple[Instance, bool]:
        """Take in an instance; one that is there already stays, also if it was about to leave.

        Returns:
            The instance, and whether it is new.

        Raises:
            ConfigError: Its control address cannot be used.
            RequestError: 409; another one of that name is healthy, or there are too many.
        """
        async with self._changing:
            known = self._pool.get(settings.name)
            if known is not None:
                await self._look(known)
                if known.healthy and known.settings == settings:
                    known.stay()
                    return known, False
                if known.healthy:
                    raise RequestError(
                        f"instance {settings.name!r} is at {known.settings.url} and healthy: "
                        "take another name, or let that one leave first",
                        status=409,
                        code="name_taken",
                    )
                await self._forget(known)
            if len(self._pool.instances) >= MAX_INSTANCES:
                raise RequestError(
                    f"there are {MAX_INSTANCES} instances, and no more are taken: let some leave",
                    status=409,
                    code="too_many_instances",
                )
            instance = self._admit(settings, registered=True)
            logger.info("instance %s at %s has joined", instance.name, settings.url)
            await self._look(instance)
            return instance, True

    def leave(self, name: str) -> Instance:
        """Send an instance nothing more, and forget it when what it works on has ended.

        Raises:
            RequestError: 404; there is none of that name.
        """
        instance = self._pool.get(name)
        if instance is None:
            known = ", ".join(other.name for other in self._pool.instances) or "none"
            raise RequestError(
                f"there is no instance {name[:128]!r}; there are: {known}",
                status=404,
                code="unknown_instance",
            )
        if instance.state != "draining":
            logger.info("instance %s leaves", name)
            instance.drain()
            self._start(instance, self._see_off(instance))
        return instance

    def _admit(self, settings: InstanceSettings, *, registered: bool = False) -> Instance:
        if settings.control:
            self._control.connect(settings.name, settings.control)
        instance = self._pool.add(settings, registered=registered)
        self._tasks[instance.name] = set()
        if self._settings.warm_up:
            self._start(instance, self._meet(instance))
        if registered:
            self._start(instance, self._forget_when_away(instance))
        return instance

    def _start(self, instance: Instance, work: Coroutine[None, None, None]) -> None:
        tasks = self._tasks[instance.name]
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_report)

    async def _meet(self, instance: Instance) -> None:
        while True:
            await instance.wait_up()
            if instance.is_introduced:
                await instance.wait_down()
            else:
                await self._introduce(instance)
                instance.introduced()

    async def _forget_when_away(self, instance: Instance) -> None:
        limit_s = self._settings.forget_after_s
        await instance.wait_down()
        while await instance.comes_up(limit_s):
            await instance.wait_down()
        logger.warning("instance %s is forgotten: away for %g s", instance.name, limit_s)
        await self._let_go(instance)

    async def _see_off(self, instance: Instance) -> None:
        await instance.wait_idle()
        if instance.state == "draining":
            logger.info("instance %s has left", instance.name)
            await self._let_go(instance)

    async def _let_go(self, instance: Instance) -> None:
        async with self._changing:
            await self._forget(instance)

    async def _forget(self, instance: Instance) -> None:
        """Drop an instance and end what watches it; for who holds the lock."""
        name = instance.name
        tasks = self._tasks.pop(name) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.remove(name)
        if instance.control:
            await self._control.disconnect(name)
        self._metrics.forget(name)

    async def _look(self, instance: Instance) -> None:
        await instance.probe(self._settings.probe_timeout_s)


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("watching an instance failed", exc_info=error)
