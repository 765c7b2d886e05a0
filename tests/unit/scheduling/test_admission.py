from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd_portable.scheduling.admission import (
    LONGEST_WAIT_S,
    SHORTEST_WAIT_S,
    Admission,
    AdmissionLimits,
    Visit,
)


def admission(items: int = 4, nbytes: int = 100) -> Admission:
    return Admission(AdmissionLimits(items=items, nbytes=nbytes))


def enter(desk: Admission, items: int = 1, nbytes: int = 1, now_s: float = 0.0) -> Visit:
    visit = Visit()
    assert desk.add_part(visit, items=items, nbytes=nbytes, now_s=now_s) is None
    return visit


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"items": 3, "nbytes": 1}, ("items", 2, 4, 3)),
        ({"items": 1, "nbytes": 50}, ("bytes", 60, 100, 50)),
    ],
)
def test_requests_are_taken_on_up_to_the_limits_and_again_when_others_left(
    more: dict[str, int], told: tuple[str, int, int, int]
) -> None:
    desk = admission()
    first, _ = enter(desk, nbytes=30), enter(desk, nbytes=30)
    refusal = desk.add_part(Visit(), **more, now_s=0.0)
    assert refusal is not None
    assert (refusal.what, refusal.queued, refusal.limit, refusal.wanted) == told
    for _ in range(2):
        desk.leave(first, now_s=1.0)
    enter(desk, **more)


def test_a_request_that_grows_is_refused_when_it_passes_the_limit_and_leaves_whole() -> None:
    desk = admission()
    enter(desk, nbytes=60)
    visit = enter(desk, nbytes=30)
    refusal = desk.add_part(visit, nbytes=20, now_s=0.0)
    assert refusal is not None
    assert (refusal.queued, refusal.wanted) == (60, 50)
    assert desk.nbytes == 90
    desk.leave(visit, now_s=0.0)
    assert (desk.items, desk.nbytes, desk.requests) == (1, 60, 1)


@pytest.mark.parametrize("more", [{"items": 5}, {"items": 1, "nbytes": 101}])
def test_a_request_that_is_too_large_alone_is_told_no_time(more: dict[str, int]) -> None:
    desk = admission()
    enter(desk)
    refusal = desk.add_part(Visit(), **more, now_s=0.0)
    assert refusal is not None and refusal.wait_s is None


def wait(desk: Admission, now_s: float, items: int = 1) -> float:
    refusal = desk.add_part(Visit(), items=items, now_s=now_s)
    assert refusal is not None and refusal.wait_s is not None
    return refusal.wait_s


def test_the_wait_follows_from_the_observed_rate_and_from_how_much_must_leave() -> None:
    desk = admission(items=4)
    now_s = 0.0
    for _ in range(19):
        visit = enter(desk, now_s=now_s)
        now_s += 0.5
        desk.leave(visit, now_s=now_s)
    for _ in range(4):
        enter(desk, now_s=now_s)
    # A request takes half a second; one of four has to leave, or all of them.
    assert wait(desk, now_s) == pytest.approx(0.5, rel=0.1)
    assert wait(desk, now_s, items=4) == pytest.approx(2.0, rel=0.1)


def test_idle_time_does_not_count_as_slowness() -> None:
    desk = admission(items=1)
    visit = enter(desk, now_s=0.0)
    desk.leave(visit, now_s=0.2)
    enter(desk, now_s=1000.0)
    assert wait(desk, 1000.0) <= 0.2


def test_a_stalled_instance_tells_longer_and_longer_times_up_to_a_bound() -> None:
    desk = admission(items=1)
    enter(desk, now_s=0.0)
    assert wait(desk, 0.0) == SHORTEST_WAIT_S
    assert wait(desk, 5.0) == pytest.approx(5.0)
    assert wait(desk, 1e6) == LONGEST_WAIT_S


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.booleans()), max_size=40))
def test_limits_hold_and_everything_is_given_back(steps: list[tuple[int, int, bool]]) -> None:
    desk = admission()
    inside: list[Visit] = []
    for now_s, (items, nbytes, leaves) in enumerate(steps):
        if leaves and inside:
            desk.leave(inside.pop(0), now_s=now_s)
        visit = Visit()
        desk.add_part(visit, items=items, nbytes=nbytes, now_s=now_s)
        inside.append(visit)
        assert desk.items == sum(each.items for each in inside) <= 4
        assert desk.nbytes == sum(each.nbytes for each in inside) <= 100
    for visit in inside:
        desk.leave(visit, now_s=100.0)
    assert (desk.items, desk.nbytes, desk.requests) == (0, 0, 0)
