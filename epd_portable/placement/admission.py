"""Admission: requests beyond the limits wait, or are refused with 429.

The order is the `Gate`'s. Here are what requests take of its limits, and the limits themselves,
some of which follow the instances that are usable.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epd_portable.config.front import AdmissionSection
from epd_portable.config.roles import Duty
from epd_portable.errors import RequestError
from epd_portable.placement.gate import Gate, Limit, Ticket
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.placement.pace import Pace

LONGEST_RETRY_S = 60

Kind = Literal["requests", "items", "bytes"]
Reason = Literal["full", "timeout"]
"""Why a request is refused: no place to wait, or no turn in time."""

_KINDS: tuple[Kind, ...] = ("requests", "items", "bytes")
_OF_INSTANCES: tuple[tuple[Duty, Kind], ...] = (("encode", "items"), ("answer", "requests"))
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """One limit that is set.

    Attributes:
        duty: The limit is for each usable instance of this duty; ``None`` for all together.
    """

    key: str
    kind: Kind
    duty: Duty | None
    limit: int


class AdmissionMetrics:
    """Metrics of admission.

    Args:
        front: Beginning of their names.
    """

    def __init__(self, registry: CollectorRegistry, front: str) -> None:
        self.waiting = Gauge(
            f"{front}_admission_waiting",
            "Requests that wait to be let in.",
            ("priority",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.wait_s = Histogram(
            f"{front}_admission_wait_seconds",
            "Of those not let in at once.",
            ("priority",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.refused = Counter(
            f"{front}_admission_refused",
            "Requests answered 429, by reason and by the limit that was reached.",
            ("reason", "limit"),
            registry=registry,
        )


class AdmissionControl:
    """Admits requests within the limits of ``front.admission``.

    Args:
        servers: API servers, each of which has its part of every limit.
    """

    def __init__(
        self,
        settings: AdmissionSection,
        instances: EndpointPool,
        metrics: AdmissionMetrics,
        *,
        servers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._metrics = metrics
        self._servers = servers
        self._clock = clock
        self._bounds = _bounds(settings)
        self._gate = Gate(
            [self._limit(bound) for bound in self._bounds],
            max_waiting=math.ceil(settings.max_waiting / servers),
        )
        self._encode_kinds = [n for n, bound in enumerate(self._bounds) if bound.duty == "encode"]
        self._pace = Pace()
        self._waiters: dict[Ticket, asyncio.Future[RequestError | None]] = {}
        if any(bound.duty for bound in self._bounds):
            instances.watch(self._rescale)

    async def enter(
        self, *, items: int, nbytes: int, key: bytes = b"", priority: int = 0
    ) -> Ticket | None:
        """Return when a request may go on; cancelling gives its place up.

        Clients' keys share what is admitted; ``nbytes`` is the size of the body.

        Returns:
            For `encoded` and `leave`; ``None`` where nothing is limited.

        Raises:
            RequestError: 429 with ``Retry-After``.
        """
        if not self._bounds:
            return None
        takes: dict[Kind, int] = {"requests": 1, "items": items, "bytes": nbytes}
        heeded = priority if self._settings.heed_priority else 0
        amounts = [takes[bound.kind] for bound in self._bounds]
        ticket = Ticket(amounts, key=key, priority=heeded)
        self._pace.see(self._clock(), busy=self._gate.going > 0)
        self._gate.enter(ticket)
        if ticket.where == "waiting":
            await self._wait(ticket)
        return ticket

    def encoded(self, ticket: Ticket | None) -> None:
        """Note that no item of a request is with an encoder any more."""
        if ticket is not None and self._encode_kinds:
            self._gate.give_back(ticket, self._encode_kinds)
            self._admit()

    def leave(self, ticket: Ticket | None) -> None:
        """Note that a request has ended."""
        if ticket is None:
            return
        self._pace.see(self._clock(), busy=True)
        self._pace.count_end()
        self._gate.leave(ticket)
        self._admit()

    async def _wait(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        longest_s = self._settings.max_wait_s
        waiter = self._waiters[ticket] = loop.create_future()
        why = f"its turn did not come within {longest_s:g} s"
        timer = loop.call_later(longest_s, self._refuse, ticket, "timeout", why)
        started = self._clock()
        name = _class(ticket.priority)
        self._metrics.waiting.labels(name).inc()
        try:
            self._admit()
            if (other := self._gate.turn_away()) is not None:
                why = (
                    "as many others wait as front.admission.max_waiting allows"
                    if other is ticket
                    else "others came for whom front.admission.max_waiting leaves the place"
                )
                self._refuse(other, "full", why)
            if (refusal := await waiter) is not None:
                raise refusal
        except BaseException:
            # A request that goes away may have been let in the moment before.
            self._gate.leave(ticket)
            self._admit()
            raise
        finally:
            timer.cancel()
            del self._waiters[ticket]
            self._metrics.waiting.labels(name).dec()
            self._metrics.wait_s.labels(name).observe(self._clock() - started)

    def _admit(self) -> None:
        if not self._gate.waiting:
            return
        for ticket in self._gate.admit():
            waiter = self._waiters[ticket]
            if not waiter.done():
                waiter.set_result(None)

    def _refuse(self, ticket: Ticket, reason: Reason, why: str) -> None:
        """End the waiting of a request with 429."""
        waiter = self._waiters[ticket]
        if waiter.done():
            return
        bound = self._bounds[self._gate.lacking_limit(ticket)]
        self._metrics.refused.labels(reason, bound.key).inc()
        for_each = f" for each usable instance of {bound.duty}" if bound.duty else ""
        retry_s = self._retry_after_s()
        waiter.set_result(
            RequestError(
                f"{bound.key} of {bound.limit}{for_each} is reached, and {why}; try again in "
                f"{retry_s} s, or raise {bound.key}",
                status=429,
                code="front_busy",
                retry_after_s=retry_s,
            )
        )

    def _retry_after_s(self) -> int:
        """Return when those that wait now have gone, at the pace that was observed."""
        self._pace.see(self._clock(), busy=self._gate.going > 0)
        wait_s = (self._gate.waiting + 1) * self._pace.seconds_each
        return max(1, math.ceil(min(wait_s, LONGEST_RETRY_S)))

    # What is taken, and what there is.

    def _rescale(self, _: Instance) -> None:
        for kind, bound in enumerate(self._bounds):
            if bound.duty is not None:
                self._gate.set_limit(kind, self._limit(bound))
        self._admit()

    def _limit(self, bound: _Bound) -> Limit:
        """Return a limit as it is for the usable instances; none where there are none.

        A request then is answered 503, or its items are encoded where it is answered.
        """
        limit: float = bound.limit / self._servers
        if bound.duty is not None:
            usable = [each for tier in self._instances.tiers(bound.duty) for each in tier]
            # One that is parked serves only where no other can.
            serving = [each for each in usable if not each.health.parked] or usable
            limit *= sum(each.weight for each in serving)
        return math.ceil(limit) or None


def _class(priority: int) -> str:
    return "normal" if not priority else "first" if priority < 0 else "last"


def _bounds(settings: AdmissionSection) -> list[_Bound]:
    bounds = []
    for duty, kind in (*((None, kind) for kind in _KINDS), *_OF_INSTANCES):
        limit = getattr(getattr(settings, duty) if duty else settings, f"max_{kind}")
        if limit is not None:
            key = f"front.admission.{duty}.max_{kind}" if duty else f"front.admission.max_{kind}"
            bounds.append(_Bound(key=key, kind=kind, duty=duty, limit=limit))
    return bounds
