"""A thread that waits for a device beside another one."""

from __future__ import annotations

import threading
import time

from epd_portable.platforms.base import DeviceEvent, Platform


def block_aside(platform: Platform, event: DeviceEvent) -> tuple[int, float]:
    """Have another thread block until an event of the first device has passed.

    Returns:
        Turns that this thread had meanwhile, and seconds of CPU time that the other one took.
    """
    passed: list[bool] = []
    spent_s: list[float] = []

    def block() -> None:
        platform.set_device(0)
        begin_s = time.thread_time()
        event.block()
        spent_s.append(time.thread_time() - begin_s)
        passed.append(event.done())

    thread = threading.Thread(target=block)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        thread.join(0.001)
    assert passed == [True]
    return turns, spent_s[0]
