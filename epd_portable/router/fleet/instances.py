"""The instances as the router sees them: how they are, how busy, and which of them gets what.

No input or output happens here: who probes tells what it saw, who asks tells what came of it. What
is counted lies in a `Tally`, which several processes may share.

Encoders are chosen by item, on a ring of hashes and under a load bound: the same picture meets the
encoder that still has it in its cache, unless that one is busier than the others. Those that answer
and those that prefill are chosen by load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, TypeAlias

import anyio
import msgspec

from epd_portable.config.roles import DUTIES, Duty, Role
from epd_portable.router.fleet.ejections import Ejections
from epd_portable.router.fleet.ring import Ring, hashes
from epd_portable.router.fleet.tally import MAX_INSTANCES, ROWS, Tally
from epd_portable.router.fleet.view import InstanceView
from epd_portable.router.http.upstream_connection import Fault
from epd_portable.router.settings import InstanceSettings

logger = logging.getLogger(__name__)

PROBES_UNTIL_DOWN = 3
"""Failed probes in a row after which an instance counts as down: a busy one may miss one."""

IDLE_POLL_S = 0.05

State = Literal["joining", "up", "down", "draining"]
"""``joining``: healthy, but not warmed up yet. ``draining``: gets nothing more."""
Failure: TypeAlias = Fault | Literal["error"]
"""How a request failed; ``error`` is an answer that says so (5xx)."""

_WORDS: dict[Failure, str] = {
    Fault.REFUSED: "refused a connection",
    Fault.CUT: "cut an answer off",
    Fault.SILENT: "stayed silent",
    Fault.BROKEN: "answered something that is no HTTP",
    "error": "answered with an error of its own",
}
_RINGS: tuple[Duty, ...] = ("encode", "answer", "prefill")


class Use:
    """A use of an instance, which must not leave while the context lasts.

    Args:
        instance: That is used.
        work: Whether it works meanwhile on a request or job, which then is in flight.
        item: Name of the item that it encodes meanwhile, or empty.

    Attributes:
        instance: See above.
        item: See above.
    """

    __slots__ = ("_callback", "_computes", "_work", "instance", "item")

    def __init__(self, instance: Instance, *, work: bool, item: str = "") -> None:
        self.instance = instance
        self.item = item
        self._work = int(work)
        self._computes = False
        self._callback: Callable[[], None] | None = None

    def __enter__(self) -> Use:
        self.instance._begin(self, self._work)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._callback = None
        if self._computes:
            self._computes = False
            self.instance._compute(-1)
        self.instance._end(self, self._work)

    def compute(self) -> None:
        """Count the request, once, as one that waits for no item; until the context ends."""
        if not self._computes:
            self._computes = True
            self.instance._compute(1)

    def on_down(self, callback: Callable[[], None]) -> None:
        """Have a function called when the instance goes down while this lasts.

        At once if it is down. The function must not raise.
        """
        if self.instance.healthy:
            self._callback = callback
        else:
            callback()

    def _gone_down(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Instance:
    """One instance; down until a probe succeeds, joining until it was introduced.

    A failed request makes a healthy instance suspected: others are preferred until it has answered
    a probe or a request. Several in a row eject it: others are preferred for a while, whatever it
    answers. Only probes take it down.

    Attributes:
        settings: Where it is and what it serves.
        name: From the settings.
        role: From the settings.
        duty: What it is asked for.
        url: From the settings, as `weight` and `labels`.
        control: ZMQ address of its control channel, or empty.
        registered: It came while the router ran, and is forgotten when it stays away.
        in_flight: Requests or jobs it works on for this process.
        healthy: Whether it answers probes.
        is_introduced: Whether clients' requests may be sent to this life of it.
        draining: It gets nothing more.
        suspected: A request failed, and it has answered nothing since.
        ejected: Requests failed in a row.
        ejections: Counts those, where this process decides.
        reason: Why it is down, suspected or ejected.
        problem: What went wrong when it was warmed up, or empty.
        row: In the tally.
        point: Its place on the ring.
    """

    def __init__(
        self,
        owner: Fleet,
        settings: InstanceSettings,
        *,
        row: int,
        registered: bool,
        warm_up: bool,
    ) -> None:
        self.settings = settings
        self.name: str = settings.name
        self.role: Role = settings.role
        self.duty: Duty = DUTIES[settings.role]
        self.weight: float = settings.weight
        self.url: str = settings.url
        self.labels: Mapping[str, str] = settings.labels
        self.control: str = settings.control
        self.registered = registered
        self.in_flight = 0
        self.healthy = False
        self.is_introduced = not warm_up
        self.suspected = False
        self.ejected = False
        self.reason = "not probed yet"
        self.problem = ""
        self.row = row
        self.point, _ = hashes(settings.name)
        self._owner = owner
        self._tally = owner.tally
        self._clock = owner.clock
        self._ring: Ring[Instance] | None = None
        self._warm_up = warm_up
        self.draining = False
        self._uses: set[Use] = set()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._missed_probes = 0
        self._missed_at = 0.0
        self.ejections = Ejections()
        self._ejection: asyncio.TimerHandle | None = None
        self._told: InstanceView | None = None

    @property
    def state(self) -> State:
        """What it is to this router."""
        if self.draining:
            return "draining"
        if not self.healthy:
            return "down"
        return "up" if self.is_introduced else "joining"

    @property
    def usable(self) -> bool:
        """Whether clients' requests may be sent to it."""
        return self.healthy and self.is_introduced and not self.draining

    @property
    def preferred(self) -> bool:
        """Whether it is chosen before those that are not."""
        return self.usable and not (self.suspected or self.ejected)

    @property
    def load(self) -> int:
        """Requests or jobs it works on for all processes of the router."""
        return self._tally.load(self.row)

    @property
    def computes_for(self) -> int:
        """Requests of all processes of the router that wait for no item any more."""
        return self._tally.computing(self.row)

    @property
    def owed_s(self) -> float:
        """Seconds of encoding that all processes of the router have given to it."""
        return self._tally.owed_ms(self.row) / 1000

    @property
    def prompt_tokens(self) -> int:
        """Of prompts that all processes wait for: they have been given to it to compute."""
        return self._tally.tokens(self.row)

    @property
    def idle(self) -> bool:
        """Whether no process needs anything of it."""
        return not self._tally.held(self.row)

    @property
    def answered_at(self) -> float:
        """When it has answered a request last; 0 for never."""
        return self._tally.answered_at(self.row)

    def working(self, item: str = "") -> Use:
        """Return a context that counts one request as in flight, or a job for an item."""
        return Use(self, work=True, item=item)

    def held(self) -> Use:
        """Return a context that keeps it from leaving: something of it is still needed."""
        return Use(self, work=False)

    @contextlib.contextmanager
    def encoding(self, seconds: float) -> Iterator[None]:
        """Count encoding that it will need so long for; within `working`."""
        ms = round(1000 * seconds)
        self._tally.owe(self.row, ms)
        try:
            yield
        finally:
            self._tally.owe(self.row, -ms)

    @contextlib.contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Count tokens of a prompt that it has to compute; within `working`."""
        self._tally.prompt(self.row, tokens)
        try:
            yield
        finally:
            self._tally.prompt(self.row, -tokens)

    async def wait_idle(self) -> None:
        """Return as soon as no process needs anything of it, nor could begin to unknowingly."""
        version = self._owner.version
        while not (self._tally.all_saw(version) and self.idle):
            await asyncio.sleep(IDLE_POLL_S)

    async def wait_up(self) -> None:
        """Return as soon as it is healthy."""
        await self._up.wait()

    async def wait_down(self) -> None:
        """Return as soon as it is not healthy."""
        await self._down.wait()

    async def comes_up(self, timeout_s: float) -> bool:
        """Wait until it is healthy; tell whether that was within the limit."""
        with anyio.move_on_after(timeout_s):
            await self._up.wait()
        return self.healthy

    # What is seen of it by probes.

    def seen_well(self) -> None:
        """It answered a probe."""
        self._missed_probes = 0
        if self.healthy and not self.suspected:
            return
        self.suspected = False
        self.healthy = True
        self._changed()

    def seen_silent(self) -> None:
        """It did not answer a probe in time: it may be busy."""
        self._miss(f"{PROBES_UNTIL_DOWN} health probes without answer")

    def seen_failing(self, problem: str) -> None:
        """It answered a probe as it should not, or cut it off: something is wrong with it."""
        if not self.healthy:
            self._fall(f"health probe: {problem}")
            return
        self.suspected = True
        self.reason = f"health probe: {problem}"
        self._miss(f"{PROBES_UNTIL_DOWN} health probes failed: {problem}")
        self._changed()

    def _miss(self, reason: str) -> None:
        """Count a probe that failed; bytes of an answer since the last one say that it lives."""
        if max(self._tally.heard_at(self.row), self.answered_at) > self._missed_at:
            self._missed_probes = 0
        self._missed_at = self._clock()
        self._missed_probes += 1
        if self._missed_probes >= PROBES_UNTIL_DOWN:
            self._fall(reason)

    def seen_gone(self, reason: str) -> None:
        """Its process has ended: who answers next is a new one."""
        self.is_introduced = not self._warm_up
        self._fall(reason)

    # What is seen of it by requests.

    def heard(self) -> None:
        """Bytes of an answer have come from it."""
        self._tally.heard(self.row, self._clock())

    def hearing(self, take: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """Return what takes pieces of its answer, and notes that they come."""

        def taken(data: bytes) -> bool:
            self.heard()
            return take(data)

        return taken

    def answered(self) -> None:
        """It answered a request as it should."""
        self._tally.answered(self.row, self._clock())
        if self.suspected:
            self.suspected = False
            self._owner.report(self, None)
            self._changed()

    def failed(self, failure: Failure) -> None:
        """A request to it failed, and not for what the request asked."""
        if not self.healthy or failure is Fault.OWN:
            return
        self.suspected = True
        if self._owner.decides:
            self._count(failure)
        self._owner.report(self, failure)
        self._changed()

    def _count(self, failure: Failure) -> None:
        now = self._clock()
        self.ejections.fail(now, self.answered_at)
        self.reason = f"{_WORDS[failure]}, {self.ejections.failures} in a row"
        if failure is Fault.REFUSED:
            # It need not be silent for long to be taken for gone.
            self._missed_probes = PROBES_UNTIL_DOWN - 1
            self._missed_at = now
        may_be = self.usable and not self.ejected and self._owner.may_eject(self.duty)
        if self.ejections.due and may_be:
            for_s = self.ejections.begin(now)
            self.ejected = True
            self._ejection = asyncio.get_running_loop().call_later(for_s, self.let_back)
            logger.warning(
                "instance %s gets nothing for %g s: it %s", self.name, for_s, self.reason
            )

    def let_back(self) -> None:
        """End its ejection; one more failure begins another."""
        self._end_ejection()
        self.ejections.end()
        self._changed()

    def _end_ejection(self) -> None:
        self.ejected = False
        if self._ejection is not None:
            self._ejection.cancel()
            self._ejection = None

    # What is decided about it.

    def introduced(self) -> None:
        """Let clients' requests be sent to it until it is gone; nothing if that is so already."""
        if self.healthy and not self.is_introduced:
            self.is_introduced = True
            self._changed()

    def drain(self) -> None:
        """Send it nothing more."""
        self.draining = True
        self._end_ejection()
        self._changed()

    def resume(self) -> None:
        """Take back `drain`."""
        self.draining = False
        self._changed()

    def note(self, problem: str) -> None:
        """Set what went wrong when it was warmed up; empty for nothing."""
        self.problem = problem
        self._changed()

    def _fall(self, reason: str) -> None:
        if self.healthy:
            self.ejections.failures = 0
            self.suspected = False
            self._end_ejection()
        self.healthy = False
        self.reason = reason
        self._changed()

    def _leave(self) -> None:
        self.draining = True
        self._fall("has left")

    def _changed(self) -> None:
        """Make known what it is since something about it has changed."""
        if self.healthy and not (self.suspected or self.ejected):
            self.reason = ""
        self._owner._place(self)
        if self.healthy and not self._up.is_set():
            logger.info("instance %s is up", self.name)
            self._down.clear()
            self._up.set()
        elif not self.healthy and self._up.is_set():
            logger.warning("instance %s is down: %s", self.name, self.reason)
            self._up.clear()
            self._down.set()
        if not self.healthy:
            for use in tuple(self._uses):
                use._gone_down()
        if (view := self.view) != self._told:
            self._told = view
            self._owner._tell(self)

    # Counting.

    def _begin(self, use: Use, work: int) -> None:
        self._uses.add(use)
        self._tally.hold(self.row, 1)
        self._count_work(work)
        if use.item:
            self._owner.encoding.setdefault(use.item, []).append(self)

    def _end(self, use: Use, work: int) -> None:
        self._uses.remove(use)
        self._tally.hold(self.row, -1)
        self._count_work(-work)
        if use.item:
            self._owner.encoding[use.item].remove(self)
            if not self._owner.encoding[use.item]:
                del self._owner.encoding[use.item]

    def _compute(self, change: int) -> None:
        self._tally.compute(self.row, change)

    def _count_work(self, change: int) -> None:
        self.in_flight += change
        self._tally.work(self.row, change)
        if self._ring is not None:
            self._tally.work(self._ring.row, change)

    # Between processes.

    @property
    def view(self) -> InstanceView:
        """What another process has to know of it."""
        return msgspec.convert(self, InstanceView, from_attributes=True)

    def _take(self, view: InstanceView) -> None:
        self.healthy = view.healthy
        self.is_introduced = view.is_introduced
        self.draining = view.draining
        self.suspected = view.suspected
        self.ejected = view.ejected
        self.reason = view.reason
        self.problem = view.problem
        self._changed()


