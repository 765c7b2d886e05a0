"""Histories of events and what the launcher decides about them."""

from __future__ import annotations

from epd_portable.config.schema import Launch, Restart
from epd_portable.launch.lifecycle import Fail, Kill, Lifecycle, Notice, Phase, Start

LAUNCH = Launch(
    startup_timeout_s=100.0,
    stop_grace_s=15.0,
    hung_after_s=30.0,
    restart=Restart(first_delay_s=1.0, max_delay_s=5.0, healthy_after_s=60.0),
)


def new() -> Lifecycle:
    return Lifecycle(["encode-0", "router"], LAUNCH)


def serving(now: float = 0.0) -> Lifecycle:
    lifecycle = new()
    lifecycle.begin(now)
    lifecycle.healthy("encode-0", now)
    lifecycle.healthy("router", now)
    return lifecycle


def test_everything_starts_at_once() -> None:
    lifecycle = new()
    assert lifecycle.begin(0.0) == [Start("encode-0"), Start("router")]
    assert lifecycle.pending() == ["encode-0", "router"]


def test_it_serves_when_the_last_process_is_healthy() -> None:
    lifecycle = new()
    lifecycle.begin(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.phase is Phase.STARTING
    assert lifecycle.pending() == ["encode-0"]
    lifecycle.healthy("encode-0", 2.0)
    assert lifecycle.phase is Phase.SERVING
    assert lifecycle.pending() == []


def test_a_death_at_start_ends_everything_even_after_it_was_healthy() -> None:
    lifecycle = new()
    lifecycle.begin(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.exited("router", "exited with status 1", 2.0) == [
        Fail("router", "exited with status 1")
    ]
    assert lifecycle.phase is Phase.FAILED


def test_a_start_that_takes_too_long_ends_everything() -> None:
    lifecycle = new()
    lifecycle.begin(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.tick(99.9) == []
    (action,) = lifecycle.tick(100.0)
    assert isinstance(action, Fail)
    assert action.name == "encode-0"
    assert "100 s after its start (launch.startup_timeout_s)" in action.reason


def test_a_death_while_serving_is_answered_with_a_restart_after_a_pause() -> None:
    lifecycle = serving()
    (notice,) = lifecycle.exited("encode-0", "was killed by SIGKILL", 10.0)
    assert notice == Notice("encode-0 was killed by SIGKILL; restarting it in 1 s")
    assert lifecycle.phase is Phase.SERVING
    assert lifecycle.pending() == []
    assert lifecycle.tick(10.9) == []
    assert lifecycle.tick(11.0) == [Start("encode-0")]
    assert lifecycle.tick(11.1) == []
    assert lifecycle.pending() == ["encode-0"]
    assert lifecycle.healthy("encode-0", 20.0) == [Notice("encode-0 is back")]


def restart_delay(lifecycle: Lifecycle, now: float) -> float:
    """Let the encoder die at ``now``; return the pause before its restart."""
    lifecycle.exited("encode-0", "died", now)
    steps = (step / 4 for step in range(100))
    return next(delay for delay in steps if Start("encode-0") in lifecycle.tick(now + delay))


def test_the_pause_doubles_up_to_its_limit_while_a_process_keeps_dying() -> None:
    lifecycle = serving()
    delays = [restart_delay(lifecycle, now) for now in (10.0, 20.0, 30.0, 40.0, 50.0)]
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_process_that_was_healthy_for_long_has_its_deaths_forgiven() -> None:
    lifecycle = serving()
    assert restart_delay(lifecycle, 10.0) == 1.0
    lifecycle.healthy("encode-0", 20.0)
    assert restart_delay(lifecycle, 79.0) == 2.0
    lifecycle.healthy("encode-0", 90.0)
    assert restart_delay(lifecycle, 150.0) == 1.0


def test_one_process_dying_leaves_the_pause_of_another_alone() -> None:
    lifecycle = serving()
    restart_delay(lifecycle, 10.0)
    restart_delay(lifecycle, 20.0)
    (notice,) = lifecycle.exited("router", "died", 30.0)
    assert notice == Notice("router died; restarting it in 1 s")


def test_a_restart_that_hangs_is_ended_once_and_tried_again() -> None:
    lifecycle = serving()
    restart_delay(lifecycle, 10.0)
    notice, kill = lifecycle.tick(111.0)
    assert isinstance(notice, Notice)
    assert "encode-0 is not healthy 100 s after its start" in notice.text
    assert kill == Kill("encode-0")
    assert lifecycle.tick(112.0) == []
    assert restart_delay(lifecycle, 113.0) == 2.0


def test_deaths_without_end_do_not_overflow() -> None:
    lifecycle = serving()
    for step in range(2000):
        assert lifecycle.exited("encode-0", "died", float(step))
