"""How many of some devices should encode, and how many answer, by the work that comes. Pure.

Queues tell too late: when one is seen, requests are late already. So work counts as it comes.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from epd_portable.config.roles import PAIR_LABEL
from epd_portable.placement.instances import EndpointPool, Instance

logger = logging.getLogger(__name__)

WINDOW_S = 3.0
"""Work that came in this time counts, and what is owed."""
DEAD_BAND = 1.15
"""The fuller side must have so many times as much as it would have after a change."""
LEAST_S = 0.5
"""Less work than that needs no instance."""
SPARE = 0.15
"""Part of a device's work that must be there beyond what further encoders take, if elastic."""
TICK_S = 1.0


class Balance:
    """Says how many devices should encode; times come in as arguments, of one clock.

    Args:
        devices: Two or more, each for either.
        elastic: Whether those that answer encode what encoders cannot. Then all work is shared by
            all as long as no encoder is idle, and too many encoders are worse than too few.
    """

    def __init__(self, devices: int, *, elastic: bool) -> None:
        self._devices = devices
        self._elastic = elastic
        self._came: deque[tuple[float, float, float]] = deque()

    def note(self, now_s: float, encode_s: float, answer_s: float) -> None:
        """Take in work that has come, in seconds of one device."""
        self._came.append((now_s, encode_s, answer_s))

    def decide(
        self, now_s: float, encoders: int, encode_owed_s: float, answer_owed_s: float
    ) -> tuple[int, str]:
        """Return how many should encode, of ``encoders`` that do, and why; call it every `TICK_S`.

        A change is what makes the fuller side least full.
        """
        while self._came and self._came[0][0] < now_s - WINDOW_S:
            self._came.popleft()
        encode_s = encode_owed_s + sum(each[1] for each in self._came)
        answer_s = answer_owed_s + sum(each[2] for each in self._came)
        all_s = (encode_s + answer_s) / self._devices

        def fuller_s(count: int) -> float:
            answers_each_s = _each_s(answer_s, self._devices - count)
            encodes_each_s = all_s if self._elastic else _each_s(encode_s, count)
            return max(encodes_each_s, answers_each_s)

        if self._elastic:
            # As many as have enough to do.
            wanted = int(encode_s / all_s) if all_s else encoders
            if wanted > encoders:
                wanted = max(encoders, int(encode_s / all_s - SPARE))
            elif fuller_s(encoders) < DEAD_BAND * all_s:
                wanted = encoders
        else:
            wanted = min(range(1, self._devices), key=fuller_s)
            if fuller_s(encoders) < DEAD_BAND * fuller_s(wanted):
                wanted = encoders
        wanted = min(wanted, self._devices - 1)
        reason = (
            f"encode {encode_s:.1f} s, answers {answer_s:.1f} s of work in {WINDOW_S:g} s: "
            f"{fuller_s(encoders):.1f} s for each of the fuller side with {encoders} of "
            f"{self._devices} that encode, {fuller_s(wanted):.1f} s with {wanted}"
        )
        return wanted, reason


def _each_s(work_s: float, count: int) -> float:
    if not count:
        return math.inf if work_s > LEAST_S else 0.0
    return work_s / count


class Switching:
    """Gives new work to one of the two instances of a pair, by `Balance`.

    A pair is an encode and a prefill-decode instance on the same devices or cores; the latter's
    `PAIR_LABEL` names the former. What was given ends where it is: an encoder that is parked ends
    its items before the other answers, and open answers go on beside items that come.

    Args:
        elastic: See `Balance`; so it is wherever one that answers is an encoder, too.
    """

    def __init__(self, pool: EndpointPool, *, elastic: bool) -> None:
        self._pool = pool
        self._elastic = elastic
        self._kind = (0, False)
        self._next_s = self._encode_s = self._answer_s = 0.0

    def tick(self, now_s: float) -> None:
        """Look, if it is time to."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + TICK_S
        usable = [each for each in self._pool.all if each.health.usable]
        pairs = []
        for each in usable:
            other = self._pool.get(each.labels.get(PAIR_LABEL, ""))
            if other is not None and other.health.usable and other.role != each.role:
                pairs.append((other, each))
        paired = {each for pair in pairs for each in pair}
        for each in usable:
            if each.health.parked and each not in paired:
                each.health.park(False)  # The other of its pair is gone.
        devices = len(usable) - len(pairs)
        if devices < 2:
            return
        only_encode = [each for each in usable if each.role == "encode"]
        shares = any("encode" in each.duties[:-1] for each in usable)
        if (kind := (devices, self._elastic or shares)) != self._kind:
            self._kind, self._balance = kind, Balance(devices, elastic=kind[1])
        came = self._pool.work.came_s.items()
        encode_s = sum(seconds for (role, _, _), seconds in came if role == "encode")
        answer_s = sum(seconds for _, seconds in came) - encode_s
        self._balance.note(now_s, encode_s - self._encode_s, answer_s - self._answer_s)
        self._encode_s, self._answer_s = encode_s, answer_s
        encoders = sum(not each.health.parked for each in only_encode)
        encode_owed_s = sum(each.backlog.encode_s for each in usable)
        answer_owed_s = sum(each.backlog.owed_s for each in usable) - encode_owed_s
        wanted, reason = self._balance.decide(now_s, encoders, encode_owed_s, answer_owed_s)
        least = len(only_encode) - len(pairs)
        change = min(max(wanted, least), len(only_encode)) - encoders
        self._switch(pairs, change, reason)

    def _switch(self, pairs: list[tuple[Instance, Instance]], change: int, reason: str) -> None:
        """Let so many more encode, or fewer; those first that have least to end."""
        starts = change > 0
        able = [pair for pair in pairs if pair[0].health.parked is starts]
        able.sort(key=lambda pair: pair[starts].load)
        for encoder, answering in able[: abs(change)]:
            names = (encoder.name, answering.name) if starts else (answering.name, encoder.name)
            logger.info("%s gets new work in place of %s: %s", *names, reason)
            encoder.health.park(not starts)
        for encoder, answering in pairs:
            if not encoder.health.parked:
                answering.health.park(True)
            elif not encoder.load:
                answering.health.park(False)
