from __future__ import annotations

import threading

import pytest
import torch

from epd_portable.connector.transport import MAX_REVOKED, LeaseFence, RevokedFence, check_source
from tests.unit.builders import slot


def test_only_the_very_slot_that_was_leased_may_be_written_until_it_is_forbidden() -> None:
    fence = LeaseFence()
    fence.allow(slot(1))
    for candidate, expected in ((slot(1), True), (slot(2), False), (slot(1, offset=64), False)):
        with fence.writing(candidate) as leased:
            assert leased is expected
    fence.forbid(slot(1))
    fence.forbid(slot(1))
    with fence.writing(slot(1)) as leased:
        assert not leased


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
    assert forbidden.wait(10)
    thread.join()


def test_a_source_must_be_contiguous_of_the_slot_s_size_and_on_the_worker_s_device() -> None:
    target, device = slot(1, nbytes=32), torch.device("cpu")
    check_source(torch.zeros(2, 4), target, device)
    for bad in (torch.zeros(2, 3), torch.zeros(4, 2).t(), torch.zeros(2, 4, device="meta")):
        with pytest.raises(ValueError, match="tensor"):
            check_source(bad, target, device)


def test_a_grant_that_was_taken_back_is_refused_and_those_after_it_are_not() -> None:
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
