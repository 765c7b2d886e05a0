"""How many devices should encode, by the work that comes."""

from __future__ import annotations

import itertools
import logging

import pytest

from epd_portable.config.roles import PAIR_LABEL, Role
from epd_portable.placement.balance import WINDOW_S, Balance, Switching
from epd_portable.placement.instances import EndpointPool, Instance
from tests.unit.builders import instance_settings


def decided(balance: Balance, encoders: int, encode_s: float, answer_s: float) -> list[int]:
    """Return what is decided in three seconds in which the same comes; nobody is switched."""
    found = []
    for now in range(3):
        balance.note(now, encode_s, answer_s)
        found.append(balance.decide(now, encoders, 0.0, 0.0)[0])
    return found


def balance(devices: int, *, elastic: bool = False) -> Balance:
    return Balance(devices, elastic=elastic)


@pytest.mark.parametrize("elastic", [False, True])
def test_both_sides_have_the_same_at_once(elastic: bool) -> None:
    assert decided(balance(8, elastic=elastic), 2, 6.4, 1.6) == [6, 6, 6]
    assert decided(balance(8, elastic=elastic), 6, 2.0, 6.0) == [2, 2, 2]


@pytest.mark.parametrize("elastic", [False, True])
def test_nothing_is_changed_for_less_than_the_dead_band(elastic: bool) -> None:
    assert decided(balance(8, elastic=elastic), 4, 4.5, 3.5) == [4, 4, 4]
    assert decided(balance(8, elastic=elastic), 4, 3.6, 4.4) == [4, 4, 4]


def test_nobody_encodes_where_those_that_answer_can_do_the_little_that_comes() -> None:
    assert decided(balance(4, elastic=True), 1, 0.5, 4.0) == [0, 0, 0]
    assert decided(balance(4), 2, 0.5, 4.0) == [1, 1, 1]
    # From a whole device's work on.
    assert decided(balance(4, elastic=True), 0, 1.2, 3.0) == [0, 0, 0]
    assert decided(balance(4, elastic=True), 0, 1.8, 3.0) == [1, 1, 1]


def test_work_counts_for_a_window_and_for_as_long_as_it_is_owed() -> None:
    found = balance(4)
    found.note(0.0, 9.0, 3.0)
    found.decide(0.0, 1, 0.0, 0.0)
    assert found.decide(1.0, 1, 0.0, 0.0)[0] == 3
    late_s = WINDOW_S + 0.1
    for owed_s, encoders in ((0.0, 1), (9.0, 3)):
        found.decide(late_s, 1, owed_s, 3.0)
        assert found.decide(late_s, 1, owed_s, 3.0)[0] == encoders


@pytest.mark.parametrize("elastic", [False, True])
def test_who_encodes_all_alone_or_not_at_all_is_no_error(elastic: bool) -> None:
    assert decided(balance(2, elastic=elastic), 2, 0.0, 3.0)[-1] == int(not elastic)
    assert decided(balance(2, elastic=elastic), 0, 0.0, 0.0)[-1] == int(not elastic)
    # Somebody must answer.
    assert decided(balance(2, elastic=elastic), 2, 9.0, 0.0)[-1] == 1


class Fleet:
    """Devices whose instances are up, and what comes to them in a second; ``x`` does all of it."""

    def __init__(self, *, elastic: bool = True, **roles: str) -> None:
        self.pool = EndpointPool()
        for name, pair in roles.items():
            kinds: dict[str, Role] = {"e": "encode", "x": "encode-prefill-decode"}
            role = kinds.get(name[0], "prefill-decode")
            labels = {PAIR_LABEL: pair} if pair else {}
            self.pool.add(instance_settings(name, role, labels=labels)).health.seen_up()
        self.switching = Switching(self.pool, elastic=elastic)
        self.seconds = itertools.count()

    def come(self, encode_s: float, answer_s: float, seconds: int = 12) -> set[str]:
        """Return who is parked when as much as that has come for so long."""
        for _ in range(seconds):
            self.pool.work.came_s["encode", "image", 18] += encode_s
            self.pool.work.came_s["prefill-decode", "text", 9] += answer_s
            self.switching.tick(float(next(self.seconds)))
        return {each.name for each in self.pool.all if each.health.parked}

    def get(self, name: str) -> Instance:
        found = self.pool.get(name)
        assert found is not None
        return found


def test_new_work_turns_within_a_pair_as_the_load_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epd_portable.placement.balance")
    fleet = Fleet(e0="", a="e0", b="")
    assert fleet.come(0.0, 0.0) == {"a"}
    assert fleet.come(0.1, 1.5) == {"e0"}
    assert fleet.pool.choose_least_loaded(exclude=["b"]) is fleet.get("a")
    assert fleet.come(1.5, 0.1) == {"a"}
    assert fleet.pool.choose_least_loaded() is fleet.get("b")
    assert fleet.come(0.1, 1.5) == {"e0"}
    records = [each for each in caplog.records if each.name == "epd_portable.placement.balance"]
    said = [each.getMessage().split(":")[0] for each in records]
    to_a, to_e0 = "a gets new work in place of e0", "e0 gets new work in place of a"
    assert said == [to_a, to_e0, to_a]


def test_a_parked_encoder_ends_its_items_first_and_answers_go_on() -> None:
    fleet = Fleet(e0="", a="e0", b="")
    assert fleet.come(0.0, 0.0) == {"a"}
    with fleet.get("e0").in_flight("item"):
        assert fleet.come(0.0, 1.5) == {"e0", "a"}
    assert fleet.come(0.0, 1.5) == {"e0"}
    with fleet.get("a").in_flight():
        assert fleet.come(1.5, 0.0) == {"a"}


def test_who_is_parked_serves_where_nobody_else_can() -> None:
    fleet = Fleet(e0="", a="e0", b="")
    assert fleet.come(0.0, 0.0) == {"a"}
    fleet.get("b").seen_gone("killed")
    assert fleet.pool.choose_least_loaded() is fleet.get("a")
    fleet.get("b").health.seen_up()
    fleet.get("e0").seen_gone("killed")
    assert fleet.come(0.0, 0.0) == set()


def test_nobody_needs_to_encode_only_where_one_that_answers_encodes_for_all() -> None:
    others = {"e0": "", "a": "e0", "b": ""}
    assert Fleet(elastic=False, **others).come(0.1, 1.5) == {"a"}
    fleet = Fleet(elastic=False, **others, x="")
    assert fleet.come(0.1, 1.5) == {"e0"}
    assert fleet.pool.choose_encoder("item") is fleet.get("x")
    assert fleet.come(1.5, 0.1) == {"a"}


def test_somebody_answers_where_every_device_could_encode() -> None:
    fleet = Fleet(e0="", e1="", a="e0", b="e1")
    assert len(fleet.come(9.0, 0.0) & {"e0", "e1"}) == 1
    assert len(fleet.come(9.0, 0.0) & {"a", "b"}) == 1
