"""Admission: requests beyond the limits wait in order, or are refused with 429.

Limits bound amounts in flight: requests, items, bytes. Some follow the instances that are usable.
A request takes its amounts when it is admitted, and releases them. One that does not fit waits in
the `AdmissionQueue`:

- Smaller values of priority are admitted first, as in vLLM.
- Within a priority, keys share by start-time fair queuing: each is charged the part of the tightest
  limit that its requests take. While two of them wait, neither gets ahead of the other by more than
  what two requests take.
- Requests of one key are admitted first come, first served.
- No request passes another at a limit that the other one lacks: a large request is not delayed for
  ever by small ones, while a text does not wait for images that wait for encoders.

A request that takes more than a whole limit takes all of it, and is admitted when nothing else is
in flight at that limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry

from epd_portable.config.front import AdmissionSection
from epd_portable.config.roles import Stage
from epd_portable.errors import RequestError
from epd_portable.instruments import SECONDS, Instruments
from epd_portable.placement.estimates import Pace
from epd_portable.placement.instances import EndpointPool, Instance

LONGEST_RETRY_S = 60

Kind = Literal["requests", "items", "bytes"]
Reason = Literal["full", "timeout"]
"""Reason of a refusal: no place to wait, or no turn in time."""

_KINDS: tuple[Kind, ...] = ("requests", "items", "bytes")
_OF_INSTANCES: tuple[tuple[Stage, Kind], ...] = (("encode", "items"), ("decode", "requests"))

Limit: TypeAlias = int | None
"""At least 1; ``None`` for none."""
Where = Literal["new", "waiting", "admitted", "left"]


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits or is admitted.

    Attributes:
        amounts: Amounts that it takes of each limit.
        key: Digest of its client's key.
        priority: Smaller is admitted first.
        where: State of the request.
        taken: Amounts in flight of each limit.
        number: Place in the order of arrival, while it waits.
        lane: A bit for each limit of which it takes something, while it waits.
    """

    amounts: Sequence[int]
    key: bytes = b""
    priority: int = 0
    where: Where = "new"
    taken: list[int] = field(default_factory=list)
    number: int = 0
    lane: int = 0


