"""Encode worker: outputs until every transfer of theirs has ended, and writes into granted slots.

The model runner's thread does not wait for a write:

- A short copy in host memory is made at once, by the thread that asks.
- A copy that a device makes by itself is queued behind the computation. One thread, the watcher,
  waits for the ends of these, which come in the order in which they were queued.
- Whatever else may block is left to a thread of a pool.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from epd_portable.encode.producer import TransferOrder, Write
from epd_portable.encode.store_writer import Output as StoreOutput
from epd_portable.encode.store_writer import StoreWriter
from epd_portable.errors import TransportError
from epd_portable.items.metrics import SenderMetrics
from epd_portable.log import trace
from epd_portable.transfer import registry
from epd_portable.transfer.copies import CHUNK_BYTES, QueuedCopy
from epd_portable.transfer.paths.base import PathWriter, SlotWrite
from epd_portable.transfer.stream_clock import StreamClock
from epd_portable.wire.descriptors import TensorSpec

if TYPE_CHECKING:
    import torch

    from epd_portable.config.instance import InstanceConfig
    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies
    from epd_portable.transfer.curve import CurveKeys

OUTDATED = "the encoder cache was reset, and its output may be that of other weights"
"""Reason for which a transfer from before a reset fails."""
_WRITERS = 4
CLOSE_S = 30.0
"""A write that goes on for so long when closing is abandoned."""
_COMPUTED_WAIT_S = 1.0
"""Longest time from the end of a copy until the end of the computation before it is reported."""


@dataclass(frozen=True, slots=True)
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


class KeptOutputs:
    """Outputs by item, and the orders that need them; for several threads.

    An output whose last transfer has ended is handed to the store, if there is one.

    Args:
        clock: Reports when outputs are computed.
        metrics: Counts the bytes that are kept.
        store: Gets outputs after their transfers; ``None`` without a store.
        copy_timeout_s: Bound of the copy into host memory that the store makes.

    Attributes:
        orders: Of transfers that have not ended, by ``transfer_id``.
    """

    def __init__(
        self,
        copies: DeviceCopies,
        clock: StreamClock,
        metrics: SenderMetrics,
        store: StoreWriter | None,
        copy_timeout_s: float,
    ) -> None:
        self._copies = copies
        self._clock = clock
        self._metrics = metrics
        self._store = store
        self._copy_timeout_s = copy_timeout_s
        self.orders: dict[str, TransferOrder] = {}
        self._outdated: Counter[str] = Counter()
        """Transfers from before a reset that have not ended, by id: one may be ordered again."""
        self._users: Counter[str] = Counter()
        self._outputs: dict[str, EncoderOutput] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of outputs."""
        return len(self._outputs)

    def add_order(self, order: TransferOrder, tensor: torch.Tensor | None) -> bool:
        """Note that a transfer needs an item; submit its output if the engine has it from before.

        Returns:
            Whether the output is here; otherwise `add` brings it.
        """
        with self._lock:
            self.orders[order.transfer_id] = order
            self._users[order.mm_hash] += 1
            if tensor is not None:
                self._keep(order.mm_hash, tensor, traced=False)
            return order.mm_hash in self._outputs

    def add(self, mm_hash: str, tensor: torch.Tensor) -> bool:
        """Keep an output whose computation has been queued; ``False`` if no order needs it."""
        with self._lock:
            if not self._users[mm_hash]:
                return False
            self._keep(mm_hash, tensor, traced=True)
            return True

    def reset(self) -> None:
        """Forget all outputs, which other weights made; orders until now get none any more."""
        with self._lock:
            for output in self._outputs.values():
                self._metrics.retained_bytes.dec(output.tensor.nbytes)
            self._outputs.clear()
            self._users.clear()
            self._outdated.update(self.orders.keys())
            self.orders.clear()
            self._outdated += Counter()  # Without those that have ended.
            if self._store is not None:
                self._store.reset()

    def output_for(self, transfer_id: str) -> EncoderOutput:
        """Return the output that a transfer delivers.

        Raises:
            TransportError: It is not what was announced, or is not there.
        """
        with self._lock:
            order = self.orders.get(transfer_id)
            output = None if order is None else self._outputs.get(order.mm_hash)
        if order is None:
            raise TransportError(f"transfer {transfer_id}: {OUTDATED}")
        if output is None:
            raise TransportError(f"item {order.mm_hash}: its output is not there")
        tensor = output.tensor
        if not _fits(order.tensor, tensor):
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            raise TransportError(
                f"encoder put out {shape} {dtype}, announced was {order.tensor.shape} "
                f"{order.tensor.dtype}"
            )
        return output

    def end_order(self, transfer_id: str) -> bool:
        """End a transfer; release its output with the last of them.

        Returns:
            Whether it is one since the last `reset`.
        """
        with self._lock:
            if self._outdated[transfer_id]:
                self._outdated[transfer_id] -= 1
                return False
            order = self.orders.pop(transfer_id)
            self._users[order.mm_hash] -= 1
            if self._users[order.mm_hash]:
                return True
            del self._users[order.mm_hash]
            output = self._outputs.pop(order.mm_hash, None)
            if output is not None:
                self._metrics.retained_bytes.dec(output.tensor.nbytes)
                self._store_output(order, output)
            return True

    def _keep(self, mm_hash: str, tensor: torch.Tensor, *, traced: bool) -> None:
        ready = partial(_trace_ready, mm_hash) if traced else None
        if mm_hash in self._outputs:
            if ready:
                ready(time.monotonic())
            return
        # The event is behind the computation, and behind the copy if that is not in one piece.
        whole = tensor.detach().contiguous()
        computed = self._copies.platform.record_event()
        computed_at: Future[float] = Future()
        self._outputs[mm_hash] = EncoderOutput(whole, computed, computed_at)
        self._metrics.retained_bytes.inc(whole.nbytes)

        def reached(at_s: float) -> None:
            computed_at.set_result(at_s)
            if ready:
                ready(at_s)

        self._clock.mark(reached, computed)

    def _store_output(self, order: TransferOrder, output: EncoderOutput) -> None:
        if self._store is None or not order.item_uuid or not _fits(order.tensor, output.tensor):
            return
        self._store.save_caches(StoreOutput(order=order, to_host=partial(self._to_host, output)))

    def _to_host(self, output: EncoderOutput) -> torch.Tensor:
        self._copies.platform.set_device(self._copies.index)
        deadline_s = time.monotonic() + self._copy_timeout_s
        return self._copies.to_host(output.tensor, after=output.computed, deadline_s=deadline_s)


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
        self._paths: dict[str, PathWriter] = {}
        self._lock = threading.Lock()
        self._blocking: SimpleQueue[Work | None] = SimpleQueue()
        self._queued: SimpleQueue[Work | None] = SimpleQueue()
        self._copied_s = 0.0
        """Time at which the copy stream ended the last copy that the watcher has waited for."""
        self._threads = [
            self._thread(f"epd-writer-{number}", self._blocking) for number in range(_WRITERS)
        ]
        if self._queues:
            self._threads.append(self._thread("epd-watcher", self._queued))
        self.are_immediate = bool(self._in_place or self._queues)

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
                copy = self.path_writer(write.path).queue(_slot_write(write, output))
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
            self.path_writer(write.path).write(_slot_write(write, output))
            result, _ = _ended(write, output.computed_at, begin_s)
            return result
        except Exception as error:
            return WriteResult(write=write, error=error)

    def _finish_copy(
        self, write: Write, copy: QueuedCopy, computed_at: Future[float], begin_s: float
    ) -> WriteResult:
        try:
            copy.finish()
            # It was queued behind the computation, and behind the copies before it.
            result, self._copied_s = _ended(write, computed_at, max(begin_s, self._copied_s))
            return result
        except Exception as error:
            return WriteResult(write=write, error=error)


