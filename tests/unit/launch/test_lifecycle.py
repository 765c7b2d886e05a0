"""Histories of events and what the launcher decides about them."""

from __future__ import annotations

import pytest

from epd_portable.config.schema import Launch
from epd_portable.launch.notices import Notice
from epd_portable.launch.run.lifecycle import (
    Action,
    Fail,
    Lifecycle,
    Phase,
    ProcessOrder,
)

LAUNCH = Launch(startup_timeout_s=100.0, stop_grace_s=15.0, hung_after_s=30.0)
START, STOP = ProcessOrder("start", "encode-0"), ProcessOrder("stop", "encode-0")
BACK = Notice("recovered", "encode-0 has recovered", {"instance": "encode-0"})
PAIR = ["encode-0", "front"]
# Two share a device, the decoder first; the front shares nothing.
NEIGHBOURS = ["encode-0", "decode-0", "front"]
AFTER = {"encode-0": ["decode-0"]}


def new(names: list[str] = PAIR, *, launch: Launch = LAUNCH) -> Lifecycle:
    return Lifecycle(names, launch, AFTER if names is NEIGHBOURS else {})


def serving(names: list[str] = PAIR, *, launch: Launch = LAUNCH) -> Lifecycle:
    lifecycle = new(names, launch=launch)
    lifecycle.start_all(0.0)
    for name in sorted(names):
        lifecycle.healthy(name, 0.0)
    assert lifecycle.all_up()
    lifecycle.phase = Phase.SERVING
    return lifecycle


def in_state(lifecycle: Lifecycle, state: str) -> list[str]:
    return [name for name, found in lifecycle.states().items() if found == state]


def said(actions: list[Action]) -> list[str]:
    """Return the texts of notices, and orders with their names."""
    return [
        f"{each.what} {each.name}" if isinstance(each, ProcessOrder) else each.text
        for each in actions
    ]


def restart_delay(lifecycle: Lifecycle, now: float) -> float:
    """Let the encoder die at ``now``; return the pause before its restart."""
    lifecycle.exited("encode-0", "died", now)
    steps = (step / 4 for step in range(200))
    return next(delay for delay in steps if START in lifecycle.tick(now + delay))


def hung(lifecycle: Lifecycle, since: float) -> float:
    """Let the encoder miss a probe every 10 s until it is asked to end; return when it is."""
    for now in (since + 10.0 * step for step in range(1, 100)):
        if STOP in lifecycle.silent("encode-0", now - 10.0, now):
            return now
    raise AssertionError("it never was")


def test_a_death_at_start_ends_everything_even_after_it_was_healthy() -> None:
    lifecycle = new()
    lifecycle.start_all(0.0)
    lifecycle.healthy("front", 1.0)
    assert lifecycle.exited("front", "exited", 2.0) == [Fail("front", "exited")]
    assert lifecycle.phase is Phase.FAILED


