"""How many devices should encode, by the work that comes."""

from __future__ import annotations

import logging

import pytest

from epd_portable.delivery.balance import WINDOW_S, Balance, DryRun
from epd_portable.delivery.instances import EndpointPool
from epd_portable.router.settings import InstanceSettings


def decided(balance: Balance, encoders: int, encode_s: float, answer_s: float) -> list[int]:
    """Return what is decided in three seconds in which the same comes; nobody is switched."""
    found = []
    for now in range(3):
        balance.note(now, encode_s, answer_s)
        found.append(balance.decide(now, encoders, 0.0, 0.0).encoders)
    return found


def balance(devices: int, *, elastic: bool = False) -> Balance:
    return Balance(devices, elastic=elastic)


@pytest.mark.parametrize("elastic", [False, True])
def test_both_sides_have_the_same_when_two_calls_agree(elastic: bool) -> None:
    assert decided(balance(8, elastic=elastic), 2, 6.4, 1.6) == [2, 6, 6]
    assert decided(balance(8, elastic=elastic), 6, 2.0, 6.0) == [6, 2, 2]


@pytest.mark.parametrize("elastic", [False, True])
def test_nothing_is_changed_for_less_than_the_dead_band(elastic: bool) -> None:
    assert decided(balance(8, elastic=elastic), 4, 4.5, 3.5) == [4, 4, 4]
    assert decided(balance(8, elastic=elastic), 4, 3.6, 4.4) == [4, 4, 4]


def test_nobody_encodes_where_those_that_answer_can_do_the_little_that_comes() -> None:
    assert decided(balance(4, elastic=True), 1, 0.5, 4.0) == [1, 0, 0]
    assert decided(balance(4), 2, 0.5, 4.0) == [2, 1, 1]
    # From a whole device's work on.
    assert decided(balance(4, elastic=True), 0, 1.2, 3.0) == [0, 0, 0]
    assert decided(balance(4, elastic=True), 0, 1.8, 3.0) == [0, 1, 1]


def test_work_counts_for_a_window_and_for_as_long_as_it_is_owed() -> None:
    found = balance(4)
    found.note(0.0, 9.0, 3.0)
    found.decide(0.0, 1, 0.0, 0.0)
    assert found.decide(1.0, 1, 0.0, 0.0).encoders == 3
    late_s = WINDOW_S + 0.1
    for owed_s, encoders in ((0.0, 1), (9.0, 3)):
        found.decide(late_s, 1, owed_s, 3.0)
        assert found.decide(late_s, 1, owed_s, 3.0).encoders == encoders


@pytest.mark.parametrize("elastic", [False, True])
def test_who_encodes_all_alone_or_not_at_all_is_no_error(elastic: bool) -> None:
    assert decided(balance(2, elastic=elastic), 2, 0.0, 3.0)[-1] == int(not elastic)
    assert decided(balance(2, elastic=elastic), 0, 0.0, 0.0)[-1] == int(not elastic)
    # Somebody must answer.
    assert decided(balance(2, elastic=elastic), 2, 9.0, 0.0)[-1] == 1


def test_a_dry_run_says_what_it_would_do_and_why_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = "epd_portable.delivery.balance"
    caplog.set_level(logging.DEBUG, logger)
    pool = EndpointPool()
    for name, role in (("e", "encode"), ("a", "prefill-decode"), ("b", "prefill-decode")):
        control = "" if role == "encode" else "tcp://h:1"
        settings = InstanceSettings(name=name, role=role, url=f"http://{name}:1", control=control)
        pool.add(settings).seen_well()
    dry_run = DryRun(pool, elastic=True)
    for second in range(6):
        pool.work.came_s["encode", "image", 18] += 4.8
        pool.work.came_s["prefill-decode", "text", 9] += 1.0
        for part_s in (0.0, 0.5):
            dry_run.tick(second + part_s)
    said = [record.getMessage() for record in caplog.records if record.name == logger]
    assert len(said) == 1, said
    assert said[0].startswith("dry run: 2 of 3 instances should encode, and 1 do: encode 9.6 s")
    for second in range(6, 20):
        pool.work.came_s["prefill-decode", "text", 9] += 1.0
        dry_run.tick(second)
    assert "dry run: 0 of 3 instances should encode" in caplog.messages[-1]
