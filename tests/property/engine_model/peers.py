"""Encoders, the router, and the network between them and the instance."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import msgspec

from epd_portable.connector.producer import ProducerSession, TransferOrder, Write
from epd_portable.connector.transport import LeaseFence
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import AnyMessage
from tests.property.engine_model.engine import ADDRESS
from tests.property.engine_model.memory import TORN, PoolMemory
from tests.property.engine_model.shapes import Shape
from tests.unit.builders import Clock

JOB_TURNS = 40
"""For which the router's calls to encoders go on when their request is answered."""


class Parcel(NamedTuple):
    """A message on its way; to the instance it goes with its sender's identity."""

    due: int
    number: int
    identity: bytes
    to_instance: bool
    message: AnyMessage


class Network:
    """Carries messages; where things may fail it loses, repeats, delays and reorders them."""

    def __init__(self, rng: Random, shape: Shape) -> None:
        self._rng, self._shape = rng, shape
        self._numbers = itertools.count()
        self._under_way: list[Parcel] = []
        self._latest: dict[tuple[bytes, bool], int] = {}
        self.history: deque[Parcel] = deque(maxlen=60)
        self.turn = 0
        self._is_good = not shape.faults

    def recover(self) -> None:
        """Carry everything well from now on, and what is late at once."""
        self._is_good = True
        self._latest.clear()
        self._under_way = [each._replace(due=self.turn) for each in self._under_way]

    def send(self, identity: bytes, message: AnyMessage, *, to_instance: bool) -> None:
        rng, link = self._rng, (identity, to_instance)
        delay = rng.choice([0, 0, 0, 1, 2, 5])
        if not self._is_good:
            if rng.random() < self._shape.lost:
                return
            if rng.random() < 0.03:
                delay = rng.choice([20, 100, 400])
            if rng.random() < 0.05:
                self.send(identity, message, to_instance=to_instance)
        due = self.turn + delay
        if self._is_good or rng.random() < 0.7:
            due = max(due, self._latest.get(link, 0))
            self._latest[link] = due
        parcel = Parcel(due, next(self._numbers), identity, to_instance, message)
        heapq.heappush(self._under_way, parcel)

    def repeat(self) -> None:
        """A message comes once more, however old."""
        if self.history:
            parcel = self._rng.choice(self.history)
            number = next(self._numbers)
            heapq.heappush(self._under_way, parcel._replace(due=self.turn, number=number))

    def arrived(self) -> list[Parcel]:
        """Return what has arrived by this turn."""
        found = []
        while self._under_way and self._under_way[0].due <= self.turn:
            found.append(heapq.heappop(self._under_way))
        self.history.extend(found)
        return found


@dataclass
class _Writing:
    write: Write
    turns: int
    problem: str = ""


class Encoder:
    """One encode instance through all its lives.

    A stopped one does nothing and hears nothing until it goes on; a killed one leaves its writes
    in the middle, and is another one afterwards.
    """

    def __init__(
        self,
        name: str,
        rng: Random,
        shape: Shape,
        clock: Clock,
        pool: PoolMemory,
        fence: LeaseFence,
        revoked: set[int],
        *,
        fingerprint: str,
    ) -> None:
        self.name = name
        self._rng, self._shape, self._clock = rng, shape, clock
        self._pool, self._fence, self._revoked = pool, fence, revoked
        self.fingerprint = fingerprint
        self.is_perfect = not shape.faults
        self.life = 0
        self.writes_ended = 0
        self.start()

    def start(self) -> None:
        """Begin another life."""
        self.life += 1
        self.session_id = f"{self.name}-life-{self.life}"
        self.is_stopped = False
        self.inbox: list[AnyMessage] = []
        self._computing: dict[str, int] = {}
        self._outputs: set[str] = set()
        self._writing: dict[str, _Writing] = {}
        self.session = ProducerSession(
            PeerDescriptor(
                instance=self.name,
                session=self.session_id,
                host="host",
                device="cpu:0",
                fingerprint=self.fingerprint,
                paths=(PathEndpoint(path="shm"),),
            ),
            wait_timeout_s=self._shape.wait_timeout_s,
        )

    @property
    def identity(self) -> bytes:
        return self.session_id.encode()

    def submit(self, transfer_id: str, name: str, tensor: TensorSpec) -> None:
        """An item is to be encoded, and brought to the instance."""
        if not self.is_perfect and self._rng.random() < 0.02:
            wrong = (tensor.shape[0] + 1, *tensor.shape[1:])
            tensor = msgspec.structs.replace(tensor, shape=wrong)
        order = TransferOrder(
            transfer_id=transfer_id, mm_hash=name, consumer=ADDRESS, tensor=tensor, item_uuid=name
        )
        self.session.submit(order, ready=name in self._outputs, now=self._clock.now)
        if name not in self._outputs:
            self._computing.setdefault(name, self._rng.choice([0, 0, 1, 3, 10]))

    def turn(self) -> list[AnyMessage]:
        """Go on for a turn; return what it sends."""
        if self.is_stopped:
            return []
        now = self._clock.now
        for message in self.inbox:
            self.session.receive(ADDRESS, message, now)
        self.inbox.clear()
        for name, left in list(self._computing.items()):
            self._computing[name] = left - 1
            if left <= 0:
                del self._computing[name]
                self._outputs.add(name)
                self.session.output_ready(name)
        for transfer_id, writing in list(self._writing.items()):
            self._write(transfer_id, writing)
        actions = self.session.poll(now)
        for write in actions.writes:
            self._begin(write)
        return [message for _, message in actions.messages]

    def _begin(self, write: Write) -> None:
        rng = self._rng
        writing = _Writing(write, rng.choice([0, 0, 1, 2, 6, 30]))
        if not self.is_perfect and rng.random() < 0.1:
            writing.problem = "the write failed"
        self._writing[write.transfer_id] = writing
        self._put(writing, TORN)
        if writing.turns == 0:
            self._write(write.transfer_id, writing)

    def _write(self, transfer_id: str, writing: _Writing) -> None:
        writing.turns -= 1
        if writing.turns >= 0:
            return
        del self._writing[transfer_id]
        if not writing.problem:
            self._put(writing, writing.write.mm_hash)
        self.writes_ended += 1
        if writing.problem:
            self.session.write_failed(transfer_id, writing.problem, self._clock.now)
        else:
            self.session.write_done(transfer_id, self._clock.now)

    def _put(self, writing: _Writing, content: str) -> None:
        slot = writing.write.slot
        is_leased = True
        if writing.write.path == "tcp":
            # The receiver in the instance's own process does it, and looks at the lease.
            with self._fence.writing(slot) as is_leased:
                pass
        elif writing.write.path == "collective":
            # The worker does, which knows only of grants that were taken back.
            is_leased = slot.generation not in self._revoked
        if is_leased:
            self._pool.write(slot, content)
        else:
            writing.problem = "the slot is not leased any more"