def test_the_pause_doubles_up_to_its_limit_for_each_that_keeps_dying() -> None:
    lifecycle = serving()
    delays = [restart_delay(lifecycle, now) for now in (0.0, 5.0, 10.0, 20.0, 30.0, 50.0, 90.0)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert said(lifecycle.exited("front", "died", 200.0)) == ["front died; restarting it in 1 s"]
    for step in range(2000):
        assert lifecycle.exited("encode-0", "died", 200.0 + step), "it overflows"


def test_a_process_that_was_healthy_for_long_has_its_deaths_forgiven() -> None:
    lifecycle = serving()
    assert restart_delay(lifecycle, 10.0) == 1.0
    lifecycle.healthy("encode-0", 20.0)
    assert restart_delay(lifecycle, 79.0) == 2.0
    lifecycle.healthy("encode-0", 90.0)
    assert restart_delay(lifecycle, 150.0) == 1.0


def test_a_restart_that_hangs_is_ended_once_and_tried_again() -> None:
    lifecycle = serving()
    restart_delay(lifecycle, 10.0)
    assert said(lifecycle.tick(111.0)) == [
        "encode-0 is not healthy 100 s after its start; killing it",
        "kill encode-0",
    ]
    assert lifecycle.tick(112.0) == []
    assert restart_delay(lifecycle, 113.0) == 2.0


def test_one_that_is_silent_for_long_is_asked_to_end_then_killed_then_started_again() -> None:
    lifecycle = serving()
    assert lifecycle.silent("encode-0", 100.0, 110.0) == []
    assert lifecycle.silent("encode-0", 110.0, 120.0) == []
    assert in_state(lifecycle, "up") == PAIR
    assert said(lifecycle.silent("encode-0", 120.0, 130.0)) == [
        "encode-0 has not answered as it should for 30 s (launch.hung_after_s); terminating it",
        "stop encode-0",
    ]
    assert in_state(lifecycle, "up") == ["front"]
    assert lifecycle.silent("encode-0", 130.0, 140.0) == [], "it was asked to end"
    assert lifecycle.tick(144.9) == []
    assert said(lifecycle.tick(145.0)) == [
        "encode-0 does not end within 15 s; killing it",
        "kill encode-0",
    ]
    assert lifecycle.tick(200.0) == []
    assert restart_delay(lifecycle, 200.0) == 1.0
    assert in_state(lifecycle, "starting") == ["encode-0"]
    for now in (210.0, 240.0, 280.0):
        assert lifecycle.silent("encode-0", now, now + 40.0) == [], "it is not up"


def test_an_answer_ends_a_silence_however_late_it_comes() -> None:
    lifecycle = serving()
    for now in (100.0, 200.0, 300.0):
        assert lifecycle.silent("encode-0", now - 50.0, now) == []
        assert lifecycle.silent("encode-0", now, now + 25.0) == []
        assert lifecycle.healthy("encode-0", now + 40.0) == []
    assert hung(lifecycle, 1000.0) == 1030.0


@pytest.mark.parametrize(
    ("probes", "hung_after_s"),
    [
        # The launcher itself may have been stopped for a while.
        ([(100.0, 900.0), (900.0, 910.0)], 30.0),
        ([(now / 10, now / 10) for now in range(1000, 1300)], 30.0),
        ([(now, now + 10.0) for now in range(0, 1000, 10)], 0.0),
    ],
    ids=["few that took long", "many within a short time", "no limit"],
)
def test_what_is_no_silence(probes: list[tuple[float, float]], hung_after_s: float) -> None:
    lifecycle = serving(launch=LAUNCH.model_copy(update={"hung_after_s": hung_after_s}))
    assert not any(lifecycle.silent("encode-0", asked, now) for asked, now in probes)


def test_the_time_of_a_silence_is_not_counted_as_healthy() -> None:
    """One that hangs at once after each start is started again ever later."""
    lifecycle = serving()
    now = 0.0
    for delay in (1.0, 2.0, 4.0, 8.0):
        now = hung(lifecycle, now + 10.0) + 1000.0
        assert restart_delay(lifecycle, now) == delay
        lifecycle.healthy("encode-0", now + 10.0)


def test_neighbours_start_one_after_the_other_in_their_order() -> None:
    lifecycle = new(NEIGHBOURS)
    assert lifecycle.start_all(0.0) == [
        ProcessOrder("start", "decode-0"),
        ProcessOrder("start", "front"),
    ]
    assert lifecycle.waiting() == {"encode-0": ["decode-0"]}
    assert lifecycle.healthy("front", 1.0) == []
    assert lifecycle.tick(99.0) == []
    assert lifecycle.healthy("decode-0", 99.0) == [START]
    assert lifecycle.waiting() == {}
    assert not lifecycle.all_up()
    assert lifecycle.tick(150.0) == [], "its time counts from its own start"
    assert lifecycle.healthy("encode-0", 160.0) == []
    assert lifecycle.all_up()


@pytest.mark.parametrize("again", [False, True], ids=["it is healthy", "it dies again"])
def test_neighbours_that_died_together_start_again_one_at_a_time_in_either_order(
    again: bool,
) -> None:
    lifecycle = serving(NEIGHBOURS)
    lifecycle.exited("encode-0", "died", 10.0)
    lifecycle.exited("decode-0", "died", 10.5)
    assert lifecycle.tick(11.0) == [START]
    assert lifecycle.tick(12.0) == []
    assert lifecycle.waiting() == {"decode-0": ["encode-0"]}
    if again:
        assert said(lifecycle.exited("encode-0", "died", 12.0))[1:] == ["start decode-0"]
        assert lifecycle.tick(30.0) == []
    else:
        assert lifecycle.healthy("encode-0", 20.0) == [BACK, ProcessOrder("start", "decode-0")]


def test_nothing_starts_while_a_neighbour_is_being_ended() -> None:
    lifecycle = serving(NEIGHBOURS)
    for asked_at in (0.0, 10.0):
        lifecycle.silent("decode-0", asked_at, asked_at + 10.0)
    lifecycle.exited("encode-0", "died", 29.5)
    assert ProcessOrder("stop", "decode-0") in lifecycle.silent("decode-0", 20.0, 30.0)
    assert lifecycle.tick(31.0) == []
    assert START in lifecycle.exited("decode-0", "exited with status 0", 32.0)
    assert lifecycle.tick(34.0) == []
    assert lifecycle.waiting() == {"decode-0": ["encode-0"]}
    assert ProcessOrder("start", "decode-0") in lifecycle.healthy("encode-0", 35.0)
