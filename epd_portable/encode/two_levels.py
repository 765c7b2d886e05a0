"""The encoder cache of an encode instance with a second level: copies in host memory.

The first level, on the device, holds what is computed and sent now, and what else fits into the
memory that an instance with a language model has for KV.
Of every item that is encoded a copy goes into host memory as well, where as many bytes are as were
configured, the least recently used going first. An item that has left the first level and is
requested again comes back from there: space is made, its copy restored, and no encoder runs.

The scheduler decides all of it; each step brings the worker its `HostOrders`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from epd_portable.items.table import Item, ItemTable, MultiModalRequest, State

FILLED = 0.75
"""Part of that memory that is filled: outputs have all sizes, so what they leave is in pieces."""


@dataclass(frozen=True, kw_only=True)
class HostOrders:
    """Orders for the worker's copies in a step, in this order, before it computes.

    Attributes:
        restored: Items whose copies become entries of the encoder cache again.
        dropped: Copies that make space.
        kept: Items of which a copy is made once they are encoded, in this step.
    """

    restored: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


class TwoLevelCache(ItemTable):
    """See the module.

    Args:
        cache_size: Of the first level, in embeddings, until `grow`.
        host_bytes: Of the second; 0 for none.
        nbytes_of: Returns the bytes of a request's item, by its index.
    """

    def __init__(
        self,
        cache_size: int,
        host_bytes: int,
        nbytes_of: Callable[[MultiModalRequest, int], int],
    ) -> None:
        super().__init__(cache_size)
        self._host_bytes = host_bytes
        self._nbytes_of = nbytes_of
        self._copies: OrderedDict[str, int] = OrderedDict()
        """Bytes of each copy; the last one was used last."""
        self._copied_bytes = 0
        self._orders = HostOrders()

    def grow(self, cache_size: int) -> None:
        """Make the first level as large as this; it never becomes smaller."""
        more = max(0, cache_size - self.cache_size)
        self.cache_size += more
        self.num_free_slots += more
        self.num_freeable_slots += more

    def hold_entry(self, request: MultiModalRequest, input_id: int) -> bool:
        """Let a request that starts hold the item, and bring it back first if there is a copy.

        Only where the item's space was counted: what waits would bring items back in every step, in
        place of each other's, and vLLM has promised space to others while it queries one.
        """
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash in self._copies:
            self._copies.move_to_end(mm_hash)
            if mm_hash not in self.items:
                num_embeds = request.get_num_encoder_embeds(input_id)
                if self.make_space(num_embeds):
                    self.occupy(Item(mm_hash, num_embeds), State.PRESENT)
                    self._orders.restored.append(mm_hash)
        return self.check_and_update_cache(request, input_id)

    def take_orders(self) -> HostOrders:
        """Return what the worker must do in the step that was just scheduled."""
        orders, self._orders = self._orders, HostOrders()
        # What has left again meanwhile would stay with the worker for ever.
        return HostOrders(
            restored=[mm_hash for mm_hash in dict.fromkeys(orders.restored) if mm_hash in self],
            dropped=orders.dropped,
            kept=[mm_hash for mm_hash in orders.kept if mm_hash in self._copies],
        )

    def take_report(self, *, lost: Set[str], missing: Set[str]) -> None:
        """Forget copies that a worker does not have, and entries with all their holders.

        A report of a worker may be old, and the item encoded again meanwhile: then it is encoded
        once more when it is requested.

        Args:
            lost: Items whose copies could not be made.
            missing: Items that could not be restored, or not be encoded: the encoder cache does not
                have them either.
        """
        for mm_hash in lost | missing:
            self._copied_bytes -= self._copies.pop(mm_hash, 0)
            self._orders.dropped.append(mm_hash)
        for item in [self.items[mm_hash] for mm_hash in missing if mm_hash in self]:
            self.release(item, *item.holders)
            self.evict(item)

    # -- what vLLM's scheduler calls -------------------------------------------------------------

    def check_and_update_cache(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the item has an entry, which the request holds from now on."""
        item = self.items.get(request.mm_features[input_id].identifier)
        if item is None or not item.is_here:
            return False
        self.hold(item, request.request_id)
        return True

    def can_allocate(
        self,
        request: MultiModalRequest,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Return whether the item may be encoded here in this step; evicts idle entries for it.

        Args:
            input_id: Index of the item in the request.
            encoder_compute_budget: Embeddings that may still be computed in this step.
            num_embeds_to_schedule: Embeddings that this step already wants to allocate.
        """
        num_embeds = request.get_num_encoder_embeds(input_id)
        together = num_embeds + num_embeds_to_schedule
        return num_embeds <= encoder_compute_budget and self.make_space(together)

    def allocate(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Make the entry of an item that is encoded in this step, and have a copy kept.

        `can_allocate` has returned true in this step.
        """
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self.items:
            item = Item(mm_hash, request.get_num_encoder_embeds(input_id))
            assert item.num_embeds <= self.num_free_slots, "allocate without can_allocate"
            self.occupy(item, State.PRESENT)
            self._copy(mm_hash, self._nbytes_of(request, input_id))
        self.check_and_update_cache(request, input_id)

    def get_cached_input_ids(
        self, request: MultiModalRequest, *args: Any, **kwargs: Any
    ) -> set[int]:
        """Return the indices of the request's items that it holds."""
        features = enumerate(request.mm_features)
        return {i for i, each in features if request.request_id in self.holders(each.identifier)}

    def free_encoder_input(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Release an item that the request has computed past, with its last occurrence."""
        mm_hash, *behind = (each.identifier for each in request.mm_features[input_id:])
        if mm_hash in self.items and mm_hash not in behind:
            self.release(self.items[mm_hash], request.request_id)

    def free(self, request: MultiModalRequest, *args: Any, **kwargs: Any) -> None:
        """Release everything that a request holds, at its end."""
        for input_id in self.get_cached_input_ids(request):
            self.free_encoder_input(request, input_id)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget every entry and every copy: other weights make other outputs."""
        super().reset(*args, **kwargs)
        self._orders.dropped.extend(self._copies)
        self._copies.clear()
        self._copied_bytes = 0

    # --------------------------------------------------------------------------------------------

    def _copy(self, mm_hash: str, nbytes: int) -> None:
        """Have a copy kept of what is encoded now, in place of one that there may be."""
        self._copied_bytes -= self._copies.pop(mm_hash, 0)
        if nbytes > self._host_bytes:
            return
        while self._copied_bytes + nbytes > self._host_bytes:
            oldest, freed = self._copies.popitem(last=False)
            self._copied_bytes -= freed
            self._orders.dropped.append(oldest)
        self._copies[mm_hash] = nbytes
        self._copied_bytes += nbytes
        self._orders.kept.append(mm_hash)
