"""Pools of consumers that a producer has mapped and page-locked, and when it lets go of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import SlotWrite
from epd_portable.connector.transports.mapped import ShmTransport
from epd_portable.errors import PeerLostError
from epd_portable.platforms.cpu import PassedEvent
from epd_portable.wire.descriptors import SlotDescriptor
from tests.keyring import keys
from tests.receiving import pool_name
from tests.unit.connector.spies import NEVER_S, SpyEvent, SpyPlatform

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
def platform() -> SpyPlatform:
    return SpyPlatform()


@pytest.fixture
def transport(platform: SpyPlatform) -> Iterator[ShmTransport]:
    made = ShmTransport(DeviceCopies(platform), keys())
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


def write(transport: ShmTransport, pool: SharedMemory) -> None:
    transport.write(item(pool))


def test_a_pool_stays_page_locked_while_a_copy_into_it_is_under_way_though_its_owner_has_gone(
    transport: ShmTransport, platform: SpyPlatform, make_pool: Callable[..., SharedMemory]
) -> None:
    gone = make_pool()
    write(transport, gone)
    platform.event = SpyEvent()
    copy = transport.queue(item(gone))
    assert copy is not None
    gone.unlink()
    write(transport, make_pool(gone.path.name))
    assert platform.unpinned == []
    with pytest.raises(PeerLostError, match="made anew"):
        write(transport, gone)
    copy.finish()
    write(transport, make_pool())
    assert platform.unpinned == [platform.pinned[0][0]]


def test_a_copy_that_was_refused_keeps_no_pool_page_locked(
    transport: ShmTransport, platform: SpyPlatform, make_pool: Callable[..., SharedMemory]
) -> None:
    gone = make_pool()
    write(transport, gone)
    with pytest.raises(ValueError, match="bytes"):
        transport.queue(item(gone, torch.ones(3)))
    gone.unlink()
    write(transport, make_pool())
    assert platform.unpinned == [platform.pinned[0][0]]


def test_an_opening_is_no_wait(
    transport: ShmTransport, make_pool: Callable[..., SharedMemory]
) -> None:
    pool = make_pool()
    write(transport, pool)
    with transport._lock:
        assert transport.queue(item(pool)) is None
    assert transport.queue(item(pool)) is not None
