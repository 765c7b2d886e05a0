from __future__ import annotations

import threading

import pytest

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms.base import DeviceEvent


class ManualEvent(DeviceEvent):
    """Passes when its flag is set, or on the n-th question."""

    def __init__(self, *, after_questions: int) -> None:
        self.left = after_questions
        self.asked = threading.Event()

    def wait(self) -> None:
        raise AssertionError("synchronize must not queue a wait")

    def block(self) -> None:
        raise AssertionError("synchronize must keep its deadline")

    def done(self) -> bool:
        self.asked.set()
        self.left -= 1
        return self.left < 0


def test_synchronize_gives_up_at_its_deadline() -> None:
    event = ManualEvent(after_questions=10**9)
    with pytest.raises(TransportTimeoutError, match=r"not complete after 0\.01 s"):
        event.synchronize(timeout_s=0.01)


def test_synchronize_asks_no_more_than_a_few_times_each_millisecond() -> None:
    never = 10**9
    event = ManualEvent(after_questions=never)
    with pytest.raises(TransportTimeoutError):
        event.synchronize(timeout_s=0.2)
    assert never - event.left < 2 * 200
