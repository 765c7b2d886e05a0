"""Who goes on when not all can, and who waits in which order. Pure: nothing is awaited here.

What is limited are amounts in flight: requests, items, whatever the limits mean. A request takes
its amounts when it goes, and gives them back. Who does not fit waits:

- Smaller values of priority go first, as in vLLM.
- Of one priority, keys share what goes, each counted by how much of the tightest limit it takes
  (start-time fair queuing). While two of them wait, none is ahead of the other by more than what
  two requests take.
- Of one key, who came first goes first.
- Nobody overtakes at a limit that somebody before lacks: a large request is not passed for ever by
  small ones, while a text need not wait for pictures that wait for encoders.

A request that takes more than a whole limit takes all of it, and goes when nobody else holds any.
"""

from __future__ import annotations

import bisect
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
        key: Of whose requests it is one.
        priority: Smaller goes first.

    Attributes:
        amounts: See above, as the next ones.
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


_Flow = tuple[int, bytes]
"""Lane and key: who shares them goes in the order of arrival."""
_Level = dict[_Flow, "OrderedDict[int, Ticket]"]


class Gate:
    """Lets requests go within limits, and the others wait in order.

    Args:
        limits: What may be in flight, by kind.
        max_waiting: Most requests that wait.

    Attributes:
        used: In flight, by kind.
        going: Requests in flight.
        waiting: Requests that wait.
    """

    def __init__(self, limits: Sequence[Limit], *, max_waiting: int) -> None:
        self.used = [0] * len(limits)
        self.going = 0
        self.waiting = 0
        self._limits = list(limits)
        self._max_waiting = max_waiting
        self._arrived = 0
        self._lacking = 0
        # By priority, and what priorities there are, in order.
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._lanes: Counter[int] = Counter()
        # What each key was given, in parts of limits, and where the others are.
        self._given: dict[bytes, float] = {}
        self._level_with = 0.0

    def enter(self, ticket: Ticket) -> None:
        """Take in a new request: it goes, or waits for `admit`."""
        if not self.waiting and not self._lacks(ticket):
            self._go(ticket)
            return
        self._arrived += 1
        ticket.number = self._arrived
        ticket.lane = sum(1 << kind for kind, amount in enumerate(ticket.amounts) if amount)
        self._put_in(ticket)

    def admit(self) -> list[Ticket]:
        """Let those go whose turn it is and for whom there is room, in order."""
        admitted: list[Ticket] = []
        lacking = 0
        for priority in tuple(self._priorities):
            ticket, lacking_here = self._next(priority, lacking)
            while ticket is not None:
                self._charge(ticket)
                self._take_out(ticket)
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

        It is the one with the least claim: of the last priority, and there the latest of the key
        with the most that wait.
        """
        if self.waiting <= self._max_waiting:
            return None
        level = self._levels[self._priorities[-1]]
        waiting: Counter[bytes] = Counter()
        for (_, key), flow in level.items():
            waiting[key] += len(flow)
        most = max(waiting.values())
        last = [
            next(reversed(flow.values()))
            for (_, key), flow in level.items()
            if waiting[key] == most
        ]
        ticket = max(last, key=lambda each: each.number)
        self.leave(ticket)
        return ticket

    def give_back(self, ticket: Ticket, kinds: Iterable[int]) -> None:
        """Free what a request that goes needs no longer; `admit` says who goes for it."""
        for kind in kinds:
            self.used[kind] -= ticket.taken[kind]
            ticket.taken[kind] = 0

    def leave(self, ticket: Ticket) -> None:
        """End a request wherever it is; `admit` says who goes for it."""
        if ticket.where == "going":
            self.give_back(ticket, range(len(self.used)))
            self.going -= 1
        elif ticket.where == "waiting":
            self._take_out(ticket)
        ticket.where = "gone"

    def limit(self, kind: int, limit: Limit) -> None:
        """Change a limit; who goes goes on, and `admit` says who goes now."""
        self._limits[kind] = limit

    def lacks(self, ticket: Ticket) -> int:
        """Return which limit keeps a request from going, or those before it."""
        lacking = self._lacks(ticket) or self._lacking & ticket.lane
        return (lacking & -lacking).bit_length() - 1

    def _lacks(self, ticket: Ticket) -> int:
        """Return a bit for each limit within which there is no room."""
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

    # Order.

    def _next(self, priority: int, lacking: int) -> tuple[Ticket | None, int]:
        """Return who goes next of a priority, and what those before lack.

        Args:
            priority: Where one was waiting a moment ago.
            lacking: What those of smaller priorities lack.
        """
        flows = self._levels.get(priority, {})
        heads = [
            (self._start(ticket.key), ticket.number, ticket)
            for ticket in (next(iter(flow.values())) for flow in flows.values())
        ]
        heapq.heapify(heads)
        while heads and not self._all_lack(lacking):
            *_, ticket = heapq.heappop(heads)
            lacks = self._lacks(ticket)
            if not lacks and not ticket.lane & lacking:
                return ticket, lacking
            # Also of one that is kept by others: nobody takes meanwhile what it lacks itself.
            lacking |= lacks
        return None, lacking

    def _all_lack(self, lacking: int) -> bool:
        return all(lane & lacking for lane in self._lanes)

    def _start(self, key: bytes) -> float:
        return max(self._level_with, self._given.get(key, 0.0))

    def _charge(self, ticket: Ticket) -> None:
        parts = [
            min(amount / limit, 1.0)
            for amount, limit in zip(ticket.amounts, self._limits, strict=True)
            if limit is not None
        ]
        self._level_with = self._start(ticket.key)
        self._given[ticket.key] = self._level_with + max(parts, default=0.0)

    def _put_in(self, ticket: Ticket) -> None:
        ticket.where = "waiting"
        self.waiting += 1
        self._lanes[ticket.lane] += 1
        if ticket.priority not in self._levels:
            self._levels[ticket.priority] = {}
            bisect.insort(self._priorities, ticket.priority)
        level = self._levels[ticket.priority]
        level.setdefault((ticket.lane, ticket.key), OrderedDict())[ticket.number] = ticket

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self._lanes[ticket.lane] -= 1
        if not self._lanes[ticket.lane]:
            del self._lanes[ticket.lane]
        level = self._levels[ticket.priority]
        flow = level[ticket.lane, ticket.key]
        del flow[ticket.number]
        if not flow:
            del level[ticket.lane, ticket.key]
        if not level:
            del self._levels[ticket.priority]
            self._priorities.remove(ticket.priority)
        if not self.waiting:
            # Who comes later starts afresh, and keys that ask no more are forgotten.
            self._given.clear()
            self._level_with = 0.0