class AdmissionQueue:
    """Order of requests beyond the limits; no I/O.

    Args:
        limits: Largest amounts in flight, by kind.
        max_waiting: Largest number of requests that wait.

    Attributes:
        used: Amounts in flight, by kind.
        admitted: Number of requests in flight.
        waiting: Number of requests that wait.
    """

    def __init__(self, limits: Sequence[Limit], *, max_waiting: int) -> None:
        self.used = [0] * len(limits)
        self.admitted = 0
        self.waiting = 0
        self._limits = list(limits)
        self._max_waiting = max_waiting
        self._arrived = 0
        self._lacking = 0
        """Limits that those lacked which the last `admit` left waiting, a bit for each."""
        self._queues: dict[tuple[int, int, bytes], OrderedDict[int, QueuedRequest]] = {}
        """Requests that wait, by priority, lane and key; none is empty."""
        self._served: dict[bytes, float] = {}
        """Parts of limits that each key got, while any request waits."""
        self._level = 0.0
        """Share of the key that was served last: no key that begins to wait has less."""

    def enter(self, request: QueuedRequest) -> None:
        """Add a new request: admitted at once, or waiting for `admit`."""
        if not self.waiting and not self._lacks(request):
            self._go(request)
            return
        self._arrived += 1
        request.number = self._arrived
        request.lane = sum(1 << kind for kind, amount in enumerate(request.amounts) if amount)
        request.where = "waiting"
        self.waiting += 1
        place = _, _, key = request.priority, request.lane, request.key
        if not any(each == key for _, _, each in self._queues):
            self._served[key] = max(self._level, self._served.get(key, 0.0))
        self._queues.setdefault(place, OrderedDict())[request.number] = request

    def admit(self) -> list[QueuedRequest]:
        """Return requests that are admitted now, in order."""
        admitted: list[QueuedRequest] = []
        lacking = 0
        for priority in sorted({each for each, _, _ in self._queues}):
            request, lacking_here = self._next(priority, lacking)
            while request is not None:
                self._charge(request)
                self._remove(request)
                self._go(request)
                admitted.append(request)
                request, lacking_here = self._next(priority, lacking)
            lacking = lacking_here
        self._lacking = lacking
        return admitted

    def reject(self) -> QueuedRequest | None:
        """Remove a request if more wait than may; call it after `admit`.

        It has the last priority, and is the latest of the key with the most that wait there.
        """
        if self.waiting <= self._max_waiting:
            return None
        count: Counter[bytes] = Counter()
        latest: dict[bytes, QueuedRequest] = {}
        lowest = max(priority for priority, _, _ in self._queues)
        for (priority, _, key), queue in self._queues.items():
            if priority == lowest:
                count[key] += len(queue)
                last = queue[next(reversed(queue))]
                if key not in latest or latest[key].number < last.number:
                    latest[key] = last
        request = latest[max(count, key=lambda key: (count[key], latest[key].number))]
        self.leave(request)
        return request

    def release(self, request: QueuedRequest, kinds: Iterable[int]) -> None:
        """Release amounts of a request in flight; call `admit` afterwards."""
        for kind in kinds:
            self.used[kind] -= request.taken[kind]
            request.taken[kind] = 0

    def leave(self, request: QueuedRequest) -> None:
        """End a request in any state; call `admit` afterwards."""
        if request.where == "admitted":
            self.release(request, range(len(self.used)))
            self.admitted -= 1
        elif request.where == "waiting":
            self._remove(request)
        request.where = "left"

    def set_limit(self, kind: int, limit: Limit) -> None:
        """Change a limit; call `admit` afterwards."""
        self._limits[kind] = limit

    def lacking_limit(self, request: QueuedRequest) -> int:
        """Return which limit keeps a request from going, or those before it."""
        lacking = self._lacks(request) or self._lacking & request.lane
        return (lacking & -lacking).bit_length() - 1

    def _lacks(self, request: QueuedRequest) -> int:
        """Return a bit for each limit within which a request has no space."""
        lacking = 0
        for kind, (amount, used, limit) in enumerate(
            zip(request.amounts, self.used, self._limits, strict=True)
        ):
            if amount and limit is not None and used + min(amount, limit) > limit:
                lacking |= 1 << kind
        return lacking

    def _go(self, request: QueuedRequest) -> None:
        request.where = "admitted"
        self.admitted += 1
        for kind, (amount, limit) in enumerate(zip(request.amounts, self._limits, strict=True)):
            taken = amount if limit is None else min(amount, limit)
            request.taken.append(taken)
            self.used[kind] += taken

    def _next(self, priority: int, lacking: int) -> tuple[QueuedRequest | None, int]:
        """Return the next request of a priority, if there is one, and what those before it lack.

        ``lacking`` is what those of smaller priorities lack.
        """
        lanes = {lane for _, lane, _ in self._queues}
        heads = [
            (self._served[key], next(iter(queue)), queue)
            for (each, _, key), queue in self._queues.items()
            if each == priority
        ]
        for _, number, queue in sorted(heads, key=lambda head: head[:2]):
            if all(lane & lacking for lane in lanes):
                break
            request = queue[number]
            lacks = self._lacks(request)
            if not lacks and not request.lane & lacking:
                return request, lacking
            # Also what one lacks that waits for others: it must not be taken meanwhile.
            lacking |= lacks
        return None, lacking

    def _charge(self, request: QueuedRequest) -> None:
        parts = [
            min(amount / limit, 1.0)
            for amount, limit in zip(request.amounts, self._limits, strict=True)
            if limit is not None
        ]
        self._level = max(self._level, self._served[request.key])
        self._served[request.key] = self._level + max(parts, default=0.0)

    def _remove(self, request: QueuedRequest) -> None:
        self.waiting -= 1
        place = request.priority, request.lane, request.key
        queue = self._queues[place]
        del queue[request.number]
        if not queue:
            del self._queues[place]
        if not self.waiting:
            # Later requests start afresh, and keys that request no more are forgotten.
            self._served, self._level = {}, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """A limit that is set.

    Attributes:
        duty: The limit is for each usable instance of this duty; ``None`` for all together.
    """

    key: str
    kind: Kind
    duty: Stage | None
    limit: int


