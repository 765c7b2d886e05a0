from __future__ import annotations

import pytest

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms.base import DeviceEvent


class NeverEvent(DeviceEvent):
    """Does not pass, however often it is asked."""

    asked = 0

    def wait(self) -> None:
        raise AssertionError("synchronize must not queue a wait")

    def block(self) -> None:
        raise AssertionError("synchronize must keep its deadline")

    def done(self) -> bool:
        self.asked += 1
        return False


def test_synchronize_gives_up_at_its_deadline_and_asks_few_times_each_millisecond() -> None:
    event = NeverEvent()
    with pytest.raises(TransportTimeoutError, match=r"not complete after 0\.2 s"):
        event.synchronize(timeout_s=0.2)
    assert event.asked < 2 * 200
