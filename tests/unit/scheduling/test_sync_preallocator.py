from __future__ import annotations

import pytest

from tests.unit.scheduling.desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk("sync")


def test_an_announced_item_waits_for_its_request_though_there_is_room(desk: Desk) -> None:
    assert desk.accept("early", 1) is None
    assert not desk.preallocator.knows("early")
    assert desk.pool.free_bytes == 10
    desk.claim("r", "early", 1)
    assert desk.reserve() == ["early"]


def test_every_claim_is_one_of_a_request(desk: Desk) -> None:
    desk.accept("early", 1)
    desk.claim("r", "a", 4)
    desk.reserve()
    desk.withdraw("r", "a")
    assert desk.preallocator.get("a") is None
    desk.assert_everything_is_back()