class AdmissionMetrics(Instruments):
    """Metrics of admission."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.waiting = self._gauge(
            "epd_front_admission_waiting", "Requests that wait for admission.", "priority"
        )
        self.wait_s = self._seconds(
            "epd_front_admission_wait_seconds",
            "Waiting time of requests that were not admitted at once.",
            "priority",
            (*SECONDS[3:], 300.0),
        )
        self.refused = self._counter(
            "epd_front_admission_refused",
            "Requests with status 429, by reason and reached limit.",
            "reason limit",
        )


@dataclass(eq=False)
class AdmissionControl:
    """Admits requests within the limits of ``front.admission``.

    Attributes:
        servers: API servers, each of which has its part of every limit.
    """

    settings: AdmissionSection
    instances: EndpointPool
    metrics: AdmissionMetrics
    servers: int = 1
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._bounds = _bounds(self.settings)
        self._queue = AdmissionQueue(
            [self._limit(bound) for bound in self._bounds],
            max_waiting=math.ceil(self.settings.max_waiting / self.servers),
        )
        self._encode_kinds = [n for n, bound in enumerate(self._bounds) if bound.duty == "encode"]
        self._pace = Pace()
        self._waiters: dict[QueuedRequest, asyncio.Future[RequestError | None]] = {}
        if any(bound.duty for bound in self._bounds):
            self.instances.watch(self._rescale)

    async def enter(
        self, *, items: int, nbytes: int, key: bytes = b"", priority: int = 0
    ) -> QueuedRequest | None:
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
        heeded = priority if self.settings.use_priority else 0
        amounts = [takes[bound.kind] for bound in self._bounds]
        request = QueuedRequest(amounts, key=key, priority=heeded)
        self._pace.see(self.clock(), busy=self._queue.admitted > 0)
        self._queue.enter(request)
        if request.where == "waiting":
            await self._wait(request)
        return request

    def encoded(self, request: QueuedRequest | None) -> None:
        """Note that no item of a request is with an encoder any more."""
        if request is not None and self._encode_kinds:
            self._queue.release(request, self._encode_kinds)
            self._admit()

    def leave(self, request: QueuedRequest | None) -> None:
        """Note that a request has ended."""
        if request is None:
            return
        self._pace.see(self.clock(), busy=True)
        self._pace.count_end()
        self._queue.leave(request)
        self._admit()

    async def _wait(self, request: QueuedRequest) -> None:
        loop = asyncio.get_running_loop()
        longest_s = self.settings.max_wait_s
        waiter = self._waiters[request] = loop.create_future()
        why = f"its turn did not come within {longest_s:g} s"
        timer = loop.call_later(longest_s, self._refuse, request, "timeout", why)
        started = self.clock()
        name = _class(request.priority)
        self.metrics.waiting.labels(name).inc()
        try:
            self._admit()
            if (other := self._queue.reject()) is not None:
                why = (
                    "as many others wait as front.admission.max_waiting allows"
                    if other is request
                    else "others came for whom front.admission.max_waiting leaves the place"
                )
                self._refuse(other, "full", why)
            if (refusal := await waiter) is not None:
                raise refusal
        except BaseException:
            # A request that goes away may have been let in the moment before.
            self._queue.leave(request)
            self._admit()
            raise
        finally:
            timer.cancel()
            del self._waiters[request]
            self.metrics.waiting.labels(name).dec()
            self.metrics.wait_s.labels(name).observe(self.clock() - started)

    def _admit(self) -> None:
        if not self._queue.waiting:
            return
        for request in self._queue.admit():
            waiter = self._waiters[request]
            if not waiter.done():
                waiter.set_result(None)

    def _refuse(self, request: QueuedRequest, reason: Reason, why: str) -> None:
        """End the waiting of a request with 429."""
        waiter = self._waiters[request]
        if waiter.done():
            return
        bound = self._bounds[self._queue.lacking_limit(request)]
        self.metrics.refused.labels(reason, bound.key).inc()
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
        self._pace.see(self.clock(), busy=self._queue.admitted > 0)
        wait_s = (self._queue.waiting + 1) * self._pace.seconds_each
        return max(1, math.ceil(min(wait_s, LONGEST_RETRY_S)))

    # What is taken, and what there is.

    def _rescale(self, _: Instance) -> None:
        for kind, bound in enumerate(self._bounds):
            if bound.duty is not None:
                self._queue.set_limit(kind, self._limit(bound))
        self._admit()

    def _limit(self, bound: _Bound) -> Limit:
        """Return a limit as it is for the usable instances; none where there are none.

        A request then is rejected with 503, or its items are encoded where its response is
        generated.
        """
        limit: float = bound.limit / self.servers
        if bound.duty is not None:
            limit *= sum(each.weight for each in self.instances.usable(bound.duty))
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
