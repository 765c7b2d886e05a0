"""Asks instances for their health, each every interval, and at once when a request failed."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Callable
from functools import partial

from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.log import say_failure
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.http.upstream_connection import UpstreamError
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.outcomes import FailureKind

logger = logging.getLogger(__name__)
_said = say_failure(logger, "watching an instance failed")

PROBES_PER_S = 100.0
"""Of all instances together: many of them are asked less often than ``probe_interval_s`` says."""
PROBES_AT_ONCE = 64
TOGETHER_S = 0.1
"""Probes that are due within this are sent together: to wake up costs more than a probe."""
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
            if error.kind is FailureKind.UNAVAILABLE:
                return _nothing
            if error.kind is FailureKind.TIMEOUT:
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


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Return when an event is set, at the latest after a time."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()


def _nothing() -> None:
    """Nothing was seen."""
