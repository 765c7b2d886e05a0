from __future__ import annotations

import base64

import msgspec
import pytest
import torch

from epd_portable.errors import (
    CapacityError,
    PeerLostError,
    PlatformError,
    TransportError,
    UnsupportedError,
)
from epd_portable.transfer import slab as slab_module
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.sessions import new_session
from epd_portable.transfer.slab import DeviceSlab, OpenedSlab
from tests.unit.transfer.spies import SLAB_ALIGNMENT as ALIGNMENT
from tests.unit.transfer.spies import SharingPlatform

NBYTES = 3 * ALIGNMENT


@pytest.fixture
def platform() -> SharingPlatform:
    return SharingPlatform()


@pytest.fixture
def slab(platform: SharingPlatform) -> DeviceSlab:
    return DeviceSlab(DeviceCopies(platform), NBYTES, new_session())


def test_a_slab_is_aligned_and_has_its_size(platform: SharingPlatform, slab: DeviceSlab) -> None:
    (memory,) = platform.shared
    assert memory.data_ptr() % ALIGNMENT == 0
    assert memory.numel() == NBYTES


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 4), (0, 0), (0, -4), (NBYTES - 3, 4), (NBYTES, 1), (1 << 60, 1)]
)
def test_a_range_outside_is_refused_at_both_ends(
    platform: SharingPlatform, slab: DeviceSlab, offset: int, nbytes: int
) -> None:
    for end in (slab, OpenedSlab(platform, slab.address)):
        with pytest.raises(ValueError, match=f"outside a slab of {NBYTES}"):
            end.tensor(offset, nbytes)


def test_slab_is_refused_when_its_address_is_invalid(platform: SharingPlatform) -> None:
    with pytest.raises(TransportError, match=r"'nonsense' is no address of device memory: "):
        OpenedSlab(platform, "nonsense")


def test_a_slab_of_an_ended_process_is_lost(platform: SharingPlatform, slab: DeviceSlab) -> None:
    pid, start, namespace, rest = new_session().split("-")
    ended = "-".join([pid, str(int(start) + 1), namespace, rest])
    packed = msgspec.msgpack.decode(base64.b85decode(slab.address))
    address = base64.b85encode(msgspec.msgpack.encode({**packed, "session": ended})).decode()
    with pytest.raises(PeerLostError, match=f"{ended} is gone with its process"):
        OpenedSlab(platform, address)


@pytest.mark.parametrize(
    ("problem", "ends", "error", "said"),
    [
        (
            PlatformError("invalid resource handle"),
            [False, False],
            *(UnsupportedError, r"which lives.*invalid resource handle.*tcp"),
        ),
        # Its process has just ended.
        (PlatformError("no such memory"), [False, True], PeerLostError, "is gone: no such memory"),
        (
            ValueError("a handle of npu memory, opened on cuda"),
            [False, False],
            *(TransportError, r"of npu memory.*set transfer\.path"),
        ),
    ],
    ids=["of a live process", "of one that ends", "of another platform"],
)
def test_memory_that_cannot_be_opened_is_refused_or_lost(
    platform: SharingPlatform,
    slab: DeviceSlab,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    ends: list[bool],
    error: type[Exception],
    said: str,
) -> None:
    platform.problem = problem
    looks = iter(ends)
    monkeypatch.setattr(slab_module, "process_is_gone", lambda session: next(looks))
    with pytest.raises(error, match=said) as caught:
        OpenedSlab(platform, slab.address)
    assert isinstance(caught.value, PeerLostError) == (error is PeerLostError)


def test_a_full_device_says_so(platform: SharingPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    free = platform.memory_info(0)
    monkeypatch.setattr(platform, "memory_info", lambda index: free)
    monkeypatch.setattr(slab_module.torch, "empty", refuse)
    with pytest.raises(CapacityError) as caught:
        DeviceSlab(DeviceCopies(platform), NBYTES, new_session())
    for part in (str(NBYTES), str(free.free_bytes), "transfer.pool_bytes", "transfer.path"):
        assert part in str(caught.value)
