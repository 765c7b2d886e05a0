"""Encoder cache bookkeeping with two-step allocation.

Implements every method that vLLM's scheduler calls on its ``EncoderCacheManager`` (0.26 to 0.33)
and adds the second way in: an item that another instance encodes first gets room
(`EncoderCacheManager.preallocate`), and becomes an entry only when its bytes are there
(`EncoderCacheManager.finalize_allocation`). Room is counted in encoder embeddings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class MultiModalFeature(Protocol):
    """One item of a request, as vLLM describes it."""

    @property
    def identifier(self) -> str:
        """The item's ``mm_hash``."""
        ...


class MultiModalRequest(Protocol):
    """The part of vLLM's ``Request`` that the bookkeeping reads."""

    @property
    def request_id(self) -> str:
        """Unique within the instance."""
        ...

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        """Items in the order of their places in the prompt."""
        ...

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Return the number of embeddings of item ``input_id``."""
        ...


@dataclass(slots=True)
class _Entry:
    num_embeds: int
    holders: set[str] = field(default_factory=set)


class EncoderCacheManager:
    """Who holds which encoder output, and how much room is left.

    An entry is held by requests and, on an encode instance, by transfers. An entry that nobody
    holds stays until its room is wanted; the one idle for longest goes first. What went is told to
    the workers by the scheduler through `get_freed_mm_hashes`.

    Preallocated room counts as used, but the item is not an entry yet: `check_and_update_cache`
    misses it. An *awaited* item is never given room for local encoding by `can_allocate`, so that
    the scheduler prefills only what stands before it. Neither is one that cannot be encoded here.

    Attributes:
        cache_size: Room in all.
        num_free_slots: Room that nothing uses.
        num_freeable_slots: That, and the room of idle entries.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._inputs: dict[str, set[int]] = {}
        self._preallocated: dict[str, int] = {}
        self._awaited: set[str] = set()
        self._never: dict[str, frozenset[int]] = {}
        self._freed: list[str] = []

    # -- two-step allocation ---------------------------------------------------------------------

    def can_preallocate(self, num_embeds: int) -> bool:
        """Tell whether room for ``num_embeds`` can be had now, evicting idle entries if need be."""
        return num_embeds <= self.num_freeable_slots

    def preallocate(self, mm_hash: str, num_embeds: int) -> None:
        """Set room aside for an item that another instance will deliver.

        Raises:
            ValueError: The item has an entry or room already, or there is not enough room.
        """
        if mm_hash in self._entries or mm_hash in self._preallocated:
            raise ValueError(f"{mm_hash}: has an entry or preallocated room already")
        if not self._make_room(num_embeds):
            raise ValueError(
                f"{mm_hash}: {num_embeds} embeddings do not fit in {self.num_freeable_slots}; "
                "ask can_preallocate first"
            )
        self._preallocated[mm_hash] = num_embeds
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds

    def depreallocate(self, mm_hash: str) -> None:
        """Give back preallocated room; does nothing if there is none."""
        num_embeds = self._preallocated.pop(mm_hash, 0)
        self.num_free_slots += num_embeds
        self.num_freeable_slots += num_embeds

    def finalize_allocation(self, mm_hash: str, holders: Iterable[tuple[str, int]]) -> None:
        """Turn preallocated room into an entry: the item's bytes are there.

        Args:
            mm_hash: The item.
            holders: ``(request_id, input_id)`` of the requests that wait for it; each holds it
                from now on. Without any, the entry is idle.

        Raises:
            KeyError: No room was preallocated for the item.
        """
        entry = _Entry(self._preallocated.pop(mm_hash))
        self._entries[mm_hash] = entry
        self._rest(mm_hash, entry)
        for request_id, input_id in holders:
            self._hold(mm_hash, request_id)
            self._inputs.setdefault(request_id, set()).add(input_id)

    def retain(self, mm_hash: str, holder: str) -> None:
        """Keep an entry for a transfer, beyond the life of the request that encoded it.

        Args:
            mm_hash: An item that has an entry.
            holder: Name of the transfer; differs from every request id.

        Raises:
            KeyError: The item has no entry.
        """
        if mm_hash not in self._entries:
            raise KeyError(mm_hash)
        self._hold(mm_hash, holder)

    def deallocate(self, mm_hash: str, holder: str) -> None:
        """End what `retain` began; does nothing the second time."""
        self._release(mm_hash, holder)

    def holders(self, mm_hash: str) -> frozenset[str]:
        """Return who holds an entry; nobody if there is none."""
        entry = self._entries.get(mm_hash)
        return frozenset(entry.holders) if entry else frozenset()

    def evict_idle(self, among: Container[str]) -> str | None:
        """Evict the one of these entries that has been idle for longest, and return it.

        For when something else than room in this cache, such as a receive slot, is short.
        """
        for mm_hash in self._idle:
            if mm_hash in among:
                self._evict(mm_hash)
                return mm_hash
        return None

    def await_item(self, mm_hash: str) -> None:
        """Refuse to encode the item here: somebody else is expected to deliver it."""
        self._awaited.add(mm_hash)

    def stop_awaiting(self, mm_hash: str) -> None:
        """Allow local encoding of the item again."""
        self._awaited.discard(mm_hash)

    def never_encode(self, request_id: str, input_ids: Iterable[int]) -> None:
        """Refuse to encode these items of a request here, whatever becomes of them.

        An engine that encodes an item without its media, or without an encoder, dies of it.
        """
        self._never[request_id] = frozenset(input_ids)

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what `never_encode` was told of it."""
        self._never.pop(request_id, None)

    def __contains__(self, mm_hash: str) -> bool:
        """Tell whether the item has an entry."""
        return mm_hash in self._entries

    # -- what vLLM's scheduler calls -------------------------------------------------------------

    def reset(self) -> None:
        """Forget every entry; preallocated room and awaited items stay as they are.

        The workers forget at the same time, but what went is told by `get_freed_mm_hashes` all the
        same: the receive slots of these items become free on that.
        """
        self._freed += self._entries
        self._entries.clear()
        self._idle.clear()
        self._inputs.clear()
        self.num_free_slots = self.cache_size - sum(self._preallocated.values())
        self.num_freeable_slots = self.num_free_slots

    def check_and_update_cache(self, request: MultiModalRequest, input_id: int) -> bool:
        """Return whether the item has an entry; if so the request holds it from now on."""
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self._entries:
            return False
        self._hold(mm_hash, request.request_id)
        self._inputs.setdefault(request.request_id, set()).add(input_id)
        return True

    def get_cached_num_encoder_embeds(
        self, request: MultiModalRequest, input_id: int
    ) -> int | None:
        """Return the size of the item's entry, or ``None`` (called by vLLM 0.31 and later)."""
        entry = self._entries.get(request.mm_features[input_id].identifier)
        return None if entry is None else entry.num_embeds

    def can_allocate(
        self,
        request: MultiModalRequest,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Tell whether the item may be encoded here in this step; evicts idle entries for it.

        Args:
            request: The request.
            input_id: Index of the item in it.
            encoder_compute_budget: Embeddings that may still be computed in this step.
            num_embeds_to_schedule: Embeddings that this step already wants to allocate.
        """
        if request.mm_features[input_id].identifier in self._awaited:
            return False
        if input_id in self._never.get(request.request_id, ()):
            return False
        num_embeds = request.get_num_encoder_embeds(input_id)
        if num_embeds > encoder_compute_budget:
            return False
        return self._make_room(num_embeds + num_embeds_to_schedule)

    def allocate(self, request: MultiModalRequest, input_id: int) -> None:
        """Make the entry of an item that is encoded here; `can_allocate` said yes in this step."""
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self._entries:
            num_embeds = request.get_num_encoder_embeds(input_id)
            assert num_embeds <= self.num_free_slots, "allocate without can_allocate"
            self._entries[mm_hash] = _Entry(num_embeds)
            self.num_free_slots -= num_embeds
            self.num_freeable_slots -= num_embeds
        self._hold(mm_hash, request.request_id)
        self._inputs.setdefault(request.request_id, set()).add(input_id)

    def get_cached_input_ids(self, request: MultiModalRequest) -> set[int]:
        """Return the indices of the request's items that it holds."""
        return self._inputs.get(request.request_id, set())

    def free_encoder_input(self, request: MultiModalRequest, input_id: int) -> None:
        """The request has computed past the item; its hold ends with the item's last occurrence."""
        request_id = request.request_id
        mm_hash = request.mm_features[input_id].identifier
        inputs = self._inputs.get(request_id, set())
        inputs.discard(input_id)
        if any(request.mm_features[other].identifier == mm_hash for other in inputs):
            return
        if not inputs:
            self._inputs.pop(request_id, None)
        self._release(mm_hash, request_id)

    def free(self, request: MultiModalRequest) -> None:
        """The request ended: give up everything it holds."""
        for input_id in list(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, input_id)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the items that went since the last call and are not entries again."""
        freed = [mm_hash for mm_hash in self._freed if mm_hash not in self._entries]
        self._freed.clear()
        return freed

    def get_manager_metadata(self) -> None:
        """Tell the workers nothing of our own (called by vLLM 0.29 and later)."""

    # --------------------------------------------------------------------------------------------

    def _make_room(self, num_embeds: int) -> bool:
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            self._evict(next(iter(self._idle)))
        return True

    def _evict(self, mm_hash: str) -> None:
        del self._idle[mm_hash]
        self.num_free_slots += self._entries.pop(mm_hash).num_embeds
        self._freed.append(mm_hash)

    def _rest(self, mm_hash: str, entry: _Entry) -> None:
        self._idle[mm_hash] = None
        self.num_freeable_slots += entry.num_embeds

    def _hold(self, mm_hash: str, holder: str) -> None:
        entry = self._entries[mm_hash]
        entry.holders.add(holder)
        if mm_hash in self._idle:
            del self._idle[mm_hash]
            self.num_freeable_slots -= entry.num_embeds

    def _release(self, mm_hash: str, holder: str) -> None:
        entry = self._entries.get(mm_hash)
        if entry is None or holder not in entry.holders:
            return
        entry.holders.discard(holder)
        if not entry.holders:
            self._rest(mm_hash, entry)
