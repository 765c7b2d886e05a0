"""Order between the copy stream and the compute stream, with kernels that last.

Their twins on Ascend are in tests/npu_sim/platform, where copies are slowed down instead.
"""

from __future__ import annotations

import pytest
import torch

from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from tests.devices.blocking import block_aside

pytestmark = pytest.mark.needs_cuda

ELEMENTS = 1 << 16
AMPLE_S = 60.0
LONG_CYCLES = 400_000_000
"""Of a device's clock: a fifth of a second or more."""


@pytest.fixture
def cuda() -> Platform:
    platform = registry.get("cuda")
    platform.set_device(0)
    target = torch.zeros(ELEMENTS, device="cuda:0")
    with platform.stream(0):  # What a process does first on a device may wait for all that it does.
        target.copy_(pinned(0), non_blocking=True)
        platform.record_event()
    torch.cuda.synchronize()
    return platform


def sleep() -> None:
    torch.cuda._sleep(LONG_CYCLES)


def pinned(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value).pin_memory()


def test_copies_on_the_copy_stream_run_beside_the_engine_s_work(cuda: Platform) -> None:
    target, source = torch.zeros(ELEMENTS, device="cuda:0"), pinned(1)
    torch.cuda.synchronize()
    sleep()
    computed = cuda.record_event()
    with cuda.stream(0):
        target.copy_(source, non_blocking=True)
        copied = cuda.record_event()
    copied.synchronize(AMPLE_S)
    assert not computed.done()
    computed.synchronize(AMPLE_S)


def test_work_that_waits_for_an_event_comes_after_it_and_its_caller_does_not_wait(
    cuda: Platform,
) -> None:
    target = torch.zeros(ELEMENTS, device="cuda:0")
    source = pinned(1)
    torch.cuda.synchronize()
    with cuda.stream(0):
        sleep()
        target.copy_(source, non_blocking=True)
        copied = cuda.record_event()
    copied.wait()
    read = target.clone()
    assert not copied.done()
    assert torch.equal(read.cpu(), torch.ones(ELEMENTS))


def test_a_thread_that_blocks_until_an_event_has_passed_holds_up_no_other(cuda: Platform) -> None:
    sleep()
    event = cuda.record_event()
    turns, spent_s = block_aside(cuda, event)
    assert turns > 20, "the thread kept Python's lock while it waited"
    assert spent_s < 0.1, "the thread asked again and again"


def reused_while_read(cuda: Platform, *, adopt: bool) -> bool:
    """Free memory of the copy stream while compute reads it; say whether others wrote in it."""
    read, one, two = torch.zeros(ELEMENTS).pin_memory(), pinned(1), pinned(2)
    torch.cuda.synchronize()
    with cuda.stream(0):
        arrived = torch.empty(ELEMENTS, device="cuda:0")
        arrived.copy_(one, non_blocking=True)
        event = cuda.record_event()
    event.wait()
    if adopt:
        cuda.adopt(arrived)
    sleep()
    read.copy_(arrived, non_blocking=True)
    compute = cuda.record_event()
    del arrived
    with cuda.stream(0):
        following = torch.empty(ELEMENTS, device="cuda:0")
        following.copy_(two, non_blocking=True)
        written = cuda.record_event()
    compute.synchronize(AMPLE_S)
    written.synchronize(AMPLE_S)
    return not torch.equal(read, torch.ones(ELEMENTS))


def test_adopted_memory_is_not_given_to_others_while_compute_still_reads_it(
    cuda: Platform,
) -> None:
    torch.cuda.empty_cache()
    assert reused_while_read(cuda, adopt=False), "the fault does not show: the test proves nothing"
    assert not reused_while_read(cuda, adopt=True)
