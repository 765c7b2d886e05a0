"""The second level of an encode instance's cache: copies of encoder outputs in host memory."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from epd_portable.errors import EPDError
from epd_portable.scheduling.two_levels import HostOrders

if TYPE_CHECKING:
    from epd_portable.connector.copies import DeviceCopies
    from epd_portable.platforms.base import DeviceEvent

logger = logging.getLogger(__name__)

_COPY_S = 30.0
"""Longest time from the queueing of an item's computation to the end of its copy."""


class HostCopies:
    """Keeps copies of what the scheduler says, made by a thread, and gives them back.

    Args:
        copies: Of the worker's device.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._device = copies
        self._wanted: set[str] = set()
        self._copies: dict[str, Future[torch.Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, "epd-host-copies")

    def carry_out(self, orders: HostOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Do what a step asks for, before it computes.

        Args:
            orders: Of the scheduler.
            encoder_cache: The model runner's, by ``mm_hash``; gets what is restored.
        """
        for mm_hash in orders.restored:
            output = self._restore(mm_hash)
            if output is not None:
                encoder_cache[mm_hash] = output
        for mm_hash in orders.dropped:
            self._wanted.discard(mm_hash)
            copy = self._copies.pop(mm_hash, None)
            if copy is not None:
                copy.cancel()
        self._wanted.update(orders.kept)

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """The encoder has queued the computation of an item, ``(num_tokens, width)``."""
        if mm_hash in self._wanted:
            self._wanted.discard(mm_hash)
            whole = output.detach().contiguous()
            computed = self._device.platform.record_event()
            self._copies[mm_hash] = self._thread.submit(self._copy, whole, computed)

    def close(self) -> None:
        """Stop copying, and forget everything."""
        self._thread.shutdown(cancel_futures=True)
        self._copies.clear()

    def _copy(self, output: torch.Tensor, computed: DeviceEvent) -> torch.Tensor:
        if output.is_cpu:
            return output.clone()  # It may be a part of what was computed together.
        self._device.platform.set_device(self._device.index)
        deadline_s = self._device.clock() + _COPY_S
        host = self._device.to_host(output, after=computed, deadline_s=deadline_s)
        return host.view(output.dtype).view(output.shape)

    def _restore(self, mm_hash: str) -> torch.Tensor | None:
        """Return an item on the device; ``None`` if its copy could not be made."""
        try:
            host = self._copies[mm_hash].result(_COPY_S)
        except (KeyError, EPDError, TimeoutError) as error:
            # Its transfers end by their deadlines, and the item is encoded elsewhere.
            logger.warning("item %s cannot be restored from host memory: %r", mm_hash, error)
            return None
        return host.to(self._device.platform.device(self._device.index))
