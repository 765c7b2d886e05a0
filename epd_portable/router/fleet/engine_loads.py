"""Reports of instances about their load: pushed by them, and forgotten when they are old.

PD instances report by their control channels as long as this router asks them to. Encode instances
have none: each is polled by HTTP, and answers when its load has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from urllib.parse import urlencode

import msgspec

from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.wire.messages import (
    LOAD_EVERY_S,
    LOAD_HEARTBEAT_S,
    LOAD_LEASE_S,
    LOAD_PATH,
    LoadReport,
)

OLD_AFTER_S = 3 * LOAD_HEARTBEAT_S
"""An older report counts for nothing."""
WANT_EVERY_S = LOAD_LEASE_S / 5
"""PD instances are asked for reports so often; a message may be lost."""
LOOK_EVERY_S = 1.0
"""Between two looks for new encode instances."""
PAUSE_S = 5.0
"""After an encode instance has not reported."""
TIMEOUT_S = LOAD_HEARTBEAT_S + 2.0


class EngineLoads:
    """Takes in what instances report of their load, and forgets it when it is old."""

    def __init__(
        self,
        instances: EndpointPool,
        control: ControlChannels,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._control = control
        self._upstream = upstream
        self._clock = clock
        self._reported_at: dict[Instance, float] = {}  # The latest one is last.
        self._asking: dict[Instance, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._wanted_at = -WANT_EVERY_S
        control.on_load = self.take

    def open(self) -> None:
        """Begin to listen; from within the event loop."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Listen no more."""
        tasks = [*self._asking.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, name: str, report: LoadReport) -> None:
        """Take in what an instance reports."""
        instance = self._instances.get(name)
        if instance is not None:
            instance.take_report(report)
            self._reported_at.pop(instance, None)
            self._reported_at[instance] = self._clock()

    def drop_old(self) -> None:
        """Forget reports that are too old."""
        oldest = self._clock() - OLD_AFTER_S
        while self._reported_at:
            instance = next(iter(self._reported_at))
            if self._reported_at[instance] >= oldest:
                break
            del self._reported_at[instance]
            instance.take_report(None)

    async def _look(self) -> None:
        while True:
            now = self._clock()
            if now - self._wanted_at >= WANT_EVERY_S:
                self._wanted_at = now
                for each in self._instances.all:
                    if each.control and each.healthy:
                        self._control.want_load(each.name)
            there = {each for each in self._instances.of_duty("encode") if each.healthy}
            for gone in self._asking.keys() - there:
                self._asking.pop(gone).cancel()
            for new in there - self._asking.keys():
                self._asking[new] = asyncio.create_task(self._ask(new))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, instance: Instance) -> None:
        """Ask an encode instance again and again; each answer comes when there is news."""
        known: dict[str, int] = {}
        while True:
            load = None
            with contextlib.suppress(UpstreamError, msgspec.MsgspecError):
                # Its health is for probes.
                status, _, body = await self._upstream.ask(
                    "GET",
                    f"{instance.url}{LOAD_PATH}?{urlencode(known)}",
                    timeout_s=TIMEOUT_S,
                )
                if status == 200:
                    load = msgspec.json.decode(body, type=LoadReport)
            if load is None:
                await asyncio.sleep(PAUSE_S)
                continue
            self.take(instance.name, load)
            known = {"items": load.items or 0, "pixels": load.pixels or 0}
            await asyncio.sleep(LOAD_EVERY_S)
