from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from epd_portable.errors import PlatformError
from epd_portable.platforms import registry
from epd_portable.transfer import stream_clock
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.stream_clock import StreamClock
from tests.held_device import DEADLINE_S, HeldPlatform


class Trace:
    def __init__(self) -> None:
        self.on = True
        self.events: list[tuple[str, float | None, dict[str, Any]]] = []

    def __call__(self, event: str, *, at_s: float | None = None, **fields: Any) -> None:
        self.events.append((event, at_s, fields))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    made = Trace()
    monkeypatch.setattr(stream_clock, "trace", made)
    return made


@pytest.fixture
def device() -> HeldPlatform:
    return HeldPlatform()


@pytest.fixture
def clock(device: HeldPlatform) -> Iterator[StreamClock]:
    made = StreamClock(DeviceCopies(device), "clock")
    yield made
    device.let()
    made.close()


def test_point_is_reached_by_the_device_and_not_by_its_mark(
    device: HeldPlatform, clock: StreamClock
) -> None:
    first, second = Future[float](), Future[float]()
    clock.mark(first.set_result)
    clock.mark(second.set_result)
    with pytest.raises(TimeoutError):
        first.result(0.05)
    let_s = device.let(1)
    assert first.result(DEADLINE_S) >= let_s
    with pytest.raises(TimeoutError):
        second.result(0.05)
    device.let(1)
    second.result(DEADLINE_S)


def test_events_of_the_trace_have_the_time_of_the_device(
    device: HeldPlatform, clock: StreamClock, trace: Trace
) -> None:
    clock.trace("encode.begin", items=["cat"])
    clock.trace("encode.end", items=["cat"])
    assert trace.events == []
    begun_s = device.let(1)
    time.sleep(0.05)
    ended_s = device.let(1)
    clock.close()
    (begin, begin_s, fields), (end, end_s, _) = trace.events
    assert (begin, end, fields) == ("encode.begin", "encode.end", {"items": ["cat"]})
    assert begin_s is not None
    assert end_s is not None
    assert begun_s <= begin_s < ended_s <= end_s


def test_without_a_trace_nothing_is_recorded_for_it(
    device: HeldPlatform, clock: StreamClock, trace: Trace
) -> None:
    trace.on = False
    clock.trace("step")
    assert device.recorded == 0
    assert "clock" not in {thread.name for thread in threading.enumerate()}


def test_clock_has_no_thread_on_synchronous_devices(trace: Trace) -> None:
    clock = StreamClock(DeviceCopies(registry.get("cpu")), "clock")
    reached = Future[float]()
    begin_s = time.monotonic()
    clock.mark(reached.set_result)
    assert begin_s <= reached.result(0) <= time.monotonic()
    clock.trace("step", tokens=3)
    assert trace.events == [("step", None, {"tokens": 3})]
    assert "clock" not in {thread.name for thread in threading.enumerate()}
    clock.close()


def test_mark_on_a_failed_device_reports_its_error(
    device: HeldPlatform, clock: StreamClock
) -> None:
    reached = Future[float]()
    clock.mark(reached.set_result)
    device.fail()
    deadline_s = time.monotonic() + DEADLINE_S
    with pytest.raises(PlatformError, match="device work failed: it is broken"):
        while time.monotonic() < deadline_s:
            clock.mark(reached.set_result)
    assert not reached.done()
