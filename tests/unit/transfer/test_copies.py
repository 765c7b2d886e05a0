from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from epd_portable.errors import (
    LeaseExpiredError,
    PeerLostError,
    PlatformError,
    TransportTimeoutError,
)
from epd_portable.platforms.cpu import CpuPlatform, PassedEvent
from epd_portable.transfer.copies import CHUNK_BYTES, DeviceCopies
from epd_portable.transfer.paths.base import SlotWrite
from epd_portable.transfer.paths.mapped import ShmWriter
from epd_portable.transfer.pool import SharedMemory
from epd_portable.wire.descriptors import SlotDescriptor
from tests.keyring import keys
from tests.receiving import pool_name, shared_memory
from tests.unit.transfer.spies import NEVER_S, SpyEvent, SpyPlatform


@pytest.fixture
def platform() -> SpyPlatform:
    return SpyPlatform()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with shared_memory(8192) as made:
        yield made


def test_a_device_copies_in_one_piece_behind_the_computation(platform: SpyPlatform) -> None:
    src = torch.arange(2 * CHUNK_BYTES // 4 + 3, dtype=torch.int32)
    target, computed = torch.zeros(src.numel() * 4, dtype=torch.uint8), SpyEvent()
    DeviceCopies(platform).write(target, src, after=computed, deadline_s=NEVER_S)
    assert torch.equal(target.view(torch.int32), src)
    assert computed.waits == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_has_ended_when_its_event_has_passed(platform: SpyPlatform, fails: bool) -> None:
    passed = iter([False, False, True])
    ended: list[bool] = []

    def look() -> bool:
        assert not ended
        if fails:
            raise PlatformError("device work failed")
        return next(passed)

    platform.event = SpyEvent(look)
    src = torch.ones(2)
    copy = DeviceCopies(platform).queue(
        torch.zeros(8, dtype=torch.uint8),
        src,
        after=PassedEvent(),
        deadline_s=NEVER_S,
        ended=lambda: ended.append(True),
    )
    assert ended == []
    if fails:
        with pytest.raises(PlatformError):
            copy.finish()
    else:
        copy.finish()
        assert next(passed, None) is None
    assert ended == [True]


def test_a_copy_without_an_event_is_waited_for_before_the_error(platform: SpyPlatform) -> None:
    looks = iter(range(3))
    platform.refusals, platform.event = 1, SpyEvent(lambda: next(looks) == 2)
    with pytest.raises(PlatformError, match="cannot record"):
        DeviceCopies(platform).queue(
            torch.zeros(8, dtype=torch.uint8),
            torch.ones(2),
            after=PassedEvent(),
            deadline_s=NEVER_S,
        )
    assert next(looks, None) is None


def test_a_lease_that_ended_before_the_write_touches_nothing(platform: SpyPlatform) -> None:
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(LeaseExpiredError, match="request a new grant"):
        DeviceCopies(platform, clock=lambda: 5.0).write(
            target, torch.ones(8, dtype=torch.uint8), after=PassedEvent(), deadline_s=5.0
        )
    assert target.eq(0).all()


def test_lease_ended_between_chunks_stops_the_copy_at_its_place() -> None:
    looks = iter([0.0, 1.0])
    target = torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)
    with pytest.raises(TransportTimeoutError, match=f"{CHUNK_BYTES} of {3 * CHUNK_BYTES} bytes"):
        DeviceCopies(CpuPlatform(), clock=lambda: next(looks)).write(
            target, torch.ones_like(target), after=PassedEvent(), deadline_s=1.0
        )
    assert target[:CHUNK_BYTES].eq(1).all()
    assert target[CHUNK_BYTES:].eq(0).all()


def test_a_copy_beyond_its_lease_is_waited_for_and_an_error(platform: SpyPlatform) -> None:
    looks, now_s = iter(range(10_000)), iter([0.0, 2.5])
    platform.event = SpyEvent(lambda: next(looks) > 100)
    with pytest.raises(TransportTimeoutError, match=r"1\.5 s longer .* raise transfer\.lease_s"):
        DeviceCopies(platform, clock=lambda: next(now_s)).write(
            torch.zeros(8, dtype=torch.uint8), torch.ones(2), after=PassedEvent(), deadline_s=1.0
        )
    assert next(looks) > 100, "it returned while the device could still write"


@pytest.mark.parametrize(
    ("changed", "refuses", "unblocked", "pinned", "unpinned"),
    [
        ({}, False, True, 1, 1),
        ({}, True, False, 0, 0),
        ({"foreign_pages_block": True}, False, False, 1, 1),
        ({"needs_device_copy": False}, False, False, 0, 0),
    ],
    ids=["a device", "refused", "unknown pages block", "host memory"],
)
def test_pool_is_page_locked_for_devices_that_copy(
    platform: SpyPlatform,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, bool],
    refuses: bool,
    unblocked: bool,
    pinned: int,
    unpinned: int,
) -> None:
    monkeypatch.setattr(platform, "traits", replace(SpyPlatform.traits, **changed))
    platform.refuses = refuses
    copies = DeviceCopies(platform)
    assert copies.pin(memory) is unblocked
    copies.unpin(memory)
    assert (len(platform.pinned), len(platform.unpinned)) == (pinned, unpinned)
    words = "is not page-locked, copies block: no more page-locked memory"
    assert (words in caplog.text) is refuses


SRC = torch.ones(2)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., SharedMemory]]:
    made: list[SharedMemory] = []

    def make(name: str = "") -> SharedMemory:
        made.append(SharedMemory.create(name or pool_name(), 4096))
        return made[-1]

    yield make
    for each in made:
        each.unlink()


@pytest.fixture
def writer(platform: SpyPlatform) -> Iterator[ShmWriter]:
    made = ShmWriter(DeviceCopies(platform), keys())
    yield made
    made.close()


def item(pool: SharedMemory, src: torch.Tensor = SRC) -> SlotWrite:
    return SlotWrite(
        src=src,
        slot=SlotDescriptor(pool=pool.path.name, offset=0, nbytes=8, generation=1),
        computed=PassedEvent(),
        address=pool.identity,
        deadline_s=NEVER_S,
    )


def write(writer: ShmWriter, pool: SharedMemory) -> None:
    writer.write(item(pool))


def test_pool_stays_page_locked_during_a_copy_without_its_owner(
    writer: ShmWriter, platform: SpyPlatform, make_pool: Callable[..., SharedMemory]
) -> None:
    gone = make_pool()
    write(writer, gone)
    platform.event = SpyEvent()
    copy = writer.queue(item(gone))
    assert copy is not None
    gone.unlink()
    write(writer, make_pool(gone.path.name))
    assert platform.unpinned == []
    with pytest.raises(PeerLostError, match="made again"):
        write(writer, gone)
    copy.finish()
    write(writer, make_pool())
    assert platform.unpinned == [platform.pinned[0][0]]


def test_a_copy_that_was_refused_keeps_no_pool_page_locked(
    writer: ShmWriter, platform: SpyPlatform, make_pool: Callable[..., SharedMemory]
) -> None:
    gone = make_pool()
    write(writer, gone)
    with pytest.raises(ValueError, match="bytes"):
        writer.queue(item(gone, torch.ones(3)))
    gone.unlink()
    write(writer, make_pool())
    assert platform.unpinned == [platform.pinned[0][0]]


def test_an_opening_is_no_wait(writer: ShmWriter, make_pool: Callable[..., SharedMemory]) -> None:
    pool = make_pool()
    write(writer, pool)
    with writer._lock:
        assert writer.queue(item(pool)) is None
    assert writer.queue(item(pool)) is not None
