from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epd_portable.config.roles import Role
from epd_portable.placement.instances import (
    FEW,
    LOAD_BOUND,
    EndpointPool,
    Instance,
    LoadReport,
)
from tests.unit.builders import instance_settings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def of(count: int, role: Role = "encode") -> EndpointPool:
    """Return instances that are all up."""
    instances = EndpointPool(clock=Clock(), chance=random.Random(7))
    for number in range(count):
        instances.add(instance_settings(f"i-{number}", role)).health.seen_up()
    return instances


def busy(instances: EndpointPool, loads: dict[str, int]) -> None:
    for name, load in loads.items():
        for _ in range(load):
            found(instances, name).in_flight().__enter__()


def found(instances: EndpointPool, name: str) -> Instance:
    return next(each for each in instances.all if each.name == name)


def chosen(instances: EndpointPool, key: str, exclude: tuple[str, ...] = ()) -> str:
    instance = instances.choose_encoder(key, exclude)
    assert instance is not None
    return instance.name


# State of an instance: events in their order, the state after them, and the reason.

WELL, GONE = lambda i: i.health.seen_up(), lambda i: i.seen_gone("refused")
DRAIN, RESUME = lambda i: i.health.drain(), lambda i: i.health.drain(False)

HISTORIES: dict[str, tuple[list[Callable[[Instance], Any]], str, str]] = {
    "its process has not begun": ([], "down", "not started yet"),
    "its process is ready": ([WELL], "up", ""),
    "its process has ended": ([WELL, GONE], "down", "refused"),
    "another process is there": ([WELL, GONE, WELL], "up", ""),
    "it drains": ([WELL, DRAIN], "draining", ""),
    "it drains while it is down": ([DRAIN], "draining", "not started yet"),
    "it resumes": ([WELL, DRAIN, RESUME], "up", ""),
    "it resumes while it is down": ([WELL, DRAIN, GONE, RESUME], "down", "refused"),
}


@pytest.mark.parametrize("history", HISTORIES)
async def test_state_of_an_instance_after(history: str) -> None:
    happens, state, reason = HISTORIES[history]
    instances = of(3)
    instance = instances.add(instance_settings("e"))
    for event in happens:
        event(instance)
    assert (instance.health.state, instance.health.reason) == (state, reason)
    assert instance.health.usable == (state == "up")
    waiting = asyncio.ensure_future(instance.health.wait_up())
    await asyncio.sleep(0)
    assert waiting.done() == instance.health.healthy
    waiting.cancel()


class Lives(RuleBasedStateMachine):
    """Instances to which anything happens."""

    @initialize()
    def begin(self) -> None:
        self.instances = EndpointPool(clock=Clock(), chance=random.Random(7))
        self.works: list[Any] = []
        self.count = 0

    def pick(self, number: int) -> Instance | None:
        everybody = self.instances.all
        return everybody[number % len(everybody)] if everybody else None

    @rule(role=st.sampled_from(["encode", "prefill-decode"]))
    def come(self, role: Role) -> None:
        self.count += 1
        self.instances.add(instance_settings(f"i-{self.count}", role))

    @rule(number=st.integers(0, 99))
    def go(self, number: int) -> None:
        if instance := self.pick(number):
            self.instances.remove(instance.name)

    @rule(number=st.integers(0, 99), event=st.sampled_from([WELL, WELL, WELL, GONE, DRAIN, RESUME]))
    def live(self, number: int, event: Callable[[Instance], Any]) -> None:
        if instance := self.pick(number):
            event(instance)

    @rule(key=st.text(max_size=3))
    def work(self, key: str) -> None:
        for instance in (self.instances.choose_encoder(key), self.instances.choose_least_loaded()):
            if instance is not None:
                self.works.append(instance.in_flight())
                self.works[-1].__enter__()

    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        if self.works:
            self.works.pop(number % len(self.works)).__exit__(None, None, None)

    @invariant()
    def only_usable_ones_are_chosen_and_excluded_ones_never(self) -> None:
        everybody = self.instances.all
        for role, choose in (
            ("encode", lambda exclude: self.instances.choose_encoder("key", exclude)),
            ("prefill-decode", self.instances.choose_least_loaded),
        ):
            names = [i.name for i in everybody if i.role == role]
            for exclude in ([], names[:1], names[::2], names):
                left = [i for i in everybody if i.name in names and i.name not in exclude]
                usable = [i for i in left if i.health.usable]
                instance = choose(exclude)
                assert (instance is None) == (not usable)
                assert instance is None or instance in usable

    @invariant()
    def lists_to_choose_from_follow_health(self) -> None:
        for duty, role in (("encode", "encode"), ("decode", "prefill-decode")):
            fit = {i for i in self.instances.all if i.role == role and i.health.usable}
            assert set(self.instances.usable(duty)) == fit


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase


