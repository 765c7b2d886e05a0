from __future__ import annotations

from collections.abc import Sequence

import pytest

from epd_portable.delivery.gate import Gate, Limit, Ticket

REQUESTS, ITEMS = range(2)


def gate(requests: Limit = 1, items: Limit = None, *, max_waiting: int = 100) -> Gate:
    return Gate([requests, items], max_waiting=max_waiting)


def enter(door: Gate, *, items: int = 0, key: str = "", priority: int = 0) -> Ticket:
    ticket = Ticket([1, items], key=key.encode(), priority=priority)
    door.enter(ticket)
    door.admit()
    return ticket


def order(door: Gate, *first: Ticket) -> list[Ticket]:
    """End requests one after the other; return who went, in order."""
    going, went = list(first), []
    while going:
        door.leave(going.pop(0))
        admitted = door.admit()
        went += admitted
        going += admitted
    return went


def test_requests_go_while_there_is_room() -> None:
    door = gate(2)
    first, second, third = (enter(door) for _ in range(3))
    assert [ticket.where for ticket in (first, second, third)] == ["going", "going", "waiting"]
    assert door.admit() == []
    door.leave(second)
    assert door.admit() == [third]
    assert (door.going, door.waiting, door.used) == (2, 0, [2, 0])


@pytest.mark.parametrize("limits", [[None, None], [3, None], [None, 3]])
def test_what_is_not_limited_keeps_nobody(limits: list[Limit]) -> None:
    door = Gate(limits, max_waiting=0)
    assert all(enter(door, items=1).where == "going" for _ in range(3))


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([0, -1, 1], [1, 0, 2]),
        ([5, 5, -5, -5], [2, 3, 0, 1]),
        ([2**70, -(2**70)], [1, 0]),
    ],
)
def test_smaller_priorities_go_first_and_equal_ones_in_order_of_arrival(
    priorities: list[int], expected: list[int]
) -> None:
    door = gate()
    first = enter(door)
    waiting = [enter(door, priority=priority) for priority in priorities]
    assert order(door, first) == [waiting[index] for index in expected]


def test_keys_take_turns_however_many_requests_they_have() -> None:
    door = gate()
    first = enter(door, key="many")
    many = [enter(door, key="many") for _ in range(4)]
    few = [enter(door, key="few") for _ in range(2)]
    went = order(door, first)
    assert went == [many[0], few[0], many[1], few[1], many[2], many[3]]


def test_a_key_of_large_requests_has_fewer_turns() -> None:
    door = gate(None, 4)
    first = enter(door, items=4)
    large = [enter(door, items=4, key="large") for _ in range(2)]
    small = [enter(door, items=1, key="small") for _ in range(8)]
    went = order(door, first)
    assert went.index(large[1]) == 5
    assert went[1:5] == small[:4]


def test_nobody_overtakes_at_a_limit_that_somebody_before_lacks() -> None:
    door = gate(None, 4)
    first = enter(door, items=3)
    large, small = enter(door, items=4), enter(door, items=1)
    assert (large.where, small.where) == ("waiting", "waiting")
    assert door.lacking_limit(small) == ITEMS
    assert order(door, first) == [large, small]


def test_a_text_does_not_wait_for_pictures_that_wait_for_encoders() -> None:
    door = gate(3, 1)
    enter(door, items=1)
    picture, text = enter(door, items=1), enter(door)
    assert (picture.where, text.where) == ("waiting", "going")


def test_texts_do_not_keep_a_picture_waiting_for_ever() -> None:
    door = gate(3, 1)
    first, text = enter(door, items=1), enter(door)
    picture, later = enter(door, items=1), enter(door)
    assert (picture.where, later.where) == ("waiting", "going")
    last = enter(door)
    assert last.where == "waiting"
    # Of what the last one lacks, the picture's part is kept: it came before.
    door.leave(first)
    assert door.admit() == [picture]
    door.leave(text)
    assert door.admit() == [last]


def test_who_takes_more_than_a_limit_goes_alone() -> None:
    door = gate(None, 4)
    first, large, small = (enter(door, items=items) for items in (1, 9, 1))
    assert order(door, first) == [large, small]
    door = gate(None, 4)
    assert enter(door, items=9).where == "going"
    assert door.used == [1, 4]


def test_a_part_that_is_given_back_lets_others_in() -> None:
    door = gate(None, 2)
    first, second = enter(door, items=2), enter(door, items=2)
    door.give_back(first, [ITEMS])
    assert door.admit() == [second]
    door.leave(first)
    assert door.used == [1, 2]


@pytest.mark.parametrize("limit", [3, None])
def test_a_limit_that_is_raised_lets_others_in(limit: Limit) -> None:
    door = gate(1)
    enter(door)
    waiting = [enter(door), enter(door)]
    door.set_limit(REQUESTS, limit)
    assert door.admit() == waiting


def test_a_limit_that_falls_below_what_goes_lets_nobody_in() -> None:
    door = gate(3)
    going = [enter(door) for _ in range(3)]
    waiting = enter(door)
    door.set_limit(REQUESTS, 1)
    for ticket in going[:2]:
        door.leave(ticket)
        assert door.admit() == []
    door.leave(going[2])
    assert door.admit() == [waiting]


def test_who_waits_may_leave() -> None:
    door = gate()
    first, second, third = (enter(door) for _ in range(3))
    door.leave(second)
    assert order(door, first) == [third]
    door.leave(second)
    assert (door.going, door.waiting, door.used) == (0, 0, [0, 0])


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
def test_one_too_many_turns_away_who_has_the_least_claim(
    waiting: list[tuple[str, int]], newcomer: tuple[str, int], turned_away: int
) -> None:
    door = gate(max_waiting=2)
    enter(door)
    tickets = [enter(door, key=key, priority=priority) for key, priority in waiting]
    assert door.turn_away() is None
    tickets.append(enter(door, key=newcomer[0], priority=newcomer[1]))
    assert door.turn_away() is tickets[turned_away]
    assert tickets[turned_away].where == "gone"
    assert (door.waiting, door.turn_away()) == (2, None)


def test_nobody_waits_where_there_is_no_place_to() -> None:
    door = gate(max_waiting=0)
    enter(door)
    late = enter(door)
    assert door.turn_away() is late


def test_nobody_takes_what_one_lacks_whom_others_keep_waiting() -> None:
    """The urgent one keeps the large one at the second limit, and that one lacks the first too."""
    door = Gate([3, 1], max_waiting=9)
    held, large = Ticket([2, 1]), Ticket([3, 1], priority=1)
    small, urgent = Ticket([1, 0], priority=1), Ticket([0, 1])
    for ticket in (held, large, small, urgent):
        door.enter(ticket)
        assert door.admit() == []
    door.leave(held)
    # Of the first there is enough now, whoever goes before.
    assert door.admit() == [urgent, small]
    for ticket in (urgent, small):
        assert door.admit() == []
        door.leave(ticket)
    assert door.admit() == [large]


class Counted(Ticket):
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
def test_who_goes_next_is_found_without_a_look_at_everybody(keys: int) -> None:
    door = Gate([4, 4], max_waiting=keys)
    going = [Ticket([1, 1]) for _ in range(4)]
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
        assert door.turn_away() is None or door.waiting == keys
        going += admitted
        went += len(admitted)
    assert Counted.looks < 200
