"""Order between the copy stream and the engine's own, which a test lets rest for a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms.accelerator import AcceleratorPlatform
from epd_portable.platforms.base import DeviceEvent, Platform

ELEMENTS = 1 << 16
AMPLE_S = 60.0
REST_CYCLES = 400_000_000
"""Cycles of a device's clock: a fifth of a second or more."""
REST_US = 2_000_000
"""Longer than a copy takes on a loaded machine, where the device is simulated."""


def runtime(platform: Platform) -> Any:
    """Return ``torch.cuda`` or ``torch.npu``."""
    return getattr(torch, platform.name)


def rest(platform: Platform) -> None:
    """Let the current stream do nothing for a while."""
    if platform.name == "cuda":
        torch.cuda._sleep(REST_CYCLES)
    else:
        from ascend_sim.memory import delay

        delay(torch.npu.current_stream(), REST_US)


def pinned(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value).pin_memory()


def rested_copy(platform: Platform, target: torch.Tensor) -> DeviceEvent:
    """Queue a copy of ones on the copy stream, which rests before."""
    source = pinned(1)
    with platform.stream(0):
        rest(platform)
        target.copy_(source, non_blocking=True)
        return platform.record_event()


@pytest.fixture
def target(platform: Platform, device: torch.device) -> torch.Tensor:
    """Zeros on an idle device: what is done first on it may wait for all that it does."""
    made, source = torch.zeros(ELEMENTS, device=device), pinned(0)
    with platform.stream(0):
        made.copy_(source, non_blocking=True)
        platform.record_event()
    runtime(platform).synchronize()
    return made


def test_copies_on_the_copy_stream_run_beside_the_engine_s_work(
    platform: Platform, target: torch.Tensor
) -> None:
    source = pinned(1)
    rest(platform)
    computed = platform.record_event()
    with platform.stream(0):
        target.copy_(source, non_blocking=True)
        copied = platform.record_event()
    copied.synchronize(AMPLE_S)
    assert not computed.done()
    computed.synchronize(AMPLE_S)


def test_work_waits_for_its_event_without_blocking_the_caller(
    platform: Platform, target: torch.Tensor
) -> None:
    early, late = pinned(0), pinned(0)
    copied = rested_copy(platform, target)
    early.copy_(target, non_blocking=True)
    copied.wait()
    late.copy_(target, non_blocking=True)
    read = platform.record_event()
    assert not copied.done()
    read.synchronize(AMPLE_S)
    assert (early.unique().tolist(), late.unique().tolist()) == ([0], [1])


def test_copy_stream_of_a_device_is_one_and_not_the_engines(
    platform: Platform, device: torch.device
) -> None:
    current = runtime(platform).current_stream
    with platform.stream(0):
        first = current()
    with platform.stream(0):
        assert current() == first
    assert current(device) != first
    if platform.device_count() > 1:
        with platform.stream(1):
            assert current() != first


def test_copy_does_not_wait_for_a_pin_of_memory(platform: AcceleratorPlatform) -> None:
    entered: list[bool] = []

    def enter() -> None:
        with platform.stream(0):
            entered.append(True)

    enter()
    thread = threading.Thread(target=enter, daemon=True)
    with platform._lock:
        thread.start()
        thread.join(AMPLE_S)
    assert entered == [True, True]


def test_an_event_that_does_not_pass_is_an_error_at_the_deadline(
    platform: Platform, target: torch.Tensor
) -> None:
    event = rested_copy(platform, target)
    with pytest.raises(TransportTimeoutError, match=r"not complete after 0\.02 s"):
        event.synchronize(0.02)
    assert not event.done()
    event.synchronize(AMPLE_S)
    assert event.done()


def test_thread_blocked_on_an_event_blocks_no_other(
    platform: Platform, target: torch.Tensor
) -> None:
    event = rested_copy(platform, target)
    passed: list[bool] = []
    spent_s: list[float] = []

    def block() -> None:
        platform.set_device(0)
        begin_s = time.thread_time()
        event.block()
        spent_s.append(time.thread_time() - begin_s)
        passed.append(event.done())

    thread = threading.Thread(target=block)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        thread.join(0.001)
    assert passed == [True]
    assert turns > 20, "the thread kept Python's lock while it waited"
    assert spent_s[0] < 0.1, "the thread asked again and again"


def reused_while_read(platform: Platform, device: torch.device, *, adopt: bool) -> bool:
    """Free memory of the copy stream while the engine reads it; say whether others wrote in it."""
    read, one, two = torch.zeros(ELEMENTS).pin_memory(), pinned(1), pinned(2)
    runtime(platform).synchronize()
    with platform.stream(0):
        arrived = torch.empty(ELEMENTS, device=device)
        arrived.copy_(one, non_blocking=True)
        event = platform.record_event()
    event.wait()
    if adopt:
        platform.adopt(arrived)
    rest(platform)
    read.copy_(arrived, non_blocking=True)
    compute = platform.record_event()
    del arrived
    with platform.stream(0):
        following = torch.empty(ELEMENTS, device=device)
        following.copy_(two, non_blocking=True)
        written = platform.record_event()
    compute.synchronize(AMPLE_S)
    written.synchronize(AMPLE_S)
    return not torch.equal(read, torch.ones(ELEMENTS))


def test_adopted_memory_is_not_reused_while_the_engine_reads_it(
    platform: Platform, device: torch.device
) -> None:
    runtime(platform).empty_cache()
    seen = reused_while_read(platform, device, adopt=False)
    assert seen, "the fault does not show: the test proves nothing"
    assert not reused_while_read(platform, device, adopt=True)
