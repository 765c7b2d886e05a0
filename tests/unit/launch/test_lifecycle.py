"""Histories of events and what the launcher decides about them."""

from __future__ import annotations

from epd_portable.config.schema import Launch
from epd_portable.launch.notices import Notice
from epd_portable.launch.run.lifecycle import Backoff, Fail, Kill, Lifecycle, Phase, Start, Stop

LAUNCH = Launch(
    startup_timeout_s=100.0,
    stop_grace_s=15.0,
    hung_after_s=30.0,
)
BACKOFF = Backoff(first_s=1.0, max_s=5.0)

BACK = Notice("back", "encode-0 is back", {"instance": "encode-0"})


def new() -> Lifecycle:
    return Lifecycle(["encode-0", "router"], LAUNCH, backoff=BACKOFF)


def serving(now: float = 0.0) -> Lifecycle:
    lifecycle = new()
    lifecycle.start_all(now)
    lifecycle.healthy("encode-0", now)
    lifecycle.healthy("router", now)
    return lifecycle


def test_everything_starts_at_once() -> None:
    lifecycle = new()
    assert lifecycle.start_all(0.0) == [Start("encode-0"), Start("router")]
    assert lifecycle.pending() == ["encode-0", "router"]


def test_it_serves_when_the_last_process_is_healthy() -> None:
    lifecycle = new()
    lifecycle.start_all(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.phase is Phase.STARTING
    assert lifecycle.pending() == ["encode-0"]
    lifecycle.healthy("encode-0", 2.0)
    assert lifecycle.phase is Phase.SERVING
    assert lifecycle.pending() == []


def test_a_death_at_start_ends_everything_even_after_it_was_healthy() -> None:
    lifecycle = new()
    lifecycle.start_all(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.exited("router", "exited with status 1", 2.0) == [
        Fail("router", "exited with status 1")
    ]
    assert lifecycle.phase is Phase.FAILED


def test_a_start_that_takes_too_long_ends_everything() -> None:
    lifecycle = new()
    lifecycle.start_all(0.0)
    lifecycle.healthy("router", 1.0)
    assert lifecycle.tick(99.9) == []
    (action,) = lifecycle.tick(100.0)
    assert isinstance(action, Fail)
    assert action.name == "encode-0"
    assert "100 s after its start (launch.startup_timeout_s)" in action.reason


def test_a_death_while_serving_is_answered_with_a_restart_after_a_pause() -> None:
    lifecycle = serving()
    (notice,) = lifecycle.exited("encode-0", "was killed by SIGKILL", 10.0)
    assert notice == Notice(
        "exited",
        "encode-0 was killed by SIGKILL; restarting it in 1 s",
        {"instance": "encode-0", "reason": "was killed by SIGKILL", "restart_in_s": 1.0},
    )
    assert lifecycle.phase is Phase.SERVING
    assert lifecycle.pending() == []
    assert lifecycle.tick(10.9) == []
    assert lifecycle.tick(11.0) == [Start("encode-0")]
    assert lifecycle.tick(11.1) == []
    assert lifecycle.pending() == ["encode-0"]
    assert lifecycle.healthy("encode-0", 20.0) == [BACK]


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
    assert isinstance(notice, Notice)
    assert notice.text == "router died; restarting it in 1 s"


def test_a_restart_that_hangs_is_ended_once_and_tried_again() -> None:
    lifecycle = serving()
    restart_delay(lifecycle, 10.0)
    notice, kill = lifecycle.tick(111.0)
    assert isinstance(notice, Notice)
    assert "encode-0 is not healthy 100 s after its start" in notice.text
    assert kill == Kill("encode-0")
    assert lifecycle.tick(112.0) == []
    assert restart_delay(lifecycle, 113.0) == 2.0


# -- silence --------------------------------------------------------------------------------------


def hung(lifecycle: Lifecycle, since: float) -> float:
    """Let the encoder miss a probe every 10 s until it is asked to end; return when it is."""
    for now in (since + 10.0 * step for step in range(1, 100)):
        if Stop("encode-0") in lifecycle.silent("encode-0", now - 10.0, now):
            return now
    raise AssertionError("it never was")


def test_one_that_is_silent_for_long_is_asked_to_end_then_killed_then_started_again() -> None:
    lifecycle = serving()
    assert lifecycle.silent("encode-0", 100.0, 110.0) == []
    assert lifecycle.silent("encode-0", 110.0, 120.0) == []
    assert lifecycle.up() == ["encode-0", "router"]
    notice, stop = lifecycle.silent("encode-0", 120.0, 130.0)
    assert isinstance(notice, Notice)
    assert "has not answered as it should for 30 s (launch.hung_after_s)" in notice.text
    assert stop == Stop("encode-0")
    assert lifecycle.up() == ["router"]
    assert lifecycle.tick(144.9) == []
    notice, kill = lifecycle.tick(145.0)
    assert isinstance(notice, Notice)
    assert notice.event == "killing"
    assert notice.text == "encode-0 does not end within 15 s; killing it"
    assert kill == Kill("encode-0")
    assert lifecycle.tick(200.0) == []
    assert restart_delay(lifecycle, 200.0) == 1.0
    assert lifecycle.pending() == ["encode-0"]


def test_an_answer_ends_a_silence_however_late_it_comes() -> None:
    lifecycle = serving()
    for now in (100.0, 200.0, 300.0):
        assert lifecycle.silent("encode-0", now - 50.0, now) == []
        assert lifecycle.silent("encode-0", now, now + 25.0) == []
        assert lifecycle.healthy("encode-0", now + 40.0) == []
    assert hung(lifecycle, 1000.0) == 1030.0


def test_a_few_probes_that_took_long_are_no_silence() -> None:
    """The launcher itself may have been stopped for a while."""
    lifecycle = serving()
    assert lifecycle.silent("encode-0", 100.0, 900.0) == []
    assert lifecycle.silent("encode-0", 900.0, 910.0) == []
    assert lifecycle.healthy("encode-0", 911.0) == []


def test_many_probes_within_a_short_time_are_no_silence() -> None:
    lifecycle = serving()
    probes = [lifecycle.silent("encode-0", now / 10, now / 10) for now in range(1000, 1300)]
    assert not any(probes)


def test_probes_that_end_after_the_process_was_asked_to_end_count_for_nothing() -> None:
    lifecycle = serving()
    hung(lifecycle, 100.0)
    assert lifecycle.silent("encode-0", 130.0, 180.0) == []
    lifecycle.exited("encode-0", "died", 200.0)
    for now in (200.0, 240.0, 280.0):
        assert lifecycle.silent("encode-0", now, now + 40.0) == []


def test_nobody_is_hung_where_the_limit_is_0() -> None:
    lifecycle = Lifecycle(["encode-0"], LAUNCH.model_copy(update={"hung_after_s": 0.0}))
    lifecycle.start_all(0.0)
    lifecycle.healthy("encode-0", 0.0)
    assert not any(lifecycle.silent("encode-0", now, now + 10.0) for now in range(0, 1000, 10))


def test_the_time_of_a_silence_is_not_counted_as_healthy() -> None:
    """One that hangs at once after each start is started again ever later."""
    lifecycle = serving()
    now = 0.0
    for delay in (1.0, 2.0, 4.0, 5.0):
        now = hung(lifecycle, now + 10.0) + 1000.0
        assert restart_delay(lifecycle, now) == delay
        lifecycle.healthy("encode-0", now + 10.0)


# -- renewal --------------------------------------------------------------------------------------


def test_one_that_is_renewed_is_started_at_once_and_has_not_died() -> None:
    lifecycle = serving()
    assert lifecycle.renew("encode-0", 10.0) == [Stop("encode-0")]
    assert lifecycle.up() == ["router"]
    assert lifecycle.exited("encode-0", "exited with status 0", 11.0) == [Start("encode-0")]
    assert lifecycle.pending() == ["encode-0"]
    assert lifecycle.healthy("encode-0", 20.0) == [BACK]
    assert lifecycle.up() == ["encode-0", "router"]
    assert restart_delay(lifecycle, 30.0) == 1.0


def test_one_that_is_renewed_and_does_not_end_is_killed() -> None:
    lifecycle = serving()
    lifecycle.renew("encode-0", 10.0)
    assert lifecycle.tick(24.9) == []
    assert Kill("encode-0") in lifecycle.tick(25.0)
    assert lifecycle.exited("encode-0", "was killed by SIGKILL", 26.0) == [Start("encode-0")]


def test_one_that_dies_after_its_renewal_is_started_again_by_the_rules() -> None:
    lifecycle = serving()
    lifecycle.renew("encode-0", 10.0)
    lifecycle.exited("encode-0", "exited with status 0", 11.0)
    (notice,) = lifecycle.exited("encode-0", "exited with status 1", 12.0)
    assert isinstance(notice, Notice)
    assert notice.text == "encode-0 exited with status 1; restarting it in 1 s"


def test_deaths_without_end_do_not_overflow() -> None:
    lifecycle = serving()
    for step in range(2000):
        assert lifecycle.exited("encode-0", "died", float(step))


# -- neighbours on one device ---------------------------------------------------------------------


def neighbours() -> Lifecycle:
    """Return two that share a device, the decoder first, and a router that shares nothing."""
    after = {"encode-0": ["decode-0"]}
    return Lifecycle(["encode-0", "decode-0", "router"], LAUNCH, after, backoff=BACKOFF)


def serving_neighbours() -> Lifecycle:
    lifecycle = neighbours()
    lifecycle.start_all(0.0)
    for name in ("decode-0", "router", "encode-0"):
        lifecycle.healthy(name, 0.0)
    assert lifecycle.phase is Phase.SERVING
    return lifecycle


def test_neighbours_start_one_after_the_other_in_their_order() -> None:
    lifecycle = neighbours()
    assert lifecycle.start_all(0.0) == [Start("decode-0"), Start("router")]
    assert lifecycle.waiting() == {"encode-0": ["decode-0"]}
    assert lifecycle.healthy("router", 1.0) == []
    assert lifecycle.tick(99.0) == []
    assert lifecycle.healthy("decode-0", 99.0) == [Start("encode-0")]
    assert lifecycle.waiting() == {}
    assert lifecycle.phase is Phase.STARTING
    assert lifecycle.tick(150.0) == [], "its time counts from its own start"
    assert lifecycle.healthy("encode-0", 160.0) == []
    assert lifecycle.phase is Phase.SERVING


def test_a_neighbour_that_never_starts_ends_everything_and_the_next_is_not_started() -> None:
    lifecycle = neighbours()
    lifecycle.start_all(0.0)
    lifecycle.healthy("router", 1.0)
    (action,) = lifecycle.tick(100.0)
    assert isinstance(action, Fail)
    assert action.name == "decode-0"


def test_neighbours_that_died_together_start_again_one_at_a_time_whoever_is_first() -> None:
    lifecycle = serving_neighbours()
    lifecycle.exited("encode-0", "died", 10.0)
    lifecycle.exited("decode-0", "died", 10.5)
    assert lifecycle.tick(11.0) == [Start("encode-0")]
    assert lifecycle.tick(12.0) == []
    assert lifecycle.waiting() == {"decode-0": ["encode-0"]}
    assert lifecycle.healthy("encode-0", 20.0) == [BACK, Start("decode-0")]


def test_who_waits_for_a_neighbour_starts_when_that_dies_again() -> None:
    lifecycle = serving_neighbours()
    lifecycle.exited("encode-0", "died", 10.0)
    lifecycle.exited("decode-0", "died", 10.0)
    assert lifecycle.tick(11.0) == [Start("encode-0")]
    notice, start = lifecycle.exited("encode-0", "died", 12.0)
    assert isinstance(notice, Notice)
    assert start == Start("decode-0")
    assert lifecycle.tick(30.0) == []


def test_nobody_starts_while_a_neighbour_is_being_ended() -> None:
    lifecycle = serving_neighbours()
    lifecycle.exited("encode-0", "died", 10.0)
    lifecycle.renew("decode-0", 10.5)
    assert lifecycle.tick(11.0) == []
    assert lifecycle.exited("decode-0", "exited with status 0", 12.0) == [Start("encode-0")]
    assert lifecycle.waiting() == {"decode-0": ["encode-0"]}
    assert Start("decode-0") in lifecycle.healthy("encode-0", 13.0)