def _fits(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")


def _trace_ready(mm_hash: str, at_s: float) -> None:
    trace("output.ready", at_s=at_s, mm_hash=mm_hash)


def _slot_write(write: Write, output: EncoderOutput) -> SlotWrite:
    return SlotWrite(
        src=output.tensor,
        slot=write.slot,
        computed=output.computed,
        address=write.address,
        deadline_s=write.deadline_s,
    )


def _trace_begun(write: Write) -> None:
    trace("transfer.begun", transfer=write.transfer_id, mm_hash=write.mm_hash, path=write.path)


def _ended(write: Write, computed_at: Future[float], begin_s: float) -> tuple[WriteResult, float]:
    """Return the result of a write that has ended just now, and the time of its end.

    Args:
        computed_at: Time at which its output was computed; another thread sets it, perhaps a little
            later.
        begin_s: Time at which the write could have begun otherwise.
    """
    end_s = time.monotonic()
    with suppress(TimeoutError):
        begin_s = max(begin_s, computed_at.result(_COMPUTED_WAIT_S))
    end_s = max(begin_s, end_s)
    trace(
        "transfer.written",
        at_s=end_s,
        transfer=write.transfer_id,
        mm_hash=write.mm_hash,
        path=write.path,
        nbytes=write.slot.nbytes,
        write_s=end_s - begin_s,
    )
    return WriteResult(write=write, write_s=end_s - begin_s), end_s
