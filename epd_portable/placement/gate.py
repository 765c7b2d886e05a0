"""Which requests are served when not all can be, and in which order the others wait. No I/O.

Limits bound amounts in flight: requests, items, bytes. A request takes its amounts when it is
admitted, and gives them back. One that does not fit waits:

- Smaller values of priority go first, as in vLLM.
- Within a priority, keys share by start-time fair queuing: each is charged the part of the tightest
  limit that its requests take. While two of them wait, neither gets ahead of the other by more than
  what two requests take.
- Requests of one key are served first come, first served.
- No request passes another at a limit that the other one lacks: a large request is not delayed for
  ever by small ones, while a text does not wait for pictures that wait for encoders.

A request that takes more than a whole limit takes all of it, and goes when nothing else is in
flight at that limit.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

Limit: TypeAlias = int | None
"""At least 1; ``None`` for none."""
Where = Literal["new", "waiting", "going", "gone"]


class Ticket:
    """One request at the gate.

    Args:
        amounts: It takes of each limit.
        key: Of its client; keys share what is served.
        priority: Smaller goes first.

    Attributes:
        where: How far it has come.
        taken: Of each limit, while it goes.
        number: In the order of arrival, of those that wait.
        lane: A bit for each limit of which it takes something, while it waits.
    """

    __slots__ = ("amounts", "key", "lane", "number", "priority", "taken", "where")

    def __init__(self, amounts: Sequence[int], *, key: bytes = b"", priority: int = 0) -> None:
        self.amounts = amounts
        self.key = key
        self.priority = priority
        self.where: Where = "new"
        self.taken: list[int] = []
        self.number = 0
        self.lane = 0


class _Shares:
    """How much each key was served, in parts of limits.

    Attributes:
        served: By key; a key that begins to wait is not behind the others for the time before.
        level: Of the key that was served last.
    """

    def __init__(self) -> None:
        self.served: dict[bytes, float] = {}
        self.level = 0.0

    def join(self, key: bytes) -> None:
        self.served[key] = max(self.level, self.served.get(key, 0.0))

    def charge(self, key: bytes, part: float) -> None:
        self.level = max(self.level, self.served[key])
        self.served[key] = self.level + part


class _Lane:
    """Requests of one priority that take of the same limits: a queue for each key."""

    def __init__(self, shares: _Shares) -> None:
        self.queues: dict[bytes, OrderedDict[int, Ticket]] = {}
        self._shares = shares
        # What a key was served, the number of its first request here, and the key; as of when it
        # was pushed. Both only grow, so an entry is corrected when it comes to the top.
        self._heads: list[tuple[float, int, bytes]] = []

    def append(self, ticket: Ticket) -> None:
        queue = self.queues.setdefault(ticket.key, OrderedDict())
        queue[ticket.number] = ticket
        if len(queue) == 1:
            self._push(ticket.key)

    def remove(self, ticket: Ticket) -> None:
        queue = self.queues[ticket.key]
        is_first = next(iter(queue)) == ticket.number
        del queue[ticket.number]
        if not queue:
            del self.queues[ticket.key]
        elif is_first:
            self._push(ticket.key)

    def first(self) -> tuple[float, int, Ticket]:
        """Return what the key of the next request was served, its number, and the request."""
        while True:
            served, number, key = self._heads[0]
            queue = self.queues.get(key)
            if queue is None or next(iter(queue)) != number:
                heapq.heappop(self._heads)
            elif served != self._shares.served[key]:
                heapq.heapreplace(self._heads, (self._shares.served[key], number, key))
            else:
                return served, number, queue[number]

    def _push(self, key: bytes) -> None:
        if len(self._heads) > 2 * len(self.queues) + 64:
            self._heads = [self._head(each) for each in self.queues]
            heapq.heapify(self._heads)
        else:
            heapq.heappush(self._heads, self._head(key))

    def _head(self, key: bytes) -> tuple[float, int, bytes]:
        return self._shares.served[key], next(iter(self.queues[key])), key


class Gate:
    """Admits requests within limits, and lets the others wait in order.

    Args:
        limits: What may be in flight, by kind.
        max_waiting: Most requests that wait.

    Attributes:
        used: In flight, by kind.
    """

    def __init__(self, limits: Sequence[Limit], *, max_waiting: int) -> None:
        self.used = [0] * len(limits)
        self.going = 0
        self.waiting = 0
        self._limits = list(limits)
        self._max_waiting = max_waiting
        self._arrived = 0
        self._lacking = 0
        """Limits that those lacked which the last `admit` left waiting, a bit for each."""
        self._priorities: dict[int, dict[int, _Lane]] = {}
        """Lanes that are not empty, by priority."""
        self._waiting_of_key: Counter[bytes] = Counter()
        self._waiting_in_lane: Counter[int] = Counter()
        self._shares = _Shares()

    def enter(self, ticket: Ticket) -> None:
        """Take in a new request: it goes, or waits for `admit`."""
        if not self.waiting and not self._lacks(ticket):
            self._go(ticket)
            return
        self._arrived += 1
        ticket.number = self._arrived
        ticket.lane = sum(1 << kind for kind, amount in enumerate(ticket.amounts) if amount)
        ticket.where = "waiting"
        if not self._waiting_of_key[ticket.key]:
            self._shares.join(ticket.key)
        self._count(ticket, 1)
        lanes = self._priorities.setdefault(ticket.priority, {})
        lanes.setdefault(ticket.lane, _Lane(self._shares)).append(ticket)

    def admit(self) -> list[Ticket]:
        """Let those go whose turn it is and for which there is room, in order."""
        admitted: list[Ticket] = []
        lacking = 0
        for priority in sorted(self._priorities):
            ticket, lacking_here = self._next(priority, lacking)
            while ticket is not None:
                self._charge(ticket)
                self._remove(ticket)
                self._go(ticket)
                admitted.append(ticket)
                ticket, lacking_here = self._next(priority, lacking)
            lacking = lacking_here
            if self._all_lack(lacking):
                break
        self._lacking = lacking
        return admitted

    def turn_away(self) -> Ticket | None:
        """Take out a request if more wait than may; call it after `admit`.

        It is one of the last priority, and there the latest of the key with the most that wait.
        """
        if self.waiting <= self._max_waiting:
            return None
        count: Counter[bytes] = Counter()
        latest: dict[bytes, Ticket] = {}
        for lane in self._priorities[max(self._priorities)].values():
            for key, queue in lane.queues.items():
                count[key] += len(queue)
                last = queue[next(reversed(queue))]
                if key not in latest or latest[key].number < last.number:
                    latest[key] = last
        ticket = latest[max(count, key=lambda key: (count[key], latest[key].number))]
        self.leave(ticket)
        return ticket

    def give_back(self, ticket: Ticket, kinds: Iterable[int]) -> None:
        """Free what a request in flight needs no longer; `admit` says which ones go for it."""
        for kind in kinds:
            self.used[kind] -= ticket.taken[kind]
            ticket.taken[kind] = 0

    def leave(self, ticket: Ticket) -> None:
        """End a request wherever it is; `admit` says which ones go for it."""
        if ticket.where == "going":
            self.give_back(ticket, range(len(self.used)))
            self.going -= 1
        elif ticket.where == "waiting":
            self._remove(ticket)
        ticket.where = "gone"

    def set_limit(self, kind: int, limit: Limit) -> None:
        """Change a limit; what is in flight goes on, and `admit` says which ones go now."""
        self._limits[kind] = limit

    def lacking_limit(self, ticket: Ticket) -> int:
        """Return which limit keeps a request from going, or those before it."""
        lacking = self._lacks(ticket) or self._lacking & ticket.lane
        return (lacking & -lacking).bit_length() - 1

    def _lacks(self, ticket: Ticket) -> int:
        """Return a bit for each limit within which a request has no room."""
        lacking = 0
        for kind, (amount, used, limit) in enumerate(
            zip(ticket.amounts, self.used, self._limits, strict=True)
        ):
            if amount and limit is not None and used + min(amount, limit) > limit:
                lacking |= 1 << kind
        return lacking

    def _go(self, ticket: Ticket) -> None:
        ticket.where = "going"
        self.going += 1
        for kind, (amount, limit) in enumerate(zip(ticket.amounts, self._limits, strict=True)):
            taken = amount if limit is None else min(amount, limit)
            ticket.taken.append(taken)
            self.used[kind] += taken

    def _next(self, priority: int, lacking: int) -> tuple[Ticket | None, int]:
        """Return the next request of a priority, if there is one, and what those before it lack.

        ``lacking`` is what those of smaller priorities lack.
        """
        lanes = self._priorities.get(priority, {})
        for *_, ticket in sorted(lane.first() for lane in lanes.values()):
            if self._all_lack(lacking):
                break
            lacks = self._lacks(ticket)
            if not lacks and not ticket.lane & lacking:
                return ticket, lacking
            # Also what one lacks that waits for others: it must not be taken meanwhile.
            lacking |= lacks
        return None, lacking

    def _all_lack(self, lacking: int) -> bool:
        return all(lane & lacking for lane in self._waiting_in_lane)

    def _charge(self, ticket: Ticket) -> None:
        parts = [
            min(amount / limit, 1.0)
            for amount, limit in zip(ticket.amounts, self._limits, strict=True)
            if limit is not None
        ]
        self._shares.charge(ticket.key, max(parts, default=0.0))

    def _remove(self, ticket: Ticket) -> None:
        lanes = self._priorities[ticket.priority]
        lane = lanes[ticket.lane]
        lane.remove(ticket)
        if not lane.queues:
            del lanes[ticket.lane]
        if not lanes:
            del self._priorities[ticket.priority]
        self._count(ticket, -1)
        if not self.waiting:
            # Later requests start afresh, and keys that ask no more are forgotten.
            self._shares = _Shares()

    def _count(self, ticket: Ticket, change: int) -> None:
        self.waiting += change
        self._waiting_of_key[ticket.key] += change
        self._waiting_in_lane[ticket.lane] += change
        if not self._waiting_of_key[ticket.key]:
            del self._waiting_of_key[ticket.key]
        if not self._waiting_in_lane[ticket.lane]:
            del self._waiting_in_lane[ticket.lane]
