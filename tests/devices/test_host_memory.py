"""Page-locking of receive pools, which torch did not allocate."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import torch

from epd_portable.errors import PlatformError
from epd_portable.platforms.base import Platform
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.pool import SharedMemory
from tests.devices.child import Child

AMPLE_S = 60.0
NBYTES = 1 << 20


@pytest.fixture
def pool() -> Iterator[SharedMemory]:
    made = SharedMemory.create(f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}", NBYTES)
    yield made
    made.unlink()


def test_the_device_writes_into_a_pinned_pool_and_reads_from_it(
    platform: Platform, device: torch.device, pool: SharedMemory
) -> None:
    copies = DeviceCopies(platform, 0)
    assert copies.pin(pool) is not platform.traits.foreign_pages_block
    try:
        content = (torch.arange(NBYTES) % 251).to(torch.uint8)
        item = content.to(device)
        computed = platform.record_event()
        deadline_s = copies.clock() + AMPLE_S
        target = pool.tensor(0, NBYTES)
        copies.queue(target, item, after=computed, deadline_s=deadline_s).finish()
        assert torch.equal(target, content)
        with platform.stream(0):
            back = torch.empty(NBYTES, dtype=torch.uint8, device=device)
            back.copy_(target, non_blocking=True)
            platform.record_event().synchronize(AMPLE_S)
        assert torch.equal(back.cpu(), content)
    finally:
        copies.unpin(pool)


def test_failed_pinning_leaves_the_device_unchanged(
    platform: Platform, device: torch.device
) -> None:
    """The runtime's error must not be that of the next kernel."""
    memory = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    with pytest.raises(PlatformError, match=f"{NBYTES} bytes at {memory.data_ptr():#x}"):
        platform.pin_host(memory.data_ptr(), NBYTES)
    assert torch.full((8,), 2.0, device=device).sum().item() == 16


def test_copy_returns_beside_its_caller_and_before_later_work(platform: Platform) -> None:
    with Child(platform.name, ASCEND_SIM_COPY_US="300000") as child:
        assert child.tell(
            f"c = DeviceCopies(platform, last); x = torch.arange({NBYTES}).to(device)"
        )
        kept = "c.to_host(x, after=platform.record_event(), deadline_s=c.clock() + 60)"
        assert child.tell(f"host = {kept}.view(torch.int64)") == "done"
        if platform.name == "cuda":  # There a copy lasts no longer than it does.
            assert child.tell("y = c.to_device(host)") == "done"  # Memory is there from now on.
            busy = "with platform.stream(last): torch.cuda._sleep(400_000_000)"
            assert child.tell(busy) == "done"
        later = "y = c.to_device(host); ended = platform.record_event().done(); z = y + 1"
        assert child.tell(later) == "done"
        assert child.tell("ended") == "False"
        assert child.tell(f"torch.equal(z.cpu(), torch.arange({NBYTES}) + 1)") == "True"
