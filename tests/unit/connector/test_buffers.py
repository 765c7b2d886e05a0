from __future__ import annotations

import torch

from epd_portable.connector.transports.buffers import RegisteredBuffers


def test_buffers_are_filled_reused_and_few_are_kept() -> None:
    registered: list[int] = []

    def register(memory: torch.Tensor) -> int:
        registered.append(memory.data_ptr())
        return memory.data_ptr()

    buffers = RegisteredBuffers(register, registered.remove, keep=1)
    small, large = torch.full((3,), 7, dtype=torch.uint8), torch.ones(3 << 20, dtype=torch.uint8)
    first, second = buffers.fill(small), buffers.fill(large)
    assert first.memory[:3].equal(small)
    assert second.memory[: large.numel()].equal(large)
    buffers.give_back(second)
    buffers.give_back(first)
    assert registered == [second.registered], "the larger one is kept"
    assert buffers.fill(small) is second
    buffers.discard(second)
    buffers.close()
    assert registered == []
