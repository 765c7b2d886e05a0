"""The engines of a front, and the default choice among them: consistent hashing, bounded loads.

An `Instance` joins four subjects: `Backlog`, `Health`, and the estimates of its work and of its
caches (`epd_portable.placement.estimates`). A `HashRing` leads an image, or a conversation, to the
instance that had it before: by the default rules, `front.choice`, headers, and the gateway. Nothing
here does input or output: connections and requests report events.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import anyio
import msgspec
from msgspec import Meta

from epd_portable.config.roles import ROLE_LABEL, Role, Stage, duties_of
from epd_portable.errors import EPDError
from epd_portable.media.limits import RequestItem
from epd_portable.placement.estimates import (
    CacheEstimate,
    CacheSizes,
    EncodeTimes,
    ResponseTimes,
    Work,
)

logger = logging.getLogger(__name__)

MAX_INSTANCES = 10_000
FEW = 16
"""Largest number of instances whose loads are all compared; of more, two are."""
ALIKE = 1.5
"""Encoders are equal for an item if none takes so many times as long as the fastest."""
InstanceState = Literal["up", "down", "draining"]
"""``draining``: no new work at all."""
LOAD_BOUND = 1.25
"""Largest multiple of its share of the load that an instance takes."""
PROBES = 21
"""Places on the circle from which a key looks for an instance."""
_MASK = (1 << 64) - 1


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine, from the launcher or from an engine that joins.

    Attributes:
        name: Unique.
        url: ZMQ address of the hub of an engine on another machine; ``plain+`` before it if jobs
            are not encrypted.
        control: ZMQ address of its control channel; or empty.
        weight: Capacity relative to others of its role.
        labels: Labels of its operator.
        max_queued_items: Largest number of jobs for others at a time.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]
    role: Role
    url: Annotated[str, Meta(pattern=r"^((plain\+)?tcp://[^/\s]+:\d+)?$")] = ""
    control: str = ""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    labels: dict[str, str] = {}
    max_queued_items: int = 256


class Health:
    """State of one instance; down until its process is ready.

    Args:
        name: Of the instance, for the log.
        changed: Called after every event.

    Attributes:
        reason: Why the instance is down; or empty.
        problem: Last failure between the instance and others; or empty.
    """

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        self.healthy = self.draining = False
        self.reason = "not started yet"
        self.problem = ""
        self._name = name
        self._report = changed
        self._up = asyncio.Event()

    @property
    def state(self) -> InstanceState:
        """State for this front."""
        if self.draining:
            return "draining"
        return "up" if self.healthy else "down"

    @property
    def usable(self) -> bool:
        """Return whether the instance may get requests of clients."""
        return self.healthy and not self.draining

    async def wait_up(self) -> None:
        """Return as soon as the process is ready."""
        await self._up.wait()

    def seen_up(self) -> None:
        """Record that the process is ready."""
        self.healthy = True
        self._changed()

    def fall(self, reason: str) -> None:
        """Record that the process has ended; see `Instance.seen_gone`."""
        self.healthy = False
        self.reason = reason
        self._changed()

    def drain(self, draining: bool = True) -> None:
        """Stop new work, or allow it again."""
        self.draining = draining
        self._changed()

    def note(self, problem: str) -> None:
        """Set the last failure between the instance and others; empty for none."""
        self.problem = problem
        self._changed()

    def _changed(self) -> None:
        if self.healthy:
            self.reason = ""
        if self.healthy and not self._up.is_set():
            logger.info("instance %s is up", self._name)
            self._up.set()
        elif not self.healthy and self._up.is_set():
            logger.warning("instance %s is down: %s", self._name, self.reason)
            self._up.clear()
        self._report()


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine by its own count; ``None`` for unknown.

    Attributes:
        waiting: Requests in the engine's queue, those that wait for items included.
        running: Requests that are computed.
        kv_used: Used part of the KV cache, 0 to 1.
        items: Open items of an encode instance.
    """

    waiting: int | None = None
    running: int | None = None
    kv_used: float | None = None
    items: int | None = None


