from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import CapacityError
from epd_portable.items.placer import Placement, Placer, WorkerOrders
from epd_portable.platforms import registry
from epd_portable.platforms.base import DeviceEvent, MemoryInfo, Platform
from epd_portable.platforms.cpu import CpuPlatform
from epd_portable.transfer import stream_clock
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.pool import SharedMemory
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from tests.receiving import shared_memory


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with shared_memory() as made:
        yield made


def make_placer(memory: SharedMemory, platform: Platform) -> Placer:
    config = InstanceConfig(
        instance="prefill_decode-0", platform="cpu", path="shm", pool=memory.path.name
    )
    copies = DeviceCopies(platform)
    return Placer(copies, WorkerEndpoint(config, copies))


def arrive(
    memory: SharedMemory, mm_hash: str, source: torch.Tensor, offset: int = 128
) -> Placement:
    """Have an item in a slot."""
    dtype = str(source.dtype).removeprefix("torch.")
    tensor = TensorSpec(shape=tuple(source.shape), dtype=dtype)
    memory.tensor(offset, tensor.nbytes).copy_(source.view(-1).view(torch.uint8))
    slot = SlotDescriptor(
        pool=memory.path.name, offset=offset, nbytes=tensor.nbytes, generation=offset
    )
    return Placement(mm_hash=mm_hash, slot=slot, in_device_memory=False, tensor=tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_cpu_a_placed_item_is_a_view_of_its_slot(memory: SharedMemory, dtype: str) -> None:
    source = torch.arange(15).to(getattr(torch, dtype)).view(3, 5)
    encoder_cache: dict[str, torch.Tensor] = {}
    placer = make_placer(memory, registry.get("cpu"))
    placer.carry_out(WorkerOrders(placements=[arrive(memory, "cat", source)]), encoder_cache)
    assert torch.equal(encoder_cache["cat"], source)
    memory.tensor(128, 4096 - 128).zero_()
    assert encoder_cache["cat"].eq(0).all()


class FullPlatform(CpuPlatform):
    """The CPU as a device, with 7 bytes free."""

    traits = replace(CpuPlatform.traits, needs_device_copy=True)

    def pin_host(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(free_bytes=7, total_bytes=4096)


def test_full_device_places_nothing_and_reports_the_remedy(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = arrive(memory, "cat", torch.ones(3, 5))
    second = arrive(memory, "dog", torch.full((4, 5), 2.0), offset=256)
    real, room = torch.empty, [True, False]

    def empty(*size: int, **options: object) -> torch.Tensor:
        if not room.pop(0):
            raise torch.OutOfMemoryError("out of memory")
        return real(*size, **options)

    placer, encoder_cache = make_placer(memory, FullPlatform()), {"old": torch.zeros(1)}
    orders = WorkerOrders(placements=[first, second])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(CapacityError) as caught:
            placer.carry_out(orders, encoder_cache)
    assert list(encoder_cache) == ["old"]
    for part in ("item dog of 80 bytes", "140 in this step", "device 0", "7 free: lower gpu_mem"):
        assert part in str(caught.value)
    placer.carry_out(orders, encoder_cache)
    assert encoder_cache["cat"].eq(1).all()
    assert encoder_cache["dog"].eq(2).all()


def test_trace_of_placements_needs_no_device_event(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = FullPlatform()
    recorded: list[DeviceEvent] = []
    seen: list[str] = []

    def record_event() -> DeviceEvent:
        recorded.append(FullPlatform().record_event())
        return recorded[-1]

    monkeypatch.setattr(platform, "record_event", record_event)
    traced = Mock(on=True, side_effect=lambda event, **_: seen.append(event))
    monkeypatch.setattr(stream_clock, "trace", traced)
    items = [
        arrive(memory, name, torch.ones(3, 5), at) for name, at in (("cat", 128), ("dog", 256))
    ]
    placer = make_placer(memory, platform)
    placer.carry_out(WorkerOrders(placements=items), {})
    placer.clock.close()
    assert [len(recorded), seen] == [1, ["item.placed"] * 2]
