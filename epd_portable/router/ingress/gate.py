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
from collections.abc import Generator, Iterable, Sequence
from typing import Literal, TypeAlias

Limit: TypeAlias = int | None
"""At least 1; ``None`` for none."""
Where = Literal["new", "waiting", "going", "gone"]
_SOME = 64
"""Places that are not worth being put in order."""


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


_Place = tuple[float, int, bytes]
"""What the key of a flow was given, the number of its first request, and the key."""


class _Shares:
    """What each key was given, in parts of limits, and where those are that wait."""

    def __init__(self) -> None:
        self.given: dict[bytes, float] = {}
        self.level = 0.0

    def start(self, key: bytes) -> float:
        """Return where a key stands: none is behind the others for what it did not ask for."""
        return max(self.level, self.given.get(key, 0.0))


class _Line:
    """Who waits of one priority and one lane: a flow for each key, and the first ones in order.

    Places in the two heaps are those of a moment, and are set right when they come to the top:
    keys are only ever given more, and numbers of first requests only grow.

    Args:
        shares: Of all keys.

    Attributes:
        flows: By key, in the order of arrival.
        most: Of each limit, what a first request takes at most.
    """

    def __init__(self, shares: _Shares, kinds: int) -> None:
        self.flows: dict[bytes, OrderedDict[int, Ticket]] = {}
        self.most = [0] * kinds
        self._shares = shares
        self._places: dict[bytes, _Place] = {}
        # Keys that have had no more than others, by the numbers of their first requests, and those
        # that are ahead.
        self._even: list[tuple[int, _Place]] = []
        self._ahead: list[_Place] = []

    def put_in(self, ticket: Ticket) -> None:
        """Take in a request, as the last one of its key."""
        flow = self.flows.get(ticket.key)
        if flow is not None:
            flow[ticket.number] = ticket
            return
        self.flows[ticket.key] = OrderedDict({ticket.number: ticket})
        self._place(ticket.key)
        if len(self._even) + len(self._ahead) > 2 * len(self.flows) + _SOME:
            self._even.clear()
            self._ahead.clear()
            for key in self.flows:
                self._place(key)

    def take_out(self, ticket: Ticket) -> None:
        """Take out a request, wherever it is."""
        flow = self.flows[ticket.key]
        del flow[ticket.number]
        if flow:
            self._see(next(iter(flow.values())))
        else:
            del self.flows[ticket.key], self._places[ticket.key]

    def walk(self) -> Generator[tuple[float, int, Ticket], None, None]:
        """Yield where it stands, number and request of each key's first one, in order.

        Nobody comes or goes meanwhile; close it.
        """
        passed: list[_Place] = []
        try:
            while place := self._first():
                ticket = self.flows[place[2]][place[1]]
                yield max(place[0], self._shares.level), place[1], ticket
                if self._even:
                    heapq.heappop(self._even)
                else:
                    heapq.heappop(self._ahead)
                passed.append(place)
            self.most = [0] * len(self.most)
            for _, number, key in passed:
                self._see(self.flows[key][number])
        finally:
            for place in passed:
                self._push(place)

    def _first(self) -> _Place | None:
        level = self._shares.level
        while self._ahead and (self._ahead[0][0] <= level or self._moved(self._ahead[0])):
            self._set_right(heapq.heappop(self._ahead))
        while self._even:
            _, place = self._even[0]
            if not self._moved(place):
                return place
            heapq.heappop(self._even)
            self._set_right(place)
            if not self._even:
                return self._first()
        return self._ahead[0] if self._ahead else None

    def _moved(self, place: _Place) -> bool:
        given, number, key = place
        if self._places.get(key) is not place:
            return True
        return self._shares.given.get(key, 0.0) != given or next(iter(self.flows[key])) != number

    def _set_right(self, place: _Place) -> None:
        """Give a flow its place of this moment, unless it has left this one for another."""
        if self._places.get(place[2]) is place:
            self._place(place[2])

    def _place(self, key: bytes) -> None:
        number, ticket = next(iter(self.flows[key].items()))
        self._see(ticket)
        place = self._places[key] = (self._shares.given.get(key, 0.0), number, key)
        self._push(place)

    def _push(self, place: _Place) -> None:
        if place[0] <= self._shares.level:
            heapq.heappush(self._even, (place[1], place))
        else:
            heapq.heappush(self._ahead, place)

    def _see(self, first: Ticket) -> None:
        self.most = [*map(max, self.most, first.amounts)]