class WentDownError(EPDError):
    """An instance went down while a request or job was open there."""


@dataclass(eq=False, slots=True)
class InFlight:
    """A request or encode job at an instance, while the context lasts; the instance stays.

    Attributes:
        load: Counted as load: 1, or 0 for something that only needs the instance.
        item: Name of the item of an encode job; or empty.
    """

    instance: Instance
    load: int = 1
    item: str = ""
    _since_s: float | None = None
    _tokens: int = 0
    _backlog_ms: int = 0
    _callback: Callable[[], None] | None = None

    def __enter__(self) -> InFlight:
        self.instance.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._callback = None
        instance = self.instance
        if self._since_s is not None:
            instance.responses.end()
        instance.responses.backlog_ms -= self._backlog_ms
        instance.end(self)

    def compute(self) -> None:
        """Count the request, once, as one that waits for no item; until the context ends."""
        if self._since_s is None:
            self._since_s = self.instance.responses.begin()

    def owe_response(self, tokens: int) -> None:
        """Count the response to a prompt, with ``tokens`` left to compute, as backlog."""
        self._tokens = tokens
        self._backlog_ms = self.instance.responses.expected_ms(tokens)
        self.instance.responses.backlog_ms += self._backlog_ms

    def note_response(self) -> None:
        """Learn from the response, which is complete."""
        if self._since_s is not None:
            self.instance.responses.observe(self._tokens, self._since_s)

    def on_down(self, callback: Callable[[], None]) -> None:
        """Call a function, which must not raise, when the instance goes down; or at once."""
        if self.instance.health.healthy:
            self._callback = callback
        else:
            callback()

    def went_down(self) -> None:
        """Call the function of `on_down`, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


@contextlib.contextmanager
def while_up(use: InFlight) -> Iterator[InFlight]:
    """Hold an instance in use, and cancel the block when the instance goes down.

    Raises:
        WentDownError: The instance has gone down; with the reason.
    """
    with anyio.CancelScope() as scope, use:
        use.on_down(scope.cancel)
        yield use
    if scope.cancelled_caught:
        raise WentDownError(f"went down: {use.instance.health.reason}")


class Backlog:
    """Work that one instance has and has not ended.

    Attributes:
        load: Requests and jobs, those of other fronts included.
        jobs: Open encode jobs of this front.
        item_jobs: Number of these jobs for each item, by its name.
        elsewhere: Jobs of other fronts.
        tokens: Tokens of prompts to compute.
        responses: Responses to generate.
    """

    def __init__(self, responses: ResponseTimes) -> None:
        self.load = self.jobs = self.elsewhere = self.tokens = 0
        self.item_jobs: Counter[str] = Counter()
        self.responses = responses
        self._uses: set[InFlight] = set()
        self._idle = asyncio.Event()
        # Whole milliseconds: sums of floats would drift.
        self._encode_ms = self._elsewhere_ms = 0
        self._report: LoadReport | None = None
        self._load_at_report = 0

    @property
    def pending_encode_s(self) -> float:
        """Seconds of encoding to do."""
        return self._encode_ms / 1000

    @property
    def backlog_s(self) -> float:
        """Seconds of all work to do."""
        return (self._encode_ms + self.responses.backlog_ms) / 1000

    @property
    def idle(self) -> bool:
        """Return whether nothing needs the instance."""
        return not self._uses

    async def wait_idle(self) -> None:
        """Return as soon as nothing needs the instance."""
        while self._uses:
            await self._idle.wait()

    def begin(self, use: InFlight) -> None:
        """Count a request or job; called by `InFlight`."""
        self._uses.add(use)
        self._idle.clear()
        self.load += use.load
        if use.item:
            self.jobs += 1
            self.item_jobs[use.item] += 1

    def end(self, use: InFlight) -> None:
        """Take `begin` back."""
        self._uses.remove(use)
        if not self._uses:
            self._idle.set()
        self.load -= use.load
        if use.item:
            self.jobs -= 1
            self.item_jobs[use.item] -= 1
            if not self.item_jobs[use.item]:
                del self.item_jobs[use.item]

    def went_down(self) -> None:
        """Notify every open request and job that the instance is down."""
        for use in tuple(self._uses):
            use.went_down()

    @contextlib.contextmanager
    def encoding(self, seconds: float) -> Iterator[None]:
        """Count encoding that takes so long."""
        ms = round(1000 * seconds)
        self._encode_ms += ms
        try:
            yield
        finally:
            self._encode_ms -= ms

    @contextlib.contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Count tokens of a prompt to compute."""
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens

    def note_elsewhere(self, jobs: int, seconds: float) -> None:
        """Set the jobs of other fronts, and the seconds that they take."""
        ms = round(1000 * seconds)
        self.load += jobs - self.elsewhere
        self._encode_ms += ms - self._elsewhere_ms
        self.elsewhere, self._elsewhere_ms = jobs, ms

    def take_report(self, report: LoadReport | None) -> None:
        """Set the engine's report, valid until the next one; ``None`` for none."""
        self._report = report
        self._load_at_report = self.load

    @property
    def reported(self) -> LoadReport | None:
        """Last report of the engine, with what it was given since; ``None`` without one.

        What it was given since the report, and what its engine does not compute, waits there,
        whether or not the engine knows of it already.
        """
        report, load = self._report, self.load
        if report is None:
            return None
        since = max(0, load - self._load_at_report)
        waiting, items = report.waiting, report.items
        if waiting is not None:
            waiting = max(waiting + since, load - (report.running or 0))
        if items is not None:
            items = max(items + since, load)
        return msgspec.structs.replace(report, waiting=waiting, items=items)


