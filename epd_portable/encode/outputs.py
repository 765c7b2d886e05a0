"""Encode worker: encoder outputs, kept until every transfer of theirs has ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.store_writer import Output as StoreOutput
from epd_portable.encode.store_writer import StoreWriter
from epd_portable.errors import TransportError
from epd_portable.items.metrics import SenderMetrics
from epd_portable.log import trace
from epd_portable.transfer.stream_clock import StreamClock
from epd_portable.wire.descriptors import TensorSpec

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies


OUTDATED = "the encoder cache was reset, and its output may be that of other weights"
"""Why a transfer from before a reset fails."""


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """One encoder output.

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
        """A transfer needs an item, whose output is given if the engine has it from before.

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
                self._metrics.kept_bytes.dec(output.tensor.nbytes)
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
        """A transfer has ended: its output goes with the last of them.

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
                self._metrics.kept_bytes.dec(output.tensor.nbytes)
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
        self._metrics.kept_bytes.inc(whole.nbytes)

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


def _fits(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")


def _trace_ready(mm_hash: str, at_s: float) -> None:
    trace("output.ready", at_s=at_s, mm_hash=mm_hash)