@dataclass
class Job:
    """One transfer, as the router knows it."""

    transfer_id: str
    request_id: str
    name: str
    tensor: TensorSpec
    asked: list[str] = field(default_factory=list)
    has_failed: bool = False


class Router:
    """Has items encoded, by another encoder if one fails, and tells when none will.

    Args:
        rng: Decides which.
        encoders: All.
        later: Calls something in so many turns.
        tell: Sends a message to the instance.
    """

    def __init__(
        self,
        rng: Random,
        encoders: list[Encoder],
        later: Callable[[int, Callable[[], None]], None],
        tell: Callable[[AnyMessage], None],
    ) -> None:
        self._rng, self._encoders, self._later, self._tell = rng, encoders, later, tell
        self.jobs: dict[str, Job] = {}

    def ask(self, job: Job) -> None:
        """Have an encoder do a job; tell the instance if there is no other one to ask."""
        from epd_portable.wire.messages import EncodeFailed

        if job.transfer_id not in self.jobs or job.has_failed:
            return
        left = [each for each in self._encoders if each.name not in job.asked]
        if left:
            encoder = self._rng.choice(left)
            job.asked.append(encoder.name)
            encoder.submit(job.transfer_id, job.name, job.tensor)
        else:
            job.has_failed = True
            failed = EncodeFailed(transfer_id=job.transfer_id, reason="no encoder is left")
            for turns in (0, 20, 60):
                self._later(turns, lambda: self._say(job, failed))

    def _say(self, job: Job, failed: AnyMessage) -> None:
        if job.transfer_id in self.jobs:
            self._tell(failed)

    def hears(self, message: AnyMessage) -> None:
        """The instance has something against an encoder, or cannot answer a request."""
        from epd_portable.wire.messages import Nack, NackCode

        job = self.jobs.get(message.transfer_id)
        final = (NackCode.TOO_LARGE, NackCode.UNAVAILABLE)
        if job is not None and isinstance(message, Nack) and message.code not in final:
            self._later(self._rng.randint(0, 5), lambda: self.ask(job))

    def encoder_died(self, name: str) -> None:
        """Its jobs are asked of others, but for those whose calls it had answered."""
        for job in list(self.jobs.values()):
            if job.asked and job.asked[-1] == name and self._rng.random() < 0.5:
                self._later(self._rng.randint(0, 30), lambda job=job: self.ask(job))

    def request_ended(self, request_id: str, *, well: bool) -> None:
        """Nobody wants its items any more; of an answered one others may, for a while."""
        from epd_portable.wire.messages import NotWanted

        for job in [each for each in self.jobs.values() if each.request_id == request_id]:
            if well:
                self._later(JOB_TURNS, lambda job=job: self.jobs.pop(job.transfer_id, None))
            else:
                del self.jobs[job.transfer_id]
                self._tell(NotWanted(transfer_id=job.transfer_id))
