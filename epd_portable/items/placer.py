"""PD worker: from receive slots into the engine's encoder cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epd_portable.transfer.stream_clock import StreamClock
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies
    from epd_portable.transfer.worker_endpoint import WorkerEndpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOrder:
    """An item to encode.

    Attributes:
        mm_hash: Key in the encoder cache.
        modality: The engine's.
        media: What the model's processor made of it (vLLM's ``MultiModalKwargsItem``).
        num_embeds: Embeddings of its output.
    """

    mm_hash: str
    modality: str
    media: Any
    num_embeds: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """An item to place in this step.

    Attributes:
        mm_hash: Key in the encoder cache.
        slot: Where its bytes are.
        in_device_memory: The slot is in the instance's slab, not in its pool's file.
        tensor: What the bytes are.
    """

    mm_hash: str
    slot: SlotDescriptor
    in_device_memory: bool
    tensor: TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrders:
    """Work of a PD instance's workers in one step.

    Attributes:
        placements: Items that have arrived.
        revoked: Generations of grants that were taken back: nothing may be written for them.
        encodings: Items to encode in the background.
        computes: The step has tokens, and may compute with every item that was placed.
    """

    placements: list[Placement] = field(default_factory=list)
    revoked: list[int] = field(default_factory=list)
    encodings: list[EncodeOrder] = field(default_factory=list)
    computes: bool = False


class Placer:
    """Places items; on platforms that compute in host memory the tensor is a view of the slot.

    Elsewhere items are copied to the worker's device on its copy stream, while work that was queued
    before continues. In the next step that computes, the current stream waits for the copies; the
    host never does (but see `PlatformTraits.foreign_pages_block`: it may be blocked while it queues
    them).

    Attributes:
        clock: Of the worker's device.
    """

    def __init__(self, copies: DeviceCopies, endpoint: WorkerEndpoint) -> None:
        self._copies = copies
        self._endpoint = endpoint
        self.clock = StreamClock(copies, "epd-computed")
        self._copied: DeviceEvent | None = None
        """Behind all copies that the current stream has not waited for."""

    def carry_out(self, orders: WorkerOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Make the items entries of ``encoder_cache``.

        If the step computes, they and those of steps before it are ready for work that is queued
        from now on; otherwise they may still be on their way.

        Args:
            encoder_cache: Outputs ``(num_tokens, width)`` by ``mm_hash``; after an error without
                any of these items.

        Raises:
            CapacityError: The device has no memory for the items. It ends the engine, as when an
                encoder has no memory for its output: the other ranks have placed the item.
        """
        self._endpoint.revoke(orders.revoked)
        if orders.placements:
            self._place(orders.placements, encoder_cache)
        if orders.computes and self._copied is not None:
            self._copied.wait()
            self._copied = None

    def _place(self, placements: list[Placement], encoder_cache: dict[str, torch.Tensor]) -> None:
        if self._copies.platform.traits.needs_device_copy:
            self._copy(placements, encoder_cache)
        else:
            for item in placements:
                encoder_cache[item.mm_hash] = _shaped(self._bytes(item), item.tensor)
        for item in placements:
            fields = {"mm_hash": item.mm_hash, "nbytes": item.slot.nbytes}
            self.clock.trace("item.placed", behind=self._copied, **fields)

    def _bytes(self, item: Placement) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 that is the item's slot."""
        memory = self._endpoint.slab if item.in_device_memory else self._endpoint.host
        return memory.tensor(item.slot.offset, item.slot.nbytes)

    def _copy(self, placements: list[Placement], encoder_cache: dict[str, torch.Tensor]) -> None:
        platform = self._copies.platform
        with platform.stream(self._copies.index):
            sources = [self._bytes(item) for item in placements]
            targets = [self._room_for(item, placements) for item in placements]
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied = platform.record_event()  # All are on one stream, one behind the other.
        for item, target in zip(placements, targets, strict=True):
            encoder_cache[item.mm_hash] = _shaped(target, item.tensor)
            platform.adopt(target)

    def _room_for(self, item: Placement, placements: list[Placement]) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 on the device, allocated on the current stream."""
        step = sum(each.slot.nbytes for each in placements)
        return self._copies.allocate(
            item.slot.nbytes,
            what=f"item {item.mm_hash} of {item.slot.nbytes} bytes ({step} in this step)",
            remedy="lower gpu_memory_utilization, which leaves more outside the KV cache, or "
            "max_num_batched_tokens, which bounds the encoder cache",
        )


def _shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return bytes as the tensor that they are."""
    import torch

    return flat.view(getattr(torch, spec.dtype)).view(spec.shape)