class Fleet:
    """The instances that there are; lists to choose from follow every change of one.

    Args:
        tally: Where things are counted; one of this process alone unless given.
        report: Another process decides how instances are: it is told of failed requests, and
            of an answer (``None``) of one that was suspected. `take` says what it decides.
        clock: Like ``time.monotonic``.
        chance: Decides between equals: nothing that a client sends does.

    Attributes:
        tally: See above, as the next ones.
        clock: See above.
        chance: See above.
        decides: Whether this process decides how instances are.
        version: Counts the changes.
        encoding: Who encodes an item for this process, by its name; once for each job.
    """

    def __init__(
        self,
        tally: Tally | None = None,
        *,
        report: Callable[[Instance, Failure | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self.tally = tally or Tally()
        self.clock = clock
        self.chance = chance or random.Random()
        self.decides = report is None
        self.version = 0
        self.encoding: dict[str, list[Instance]] = {}
        self._report = report
        self._instances: dict[str, Instance] = {}
        self._watchers: list[Callable[[Instance], None]] = []
        # Of each duty those that are preferred, then the other usable ones.
        self._rings: dict[Duty, tuple[Ring[Instance], Ring[Instance]]] = {
            duty: (Ring(self.tally, 2 * n), Ring(self.tally, 2 * n + 1))
            for n, duty in enumerate(_RINGS)
        }
        self._free_rows = deque(range(2 * len(_RINGS), ROWS))

    @property
    def all(self) -> tuple[Instance, ...]:
        """All instances, in the order in which they came."""
        return tuple(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def of_duty(self, duty: Duty) -> list[Instance]:
        """Return all instances that do one thing."""
        return [instance for instance in self._instances.values() if instance.duty == duty]

    def any_usable(self, duty: Duty) -> bool:
        """Tell whether an instance that does something is usable."""
        return any(self._rings[duty])

    def get(self, name: str) -> Instance | None:
        """Return the instance of that name."""
        return self._instances.get(name)

    def watch(self, callback: Callable[[Instance], None]) -> None:
        """Have a function called whenever an instance has come, changed or left."""
        self._watchers.append(callback)

    def add(
        self, settings: InstanceSettings, *, registered: bool = False, warm_up: bool = False
    ) -> Instance:
        """Take in an instance, at most `MAX_INSTANCES`.

        Args:
            settings: Where it is and what it serves.
            registered: It came while the router ran.
            warm_up: It has to be introduced, whenever its process has been started.
        """
        assert len(self._instances) < MAX_INSTANCES
        return self._add(settings, self._free_row(), registered=registered, warm_up=warm_up)

    def remove(self, name: str) -> None:
        """Forget an instance, which is down from then on."""
        instance = self._instances.pop(name)
        instance._leave()
        self._free_rows.append(instance.row)

    def take(self, view: InstanceView) -> None:
        """Take over what another process says of an instance that is there for it."""
        instance = self._instances.get(view.name)
        if instance is not None and instance.row != view.row:
            self.remove(view.name)
            instance = None
        if instance is None:
            settings = InstanceSettings(
                name=view.name,
                role=view.role,
                url=view.url,
                control=view.control,
                weight=view.weight,
                labels=view.labels,
            )
            instance = self._add(settings, view.row, registered=view.registered, warm_up=False)
        instance._take(view)

    def tiers(self, duty: Duty) -> Iterator[Sequence[Instance]]:
        """Yield the preferred instances that do one thing, then the other usable ones."""
        for ring in self._rings[duty]:
            yield ring.instances

    def encoder(self, mm_hash: str, exclude: Collection[str] = ()) -> Instance | None:
        """Return the usable encode instance that should have an item.

        One that encodes it already has least to do for it, however busy it is.

        Args:
            mm_hash: Of the item.
            exclude: Names of instances that must not have it, such as those that are full.
        """
        for instance in self.encoding.get(mm_hash, ()):
            if instance.preferred and instance.name not in exclude:
                return instance
        for ring in self._rings["encode"]:
            if chosen := ring.near(mm_hash, self._within(ring, exclude)):
                return chosen
        return None

    def prefill_decode(
        self, exclude: Collection[str] = (), duty: Duty = "answer"
    ) -> Instance | None:
        """Return the usable instance that should answer a request, or prefill it for another.

        Args:
            exclude: Names of instances that must not have it.
            duty: What is asked.
        """
        for ring in self._rings[duty]:
            if chosen := ring.lightest(self.chance, self._within(ring, exclude)):
                return chosen
        return None

    def may_eject(self, duty: Duty) -> bool:
        """Tell whether one more may be ejected: at most half of the usable ones."""
        return 2 * (len(self._ejected(duty)) + 1) <= sum(map(len, self._rings[duty]))

    def report(self, instance: Instance, failure: Failure | None) -> None:
        """Tell the process that decides, if it is another one."""
        if self._report is not None:
            self._report(instance, failure)

    def _within(self, ring: Ring[Instance], names: Collection[str]) -> list[Instance]:
        found = (self._instances.get(name) for name in set(names))
        return [instance for instance in found if instance is not None and instance._ring is ring]

    def _ejected(self, duty: Duty) -> list[Instance]:
        return [instance for instance in self._rings[duty][1].instances if instance.ejected]

    def _add(
        self, settings: InstanceSettings, row: int, *, registered: bool, warm_up: bool
    ) -> Instance:
        assert settings.name not in self._instances
        instance = Instance(self, settings, row=row, registered=registered, warm_up=warm_up)
        self._instances[instance.name] = instance
        if self.decides:
            self.tally.answered(row, 0.0)
            self.tally.heard(row, 0.0)
        self._tell(instance)
        return instance

    def _free_row(self) -> int:
        for _ in range(len(self._free_rows)):
            row = self._free_rows.popleft()
            if not self.tally.held(row):
                return row
            self._free_rows.append(row)
        raise AssertionError("more rows are held by instances that have left than there are spare")

    def _place(self, instance: Instance) -> None:
        """Put an instance into the ring in which it belongs."""
        preferred, other = self._rings[instance.duty]
        ring = None
        if instance.usable and self.get(instance.name) is instance:
            ring = preferred if instance.preferred else other
        if ring is instance._ring:
            return
        if instance._ring is not None:
            instance._ring.remove(instance)
        instance._ring = ring
        if ring is not None:
            ring.add(instance)
        if ring is None and self.decides:
            self._keep_half(instance.duty)

    def _keep_half(self, duty: Duty) -> None:
        """Let ejected ones back, the first first, until they are at most half of the usable."""
        ejected = sorted(self._ejected(duty), key=lambda instance: instance.ejections.until)
        for instance in ejected:
            if 2 * len(self._ejected(duty)) <= sum(map(len, self._rings[duty])):
                break
            instance.let_back()

    def _tell(self, instance: Instance) -> None:
        self.version += 1
        for callback in self._watchers:
            callback(instance)
