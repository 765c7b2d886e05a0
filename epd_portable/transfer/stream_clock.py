"""Progress of a device: points of its work are reached later than the work was queued."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from epd_portable.errors import PlatformError
from epd_portable.log import trace
from epd_portable.transfer.cores import on_all_cores

if TYPE_CHECKING:
    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies

_CLOSE_S = 5.0
_CHECK_EVERY_S = 0.05
_STEPS_AHEAD = 1
"""A step is queued while so many before it are not computed: the device never waits for the next,
and what is encoded next is decided as late as can be."""


class StreamClock:
    """Reports points in the work of one stream, in their order, without polling.

    A thread waits in the runtime for one point after the other; it starts with the first. Reported
    times include what the thread takes to wake and to get Python's lock: tens of microseconds while
    another thread queues kernels. On platforms whose operations are complete when their call
    returns there is no thread, and points are reached when they are marked.
    """

    def __init__(self, copies: DeviceCopies, name: str) -> None:
        self._copies = copies
        self._name = name
        self._at_once = not copies.platform.traits.needs_device_copy
        self._marks: SimpleQueue[tuple[DeviceEvent, Callable[[float], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def mark(self, reached: Callable[[float], None], event: DeviceEvent | None = None) -> None:
        """Call back when the work queued so far is complete.

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

    def trace(self, event: str, *, behind: DeviceEvent | None = None, **fields: Any) -> None:
        """Record an event of the trace with the time at which the device comes to this point.

        ``behind`` is the event of `mark`.
        """
        if self._at_once:
            trace(event, **fields)
        elif trace.on:
            self.mark(lambda at_s: trace(event, at_s=at_s, **fields), behind)

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
        except Exception as error:  # The next `mark` or `check` raises it.
            self._problem = error


class StepProgress:
    """Report of an encode worker to the engine: transfers that ended, steps that are computed.

    For several threads.
    """

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._ended: set[str] = set()
        self._computed = self._taken = 0
        self._changed = threading.Condition()

    def transfer_ended(self, transfer_id: str) -> None:
        """Note that a transfer has ended, well or not."""
        with self._changed:
            self._ended.add(transfer_id)
            self._changed.notify_all()

    def step_queued(self, step: int) -> None:
        """Note that all work of a step is queued; blocks while too many steps are not computed.

        Args:
            step: Its number; they grow by one, from 1.

        Raises:
            PlatformError: The device has failed.
        """
        self._clock.mark(partial(self._step_computed, step))
        with self._changed:
            while self._computed < step - _STEPS_AHEAD:
                self._clock.check()
                self._changed.wait(_CHECK_EVERY_S)

    def take_ended(self) -> set[str]:
        """Return the ids of transfers that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, set()
        return ended

    def take_computed(self) -> int | None:
        """Return the last step that is computed, if there is a new one since the last call.

        Raises:
            PlatformError: The device has failed.
        """
        self._clock.check()
        with self._changed:
            if self._taken == self._computed:
                return None
            self._taken = self._computed
            return self._taken

    def rest(self, timeout_s: float) -> None:
        """Block until there is something to take, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._taken != self._computed, timeout_s)

    def _step_computed(self, step: int, at_s: float) -> None:
        with self._changed:
            self._computed = step
            self._changed.notify_all()
