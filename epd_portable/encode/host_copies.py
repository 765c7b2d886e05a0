"""The second level of an encode instance's cache: copies of encoder outputs in host memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epd_portable.encode.two_levels import HostOrders

if TYPE_CHECKING:
    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies

logger = logging.getLogger(__name__)

_COPY_S = 30.0
"""Longest time from the queueing of an item's computation to the end of its copy."""


def alone(output: torch.Tensor) -> torch.Tensor:
    """Return an output that keeps no memory but its own: no part of what was computed together."""
    whole = output.untyped_storage().nbytes() == output.nbytes
    return output if whole else output.clone()


@dataclass(slots=True, eq=False)
class _Copy:
    """An encoder output on the device until its copy is made, then the copy; neither if lost."""

    output: torch.Tensor | None
    host: torch.Tensor | None = None


class HostCopies:
    """Copies that the scheduler orders, made by a thread, and restored.

    An error ends one copy only, and is reported to the scheduler with the next step.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._device = copies
        self._wanted: Sequence[str] = ()
        self._copies: dict[str, _Copy] = {}
        self._lost: deque[str] = deque()
        self._thread = ThreadPoolExecutor(1, "epd-host-copies")

    def carry_out(
        self, orders: HostOrders, encoder_cache: dict[str, torch.Tensor]
    ) -> Sequence[str]:
        """Follow the orders of a step, before it computes; never waits for a copy.

        Args:
            encoder_cache: The model runner's, by ``mm_hash``; gets restored items.

        Returns:
            Items that could not be restored.
        """
        missing = []
        for mm_hash in orders.restored:
            output = self._restore(mm_hash)
            if output is not None:
                encoder_cache[mm_hash] = output
            else:
                missing.append(mm_hash)
        for mm_hash in orders.dropped:
            if copy := self._copies.pop(mm_hash, None):
                copy.output = None
        self._wanted = orders.kept
        return missing

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """Note that the computation of an item, ``(num_tokens, width)``, is queued."""
        if mm_hash in self._wanted:
            copy = self._copies[mm_hash] = _Copy(output.detach().contiguous())
            self._thread.submit(self._make, mm_hash, copy, self._device.platform.record_event())

    def take_lost(self) -> set[str]:
        """Return items whose copies could not be made, since the last call."""
        return {self._lost.popleft() for _ in range(len(self._lost))}

    def close(self) -> None:
        """Stop copying, and release all copies."""
        self._thread.shutdown(cancel_futures=True)
        self._copies.clear()

    def _make(self, mm_hash: str, copy: _Copy, computed: DeviceEvent) -> None:
        try:
            if (output := copy.output) is not None:
                copy.host = self._copy(output, computed)
        except Exception as error:
            self._log(mm_hash, "made", error)
            self._lost.append(mm_hash)
        finally:
            copy.output = None

    def _copy(self, output: torch.Tensor, computed: DeviceEvent) -> torch.Tensor:
        if output.is_cpu:
            return alone(output)
        self._device.platform.set_device(self._device.index)
        deadline_s = self._device.clock() + _COPY_S
        host = self._device.to_host(output, after=computed, deadline_s=deadline_s)
        return host.view(output.dtype).view(output.shape)

    def _restore(self, mm_hash: str) -> torch.Tensor | None:
        """Return an item on the device; ``None`` without a copy or without memory.

        Until its copy is made, that is the output itself: it may not be computed yet, and a copy
        on another stream would not wait for that.
        """
        copy = self._copies.get(mm_hash)
        if copy is None:
            return None
        # In this order: the thread sets the copy before it releases the output.
        if (output := copy.output) is not None:
            return output
        try:
            return None if copy.host is None else self._device.to_device(copy.host)
        except Exception as error:
            self._log(mm_hash, "restored", error)
            return None

    def _log(self, mm_hash: str, what: str, error: Exception) -> None:
        logger.error(
            "the copy of item %s in host memory cannot be %s, the item is encoded again when it is "
            "requested: %r; if memory is short lower host_cache_bytes in instances.encode",
            mm_hash,
            what,
            error,
        )
