"""The instances as a front sees them: how they are, how busy, and which of them gets what.

Nothing here does input or output: connections and requests report what they saw of an instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import anyio
import msgspec

from epd_portable.config.roles import ROLE_LABEL, Duty, Role, duties_of
from epd_portable.errors import EPDError
from epd_portable.placement.caches import CacheEstimate, CacheSizes
from epd_portable.placement.ring import HashRing
from epd_portable.placement.work import AnswerLoad, Work

logger = logging.getLogger(__name__)

MAX_INSTANCES = 10_000
FEW = 16
"""Up to so many instances the loads of all are compared, else those of two."""
InstanceState = Literal["up", "down", "draining"]
"""``draining``: gets nothing more."""


class InstanceSpec(Protocol):
    """What is known of an instance before it is there."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def role(self) -> Role:
        """What it serves."""

    @property
    def url(self) -> str:
        """Of its HTTP server, empty without one."""

    @property
    def control(self) -> str:
        """ZMQ address of its control channel, empty for encode instances."""

    @property
    def weight(self) -> float:
        """How much it does of what others of its role do."""

    @property
    def labels(self) -> Mapping[str, str]:
        """What its operator says of it."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is, by itself; ``None`` where that is unknown.

    Attributes:
        waiting: Requests in the engine's queue, those that wait for items included.
        running: Requests that are computed.
        kv_used: Used part of the KV cache, 0 to 1.
        items: Media items that an encode instance has accepted and not answered.
    """

    waiting: int | None = None
    running: int | None = None
    kv_used: float | None = None
    items: int | None = None


class WentDownError(EPDError):
    """An instance went down while something of it was awaited."""


