from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import torch

from epd_portable.connector.pool import SharedMemory
from epd_portable.platforms import registry
from epd_portable.runners.placer import Placement, Placer
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(f"epd-test-{os.getpid()}-{uuid.uuid4().hex}", 4096)
    yield made
    made.unlink()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_cpu_a_placed_item_is_a_view_of_its_slot(memory: SharedMemory, dtype: str) -> None:
    platform = registry.get("cpu")
    placer = Placer(platform, platform.device(0))
    tensor = TensorSpec(shape=(3, 5), dtype=dtype)
    source = torch.arange(15).to(getattr(torch, dtype)).view(3, 5)
    memory.tensor(128, tensor.nbytes).copy_(source.view(-1).view(torch.uint8))
    slot = SlotDescriptor(pool=memory.path.name, offset=128, nbytes=tensor.nbytes, generation=1)
    encoder_cache: dict[str, torch.Tensor] = {}
    placer.place([Placement(mm_hash="cat", slot=slot, tensor=tensor)], encoder_cache)
    assert torch.equal(encoder_cache["cat"], source)
    memory.tensor(128, tensor.nbytes).zero_()
    assert encoder_cache["cat"].eq(0).all()
