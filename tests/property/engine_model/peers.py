"""The front, and the network between encoders and instance."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import Received
from tests.kit.encoder import Encoder
from tests.property.engine_model.shapes import Shape

JOB_TURNS = 40
"""Time for which encode jobs go on after their request was served."""


class Parcel(NamedTuple):
    """A message on its way; to the instance it goes with its sender's identity."""

    due: int
    number: int
    identity: bytes
    to_instance: bool
    message: Received


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

    def send(self, identity: bytes, message: Received, *, to_instance: bool) -> None:
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
class Job:
    """A transfer, as the front has it."""

    transfer_id: str
    request_id: str
    name: str
    tensor: TensorSpec
    asked: list[str] = field(default_factory=list)
    has_failed: bool = False


class Front:
    """Has items encoded, by another encoder if one fails.

    Args:
        rng: Decides which.
        encoders: All.
        later: Calls something in so many turns.
        give_up: Called with a job when no encoder is left for it.

    Attributes:
        asked: Number of times that an encoder was asked, full ones among them.
    """

    def __init__(
        self,
        rng: Random,
        encoders: list[Encoder],
        later: Callable[[int, Callable[[], None]], None],
        give_up: Callable[[Job], None],
    ) -> None:
        self._rng, self._encoders, self._later, self._give_up = rng, encoders, later, give_up
        self.jobs: dict[str, Job] = {}
        self.asked = 0

    def ask(self, job: Job) -> None:
        """Have another encoder do a job; give it up if none is left."""
        if job.transfer_id not in self.jobs or job.has_failed:
            return
        left = [each for each in self._encoders if each.name not in job.asked]
        if left:
            encoder = self._rng.choice(left)
            self.asked += 1
            if not encoder.is_perfect and self._rng.random() < 0.1:
                encoder.seen["jobs that a full engine refused"] += 1
                self._later(self._rng.choice([1, 20]), lambda: self.ask(job))
                return
            job.asked.append(encoder.name)
            encoder.submit(job.transfer_id, job.name, job.tensor)
            if not encoder.is_perfect and self._rng.random() < 0.05:
                # Another encoder is asked, and the first one goes on.
                encoder.seen["jobs that were late"] += 1
                self._later(self._rng.choice([5, 40]), lambda: self.ask(job))
        else:
            job.has_failed = True
            self._give_up(job)

    def encoder_died(self, name: str) -> None:
        """Give its jobs to other encoders, but for those whose calls it had answered."""
        for job in list(self.jobs.values()):
            if job.asked and job.asked[-1] == name and self._rng.random() < 0.5:
                self._later(self._rng.randint(0, 30), lambda job=job: self.ask(job))

    def request_ended(self, request_id: str, *, well: bool) -> None:
        """End the jobs of a request; of one that was served well they go on for a while."""
        for job in [each for each in self.jobs.values() if each.request_id == request_id]:
            if well:
                self._later(JOB_TURNS, lambda job=job: self.jobs.pop(job.transfer_id, None))
            else:
                del self.jobs[job.transfer_id]
