from __future__ import annotations

import threading

import torch

from epd_portable.transfer.paths.base import MAX_REVOKED, LeaseFence, RevokedFence
from epd_portable.transfer.paths.nixl import RegisteredBuffers
from tests.unit.builders import slot


def test_forbidding_waits_for_a_write_that_is_under_way() -> None:
    fence = LeaseFence()
    fence.allow(slot(1))
    forbidden = threading.Event()

    def forbid() -> None:
        fence.forbid(slot(1))
        forbidden.set()

    with fence.writing(slot(1)):
        thread = threading.Thread(target=forbid)
        thread.start()
        assert not forbidden.wait(0.05)
    assert forbidden.wait(120)
    thread.join()


def test_revoked_grant_is_refused_and_later_ones_are_not() -> None:
    fence = RevokedFence()
    for generation in range(10, 10 + MAX_REVOKED + 5):
        if generation != 20:
            fence.revoke(generation)
    newest = 10 + MAX_REVOKED + 5
    for generation, expected in ((9, False), (10, False), (newest - 1, False), (newest, True)):
        with fence.writing(slot(generation)) as leased:
            assert leased is expected, generation
    with fence.writing(slot(20)) as leased:
        assert leased, "younger than the oldest that is remembered, and not taken back"


def test_buffers_are_filled_reused_and_few_are_kept() -> None:
    registered: list[int] = []

    class Agent:
        def register(self, memory: torch.Tensor) -> int:
            registered.append(memory.data_ptr())
            return memory.data_ptr()

        def deregister(self, address: int) -> None:
            registered.remove(address)

    buffers = RegisteredBuffers(Agent(), keep=1)
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
