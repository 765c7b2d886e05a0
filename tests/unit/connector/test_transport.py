from __future__ import annotations

import threading

from epd_portable.connector.transport import MAX_REVOKED, LeaseFence, RevokedFence
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
    assert forbidden.wait(10)
    thread.join()


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