class Use:
    """A use of an instance, which must not leave while the context lasts.

    Args:
        work: Whether it counts as load: a request, or an encode job.
        item: That the job is for; empty for others.
    """

    __slots__ = ("_answer", "_callback", "_since_s", "_work", "instance", "item")

    def __init__(self, instance: Instance, *, work: bool, item: str = "") -> None:
        self.instance = instance
        self.item = item
        self._work = work
        self._since_s: float | None = None
        self._answer = (0, 0)
        self._callback: Callable[[], None] | None = None

    def __enter__(self) -> Use:
        self.instance._start_use(self, self._work)
        return self

    def __exit__(self, *_: object) -> None:
        self._callback = None
        if self._since_s is not None:
            self.instance.answers.each_s(self.instance.computes_for)
            self.instance.computes_for -= 1
        self.instance.answers.owed_ms -= self._answer[1]
        self.instance._end_use(self, self._work)

    def compute(self) -> None:
        """Count the request, once, as one that waits for no item; until the context ends."""
        if self._since_s is None:
            self._since_s = self.instance.answers.each_s(self.instance.computes_for)
            self.instance.computes_for += 1

    def owe_answer(self, tokens: int) -> None:
        """Count an answer to a prompt, of which so many tokens are to be computed, as owed."""
        self._answer = tokens, self.instance.answers.expected_ms(tokens)
        self.instance.answers.owed_ms += self._answer[1]

    def note_answered(self) -> None:
        """Learn from the whole answer that was owed, and is there."""
        if (since_s := self._since_s) is not None:
            self.instance.answers.observe(self._answer[0], self.instance.computes_for, since_s)

    def on_down(self, callback: Callable[[], None]) -> None:
        """Call a function when the instance goes down while this lasts; at once if it is down.

        The function must not raise.
        """
        if self.instance.healthy:
            self._callback = callback
        else:
            callback()

    def _went_down(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


@contextlib.contextmanager
def while_up(use: Use) -> Iterator[Use]:
    """Hold an instance in use, and cancel what is done meanwhile when it goes down.

    Raises:
        WentDownError: It has gone down; says why.
    """
    with anyio.CancelScope() as scope, use:
        use.on_down(scope.cancel)
        yield use
    if scope.cancelled_caught:
        raise WentDownError(f"went down: {use.instance.reason}")


class Instance:
    """One instance; down until its process is ready.

    It is a `Candidate` of `epd_portable.placement.profiles`.

    Attributes:
        labels: Of the settings, and its role as ``llm-d.ai/role``.
        jobs: Encode jobs that it has in flight; they are a part of its load.
        elsewhere: Jobs that it has of other fronts, a part of its load as well.
        registered: It came while the front ran, and is forgotten when it stays away.
        answered_at: When it has answered a request last; minus infinity for never.
        parked: Others have what both compute on; see `park`.
        reason: Why it is down.
        problem: What went wrong when it met others, or empty.
    """

    def __init__(self, owner: EndpointPool, settings: InstanceSpec, *, registered: bool) -> None:
        self.settings = settings
        self.name: str = settings.name
        self.role: Role = settings.role
        self.duties: tuple[Duty, ...] = duties_of(settings.role)
        self.weight: float = settings.weight
        self.url: str = settings.url
        self.labels: Mapping[str, str] = {ROLE_LABEL: settings.role, **settings.labels}
        self.control: str = settings.control
        self.registered = registered
        self.load = self.jobs = 0
        self.computes_for = self.tokens = 0
        self.cached: CacheEstimate = owner.caches.new_estimate()
        self.answers = AnswerLoad(owner.work, settings.role, owner.clock)
        self.answered_at = float("-inf")
        self.healthy = False
        self.parked = False
        self.draining = False
        self.reason = "not started yet"
        self.problem = ""
        self._owner = owner
        self._clock = owner.clock
        self._tiers: list[HashRing[Instance]] = []
        self._uses: set[Use] = set()
        self._idle = asyncio.Event()
        self._up = asyncio.Event()
        self._pending_encode_ms = self._elsewhere_ms = 0
        self.elsewhere = 0
        self._report: LoadReport | None = None
        self._load_at_report = 0
        self._shown: tuple[object, ...] = ()

    @property
    def state(self) -> InstanceState:
        """What it is to this front."""
        if self.draining:
            return "draining"
        return "up" if self.healthy else "down"

    @property
    def usable(self) -> bool:
        """Whether clients' requests may be sent to it."""
        return self.healthy and not self.draining

    @property
    def preferred(self) -> bool:
        """Whether it is chosen before those that are not."""
        return self.usable and not self.parked

    @property
    def pending_encode_s(self) -> float:
        """Seconds of encoding that it was given and has not done."""
        return self._pending_encode_ms / 1000

    @property
    def owed_s(self) -> float:
        """Seconds of work that it was given and has not ended."""
        return (self._pending_encode_ms + self.answers.owed_ms) / 1000

    def shown(self) -> dict[str, Any]:
        """Return what operators see of it, as JSON values."""
        names = ("name", "role", "url", "control", "healthy", "state", "parked", "idle")
        words = {"in_flight": self.load, "reason": self.reason, "problem": self.problem}
        return {name: getattr(self, name) for name in (*names, "registered")} | words

    @property
    def idle(self) -> bool:
        """Whether nothing of it is needed."""
        return not self._uses

    @property
    def reported(self) -> LoadReport | None:
        """Its last report of its load, with what it was given since; ``None`` without one.

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

    def take_report(self, report: LoadReport | None) -> None:
        """Set what it reports of its load, which holds until the next; ``None`` for nothing."""
        self._report = report
        self._load_at_report = self.load

    def working(self, item: str = "") -> Use:
        """Return a context that counts one request as in flight, or a job for an item."""
        return Use(self, work=True, item=item)

    def held(self) -> Use:
        """Return a context that keeps it from leaving: something of it is still needed."""
        return Use(self, work=False)

    @contextlib.contextmanager
    def encoding(self, seconds: float) -> Iterator[None]:
        """Count encoding that takes it so long; within `working`."""
        # Whole milliseconds: sums of floats would drift.
        ms = round(1000 * seconds)
        self._pending_encode_ms += ms
        try:
            yield
        finally:
            self._pending_encode_ms -= ms

    def note_elsewhere(self, jobs: int, seconds: float) -> None:
        """Set what it has to do for others than this front: so many jobs, which take so long."""
        ms = round(1000 * seconds)
        self._add_load(jobs - self.elsewhere)
        self._pending_encode_ms += ms - self._elsewhere_ms
        self.elsewhere, self._elsewhere_ms = jobs, ms

    @contextlib.contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Count tokens of a prompt that it has to compute; within `working`."""
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens

    async def wait_idle(self) -> None:
        """Return as soon as nothing of it is needed."""
        while self._uses:
            await self._idle.wait()

    async def wait_up(self) -> None:
        """Return as soon as it is healthy."""
        await self._up.wait()

    # What was seen of it.

    def seen_well(self) -> None:
        """Its process has begun, and is ready."""
        self.healthy = True
        self._changed()

    def seen_gone(self, reason: str) -> None:
        """Its process has ended: what comes next is a new one."""
        self._fall(reason)

    def answered(self) -> None:
        """It answered a request as it should."""
        self.answered_at = self._clock()

    # What is decided about it.

    def drain(self) -> None:
        """Send it nothing more."""
        self.draining = True
        self._changed()

    def resume(self) -> None:
        """Take back `drain`."""
        self.draining = False
        self._changed()

    def park(self, parked: bool) -> None:
        """Let it have new work only where no other is usable, or take that back."""
        if parked != self.parked:
            self.parked = parked
            self._changed()

    def note(self, problem: str) -> None:
        """Set what went wrong when it met others; empty for nothing."""
        self.problem = problem
        self._changed()

    def leave(self) -> None:
        """Take it down for good."""
        self.draining = True
        self._fall("has left")

    def _fall(self, reason: str) -> None:
        self.healthy = False
        self.reason = reason
        # What comes back may be another process.
        self.cached.clear()
        self.take_report(None)
        self.note_elsewhere(0, 0.0)
        self._changed()

    def _changed(self) -> None:
        """Make known what it is since something about it has changed."""
        if self.healthy:
            self.reason = "parked" if self.parked else ""
        self._owner._place(self)
        if self.healthy and not self._up.is_set():
            logger.info("instance %s is up", self.name)
            self._up.set()
        elif not self.healthy and self._up.is_set():
            logger.warning("instance %s is down: %s", self.name, self.reason)
            self._up.clear()
        if not self.healthy:
            for use in tuple(self._uses):
                use._went_down()
        names = ("state", "healthy", "parked", "reason", "problem")
        if (shown := tuple(getattr(self, name) for name in names)) != self._shown:
            self._shown = shown
            self._owner._notify(self)

    # What is counted.

    def _start_use(self, use: Use, work: bool) -> None:
        self._uses.add(use)
        self._idle.clear()
        self._add_load(work)
        if use.item:
            self.jobs += 1
            self._owner.encoding.setdefault(use.item, []).append(self)

    def _end_use(self, use: Use, work: bool) -> None:
        self._uses.remove(use)
        if not self._uses:
            self._idle.set()
        self._add_load(-work)
        if use.item:
            self.jobs -= 1
            self._owner.encoding[use.item].remove(self)
            if not self._owner.encoding[use.item]:
                del self._owner.encoding[use.item]

    def _add_load(self, load: int) -> None:
        self.load += load
        for tier in self._tiers:
            tier.load += load


class EndpointPool:
    """The instances that there are; lists to choose from follow every change of one.

    Args:
        chance: Decides between equals: nothing that a client sends does.

    Attributes:
        encoding: Instances that encode an item, by its name; once for each job.
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
        self.encoding: dict[str, list[Instance]] = {}
        self.work = Work()
        self._instances: dict[str, Instance] = {}
        self._watchers: list[Callable[[Instance], None]] = []
        duties: tuple[Duty, ...] = ("encode", "answer", "prefill")
        self._tiers = {duty: (HashRing[Instance](), HashRing[Instance]()) for duty in duties}

    @property
    def all(self) -> tuple[Instance, ...]:
        """All instances, in the order in which they came."""
        return tuple(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def of_duty(self, duty: Duty) -> list[Instance]:
        """Return all instances with a duty."""
        return [instance for instance in self._instances.values() if duty in instance.duties]

    def counts(self) -> dict[InstanceState, int]:
        """Return how many instances are in each state."""
        found = Counter(instance.state for instance in self._instances.values())
        return {state: found[state] for state in ("up", "down", "draining")}

    def any_usable(self, duty: Duty) -> bool:
        """Return whether an instance with a duty is usable."""
        return any(self._tiers[duty])

    def get(self, name: str) -> Instance | None:
        """Return the instance of that name."""
        return self._instances.get(name)

    def __contains__(self, instance: Instance) -> bool:
        """Return whether an instance has not left, however many of its name there were."""
        return self._instances.get(instance.name) is instance

    def watch(self, callback: Callable[[Instance], None]) -> None:
        """Call a function whenever an instance has come, changed or left."""
        self._watchers.append(callback)

    def add(self, settings: InstanceSpec, *, registered: bool = False) -> Instance:
        """Take in an instance, at most `MAX_INSTANCES`.

        Args:
            registered: It came while the front ran.
        """
        assert len(self._instances) < MAX_INSTANCES
        assert settings.name not in self._instances
        instance = Instance(self, settings, registered=registered)
        self._instances[instance.name] = instance
        self._notify(instance)
        return instance

    def remove(self, name: str) -> None:
        """Forget an instance, which is down from then on."""
        self._instances.pop(name).leave()

    def tiers(self, duty: Duty) -> Iterator[Sequence[Instance]]:
        """Yield the preferred instances with a duty, then the other usable ones."""
        for tier in self._tiers[duty]:
            yield tier.members

    def choose_encoder(
        self,
        key: str,
        exclude: Collection[str] = (),
        among: Collection[Instance] | None = None,
        first: Callable[[Instance], Any] | None = None,
    ) -> Instance | None:
        """Return the usable instance that should encode an item.

        One that encodes it already has least to do for it, however busy it is.

        Args:
            key: Name of the item, or what is hashed in its place: a repeated picture meets the
                encoder that has it in its cache, unless that one is busier than the others.
            exclude: Names of instances that must not have it, such as those that are full.
            among: Those that may have it; all by default.
            first: Hashing decides only among those for which this is least.
        """
        for instance in self.encoding.get(key, ()):
            allowed = among is None or instance in among
            if instance.preferred and allowed and instance.name not in exclude:
                return instance
        for tier in self._tiers["encode"]:
            named = map(self._instances.get, exclude)
            out = {each for each in named if each is not None and tier in each._tiers}
            if among is not None:
                out.update(each for each in tier.members if each not in among)
            if first and (left := [each for each in tier.members if each not in out]):
                least = min(map(first, left))
                out.update(each for each in left if first(each) > least)
            if chosen := tier.choose(key, out):
                return chosen
        return None

    def choose_least_loaded(
        self, exclude: Collection[str] = (), duty: Duty = "answer"
    ) -> Instance | None:
        """Return the usable instance with the least load for its weight; of many, of two."""
        for tier in self._tiers[duty]:
            left = tier.members
            if exclude:
                left = [each for each in left if each.name not in exclude]
            if left:
                some = self.chance.sample(left, 2) if len(left) > FEW else left
                least = min(each.load / each.weight for each in some)
                return self.chance.choice([e for e in some if e.load / e.weight == least])
        return None

    def _place(self, instance: Instance) -> None:
        """Put an instance into the tiers in which it belongs."""
        tiers = []
        if instance.usable and instance in self:
            tiers = [self._tiers[duty][not instance.preferred] for duty in instance.duties]
        if tiers == instance._tiers:
            return
        for tier in instance._tiers:
            tier.remove(instance)
        instance._tiers = tiers
        for tier in tiers:
            tier.add(instance)

    def _notify(self, instance: Instance) -> None:
        for callback in self._watchers:
            callback(instance)
