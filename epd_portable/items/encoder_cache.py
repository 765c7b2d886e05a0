"""The encoder cache of a prefill+decode engine, in place of vLLM's ``EncoderCacheManager``.

Space, and a receive slot for each item that another engine encodes, is given to claims in the order
of `epd_portable.items.room`. Nothing here blocks or reads a clock.
"""

from __future__ import annotations

from typing import Any

from epd_portable.items import room
from epd_portable.items.placer import EncodeOrder
from epd_portable.items.slots import ReceivePool, SlotState
from epd_portable.items.table import (
    COMPUTED,
    Claim,
    Item,
    ItemRequest,
    ItemTable,
    MultiModalRequest,
    PromptItem,
    State,
)
from epd_portable.log import trace
from epd_portable.wire.descriptors import TensorSpec

MAX_PREEMPTIONS = 20
"""Preemptions of one claim in one call of `PrefillEncoderCache.serve`; more would never end."""


class PrefillEncoderCache(ItemTable):
    """The table of a prefill+decode engine: requests, their claims, and space for these.

    Args:
        cache_size: Space in encoder embeddings.
        pool: Receive slots.
        encode_together: Upper bound of embeddings that one request encodes in one step, unless a
            single item is larger; 0 for no bound.

    Attributes:
        requests: All that have items, by id.
        incomplete: Ids of requests whose items are not all computed: the engine queries before it
            computes any of them further.
        progress: Number of items that came, and of steps in which a request with items computed.
        changes: Items that became entries (``True``) or were evicted, until they are taken.
        pending: Claims that are not served.
        with_space: Requests that hold items, by id: no more than the cache has embeddings.
        touched: Items that have changed, until `take_touched`.
        encodings: Items for workers to encode in the background, until they are taken.
    """

    def __init__(self, cache_size: int, pool: ReceivePool, *, encode_together: int = 0) -> None:
        super().__init__(cache_size)
        self.pool = pool
        self.requests: dict[str, ItemRequest] = {}
        self.incomplete: set[str] = set()
        self.progress = 0
        self.changes: dict[str, bool] = {}
        self.pending = room.PendingClaims()
        self.with_space: dict[str, ItemRequest] = {}
        self.encodings: list[EncodeOrder] = []
        self._encode_together = encode_together
        self.touched: dict[Item, None] = {}
        self._outdated: set[str] = set()  # Encoded in the background when entries were reset.
        self._served_version = 0
        self._woken: dict[str, None] = {}

    # -- requests --------------------------------------------------------------------------------

    def fits_at_all(self, num_embeds: int, nbytes: int = 0) -> bool:
        """Return whether an item could ever be held, or received, by this engine."""
        return num_embeds <= self.cache_size and nbytes <= self.pool.capacity_bytes

    def enter(self, request: ItemRequest) -> None:
        """Add a request."""
        self.requests[request.request_id] = request
        self.incomplete.add(request.request_id)

    def open(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Return the item of a name, a new one if need be.

        An unused item of that name with another shape is dropped; ``None`` if it is used.
        """
        item = self.items.get(mm_hash)
        if item is not None and item.tensor != tensor:
            if item.pending or not (item.is_idle or item.state is State.WAITING):
                return None
            if item.is_idle:
                self.evict(item)
            item = None
        if item is None:
            item = self.items[mm_hash] = Item(mm_hash, tensor.shape[0], tensor)
        return item

    def claim(self, request: ItemRequest, place: PromptItem, transfer_id: str = "") -> Claim | None:
        """Let a request claim an item, or another occurrence of one; `serve` serves it.

        Returns:
            The claim; ``None`` if requests use another item of that name.
        """
        item = self.open(place.mm_hash, place.tensor)
        if item is None:
            return None
        claim = request.claims.get(item.mm_hash)
        if claim is None:
            claim = Claim(request, item, transfer_id)
            request.claims[item.mm_hash] = item.pending[request.request_id] = claim
        claim.inputs[place.input_id] = place
        self._find_place(claim)
        return claim

    def hold_if_last(self, claim: Claim) -> None:
        """Serve a claim on an entry if no transfer is left that can bring the item again."""
        if (
            claim.item.is_here
            and claim.is_pending
            and claim.metadata_only
            and claim.transfer_id not in claim.item.transfers
            and not any(
                each.is_pending and each.place < claim.place
                for each in claim.request.claims.values()
            )
        ):
            self._hold(claim)

    def moved(
        self, request: ItemRequest, num_computed_tokens: int, *, running: bool
    ) -> list[Claim]:
        """Note how far a request is computed, or would be if it began now.

        The claims of a running request on what it has passed end. It claims an item again when the
        engine takes computed tokens back: it preempts the request, or cannot load its KV.

        Returns:
            Claims that ended though their items were not here: the prefix cache covers them.
        """
        if request.failed or (num_computed_tokens, running) == (
            request.num_computed_tokens,
            request.running,
        ):
            return []
        back = num_computed_tokens < request.num_computed_tokens
        self.progress += running and not back
        request.num_computed_tokens = num_computed_tokens
        if request.running != running:
            request.running = running
            for claim in request.claims.values():
                self._queue(claim)
        covered = []
        for claim in list(request.claims.values()):
            passed = claim.place == COMPUTED or claim.inputs[claim.place].end <= num_computed_tokens
            if back or passed:
                self._find_place(claim)
            if running and claim.place == COMPUTED:
                if not claim.item.is_here:
                    covered.append(claim)
                self._end(claim)
        if back:
            self._claim_again(request)
        return covered

    def take_woken(self) -> list[str]:
        """Return requests of which an item came, got space or was lost since the last call.

        The request of the first pending claim is among them: it may be able to start.
        """
        if (first := self.pending.first) is not None:
            self._woken[first.request.request_id] = None
        woken, self._woken = [each for each in self._woken if each in self.requests], {}
        return woken

    def fail(self, request: ItemRequest) -> None:
        """End all claims of a request that the engine is about to end without a response."""
        request.failed = True
        for claim in list(request.claims.values()):
            self._end(claim)

    def leave(self, request: ItemRequest) -> None:
        """Remove a request that has ended."""
        for claim in list(request.claims.values()):
            self._end(claim)
        self.requests.pop(request.request_id, None)
        self._woken.pop(request.request_id, None)
        self.incomplete.discard(request.request_id)

    def expire(self, request: ItemRequest, reason: str) -> bool:
        """End the time that a request waits for others to bring its items.

        An item that is being written may still come: its lease has a deadline. Otherwise the
        request encodes the item when it has space for that, or has lost it. Transfers for other
        requests go on.

        Args:
            reason: For the items that the request cannot encode.

        Returns:
            Whether it waited for others.
        """
        request.expired = True
        self.version += 1
        elsewhere = (State.WAITING, State.RESERVED, State.GRANTED)
        awaited = [
            each
            for each in request.claims.values()
            if each.item.transfers and each.item.state in elsewhere
        ]
        for claim in awaited:
            if claim.item.state is State.GRANTED:
                continue
            if claim.metadata_only:
                self._lose(claim, reason)
            elif claim.item.state is State.RESERVED:
                self._vacate(claim.item)
        return bool(awaited)

    # -- space -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve pending claims in their order, up to the first for which there is no space."""
        preemptions: dict[Claim, int] = {}
        while self._served_version != self.version:
            self._served_version = self.version
            while (first := self.pending.first) is not None:
                if not self._serve(first):
                    preempted = room.claim_to_preempt(self, first)
                    if preempted is None:
                        break
                    count = preemptions[preempted] = preemptions.get(preempted, 0) + 1
                    assert count < MAX_PREEMPTIONS, "claims preempt each other"
                    self.preempt(preempted)

    def take_touched(self) -> list[Item]:
        """Return items that have changed since the last call, for their transfers."""
        touched, self.touched = list(self.touched), {}
        return touched

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing has changed since `serve` and `take_touched`."""
        return self._served_version == self.version and not self.touched

    @property
    def slot_returns(self) -> bool:
        """Return whether a slot will be free when workers have forgotten its item or its writer."""
        resident = self.pool.resident
        return bool(self.pool.retiring) or any(mm_hash in resident for mm_hash in self._freed)

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        """Return whether a transfer may use an item's slot.

        The transfer of a pending request that has no other way to the item brings it to none that
        has, or had, another transfer: the item may be evicted before that request's turn. Requests
        of one body (``n``) share theirs.
        """
        return transfer_id not in item.promised_transfers or any(
            each.transfer_id == transfer_id or (each.metadata_only and not each.transfer_id)
            for each in self.served(item)
        )

    def served(self, item: Item) -> list[Claim]:
        """Return the served claims on an item; transfers to others hold it, too."""
        requests = (self.requests[name] for name in item.holders if name in self.requests)
        return [each.claims[item.mm_hash] for each in requests]

    def preempt(self, claim: Claim) -> None:
        """Take an item from a request, and what the request holds behind it."""
        self._unserve(claim)
        self._close_gap(claim.request)

    def land(self, item: Item) -> None:
        """Note that the bytes of a granted item are in its slot."""
        assert item.slot is not None
        self.pool.move(item.slot, SlotState.RESIDENT)
        super().land(item)
        self._came(item)

    def revoke(self, item: Item) -> None:
        """Take the slot of a granted item back: its claims are pending again."""
        assert item.state is State.GRANTED and item.slot is not None
        self.pool.move(item.slot, SlotState.QUARANTINED)
        self._vacate(item)

    def grant(self, item: Item) -> None:
        """Let an encoder write the item's slot."""
        assert item.slot is not None
        super().grant(item)
        self.pool.move(item.slot, SlotState.LEASED)

    def transfer_failed(self, item: Item, reason: str) -> None:
        """Note that a transfer ended without its item: after the last, the item is encoded here.

        ``reason`` is for the requests that cannot encode it.
        """
        self._release_unused(item)
        self._touch(item)
        if item.state is State.WAITING and not item.transfers:
            for claim in [each for each in item.pending.values() if each.metadata_only]:
                self._lose(claim, reason)
            self.forget_if_unused(item)

    def retire(self, mm_hash: str) -> None:
        """Free an item's slot with the step that makes the workers forget the item."""
        if (slot := self.pool.resident.get(mm_hash)) is not None:
            self.pool.move(slot, SlotState.RETIRING)
            self.version += 1

    def step_ended(self, step: int) -> None:
        """Free the slots that were passed to a step, or one before."""
        self.version += self.pool.step_ended(step)

    # -- encoding here ---------------------------------------------------------------------------

    def encode_in_background(self, claim: Claim) -> bool:
        """Have workers encode an item that a step was to encode; return whether they can."""
        place = claim.inputs[claim.place]
        if place.media is None:
            return False
        self.begin_encoding(claim.item)
        self.encodings.append(
            EncodeOrder(
                mm_hash=place.mm_hash,
                modality=place.modality,
                media=place.media,
                num_embeds=place.num_embeds,
            )
        )
        claim.request.note_local(place.mm_hash)
        return True

    @property
    def encodes_in_background(self) -> bool:
        """Return whether workers encode an item in the background."""
        return any(each.state is State.ENCODING for each in self.items.values())

    def encoded(self, mm_hash: str) -> None:
        """Note that an item that was encoded in the background is in the workers' caches."""
        if mm_hash in self._outdated:
            return self.not_encoded(mm_hash)
        item = self.items[mm_hash]
        self.end_encoding(item)
        self._came(item)

    def not_encoded(self, mm_hash: str) -> None:
        """Note that an item could not be encoded in the background: a step has to."""
        self._outdated.discard(mm_hash)
        item = self.items[mm_hash]
        self.end_encoding(item, failed=True)
        self._freed.append(mm_hash)  # Some ranks of several may have it.
        self._woken.update(dict.fromkeys(item.holders))
        for claim in self.served(item):
            if claim.metadata_only:
                self.preempt(claim)
        self._release_unused(item)

    # -- calls of vLLM's scheduler ---------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """See `ItemTable.reset`; requests that held entries claim them again."""
        # Workers may have forgotten these when they report that they are encoded.
        encoding = (each for each in self.items.values() if each.state is State.ENCODING)
        self._outdated.update(each.mm_hash for each in encoding)
        for item in [each for each in self.items.values() if each.is_here]:
            for claim in self.served(item):
                self.preempt(claim)
        super().reset(*args, **kwargs)

    def check_and_update_cache(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the item is here and the request holds it."""
        known = self.requests.get(request.request_id)
        if known is None:
            return False
        if known.items and known.items[input_id].end <= known.num_computed_tokens:
            # The engine has taken computed tokens back: it queries before the next step.
            self.incomplete.add(known.request_id)
        claim = known.claims.get(request.mm_features[input_id].identifier)
        return claim is not None and claim.is_served and claim.item.is_here

    def get_cached_input_ids(
        self, request: MultiModalRequest, *args: Any, **kwargs: Any
    ) -> set[int]:
        """Return the indices of the request's items that it holds and has not passed."""
        known = self.requests.get(request.request_id)
        if known is None:
            return set()
        return {
            input_id
            for claim in known.claims.values()
            if claim.item.is_here and claim.is_served
            for input_id, place in claim.inputs.items()
            if place.end > known.num_computed_tokens
        }

    def can_allocate(
        self,
        request: MultiModalRequest,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Return whether the item is to be encoded here, in this step, and has space for that."""
        item = self.items.get(request.mm_features[input_id].identifier)
        if item is None or item.state is not State.LOCAL or request.request_id not in item.holders:
            return False
        together = num_embeds_to_schedule + item.num_embeds
        if num_embeds_to_schedule and 0 < self._encode_together < together:
            return False
        return item.num_embeds <= encoder_compute_budget

    def allocate(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Note that the step that is being scheduled encodes an item."""
        item = self.items[request.mm_features[input_id].identifier]
        if item.state is State.LOCAL:
            self.end_encoding(item)
            self._came(item)

    def free_encoder_input(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Note that a request has computed past an item; its last occurrence ends the claim."""
        known = self.requests.get(request.request_id)
        claim = known.claims.get(request.mm_features[input_id].identifier) if known else None
        if known is not None and claim is not None:
            passed = max(claim.inputs[input_id].end, known.num_computed_tokens)
            self.moved(known, passed, running=True)

    def free(self, request: MultiModalRequest, *args: Any, **kwargs: Any) -> None:
        """Note that a request was preempted or could not be started: it keeps its space.

        vLLM calls this as well when a request has ended, and its claims have.
        """
        known = self.requests.get(request.request_id)
        if known is not None:
            self.moved(known, known.num_computed_tokens, running=False)
            self.incomplete.add(known.request_id)

    # -- claims ----------------------------------------------------------------------------------

    def _claim_again(self, request: ItemRequest) -> None:
        """Claim what a request had passed, and must compute again."""
        for place in request.items[request.next_item :]:
            if place.end <= request.num_computed_tokens or place.mm_hash in request.lost:
                continue
            if self.claim(request, place) is None:
                request.lost[place.mm_hash] = "another item of that name has taken its place"
        self._close_gap(request)

    def _find_place(self, claim: Claim) -> None:
        """Give a claim the place of its first occurrence that is not computed."""
        computed = claim.request.num_computed_tokens
        ahead = (index for index, place in claim.inputs.items() if place.end > computed)
        place = min(ahead, default=COMPUTED)
        if place != claim.place:
            claim.place = place
            self._queue(claim)

    def _queue(self, claim: Claim) -> None:
        """Note that a claim has another position."""
        self._touch(claim.item)
        self.pending.add(claim)

    def _note_space(self, request: ItemRequest) -> None:
        """Keep `with_space` true of a request whose claims have changed."""
        if any(claim.is_served for claim in request.claims.values()):
            self.with_space[request.request_id] = request
        else:
            self.with_space.pop(request.request_id, None)

    def _serve(self, claim: Claim) -> bool:
        """Let a request hold an item; return ``False`` if there is no space for the item."""
        item = claim.item
        if item.state is State.LOCAL and claim.metadata_only:
            return False  # Another request is to encode it.
        if (
            item.state is State.RESERVED
            and claim.request.expired
            and not any(each.metadata_only for each in (claim, *self.served(item)))
        ):
            self._vacate(item)  # Transfers for requests that are paused have no deadline.
        if item.state is State.WAITING:
            if claim.by_transfer:
                if not self._reserve(item):
                    return False
            elif claim.metadata_only:
                self._lose(claim, "it is not here any more")
                return True
            elif self.make_space(item.num_embeds):
                self.occupy(item, State.LOCAL)
                self.encode_in_background(claim)
            else:
                return False
        self._hold(claim)
        return True

    def _hold(self, claim: Claim) -> None:
        request, item = claim.request, claim.item
        del item.pending[request.request_id]
        self.hold(item, request.request_id)
        self._note_space(request)
        self._woken[request.request_id] = None

    def _reserve(self, item: Item) -> bool:
        """Give an item space and a slot, or neither; begin to free a slot where that is possible.

        An idle entry that occupies a slot is evicted if no slot is free; its slot is free only
        after the workers forgot it.
        """
        assert item.tensor is not None
        # Workers may still read the slot that an item had before.
        if item.mm_hash in self.pool.resident or item.num_embeds > self.num_freeable_slots:
            return False
        slot = self.pool.reserve(item.tensor.nbytes, item.mm_hash)
        if slot is None:
            if not self.slot_returns:
                resident = (each for each in self._idle if each in self.pool.resident)
                if (idle := next(resident, None)) is not None:
                    self.evict(self._idle[idle])
            return False
        self.make_space(item.num_embeds)
        self.occupy(item, State.RESERVED, slot)
        trace("item.reserved", mm_hash=item.mm_hash, nbytes=item.tensor.nbytes)
        return True

    def _unserve(self, claim: Claim) -> None:
        """Take an item from a request, whose claim is pending again."""
        request, item = claim.request, claim.item
        item.pending[request.request_id] = claim
        self.release(item, request.request_id)
        self._note_space(request)
        self.pending.add(claim)
        self._release_unused(item)

    def _vacate(self, item: Item) -> None:
        """Take the space of an item that did not come: its claims are pending again."""
        held = self.served(item)
        for claim in held:
            item.pending[claim.request.request_id] = claim
        self.release(item, *item.holders)
        slot = self.vacate(item)
        if slot is not None and slot.state is SlotState.RESERVED:
            self.pool.free(slot)
        for claim in held:
            self._note_space(claim.request)
            self.pending.add(claim)
        for claim in held:
            self._close_gap(claim.request)

    def _close_gap(self, request: ItemRequest) -> None:
        """Release what a request holds behind its first pending claim."""
        for claim in room.beyond_gap(request):
            self._unserve(claim)

    def _release_unused(self, item: Item) -> None:
        """Take the space of an item that no request is to encode, or that no transfer may bring."""
        if item.state is State.LOCAL:
            if not item.holders:
                self._vacate(item)
        elif item.state is State.RESERVED and not any(
            claim.by_transfer for claim in self.served(item)
        ):
            self._vacate(item)

    def _came(self, item: Item) -> None:
        """Let all holders of an item compute with it.

        It may be evicted before the turn of others, whose own transfers may be used up. Such a
        request holds it from now on, if it needs the item next.
        """
        self.progress += 1
        self._woken.update(dict.fromkeys(item.holders))
        for claim in list(item.pending.values()):
            self.hold_if_last(claim)

    def _lose(self, claim: Claim, reason: str) -> None:
        claim.request.lost[claim.item.mm_hash] = reason
        self._end(claim)
        self._woken[claim.request.request_id] = None

    def _end(self, claim: Claim) -> None:
        """End a request's claim on an item."""
        request, item = claim.request, claim.item
        del request.claims[item.mm_hash]
        item.pending.pop(request.request_id, None)
        self.release(item, request.request_id)
        self._touch(item)
        self._note_space(request)
        self._release_unused(item)
        self.forget_if_unused(item)

    def _touch(self, item: Item) -> None:
        super()._touch(item)
        self.touched[item] = None

    def _move(self, item: Item, state: State) -> None:
        was_here = item.is_here
        super()._move(item, state)
        self.touched[item] = None
        if item.is_here != was_here:
            self.changes[item.mm_hash] = item.is_here