class Instance(Backlog):
    """An instance, with its backlog.

    Attributes:
        labels: Labels of the settings, and the role as ``llm-d.ai/role``.
        registered: It joined while the front ran.
        answered_at: Time of its last encode job's end, in seconds; minus infinity for none.
        cached: Estimate of its caches.
        output_difference: Largest relative difference of its encoder outputs from those that are
            right, see `epd_portable.placement.output_check`; ``None`` if none was compared.
    """

    def __init__(self, pool: EndpointPool, settings: EngineSettings, *, registered: bool) -> None:
        super().__init__(ResponseTimes(pool.work, settings.role, pool.clock))
        self.name: str = settings.name
        self.role: Role = settings.role
        self.duties: tuple[Stage, ...] = duties_of(settings.role)
        self.weight: float = settings.weight
        self.url: str = settings.url
        self.labels: Mapping[str, str] = {ROLE_LABEL: settings.role, **settings.labels}
        self.control: str = settings.control
        self.registered = registered
        self.answered_at = float("-inf")
        self.output_difference: float | None = None
        self.health = Health(self.name, self._changed)
        self.cached = CacheEstimate(pool.caches)
        self._pool = pool
        self._shown: tuple[object, ...] = ()

    def in_flight(self, item: str = "") -> InFlight:
        """Return a context that counts one request, or an encode job for an item."""
        return InFlight(self, item=item)

    def retained(self) -> InFlight:
        """Return a context in which the instance is needed, without load."""
        return InFlight(self, load=0)

    def seen_gone(self, reason: str) -> None:
        """Record that the process has ended: the next one starts empty."""
        self.cached.clear()
        self.take_report(None)
        self.note_elsewhere(0, 0.0)
        self.health.fall(reason)

    def shown(self) -> dict[str, Any]:
        """Return the state for operators, as JSON values."""
        health = self.health
        return {
            "name": self.name,
            "role": self.role,
            "url": self.url,
            "control": self.control,
            "healthy": health.healthy,
            "state": health.state,
            "idle": self.idle,
            "registered": self.registered,
            "in_flight": self.load,
            "backlog_s": self.backlog_s,
            "reason": health.reason,
            "problem": health.problem,
            "output_difference": self.output_difference,
        }

    def _changed(self) -> None:
        health = self.health
        self._pool.place(self)
        if not health.healthy:
            self.went_down()
        shown = (health.state, health.healthy, health.reason, health.problem)
        if shown != self._shown:
            self._shown = shown
            self._pool.notify(self)


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """State of the instances, as one API server sees it.

    Attributes:
        instances: `Instance.shown` of each.
        came_s: Items of `Work.came_s`.
    """

    instances: list[dict[str, Any]]
    came_s: list[tuple[tuple[Role, str, int], float]]