# Who is chosen.

loads = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(st.sets(st.integers(0, 1000), min_size=2, max_size=30), st.data())
@settings(deadline=None)
def test_departed_encoder_moves_only_its_own_items(numbers: set[int], data: st.DataObject) -> None:
    instances = EndpointPool()
    for number in numbers:
        WELL(instances.add(instance_settings(f"i-{number}")))
    before = {f"item-{n}": chosen(instances, f"item-{n}") for n in range(50)}
    gone = found(instances, data.draw(st.sampled_from([f"i-{n}" for n in sorted(numbers)])))
    GONE(gone)
    for item, name in before.items():
        assert (chosen(instances, item) == name) == (name != gone.name)
    WELL(gone)
    assert {item: chosen(instances, item) for item in before} == before


@given(st.text(), loads)
@settings(deadline=None)
def test_no_encoder_takes_more_than_its_bound(key: str, given_loads: list[int]) -> None:
    instances = of(len(given_loads))
    load = {f"i-{n}": load for n, load in enumerate(given_loads)}
    busy(instances, load)
    assert load[chosen(instances, key)] < LOAD_BOUND * (sum(load.values()) + 1) / len(load) + 1
    if len(load) > 1:
        left = {name: each for name, each in load.items() if name != "i-0"}
        bound = LOAD_BOUND * (sum(left.values()) + 1) / len(left) + 1
        assert load[chosen(instances, key, exclude=("i-0", "nobody"))] < bound


@pytest.mark.parametrize("count", [2, 4, 8])
def test_an_item_that_is_being_encoded_goes_where_it_is_encoded(count: int) -> None:
    instances = of(count)
    for number in range(50):
        one = instances.choose_encoder(item := f"item {number}")
        assert one is not None
        with one.in_flight(item):
            assert instances.choose_encoder(item) is one
            with one.in_flight(item):
                # Who says that it is full is excluded.
                other = instances.choose_encoder(item, [one.name])
                assert other is not one
            others = {instances.choose_encoder(f"other {n}") for n in range(50)}
            assert count == 2 or one not in others
            GONE(one)
            assert instances.choose_encoder(item) is not one
            WELL(one)
        assert not one.item_jobs


@given(loads)
@settings(deadline=None)
def test_least_busy_of_few_gets_the_request(given_loads: list[int]) -> None:
    instances = of(len(given_loads), "prefill-decode")
    busy(instances, {f"i-{n}": load for n, load in enumerate(given_loads)})
    instance = instances.choose_least_loaded()
    assert instance is not None
    assert instance.load == min(given_loads)


def test_chance_decides_between_equals() -> None:
    instances = of(3, "prefill-decode")
    shares = Counter(i.name for _ in range(300) if (i := instances.choose_least_loaded()))
    assert len(shares) == 3
    assert min(shares.values()) > 60


def test_lighter_of_two_among_many_gets_the_request() -> None:
    count = 10 * FEW
    instances = of(count, "prefill-decode")
    for _ in range(20 * count):
        instance = instances.choose_least_loaded()
        assert instance is not None
        instance.in_flight().__enter__()
    assert max(instance.load for instance in instances.all) <= 24


# What is counted.


async def test_instance_is_idle_after_its_last_work_even_if_failed() -> None:
    instance = found(of(1), "i-0")
    with pytest.raises(ValueError, match="broken"), instance.in_flight(), instance.in_flight():
        assert instance.load == 2
        raise ValueError("broken")
    with instance.retained():
        assert instance.load == 0
        waiting = asyncio.ensure_future(instance.wait_idle())
        await asyncio.sleep(0)
        assert not instance.idle
        assert not waiting.done()
    await asyncio.wait_for(waiting, 10)
    assert instance.idle