class _Level:
    """Who waits of one priority.

    Attributes:
        lines: By lane.
    """

    def __init__(self) -> None:
        self.lines: dict[int, _Line] = {}
        # How many wait of a key and the number of its latest one, below zero, and the key: as they
        # were when it came. Until the next one comes both can only grow.
        self._most: list[tuple[int, int, bytes]] = []

    def came(self, key: bytes) -> None:
        """Note that the latest of a key has come."""
        heapq.heappush(self._most, (*self._claim(key), key))
        if len(self._most) > 2 * sum(len(line.flows) for line in self.lines.values()) + _SOME:
            keys = {key for line in self.lines.values() for key in line.flows}
            self._most = [(*self._claim(key), key) for key in keys]
            heapq.heapify(self._most)

    def latest_of_most(self) -> Ticket:
        """Return the latest request of the key with the most."""
        while True:
            *before, key = self._most[0]
            waits = self._flows(key)
            now = self._claim(key) if waits else None
            if now is not None and now == tuple(before):
                return next(flow[-now[1]] for flow in waits if -now[1] in flow)
            if now is None:
                heapq.heappop(self._most)
            else:
                heapq.heapreplace(self._most, (*now, key))

    def _flows(self, key: bytes) -> list[OrderedDict[int, Ticket]]:
        return [line.flows[key] for line in self.lines.values() if key in line.flows]

    def _claim(self, key: bytes) -> tuple[int, int]:
        flows = self._flows(key)
        return -sum(map(len, flows)), -max(next(reversed(flow)) for flow in flows)


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
        self._shares = _Shares()

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
        ticket = self._levels[self._priorities[-1]].latest_of_most()
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
        return self._lacking_for(ticket.amounts)

    def _lacking_for(self, amounts: Sequence[int]) -> int:
        lacking = 0
        for kind, (amount, used, limit) in enumerate(
            zip(amounts, self.used, self._limits, strict=True)
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
        level = self._levels.get(priority)
        walks = [(line, line.walk()) for line in level.lines.values()] if level is not None else []
        heads = [(*next(walk), index) for index, (_, walk) in enumerate(walks)]
        heapq.heapify(heads)
        try:
            while heads and not self._all_lack(lacking):
                _, _, ticket, index = heapq.heappop(heads)
                lacks = self._lacks(ticket)
                if not lacks and not ticket.lane & lacking:
                    return ticket, lacking
                # Also of one that is kept by others: nobody takes meanwhile what it lacks itself.
                lacking |= lacks
                line, walk = walks[index]
                # The others of its lane are kept, too, and most of them lack no more than it.
                if self._lacking_for(line.most) & ~lacking and (head := next(walk, None)):
                    heapq.heappush(heads, (*head, index))
        finally:
            for _, walk in walks:
                walk.close()
        return None, lacking

    def _all_lack(self, lacking: int) -> bool:
        return all(lane & lacking for lane in self._lanes)

    def _charge(self, ticket: Ticket) -> None:
        parts = [
            min(amount / limit, 1.0)
            for amount, limit in zip(ticket.amounts, self._limits, strict=True)
            if limit is not None
        ]
        shares = self._shares
        shares.level = shares.start(ticket.key)
        shares.given[ticket.key] = shares.level + max(parts, default=0.0)

    def _put_in(self, ticket: Ticket) -> None:
        ticket.where = "waiting"
        self.waiting += 1
        self._lanes[ticket.lane] += 1
        level = self._levels.get(ticket.priority)
        if level is None:
            level = self._levels[ticket.priority] = _Level()
            bisect.insort(self._priorities, ticket.priority)
        line = level.lines.get(ticket.lane)
        if line is None:
            line = level.lines[ticket.lane] = _Line(self._shares, len(self._limits))
        line.put_in(ticket)
        level.came(ticket.key)

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self._lanes[ticket.lane] -= 1
        if not self._lanes[ticket.lane]:
            del self._lanes[ticket.lane]
        level = self._levels[ticket.priority]
        line = level.lines[ticket.lane]
        line.take_out(ticket)
        if not line.flows:
            del level.lines[ticket.lane]
        if not level.lines:
            del self._levels[ticket.priority]
            self._priorities.remove(ticket.priority)
        if not self.waiting:
            # Who comes later starts afresh, and keys that ask no more are forgotten.
            self._shares = _Shares()
