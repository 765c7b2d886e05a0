"""Encoder cache bookkeeping with two-step allocation, in place of vLLM's ``EncoderCacheManager``.

An item that another instance encodes first gets room (`EncoderCacheManager.preallocate`), and
becomes an entry only when its bytes are there (`EncoderCacheManager.finalize_allocation`). Room is
counted in encoder embeddings.

Which entries requests hold is up to the role: `epd_portable.encode.two_levels` is the cache of
an encode instance, `epd_portable.items.preallocator` that of a prefill+decode instance. Each
has the methods that vLLM's scheduler calls (0.26 to 0.33).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from epd_portable.items.items import Item, State

_WITH_ROOM = (State.RESERVED, State.GRANTED, State.LOCAL, State.ENCODING)
"""Of items that are no entries yet."""


class MultiModalRequest(Protocol):
    """The part of vLLM's ``Request`` that the bookkeeping reads.

    Attributes:
        mm_features: Items in the order of their places in the prompt, each with its ``identifier``
            (the ``mm_hash``) and ``mm_position``: first prompt token, and length.
    """

    @property
    def request_id(self) -> str: ...  # noqa: D102 - above
    @property
    def mm_features(self) -> Sequence[Any]: ...  # noqa: D102 - above
    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Return the number of embeddings of item ``input_id``."""
        ...


class EncoderCacheManager:
    """Which encoder outputs are held by what, and how much room is left.

    An entry is held by requests and by transfers to other instances. An idle entry stays until
    its room is wanted; the one idle for longest goes first. The scheduler passes what went on to
    the workers by `get_freed_mm_hashes`.

    Preallocated room counts as used, but the item is not an entry yet: `check_and_update_cache`
    misses it.

    Attributes:
        num_free_slots: Room that nothing uses.
        num_freeable_slots: That, and the room of idle entries.
        items: Everything that has room or waits for it, by ``mm_hash``.
        changes: Items that became entries (``True``) or went, until they are taken; ``None`` where
            they are not.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self.items: dict[str, Item] = {}
        self.changes: dict[str, bool] | None = None
        self._idle: OrderedDict[str, Item] = OrderedDict()
        self._freed: list[str] = []

    # -- two-step allocation ---------------------------------------------------------------------

    def can_preallocate(self, num_embeds: int) -> bool:
        """Return whether ``num_embeds`` fit now, evicting idle entries if need be."""
        return num_embeds <= self.num_freeable_slots

    def preallocate(self, mm_hash: str, num_embeds: int) -> Item:
        """Set room aside for an item that another instance will deliver.

        Raises:
            ValueError: The item has room already, or there is not enough.
        """
        item = self.items.get(mm_hash) or Item(mm_hash, num_embeds)
        if item.state is not State.WAITING:
            raise ValueError(f"{mm_hash}: has an entry or preallocated room already")
        if not self._make_room(num_embeds):
            raise ValueError(
                f"{mm_hash}: {num_embeds} embeddings do not fit in {self.num_freeable_slots}; "
                "ask can_preallocate first"
            )
        self.items[mm_hash] = item
        self._occupy(item, State.RESERVED)
        return item

    def depreallocate(self, mm_hash: str) -> None:
        """Give back preallocated room; does nothing if there is none."""
        item = self.items.get(mm_hash)
        if item is not None and item.state in _WITH_ROOM:
            item.state = State.WAITING
            self.num_free_slots += item.num_embeds
            self.num_freeable_slots += item.num_embeds
            self._forget_if_unused(item)

    def finalize_allocation(self, mm_hash: str) -> Item:
        """Turn preallocated room into an entry: the item's bytes are there.

        Raises:
            KeyError: No room was preallocated for the item.
        """
        item = self.items[mm_hash]
        if item.state not in (State.RESERVED, State.GRANTED):
            raise KeyError(mm_hash)
        item.state = State.LANDED
        if not item.holders:
            self._rest(item)
        return item

    def retain(self, mm_hash: str, holder: str) -> None:
        """Keep an entry for a transfer, beyond the life of the request that encoded it.

        Args:
            mm_hash: An item that has an entry.
            holder: Name of the transfer; differs from every request id.

        Raises:
            KeyError: The item has no entry.
        """
        if mm_hash not in self:
            raise KeyError(mm_hash)
        self._hold(self.items[mm_hash], holder)

    def deallocate(self, mm_hash: str, holder: str) -> None:
        """End what `retain` began; does nothing the second time."""
        item = self.items.get(mm_hash)
        if item is not None:
            self._release(item, holder)

    def holders(self, mm_hash: str) -> frozenset[str]:
        """Return the holders of an entry; none if there is no entry."""
        return frozenset(self.items[mm_hash].holders) if mm_hash in self else frozenset()

    def __contains__(self, mm_hash: str) -> bool:
        """Return whether the item has an entry."""
        item = self.items.get(mm_hash)
        return item is not None and item.is_here

    # -- what vLLM's scheduler calls -------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget every entry; preallocated room stays as it is.

        The workers forget at the same time, but `get_freed_mm_hashes` returns what went all the
        same: the receive slots of these items become free on that.
        """
        for item in [each for each in self.items.values() if each.is_here]:
            item.holders.clear()
            self._rest(item)
            self._evict(item)

    def get_cached_num_encoder_embeds(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> int | None:
        """Return the size of the item's entry, or ``None`` (called by vLLM 0.31 and later)."""
        item = self.items.get(request.mm_features[input_id].identifier)
        return item.num_embeds if item is not None and item.is_here else None

    def get_freed_mm_hashes(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return the items that went since the last call and are not entries again."""
        freed = [mm_hash for mm_hash in self._freed if mm_hash not in self]
        self._freed.clear()
        return freed

    def get_manager_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Tell the workers nothing of our own (called by vLLM 0.29 and later)."""

    # --------------------------------------------------------------------------------------------

    def _make_room(self, num_embeds: int) -> bool:
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            self._evict(next(iter(self._idle.values())))
        return True

    def _occupy(self, item: Item, state: State) -> None:
        """Give an item room that is free."""
        item.state = state
        self.num_free_slots -= item.num_embeds
        self.num_freeable_slots -= item.num_embeds

    def _evict(self, item: Item) -> None:
        """Take the room of an idle entry."""
        del self._idle[item.mm_hash]
        if self.changes is not None:
            self.changes[item.mm_hash] = False
        self.num_free_slots += item.num_embeds
        self._freed.append(item.mm_hash)
        item.state = State.WAITING
        self._forget_if_unused(item)

    def _forget_if_unused(self, item: Item) -> None:
        """Drop an item without room and without waiting claims."""
        if item.state is State.WAITING and not item.wanted and not item.transfers:
            self.items.pop(item.mm_hash, None)

    def _rest(self, item: Item) -> None:
        if item.mm_hash not in self._idle:
            self._idle[item.mm_hash] = item
            self.num_freeable_slots += item.num_embeds

    def _hold(self, item: Item, holder: str) -> None:
        item.holders.add(holder)
        if self._idle.pop(item.mm_hash, None) is not None:
            self.num_freeable_slots -= item.num_embeds

    def _release(self, item: Item, holder: str) -> None:
        if holder in item.holders:
            item.holders.discard(holder)
            if not item.holders and item.is_here:
                self._rest(item)
