"""Tells when a device has come to points of its work, which is later than the work was queued."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from epd_portable.errors import PlatformError
from epd_portable.log import trace
from epd_portable.runners.cores import on_all_cores

if TYPE_CHECKING:
    from epd_portable.connector.copies import DeviceCopies
    from epd_portable.platforms.base import DeviceEvent

_CLOSE_S = 5.0


class Moment:
    """The time at which something was complete, once that is known."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._known = threading.Event()

    def set(self, at_s: float) -> None:
        """It was at this monotonic time."""
        self._at_s = at_s
        self._known.set()

    def wait(self, timeout_s: float) -> float | None:
        """Return it; ``None`` if it is not known in time."""
        self._known.wait(timeout_s)
        return self._at_s


class StreamClock:
    """Hears of points in the work of one stream, in their order, without polling.

    A thread waits in the runtime for one point after the other; it starts with the first. A time
    that it tells is that of the device and what it took the thread to wake and to get Python's
    lock: tens of microseconds beside a thread that queues kernels. On platforms whose operations
    are complete when their call returns there is no thread, and points are reached when they are
    marked.

    Args:
        copies: Of the worker's device.
        name: Of the thread.
    """

    def __init__(self, copies: DeviceCopies, name: str) -> None:
        self._copies = copies
        self._name = name
        self._at_once = not copies.platform.traits.needs_device_copy
        self._marks: SimpleQueue[tuple[DeviceEvent, Callable[[float], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def mark(self, reached: Callable[[float], None], event: DeviceEvent | None = None) -> None:
        """Have somebody told when the work queued so far is complete.

        Args:
            reached: Called once with the monotonic time, by the clock's thread; must not raise.
            event: Behind that work, on this clock's stream; ``None`` records one on the current
                stream.

        Raises:
            PlatformError: The device has failed: nothing is reached any more.
        """
        if self._at_once:
            reached(time.monotonic())
            return
        self.check()
        self._marks.put((event or self._copies.platform.record_event(), reached))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with on_all_cores():
                self._thread.start()

    def trace(self, event: str, **fields: Any) -> None:
        """Record an event of the trace with the time at which the device comes to this point."""
        if self._at_once:
            trace(event, **fields)
        elif trace.on:
            self.mark(lambda at_s: trace(event, at_s=at_s, **fields))

    def check(self) -> None:
        """Find out whether points are still reached.

        Raises:
            PlatformError: The device has failed.
        """
        if self._problem is not None:
            raise PlatformError(f"device work failed: {self._problem}") from self._problem

    def close(self) -> None:
        """Let the points that were marked be reached, if that takes no more than some seconds."""
        if self._thread is not None:
            self._marks.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._copies.platform.set_device(self._copies.index)
            while (mark := self._marks.get()) is not None:
                event, reached = mark
                event.block()
                reached(time.monotonic())
        except Exception as error:  # Who marks the next point raises it.
            self._problem = error