class Member(Protocol):
    """Candidate of a choice."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def weight(self) -> float:
        """Share of the load relative to other candidates; positive."""

    @property
    def load(self) -> int:
        """Requests or jobs that it was given and that have not ended."""


T = TypeVar("T", bound=Member)


class HashRing(Generic[T]):
    """Instances on a circle of hashes, with one point each.

    A key probes the circle at several places and prefers the instance whose point comes soonest
    after one of them, distances divided by weights: so shares are even among few instances, and
    when one leaves only the keys that preferred it move. (Appleton and O'Reilly, Multi-probe
    consistent hashing, 2015.)

    Attributes:
        members: In the order of their points.
    """

    def __init__(self, members: Iterable[T] = ()) -> None:
        self.members: list[T] = []
        self._points: list[int] = []
        for member in members:
            self.add(member)

    def add(self, member: T) -> None:
        """Let an instance be chosen."""
        point, _ = _hashes(member.name)
        index = bisect_left(self._points, point)
        self._points.insert(index, point)
        self.members.insert(index, member)

    def remove(self, member: T) -> None:
        """Let an instance be chosen no more."""
        index = self.members.index(member)
        del self._points[index], self.members[index]

    def in_order(self, key: str) -> Iterator[T]:
        """Yield every instance, some of them several times, the one that a key prefers first."""
        points, members, count = self._points, self.members, len(self._points)
        place, step = _hashes(key)
        found: list[tuple[float, int]] = []
        for _ in range(PROBES if count else 0):
            index = bisect_left(points, place)
            if index == count:
                index = 0
            found.append((((points[index] - place) & _MASK) / members[index].weight, index))
            place = (place + step) & _MASK
        found.sort()
        for _, index in found:
            yield members[index]
        if found:
            first = found[0][1]
            yield from members[first:]
            yield from members[:first]

    def choose(
        self, key: str, among: Collection[T] | None = None, bound: float = LOAD_BOUND
    ) -> T | None:
        """Return the member that a key prefers of some with capacity; ``None`` for none.

        Args:
            key: Such as an item's hash.
            among: Members that may be chosen; all by default.
            bound: Multiple of its share up to which a member has capacity; 1 for even shares.
        """
        among = self.members if among is None else among
        if not among:
            return None
        load, weight = sum(each.load for each in among), sum(each.weight for each in among)
        most = bounded_load(load, weight, bound)
        left = (each for each in self.in_order(key) if each in among)
        return next((each for each in left if each.load < most * each.weight), None)


def bounded_load(load: float, weight: float, bound: float = LOAD_BOUND) -> float:
    """Return the load, for each unit of its weight, below which an instance has space.

    Args:
        load: Sum of the loads of all instances.
        bound: See `HashRing.choose`.
    """
    return bound * (load + 1) / weight


def _hashes(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def _without_late(encoders: Sequence[Instance], seconds: Sequence[float]) -> list[Instance]:
    """Leave out encoders that are slow for an item, and would end it later than all others.

    Args:
        seconds: Time that each takes for the item.
    """
    limit_s = ALIKE * min(seconds)
    found = [
        (each, each.pending_encode_s + s, s <= limit_s)
        for each, s in zip(encoders, seconds, strict=True)
    ]
    soonest_s = min(end_s for _, end_s, is_fast in found if is_fast)
    return [each for each, end_s, is_fast in found if is_fast or end_s < soonest_s]


class EndpointPool:
    """All instances; the lists to choose from follow every change of one.

    Args:
        chance: Decides between equals: no value of a client does.
    """

    def __init__(
        self,
        *,
        caches: CacheSizes | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self.caches = caches or CacheSizes()
        self.clock = clock
        self.chance = chance or random.Random()
        self.work = Work()
        self.encode_times = EncodeTimes()
        self._instances: dict[str, Instance] = {}
        self._watchers: list[Callable[[Instance], None]] = []
        duties: tuple[Stage, ...] = ("encode", "decode", "prefill")
        self._usable = {duty: HashRing[Instance]() for duty in duties}

    @property
    def all(self) -> tuple[Instance, ...]:
        """All instances, in order of arrival."""
        return tuple(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def seen(self) -> Seen:
        """Return the state of the instances at this moment."""
        return Seen([each.shown() for each in self.all], [*self.work.came_s.items()])

    def of_duty(self, duty: Stage) -> list[Instance]:
        """Return all instances with a duty."""
        return [instance for instance in self._instances.values() if duty in instance.duties]

    def usable(self, duty: Stage) -> Sequence[Instance]:
        """Return the usable instances with a duty; a list that changes with them."""
        return self._usable[duty].members

    def __contains__(self, instance: Instance) -> bool:
        """Return whether an instance has not left; another one may have its name."""
        return self._instances.get(instance.name) is instance

    def watch(self, callback: Callable[[Instance], None]) -> None:
        """Call a function whenever an instance has come, changed or left."""
        self._watchers.append(callback)

    def add(self, settings: EngineSettings, *, registered: bool = False) -> Instance:
        """Add an instance, at most `MAX_INSTANCES`."""
        assert len(self._instances) < MAX_INSTANCES
        assert settings.name not in self._instances
        instance = Instance(self, settings, registered=registered)
        self._instances[instance.name] = instance
        self.notify(instance)
        return instance

    def remove(self, name: str) -> None:
        """Remove an instance, which is down from then on."""
        instance = self._instances.pop(name)
        instance.health.draining = True
        instance.seen_gone("has left")
        self.encode_times.forget(name)

    def choose_encoder(
        self,
        key: str,
        exclude: Collection[str] = (),
        among: Collection[Instance] | None = None,
        first: Callable[[Instance], Any] | None = None,
        item: RequestItem | None = None,
    ) -> Instance | None:
        """Return the usable instance that should encode an item.

        One that encodes it already has least to do for it, however busy it is. Otherwise a hash
        leads a repeated item to the encoder that has it in its cache, unless that one is too busy.
        A slow one, such as a CPU next to a GPU, gets what it ends before all faster ones would.

        Args:
            key: Name of the item, or a text to hash in its place.
            exclude: Names of instances that must not have it, such as full ones.
            among: Instances that may have it; all by default.
            first: Rank: instances for which it is not least are left out.
            item: Its size leads to the time that each instance takes; by default equal for all.
        """
        left = [
            each
            for each in self.usable("encode")
            if each.name not in exclude and (among is None or each in among)
        ]
        for each in left:
            if key in each.item_jobs:
                return each
        if first and left:
            least = min(map(first, left))
            left = [each for each in left if first(each) == least]
        if item and left:
            left = _without_late(left, [self.encode_times.of(item, each.name) for each in left])
        return self._usable["encode"].choose(key, left)

    def choose_least_loaded(
        self, exclude: Collection[str] = (), duty: Stage = "decode"
    ) -> Instance | None:
        """Return the usable instance with the least load for its weight; of many, of two."""
        left = [each for each in self.usable(duty) if each.name not in exclude]
        if not left:
            return None
        some = self.chance.sample(left, 2) if len(left) > FEW else left
        least = min(each.load / each.weight for each in some)
        return self.chance.choice([e for e in some if e.load / e.weight == least])

    def place(self, instance: Instance) -> None:
        """Put an instance, whose health has changed, into the lists in which it belongs."""
        for duty, ring in self._usable.items():
            belongs = instance.health.usable and instance in self and duty in instance.duties
            if belongs != (instance in ring.members):
                (ring.add if belongs else ring.remove)(instance)

    def notify(self, instance: Instance) -> None:
        """Call the watchers of an instance."""
        for callback in self._watchers:
            callback(instance)
