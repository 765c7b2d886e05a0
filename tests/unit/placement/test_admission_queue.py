from __future__ import annotations

from collections.abc import Sequence

import pytest

from epd_portable.placement.admission import AdmissionQueue, Limit, QueuedRequest

REQUESTS, ITEMS = range(2)


def gate(requests: Limit = 1, items: Limit = None, *, max_waiting: int = 100) -> AdmissionQueue:
    return AdmissionQueue([requests, items], max_waiting=max_waiting)


def enter(
    door: AdmissionQueue, *, items: int = 0, key: str = "", priority: int = 0
) -> QueuedRequest:
    ticket = QueuedRequest([1, items], key=key.encode(), priority=priority)
    door.enter(ticket)
    door.admit()
    return ticket


def order(door: AdmissionQueue, *first: QueuedRequest) -> list[QueuedRequest]:
    """End requests one after the other; return who went, in order."""
    going, went = list(first), []
    while going:
        door.leave(going.pop(0))
        admitted = door.admit()
        went += admitted
        going += admitted
    return went


@pytest.mark.parametrize(
    ("waiting", "newcomer", "turned_away"),
    [
        # Key and priority of each; the last of those that wait is turned away, or the newcomer.
        ([("", 0), ("", 0)], ("", 0), 2),
        ([("", 0), ("", 0)], ("", -1), 1),
        ([("", 0), ("", 1)], ("", 0), 1),
        ([("", 0), ("", 1)], ("", 2), 2),
        ([("a", 0), ("a", 0)], ("b", 0), 1),
        ([("a", 0), ("b", 0)], ("b", 0), 2),
        ([("a", 0), ("b", 0)], ("a", 0), 2),
        # A key with few of that priority is asked to go only if its priority is the last.
        ([("a", 0), ("b", 1)], ("a", 0), 1),
    ],
)
def test_full_queue_refuses_the_lowest_ranked_request(
    waiting: list[tuple[str, int]], newcomer: tuple[str, int], turned_away: int
) -> None:
    door = gate(max_waiting=2)
    enter(door)
    tickets = [enter(door, key=key, priority=priority) for key, priority in waiting]
    assert door.reject() is None
    tickets.append(enter(door, key=newcomer[0], priority=newcomer[1]))
    assert door.reject() is tickets[turned_away]
    assert tickets[turned_away].where == "left"
    assert (door.waiting, door.reject()) == (2, None)


def test_request_does_not_overtake_at_a_shared_limit() -> None:
    door = gate(None, 4)
    first = enter(door, items=3)
    large, small = enter(door, items=4), enter(door, items=1)
    assert (large.where, small.where) == ("waiting", "waiting")
    assert door.lacking_limit(small) == ITEMS
    assert order(door, first) == [large, small]


class Counted(QueuedRequest):
    """Counts how often somebody looks at what it takes, and whose it is."""

    looks = 0

    @property
    def amounts(self) -> Sequence[int]:
        Counted.looks += 1
        return self._amounts

    @amounts.setter
    def amounts(self, amounts: Sequence[int]) -> None:
        self._amounts = amounts

    @property
    def key(self) -> bytes:
        Counted.looks += 1
        return self._key

    @key.setter
    def key(self, key: bytes) -> None:
        self._key = key


@pytest.mark.parametrize("keys", [10, 1000])
def test_next_request_is_found_without_a_full_scan(keys: int) -> None:
    door = AdmissionQueue([4, 4], max_waiting=keys)
    going = [QueuedRequest([1, 1]) for _ in range(4)]
    for ticket in going:
        door.enter(ticket)
    for number in range(keys):
        # Texts behind pictures, of a key each; one of them is larger than the others.
        amounts = [1, 2 if number == 3 else 1] if number % 2 else [1, 0]
        door.enter(Counted(amounts, key=b"%d" % number))
    Counted.looks = 0
    went = 0
    while went < 8:
        door.leave(going.pop(0))
        admitted = door.admit()
        door.enter(Counted([1, 1], key=b"late %d" % went))
        assert door.reject() is None or door.waiting == keys
        going += admitted
        went += len(admitted)
    assert Counted.looks < 200