def test_work_is_counted_once_until_it_ends() -> None:
    instance = found(of(1), "i-0")
    with instance.in_flight() as waits, instance.in_flight() as computes:
        for use, count in ((computes, 1), (computes, 1), (waits, 2)):
            use.compute()
            assert instance.responses.running == count
        with instance.computing(7), instance.encoding(0.25), instance.in_flight("item"):
            assert (instance.tokens, instance.pending_encode_s, instance.jobs) == (7, 0.25, 1)
        assert instance.jobs == 0
    assert (instance.responses.running, instance.tokens, instance.pending_encode_s) == (0, 0, 0)


def test_users_are_notified_of_a_lost_or_removed_instance() -> None:
    instances = of(1)
    instance = found(instances, "i-0")
    heard: list[str] = []
    with instance.retained() as first, instance.in_flight():
        first.on_down(lambda: heard.append("first"))
        with instance.in_flight() as over:
            over.on_down(lambda: heard.append("over"))
        assert heard == []
        GONE(instance)
        GONE(instance)
        assert heard == ["first"]
    with instance.in_flight() as late:
        late.on_down(lambda: heard.append("late"))
    WELL(instance)
    with instance.in_flight() as work:
        work.on_down(lambda: heard.append(instance.health.reason))
        instances.remove("i-0")
    assert heard == ["first", "late", "has left"]
    assert instance not in instances
    assert instances.add(instance_settings("i-0")).load == 0


def test_watchers_hear_of_changes_only() -> None:
    instances = of(1)
    instance = found(instances, "i-0")
    heard: list[str] = []
    instances.watch(lambda changed: heard.append(changed.health.state))
    for event in (WELL, GONE, GONE, WELL, DRAIN, DRAIN, lambda i: i.health.note("a problem")):
        event(instance)
    instances.remove("i-0")
    assert heard == ["down", "up", *["draining"] * 3]


def test_report_counts_until_its_instance_goes_down() -> None:
    instances = EndpointPool()
    pd = instances.add(instance_settings("pd0", "prefill-decode"))
    pd.health.seen_up()
    assert pd.reported is None
    report = LoadReport(waiting=2, running=3, kv_used=0.5)
    pd.take_report(report)
    assert pd.reported == report
    pd.note_elsewhere(2, 3.0)
    pd.cached.items.use(["cat"])
    pd.seen_gone("killed")
    assert "cat" not in pd.cached.items
    assert (pd.reported, pd.load, pd.pending_encode_s) == (None, 0, 0)


def test_requests_sent_since_a_report_count_as_waiting() -> None:
    instances = EndpointPool()
    for name, role in (("e0", "encode"), ("pd0", "prefill-decode")):
        instances.add(instance_settings(name, role)).health.seen_up()  # type: ignore[arg-type]
    pd, encoder = instances.of_duty("decode")[0], instances.of_duty("encode")[0]
    with pd.in_flight(), pd.in_flight():
        # Both are on their way into the engine, whose report counts another one.
        for running, waiting in ((1, 1), (0, 2)):
            pd.take_report(LoadReport(waiting=1, running=running))
            known = pd.reported
            assert known is not None and known.waiting == waiting
        with pd.in_flight(), pd.in_flight():
            known = pd.reported
            assert known is not None and known.waiting == 4
    encoder.take_report(LoadReport(items=3))
    with encoder.in_flight():
        known = encoder.reported
        assert known is not None and known.items == 4


def test_work_of_other_fronts_replaces_their_former_report() -> None:
    encoder = EndpointPool().add(instance_settings("e0", "encode"))
    with encoder.encoding(0.5):
        for jobs, seconds in ((3, 12.5), (1, 2.0), (0, 0.0)):
            encoder.note_elsewhere(jobs, seconds)
            assert (encoder.load, encoder.elsewhere) == (jobs, jobs)
            assert (encoder.pending_encode_s, encoder.backlog_s) == (seconds + 0.5, seconds + 0.5)
