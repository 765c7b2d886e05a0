from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from epd_portable.config.front import AdmissionSection
from epd_portable.errors import RequestError
from epd_portable.placement.admission import (
    LONGEST_RETRY_S,
    AdmissionControl,
    AdmissionMetrics,
    QueuedRequest,
)
from epd_portable.placement.instances import EndpointPool, Instance
from tests.unit.builders import instance_settings


class Door:
    """Admission whose clock a test sets."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 0.0
        self.metrics = CollectorRegistry()
        self.fleet = EndpointPool()
        self.keeper = AdmissionControl(
            AdmissionSection.model_validate(limits),
            self.fleet,
            AdmissionMetrics(self.metrics),
            clock=lambda: self.now_s,
        )

    async def enter(self) -> QueuedRequest | None:
        return await self.keeper.enter(items=0, nbytes=0)

    async def enter_at_once(self) -> QueuedRequest | None:
        """Return who was let in at once; ``None`` for nobody."""
        entering = asyncio.create_task(self.enter())
        for _ in range(3):
            await asyncio.sleep(0)
        if not entering.done():
            entering.cancel()
            return None
        return entering.result()

    async def go_at_once(self) -> int:
        """Return how many may go at the same time."""
        going = 0
        while await self.enter_at_once():
            going += 1
        return going

    def add(self, name: str, *, weight: float = 1.0) -> Instance:
        instance = self.fleet.add(instance_settings(name, "prefill-decode", weight=weight))
        instance.health.seen_up()
        return instance


async def test_request_without_limits_has_no_ticket() -> None:
    assert await Door().enter() is None


async def test_limit_by_instance_scales_with_usable_instances() -> None:
    door = Door(decode={"max_requests": 2})
    door.add("a")
    double = door.add("b", weight=2.0)
    assert await door.go_at_once() == 6
    waiting = asyncio.create_task(door.enter())
    await asyncio.sleep(0)
    double.health.drain()
    assert await door.enter_at_once() is None
    double.health.drain(False)
    door.add("c")
    await waiting
    assert await door.go_at_once() == 1


async def test_a_small_limit_is_one_request_at_least() -> None:
    door = Door(decode={"max_requests": 1})
    door.add("slow", weight=0.5)
    assert await door.go_at_once() == 1


@pytest.mark.parametrize(
    ("seconds_each", "waiting", "expected"), [(0.1, 1, 1), (1.0, 4, 5), (2.0, 9, 20), (60.0, 9, 60)]
)
async def test_retry_after_is_when_those_that_wait_have_gone(
    seconds_each: float, waiting: int, expected: int
) -> None:
    assert expected <= LONGEST_RETRY_S
    door = Door(max_requests=1, max_waiting=waiting)
    for _ in range(200):
        ticket = await door.enter()
        door.now_s += seconds_each
        door.keeper.leave(ticket)
        door.now_s += 1000.0  # Idle time says nothing.
    going = await door.enter()
    tasks = [asyncio.create_task(door.enter()) for _ in range(waiting)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="as many others wait") as refused:
        await door.enter()
    retry_after_s = refused.value.retry_after_s
    assert retry_after_s is not None
    # The one that goes counts as ended now.
    assert 0.8 * expected <= retry_after_s <= expected
    assert f"try again in {retry_after_s} s" in str(refused.value)
    for _ in range(waiting + 1):
        door.keeper.leave(going)
        going = await tasks.pop(0) if tasks else None
    assert door.keeper._waiters == {}


async def test_refusal_after_a_wait_names_the_limit_and_counts_it() -> None:
    door = Door(decode={"max_requests": 1}, max_wait_s=0.001)
    door.add("a")
    assert await door.enter()
    waiting = asyncio.create_task(door.enter())
    await asyncio.sleep(0)
    door.now_s = 10.0
    with pytest.raises(RequestError, match=r"come within 0\.001 s") as refused:
        await waiting
    assert (refused.value.status, refused.value.retry_after_s) == (429, 20)
    key = "front.admission.decode.max_requests"
    limit = f"{key} of 1 for each usable instance of decode is reached"
    assert str(refused.value).startswith(limit)
    labels = {"reason": "timeout", "limit": key}
    assert door.metrics.get_sample_value("epd_front_admission_refused_total", labels) == 1


async def test_request_cancelled_at_admission_releases_its_place() -> None:
    door = Door(max_requests=1)
    first = await door.enter()
    second, third = (asyncio.create_task(door.enter()) for _ in range(2))
    await asyncio.sleep(0)
    door.keeper.leave(first)
    second.cancel()
    assert await third
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_priority_counts_only_where_the_key_allows_it() -> None:
    for heeds, expected in ((True, ["urgent", "usual"]), (False, ["usual", "urgent"])):
        door = Door(max_requests=1, use_priority=heeds)
        first, went = await door.enter(), list[str]()

        async def wait(name: str, priority: int, door: Door = door, went: list[str] = went) -> None:
            ticket = await door.keeper.enter(items=0, nbytes=0, priority=priority)
            went.append(name)
            door.keeper.leave(ticket)

        async with asyncio.TaskGroup() as waiting:
            for name, priority in (("usual", 0), ("urgent", -1)):
                waiting.create_task(wait(name, priority))
            await asyncio.sleep(0)
            door.keeper.leave(first)
        assert went == expected


async def test_waiting_requests_are_counted_by_their_priority() -> None:
    door = Door(max_requests=1, use_priority=True)
    priorities = {"first": -7, "normal": 0, "last": 3}

    def counted(name: str) -> list[float | None]:
        return [door.metrics.get_sample_value(name, {"priority": each}) for each in priorities]

    async def wait(priority: int) -> None:
        door.keeper.leave(await door.keeper.enter(items=0, nbytes=0, priority=priority))

    first, door.now_s = await door.enter(), 1.0
    async with asyncio.TaskGroup() as waiting:
        for priority in priorities.values():
            waiting.create_task(wait(priority))
        await asyncio.sleep(0)
        assert counted("epd_front_admission_waiting") == [1, 1, 1]
        door.now_s = 3.5
        door.keeper.leave(first)
    assert counted("epd_front_admission_waiting") == [0, 0, 0]
    assert counted("epd_front_admission_wait_seconds_sum") == [2.5, 2.5, 2.5]
