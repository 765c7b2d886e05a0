"""Encode worker: writes outputs into granted slots, without the model runner's thread waiting.

- A short copy in host memory is made at once, by the thread that asks.
- A copy that a device makes by itself is queued behind the computation. One thread, the watcher,
  waits for the ends of these, which come in the order in which they were queued.
- Whatever else may block is left to a thread of a pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from epd_portable.encode.outputs import EncoderOutput, KeptOutputs
from epd_portable.encode.producer import Write
from epd_portable.log import trace
from epd_portable.transfer import registry
from epd_portable.transfer.copies import CHUNK_BYTES, QueuedCopy
from epd_portable.transfer.transport import SlotWrite, Transport

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig
    from epd_portable.transfer.copies import DeviceCopies
    from epd_portable.transfer.curve import CurveKeys

_WRITERS = 4
CLOSE_S = 30.0
"""A write that goes on for so long when closing is abandoned."""
_COMPUTED_WAIT_S = 1.0
"""Longest time from the end of a copy until the end of the computation before it is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """How a write ended.

    Attributes:
        write: Which.
        write_s: Its duration from when the output was computed.
        error: What it failed with.
    """

    write: Write
    write_s: float = 0.0
    error: Exception | None = None


Work = Callable[[], WriteResult]


class Writers:
    """Carries out writes; owns the transports, the pool's threads and the watcher.

    Args:
        on_result: Called with each result by one of its threads.
        on_death: Called when one ends by an error that nothing foresaw.
    """

    def __init__(
        self,
        config: InstanceConfig,
        copies: DeviceCopies,
        keys: CurveKeys,
        outputs: KeptOutputs,
        *,
        on_result: Callable[[WriteResult], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._copies = copies
        self._keys = keys
        self._outputs = outputs
        self._on_result = on_result
        self._on_death = on_death
        paths = [path.name for path in registry.offered_by(config)]
        platform = copies.platform.name
        self._in_place = {path for path in paths if registry.copies_in_place(path, platform)}
        self._queues = {path for path in paths if registry.queues_copies(path, platform)}
        self._transports: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._blocking: SimpleQueue[Work | None] = SimpleQueue()
        self._queued: SimpleQueue[Work | None] = SimpleQueue()
        self._copied_s = 0.0
        """When the copy stream ended the last copy that the watcher has waited for."""
        self._threads = [
            self._thread(f"epd-writer-{number}", self._blocking) for number in range(_WRITERS)
        ]
        if self._queues:
            self._threads.append(self._thread("epd-watcher", self._queued))

    @property
    def are_immediate(self) -> bool:
        """Whether some writes begin in the thread that starts them."""
        return bool(self._in_place or self._queues)

    def open(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def start(self, write: Write) -> WriteResult | None:
        """Begin a write, which blocks for about a millisecond at most.

        Returns:
            The result, if it has ended; otherwise a callback gets it.
        """
        if write.path in self._in_place and write.slot.nbytes <= CHUNK_BYTES:
            return self._write(write)
        if write.path in self._queues:
            begin_s = time.monotonic()
            try:
                output = self._outputs.output_for(write.transfer_id)
                copy = self.transport(write.path).queue(_slot_write(write, output))
            except Exception as error:
                return WriteResult(write=write, error=error)
            if copy is not None:
                try:
                    _trace_begun(write)
                finally:  # Whatever happens, the end of the copy must be waited for.
                    self._queued.put(
                        partial(self._finish_copy, write, copy, output.computed_at, begin_s)
                    )
                return None
        self._blocking.put(partial(self._write, write))
        return None

    def transport(self, path: str) -> Transport:
        """Return the transport of a path; loads it the first time."""
        with self._lock:
            if path not in self._transports:
                self._transports[path] = registry.load_transport(path, self._copies, self._keys)
            return self._transports[path]

    def close(self) -> None:
        """End the threads after the writes under way; one that is stuck keeps its memory."""
        for _ in range(_WRITERS):
            self._blocking.put(None)
        self._queued.put(None)
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for transport in self._transports.values():
                transport.close()

    def _thread(self, name: str, queue: SimpleQueue[Work | None]) -> threading.Thread:
        def run() -> None:
            try:
                self._copies.platform.set_device(self._copies.index)
                while (work := queue.get()) is not None:
                    self._on_result(work())
            except BaseException as error:
                self._on_death(error)
                raise

        return threading.Thread(target=run, name=name, daemon=True)

    def _write(self, write: Write) -> WriteResult:
        try:
            output = self._outputs.output_for(write.transfer_id)
            _trace_begun(write)
            begin_s = time.monotonic()
            self.transport(write.path).write(_slot_write(write, output))
            write_s, end_s = _duration(output.computed_at, begin_s)
            _trace_written(write, write_s, end_s)
        except Exception as error:
            return WriteResult(write=write, error=error)
        return WriteResult(write=write, write_s=write_s)

    def _finish_copy(
        self, write: Write, copy: QueuedCopy, computed_at: Future[float], begin_s: float
    ) -> WriteResult:
        try:
            copy.finish()
            # It was queued behind the computation, and behind the copies before it.
            write_s, self._copied_s = _duration(computed_at, max(begin_s, self._copied_s))
            _trace_written(write, write_s, self._copied_s)
        except Exception as error:
            return WriteResult(write=write, error=error)
        return WriteResult(write=write, write_s=write_s)


def _slot_write(write: Write, output: EncoderOutput) -> SlotWrite:
    return SlotWrite(
        src=output.tensor,
        slot=write.slot,
        computed=output.computed,
        address=write.address,
        deadline_s=write.deadline_s,
    )


def _duration(computed_at: Future[float], begin_s: float) -> tuple[float, float]:
    """Return how long a write took that has ended just now, and when that was.

    Args:
        computed_at: When its output was computed; another thread hears of it, perhaps a little
            later than this one heard of the end.
        begin_s: When the write could have begun otherwise.
    """
    end_s = time.monotonic()
    with suppress(TimeoutError):
        begin_s = max(begin_s, computed_at.result(_COMPUTED_WAIT_S))
    end_s = max(begin_s, end_s)
    return end_s - begin_s, end_s


def _trace_begun(write: Write) -> None:
    trace("transfer.begun", transfer=write.transfer_id, mm_hash=write.mm_hash, path=write.path)


def _trace_written(write: Write, write_s: float, end_s: float) -> None:
    trace(
        "transfer.written",
        at_s=end_s,
        transfer=write.transfer_id,
        mm_hash=write.mm_hash,
        path=write.path,
        nbytes=write.slot.nbytes,
        write_s=write_s,
    )
