"""Encode worker: writes of encoder outputs into granted slots.

The model runner's thread does not wait for a write:

- A short copy in host memory is made at once, by the calling thread.
- A copy that a device makes on its own is queued behind the computation. One thread, the watcher,
  waits for the ends of these, which come in the order in which they were queued.
- A write that may block otherwise is left to a thread of a pool.
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

from epd_portable.encode.producer import Write
from epd_portable.errors import TransportError
from epd_portable.log import trace
from epd_portable.transfer import registry
from epd_portable.transfer.copies import CHUNK_BYTES, QueuedCopy
from epd_portable.transfer.paths.base import PathWriter, SlotWrite
from epd_portable.wire.descriptors import TensorSpec

if TYPE_CHECKING:
    import torch

    from epd_portable.config.instance import InstanceConfig
    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies
    from epd_portable.transfer.curve import CurveKeys

_WRITERS = 4
CLOSE_S = 30.0
"""Longest time in seconds that closing waits for a write, which is abandoned then."""
_COMPUTED_WAIT_S = 1.0
"""Longest time from the end of a copy until the end of the computation before it is reported."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderOutput:
    """An encoder output.

    Attributes:
        tensor: ``(num_tokens, width)``, contiguous.
        computed: Event behind its computation.
        computed_at: Monotonic time at which that event passed.
    """

    tensor: torch.Tensor
    computed: DeviceEvent
    computed_at: Future[float]

    def fits(self, spec: TensorSpec) -> bool:
        """Return whether it has the shape and dtype that were announced."""
        tensor = self.tensor
        return (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """Result of a write.

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
    """Threads that write, and the paths by which they do.

    Args:
        on_result: Called with each result by one of the threads.
        on_death: Called when a thread ends by an unexpected error.

    Attributes:
        are_immediate: Some writes begin in the thread that starts them.
    """

    def __init__(
        self,
        config: InstanceConfig,
        copies: DeviceCopies,
        keys: CurveKeys,
        *,
        on_result: Callable[[WriteResult], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._copies = copies
        self._keys = keys
        self._on_result = on_result
        self._on_death = on_death
        paths = [path.name for path in registry.offered_by(config)]
        platform = copies.platform.name
        self._in_place = {path for path in paths if registry.copies_in_place(path, platform)}
        self._queues = {path for path in paths if registry.queues_copies(path, platform)}
        self._paths: dict[str, PathWriter] = {}
        self._lock = threading.Lock()
        self._blocking: SimpleQueue[Work | None] = SimpleQueue()
        self._queued: SimpleQueue[Work | None] = SimpleQueue()
        self._copied_s = 0.0
        """Time at which the copy stream ended the last copy that the watcher has waited for."""
        self._threads = [
            self._start(f"epd-writer-{number}", self._blocking) for number in range(_WRITERS)
        ]
        if self._queues:
            self._threads.append(self._start("epd-watcher", self._queued))
        self.are_immediate = bool(self._in_place or self._queues)

    def start(self, write: Write) -> WriteResult | None:
        """Begin a write, which blocks for about a millisecond at most.

        Returns:
            The result, if it has ended; otherwise a callback gets it.
        """
        order, path, begin_s = write.order, write.path, time.monotonic()
        try:
            trace("transfer.begun", transfer=order.transfer_id, mm_hash=order.mm_hash, path=path)
            if path in self._in_place and write.slot.nbytes <= CHUNK_BYTES:
                return self._write(write)
            copy = None
            if path in self._queues:
                copy = self.path_writer(path).queue(_slot_write(write))
        except Exception as error:
            return WriteResult(write=write, error=error)
        if copy is None:
            self._blocking.put(partial(self._write, write))
        else:
            self._queued.put(partial(self._finish_copy, write, copy, begin_s))
        return None

    def path_writer(self, path: str) -> PathWriter:
        """Return the writer of a path; loads it the first time."""
        with self._lock:
            if path not in self._paths:
                self._paths[path] = registry.load_writer(path, self._copies, self._keys)
            return self._paths[path]

    def close(self) -> None:
        """End the threads after the writes under way; one that is stuck keeps its memory."""
        for _ in range(_WRITERS):
            self._blocking.put(None)
        self._queued.put(None)
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for path_writer in self._paths.values():
                path_writer.close()

    def _start(self, name: str, queue: SimpleQueue[Work | None]) -> threading.Thread:
        def run() -> None:
            try:
                self._copies.platform.set_device(self._copies.index)
                while (work := queue.get()) is not None:
                    self._on_result(work())
            except BaseException as error:
                self._on_death(error)
                raise

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _write(self, write: Write) -> WriteResult:
        begin_s = time.monotonic()
        try:
            self.path_writer(write.path).write(_slot_write(write))
            return _ended(write, begin_s)[0]
        except Exception as error:
            return WriteResult(write=write, error=error)

    def _finish_copy(self, write: Write, copy: QueuedCopy, begin_s: float) -> WriteResult:
        try:
            copy.finish()
            # It was queued behind the computation, and behind the copies before it.
            result, self._copied_s = _ended(write, max(begin_s, self._copied_s))
            return result
        except Exception as error:
            return WriteResult(write=write, error=error)


def _slot_write(write: Write) -> SlotWrite:
    """Return what a path writes.

    Raises:
        TransportError: The output is not what was announced, or is not there.
    """
    order, output = write.order, write.output
    if output is None:
        raise TransportError(f"item {order.mm_hash}: its output is not there")
    if not output.fits(order.tensor):
        shape, dtype = tuple(output.tensor.shape), str(output.tensor.dtype)
        raise TransportError(
            f"encoder put out {shape} {dtype.removeprefix('torch.')}, announced was "
            f"{order.tensor.shape} {order.tensor.dtype}"
        )
    return SlotWrite(
        src=output.tensor,
        slot=write.slot,
        computed=output.computed,
        address=write.address,
        deadline_s=write.deadline_s,
    )


def _ended(write: Write, begin_s: float) -> tuple[WriteResult, float]:
    """Return the result of a write that has ended just now, and the time of its end.

    Args:
        begin_s: Time at which the write could have begun if its output had been computed.
    """
    end_s = time.monotonic()
    with suppress(TimeoutError):  # Another thread sets it, perhaps a little later.
        begin_s = max(begin_s, write.output.computed_at.result(_COMPUTED_WAIT_S))
    end_s = max(begin_s, end_s)
    trace(
        "transfer.written",
        at_s=end_s,
        transfer=write.order.transfer_id,
        mm_hash=write.order.mm_hash,
        path=write.path,
        nbytes=write.slot.nbytes,
        write_s=end_s - begin_s,
    )
    return WriteResult(write=write, write_s=end_s - begin_s), end_s
