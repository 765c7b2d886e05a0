"""How busy instances say that they are: pushed by them, kept with its age, unknown when it is old.

PD instances tell by their control channels as long as this router says that it wants to know.
Encode instances have none: each is asked by HTTP, and answers when there is news.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec

from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.instances import Fleet, Instance
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.http.upstream_connection import UpstreamError
from epd_portable.wire.messages import (
    LOAD_EVERY_S,
    LOAD_HEARTBEAT_S,
    LOAD_LEASE_S,
    LOAD_PATH,
    LoadReport,
)

OLD_AFTER_S = 3 * LOAD_HEARTBEAT_S
"""A load that was told longer ago is unknown."""
WANT_EVERY_S = LOAD_LEASE_S / 5
"""PD instances are told so often that this router wants to know; a message may be lost."""
LOOK_EVERY_S = 1.0
"""So often is looked which instances there are."""
PAUSE_S = 5.0
"""After an encode instance has not told its load."""
TIMEOUT_S = LOAD_HEARTBEAT_S + 2.0


@dataclass(frozen=True, slots=True)
class _Told:
    load: LoadReport
    at: float
    given: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an instance is, by what it has told and what it was given since.

    Attributes:
        waiting: Requests that wait at it, in its engine or before; ``None`` if it does not tell.
        running: Requests that its engine computes for; ``None`` if it does not tell.
        kv_used: Used part of its KV cache, 0 to 1; ``None`` if it does not tell.
        items: Media items that wait at an encode instance; ``None`` if it does not tell.
        pixels: Of these; ``None`` if it does not tell.
        age_s: Of what it told.
    """

    waiting: int | None
    running: int | None
    kv_used: float | None
    items: int | None
    pixels: int | None
    age_s: float


class EngineLoads:
    """Keeps what instances tell of their load.

    Args:
        instances: Who is there.
        control: Channels to PD instances.
        upstream: Connections to encode instances.
        clock: Like ``time.monotonic``.
    """

    def __init__(
        self,
        instances: Fleet,
        control: ControlChannels,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._control = control
        self._upstream = upstream
        self._clock = clock
        self._told: dict[Instance, _Told] = {}  # Who told last is last.
        self._news: set[Instance] = set()
        self._asking: dict[Instance, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._wanted_at = -WANT_EVERY_S
        control.on_load = self.told
        instances.watch(self._changed)

    def open(self) -> None:
        """Begin to listen; from within the event loop."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Listen no more."""
        tasks = [*self._asking.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def told(self, name: str, load: LoadReport) -> None:
        """Take in what an instance tells."""
        instance = self._instances.get(name)
        if instance is not None:
            self._forget(instance)
            self._told[instance] = _Told(load, self._clock(), instance.load)

    def news(self) -> Collection[Instance]:
        """Return who has told a load since this was asked, or of whom it is not known any more."""
        oldest = self._clock() - OLD_AFTER_S
        for instance in [
            *itertools.takewhile(lambda each: self._told[each].at < oldest, self._told)
        ]:
            self._forget(instance)
        news, self._news = self._news, set()
        return news

    def of(self, instance: Instance) -> EngineLoad | None:
        """Return how busy an instance is; ``None`` if that is not known, or not any more.

        What this router has given to it since it told, and what it has given and the engine does
        not compute, waits there, whether or not the engine knows of it already.
        """
        told = self._told.get(instance)
        if told is None:
            return None
        age_s = self._clock() - told.at
        if age_s > OLD_AFTER_S:
            return None
        load, given = told.load, instance.load
        since = max(0, given - told.given)
        waiting, items = load.waiting, load.items
        if waiting is not None:
            waiting = max(waiting + since, given - (load.running or 0))
        if items is not None:
            items = max(items + since, given)
        return EngineLoad(
            waiting=waiting,
            running=load.running,
            kv_used=load.kv_used,
            items=items,
            pixels=load.pixels,
            age_s=age_s,
        )

    def _changed(self, instance: Instance) -> None:
        if not instance.healthy:
            # Who comes back may be another process.
            self._forget(instance)

    def _forget(self, instance: Instance) -> None:
        self._told.pop(instance, None)
        self._news.add(instance)

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
                # Whether it is well is told by probes.
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
            self.told(instance.name, load)
            known = {"items": load.items or 0, "pixels": load.pixels or 0}
            await asyncio.sleep(LOAD_EVERY_S)
