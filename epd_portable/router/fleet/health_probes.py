"""Asks instances for their health, each every interval, and at once when a request failed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from functools import partial

from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.outcomes import FailureKind

PROBES_PER_S = 100.0
"""Of all instances together: many of them are asked less often than ``probe_interval_s`` says."""
PROBES_AT_ONCE = 64
TOGETHER_S = 0.1
"""Probes are due at multiples of this: to wake up costs more than a probe."""
JITTER = 0.1
"""Part of an interval by which probes are moved, so that they do not come in bursts."""


class HealthProbes:
    """Asks instances for ``/health``: each every interval, and at once when a request failed.

    One that has answered a request since is not asked.
    """

    def __init__(
        self, settings: RouterSettings, instances: EndpointPool, upstream: Upstream
    ) -> None:
        self._interval_s = settings.probe_interval_s
        self._timeout_s = settings.probe_timeout_s
        self._instances = instances
        self._upstream = upstream
        self._due: dict[Instance, asyncio.Event] = {}
        self._at_once = asyncio.Semaphore(PROBES_AT_ONCE)
        instances.watch(self._changed)

    async def look(self, instance: Instance) -> None:
        """Ask an instance once, and let it know what was seen."""
        note = await self._see(instance)
        if instance in self._instances:
            note()

    def watch(self, instance: Instance) -> Coroutine[None, None, None]:
        """Return what asks an instance again and again, until it is cancelled."""
        # Of those that come together each later one waits longer, so their probes are spread.
        return self._watch(instance, self._pause_s(instance))

    def _changed(self, instance: Instance) -> None:
        if instance.suspected and instance in self._due:
            self._due[instance].set()

    async def _watch(self, instance: Instance, pause_s: float) -> None:
        self._due[instance] = due = asyncio.Event()
        try:
            while True:
                timer = asyncio.get_running_loop().call_later(pause_s, due.set)
                await due.wait()
                timer.cancel()
                due.clear()
                well = instance.healthy and not instance.suspected
                silent_s = self._instances.clock() - instance.answered_at
                if not well or silent_s >= self._interval_s:
                    await self._probe(instance, due)
                pause_s = self._pause_s(instance)
        finally:
            del self._due[instance]

    async def _probe(self, instance: Instance, due: asyncio.Event) -> None:
        async with self._at_once:
            note = await self._see(instance)
        failed_meanwhile = due.is_set()
        note()
        if not failed_meanwhile:
            # Also of one that fails a probe the next one comes in its time: what ails it may
            # pass. But what was seen of one that failed a request may be from before that.
            due.clear()

    def _pause_s(self, instance: Instance) -> float:
        interval_s = self._interval_s
        if not instance.suspected:
            interval_s = max(interval_s, len(self._instances) / PROBES_PER_S)
        now = self._instances.clock()
        due = now + interval_s * random.uniform(1 - JITTER, 1 + JITTER)
        return math.ceil(due / TOGETHER_S) * TOGETHER_S - now

    async def _see(self, instance: Instance) -> Callable[[], None]:
        """Ask an instance once; return what lets it know what was seen."""
        try:
            url = instance.url + "/health"
            status, _, _ = await self._upstream.fetch("GET", url, timeout_s=self._timeout_s)
        except UpstreamError as error:
            if error.kind is FailureKind.UNAVAILABLE:
                return lambda: None
            if error.kind is FailureKind.TIMEOUT:
                return instance.seen_silent
            if isinstance(error.__cause__, ConnectionRefusedError):
                return partial(instance.seen_gone, f"health probe: {error}")
            return partial(instance.seen_failing, str(error))
        if 200 <= status < 300:
            return instance.seen_well
        return partial(instance.seen_failing, f"answered {status}")
