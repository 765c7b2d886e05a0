"""The encoder cache of an encode instance with a second level: copies in host memory.

The first level, on the device, holds what is computed and sent now, and what still fits beside it.
Of every item that is encoded a copy goes into host memory as well, where as many bytes are as were
asked for, the least recently used going first. An item that has left the first level and is asked
for again comes back from there: its room is made, its copy restored, and no encoder runs.

The scheduler decides all of it; the worker is told with each step (`HostOrders`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from epd_portable.scheduling.encoder_cache import EncoderCacheManager, MultiModalRequest
from epd_portable.scheduling.items import Item, State


@dataclass(frozen=True, kw_only=True)
class HostOrders:
    """What the worker must do with its copies in a step, in this order, before it computes.

    Attributes:
        restored: Items whose copies become entries of the encoder cache again.
        dropped: Copies that make room.
        kept: Items of which a copy is made once they are encoded, in this step.
    """

    restored: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


class TwoLevelCache(EncoderCacheManager):
    """See the module.

    Args:
        cache_size: Of the first level, in embeddings.
        host_bytes: Of the second.
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
        self._copied_bytes = 0
        self._dropped: list[str] = []
        self._restored: list[str] = []
        self._kept: list[str] = []

    def take_orders(self) -> HostOrders:
        """Return what the worker must do in the step that was just scheduled."""
        orders = HostOrders(
            # What has left again meanwhile would stay with the worker for ever.
            restored=[mm_hash for mm_hash in dict.fromkeys(self._restored) if mm_hash in self],
            dropped=self._dropped,
            kept=[mm_hash for mm_hash in self._kept if mm_hash in self._copies],
        )
        self._dropped, self._restored, self._kept = [], [], []
        return orders

    def check_and_update_cache(self, request: MultiModalRequest, input_id: int) -> bool:
        """Return whether the item has an entry, brought back if need be, and hold it.

        Only for requests that are scheduled: what waits would bring items back in every step, in
        place of each other's.
        """
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash in self._copies:
            self._copies.move_to_end(mm_hash)
            if mm_hash not in self.items:
                num_embeds = request.get_num_encoder_embeds(input_id)
                if self._make_room(num_embeds):
                    self._enter(Item(mm_hash, num_embeds))
                    self._restored.append(mm_hash)
        return super().check_and_update_cache(request, input_id)

    def allocate(self, request: MultiModalRequest, input_id: int) -> None:
        """Make the entry of an item that is encoded in this step, and have a copy kept."""
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self.items:
            self._copy(mm_hash, self._nbytes_of(request, input_id))
        super().allocate(request, input_id)

    def reset(self) -> None:
        """Forget every entry and every copy: other weights make other outputs."""
        super().reset()
        self._dropped += self._copies
        self._copies.clear()
        self._copied_bytes = 0

    def _enter(self, item: Item) -> None:
        self.items[item.mm_hash] = item
        self._occupy(item, State.PRESENT)
        self._rest(item)

    def _copy(self, mm_hash: str, nbytes: int) -> None:
        """Have a copy kept of what is encoded now, in place of one that there may be."""
        self._copied_bytes -= self._copies.pop(mm_hash, 0)
        if nbytes > self._host_bytes:
            return
        while self._copied_bytes + nbytes > self._host_bytes:
            oldest, freed = self._copies.popitem(last=False)
            self._copied_bytes -= freed
            self._dropped.append(oldest)
        self._copies[mm_hash] = nbytes
        self._copied_bytes += nbytes
        self._kept.append(mm_hash)
