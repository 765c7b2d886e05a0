"""The order in which items get room on a prefill+decode instance, local encodes among them.

Room in the encoder cache, and a receive slot for what comes from elsewhere, are given to *claims*
(`epd_portable.items.items`) strictly in one order: first what running requests wait for, then
by the arrival of the requests and, within one, by the first place in the prompt that is not
computed. The first claim that cannot be served stops all behind it, whatever they need. So none is
overtaken for ever.

What holds after every call:

- An item that is not `State.WAITING` has its room; only idle entries can lose theirs.
- `State.LOCAL` and `State.RESERVED` items have holders; the last that leaves gives room back. What
  is written by an encoder, or encoded in the background, keeps its room until that has ended.
- A claim that waits is in the queue. One of which every occurrence is computed does not wait: it
  ends when its request runs. Before, the prefix cache may yet lose what covers it, so it keeps the
  room that it has, as the last of its request.
- A request is started only when all that it needs is served, or when the first that waits is its
  own and no request that was not started has all that it needs (`may_start`). So running requests
  can go on without room that waits for others, and what waits for room waits for running requests.
- A claim behind the first may have room all the same: the first was preempted, its entry was
  reset, it has computed the first of two occurrences, or the prefix cache covers what it holds.
  Then the last claim behind it gives its room back: of requests that cannot go on (`has_all`), its
  own among them, or, if it computes, of all that were not started (`_make_way`). A claim that
  cannot have its item again gives way last, when nothing else will give room, and none is asked for
  a slot that was granted.

Together: whenever the first claim waits, a request that came before computes, a transfer with a
deadline, here or to another instance, or an encoder is under way, a slot comes back with the next
step or from its producer, or a claim gives way; so every claim is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from epd_portable.items.encoder_cache import EncoderCacheManager, MultiModalRequest
from epd_portable.items.items import (
    COMPUTED,
    Claim,
    Claimant,
    ClaimQueue,
    Deliveries,
    Item,
    PromptItem,
    State,
    encoded_in_vain,
    order,
)
from epd_portable.items.slots import ReceivePool
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec

_UNDER_WAY = (State.GRANTED, State.ENCODING)
"""Of items whose room cannot be given to others before something has ended."""


class EncoderCachePreallocator(EncoderCacheManager):
    """The encoder cache of a prefill+decode instance: gives room to claims, in their order.

    Nothing here blocks or knows the time.

    Args:
        cache_size: Room in encoder embeddings.
        deliveries: Transfers of the items; called when room is given or not wanted.
        encode_together: Upper bound of embeddings that one request encodes in one step, unless a
            single item is larger; 0 for no bound.
        encode: Starts to encode the item of a claim in the background; ``False`` if a step must.

    Attributes:
        requests: All that have items, by id.
        unsettled: Ids of those whose items are not all computed: the engine asks before it
            computes any of them further.
        progress: Grows when an item comes, and when a request with items computes.
    """

    def __init__(
        self,
        cache_size: int,
        slots: ReceivePool,
        deliveries: Deliveries,
        *,
        encode_together: int = 0,
        encode: Callable[[Claim], bool] = lambda claim: False,
    ) -> None:
        super().__init__(cache_size)
        self._encode_together = encode_together
        self._encode = encode
        self.requests: dict[str, Claimant] = {}
        self.unsettled: set[str] = set()
        self.progress = 0
        self.changes: dict[str, bool] = {}
        self._slots = slots
        self._deliveries = deliveries
        self._with_room: dict[str, Claimant] = {}
        """Requests that have room for items: no more than the cache has embeddings."""
        self._queue = ClaimQueue()
        self._resident: dict[str, SlotDescriptor] = {}  # Slots that workers may read, by item.
        self._outdated: set[str] = set()  # Encoded in the background when entries were reset.
        self._retiring = 0
        self._stirred = False
        """Something has changed since `advance` found no room."""
        self._changed: dict[str, None] = {}

    # -- requests --------------------------------------------------------------------------------

    def fits_at_all(self, num_embeds: int, nbytes: int = 0) -> bool:
        """Return whether an item could ever be held, or received, by this instance."""
        return num_embeds <= self.cache_size and nbytes <= self._slots.capacity_bytes

    def enter(self, claimant: Claimant) -> None:
        """A request has arrived."""
        self.requests[claimant.request_id] = claimant
        self.unsettled.add(claimant.request_id)

    def open(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Return the item of a name, a new one if need be.

        What bears the name, is something else and is unused is dropped. ``None`` if
        requests use something else of that name.
        """
        item = self.items.get(mm_hash)
        if item is not None and item.tensor != tensor:
            if item.holders or item.wanted or item.state is State.ENCODING:
                return None
            self._evict(item)
            item = None
        if item is None:
            item = self.items[mm_hash] = Item(mm_hash, tensor.shape[0], tensor)
        return item

    def claim(self, claimant: Claimant, place: PromptItem, transfer_id: str = "") -> Claim | None:
        """Let a request claim an item, or another occurrence of one; `advance` serves it.

        Returns:
            The claim; ``None`` if requests use something else of that name.
        """
        item = self.open(place.mm_hash, place.tensor)
        if item is None:
            return None
        claim = claimant.claims.get(item.mm_hash)
        if claim is None:
            claim = Claim(claimant, item, transfer_id)
            claimant.claims[item.mm_hash] = item.wanted[claimant.request_id] = claim
        claim.inputs[place.input_id] = place.end
        self._find_place(claim)
        return claim

    def retain_for(self, claim: Claim) -> None:
        """No transfer of its own will bring a request its item: it holds the entry from now on."""
        if claim.metadata_only and claim.waits and claim.item.is_here:
            self._keep(claim)

    def moved(self, claimant: Claimant, num_computed_tokens: int, *, running: bool) -> list[Claim]:
        """Note how far a request is computed, or would be if it began now.

        A running request needs what it has passed no more. It needs it again when the engine takes
        computed tokens back, as it does when it preempts the request or cannot load its KV.

        Returns:
            Claims that are over though their items were not here: the prefix cache covers them.
        """
        if claimant.failed or (num_computed_tokens, running) == (
            claimant.num_computed_tokens,
            claimant.running,
        ):
            return []
        back = num_computed_tokens < claimant.num_computed_tokens
        self.progress += running and not back
        claimant.num_computed_tokens = num_computed_tokens
        if claimant.running != running:  # Its rank is another.
            claimant.running = running
            for claim in claimant.claims.values():
                self._push(claim)
        covered = []
        for claim in list(claimant.claims.values()):
            if back or claim.place == COMPUTED or claim.inputs[claim.place] <= num_computed_tokens:
                self._find_place(claim)
            if running and claim.place == COMPUTED:
                if not claim.item.is_here:
                    covered.append(claim)
                self._end_claim(claim)
        if back:
            self._claim_again(claimant)
        return covered

    def may_start(self, claimant: Claimant) -> bool:
        """Return whether a request may start to compute: it has all its room, or is first.

        The first must not take a seat that others wait for with room that it waits for; see the
        module. Nor must one that waits for another to encode its item.
        """
        if claimant.to_be_encoded:
            return False
        first = self._queue.first
        if first is None or first.claimant is not claimant:
            if not claimant.waits:
                return True
            needed = [] if first is None else first.claimant.to_be_encoded
            if not any(self.may_encode(item, claimant.request_id) for item in needed):
                return False
        return not any(
            other.has_all
            for other in self._with_room.values()
            if other is not claimant and not other.running
        )

    def contenders(self) -> list[Claimant]:
        """Return requests that have room for items, and the first that waits for some; by rank."""
        found, first = dict(self._with_room), self._queue.first
        if first is not None:
            found[first.claimant.request_id] = first.claimant
        return sorted(found.values(), key=lambda each: each.rank)

    def take_woken(self) -> list[str]:
        """Return requests of which an item came, got room or was lost since the last call.

        With the first in the order, which may wait for a seat, and those that could encode for it.
        """
        first = self._queue.first
        if first is not None:
            self._changed[first.claimant.request_id] = None
            for item in first.claimant.to_be_encoded:
                self._changed.update(dict.fromkeys(item.holders))
        woken, self._changed = [each for each in self._changed if each in self.requests], {}
        return woken

    def fail(self, claimant: Claimant) -> None:
        """A request cannot be answered: all its claims are over; the engine is about to end it."""
        claimant.failed = True
        self._end_claims(claimant)

    def leave(self, claimant: Claimant) -> None:
        """A request has ended, well or not: all its claims are over."""
        self._end_claims(claimant)
        self.requests.pop(claimant.request_id, None)
        self._changed.pop(claimant.request_id, None)
        self.unsettled.discard(claimant.request_id)

    def expire(self, claim: Claim, reason: str) -> None:
        """A request has waited for others to bring an item as long as it may.

        What is being written may still come: that has a deadline of its own. Otherwise the request
        encodes the item as soon as it has room for that, or has lost it. Transfers for other
        requests go on. ``reason`` is for requests that cannot encode the item.
        """
        item = claim.item
        if not item.transfers or item.is_here or item.state in (State.LOCAL, State.ENCODING):
            return
        claim.expired = True
        if item.state is State.GRANTED:
            return
        if claim.metadata_only:
            self._lose(claim, reason)
        elif item.state is State.RESERVED:
            self._wait_again(item)

    # -- room ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Serve claims in their order, up to the first for which there is no room.

        When slots are short, an idle entry that occupies one is evicted; its slot
        comes back only after the workers forgot it (`retire`, `give_back`).
        """
        if not self._stirred:
            return
        self._stirred = False
        while (claim := self._queue.first) is not None:
            if not self._serve(claim) and not self._make_way(claim):
                return

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        """Return whether a transfer may use an item's slot.

        One of a request that waits, and cannot do without the item, brings it to none that has, or
        had, another transfer: the item may be evicted before that turn. Requests of one body
        (``n``) share theirs.
        """
        return transfer_id not in item.kept_transfers or any(
            each.transfer_id == transfer_id or (each.metadata_only and not each.transfer_id)
            for each in self._held(item)
        )

    def landed(self, item: Item) -> None:
        """The bytes of a granted item are in its slot."""
        self.finalize_allocation(item.mm_hash)
        assert item.slot is not None
        self._resident[item.mm_hash] = item.slot
        item.slot = None
        self._is_here(item)
        self._stirred = True  # While it was written, its room could not be given to others.

    def encoded(self, mm_hash: str) -> None:
        """An item that was encoded in the background is in the workers' encoder caches."""
        if mm_hash in self._outdated:
            return self.not_encoded(mm_hash)
        item = self.items[mm_hash]
        item.state = State.PRESENT
        if not item.holders:
            self._rest(item)
        self._is_here(item)
        self._stirred = True  # Meanwhile its room could not be given to others.

    def not_encoded(self, mm_hash: str) -> None:
        """An item could not be encoded in the background: a step has to."""
        self._outdated.discard(mm_hash)
        item = self.items[mm_hash]
        item.state = State.LOCAL
        self._freed.append(mm_hash)  # Some ranks of several may have it.
        self._changed.update(dict.fromkeys(item.holders))
        self._settle(item)
        self._stirred = True

    def encode_beside(self, claim: Claim) -> bool:
        """Start to encode an item that a step was to encode; return whether workers do."""
        if not self._encode(claim):
            return False
        claim.item.state = State.ENCODING
        return True

    def lost_slot(self, item: Item) -> None:
        """A transfer failed and its slot is not the item's any more: its claims queue again."""
        self._wait_again(item)

    def lost_transfer(self, item: Item, reason: str) -> None:
        """A transfer of an item has ended without it; after the last it is encoded here, if it can.

        ``reason`` is for the requests that cannot encode it.
        """
        self._settle(item)
        if item.state is State.WAITING and not item.transfers:
            for claim in [each for each in item.wanted.values() if each.metadata_only]:
                self._lose(claim, reason)
            self._forget_if_unused(item)
            self._stirred = True

    def retire(self, mm_hash: str) -> SlotDescriptor | None:
        """Return an item's slot, for `give_back` when the step that forgets the item has ended."""
        slot = self._resident.pop(mm_hash, None)
        if slot is not None:
            self._retiring += 1
        return slot

    def give_back(self, retired: Iterable[SlotDescriptor]) -> None:
        """Make slots free again that were retired or taken back."""
        for slot in retired:
            self._retiring -= 1
            self._slots.give_back(slot)
            self._stirred = True

    def stir(self) -> None:
        """Something changed that `advance` cannot see: room that transfers to others have left."""
        self._stirred = True

    def taken_back(self) -> None:
        """A slot has come back from its producer, for `give_back` when workers know that."""
        self._retiring += 1

    # -- what vLLM's scheduler calls -------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """See `EncoderCacheManager.reset`; holders of entries queue for them again."""
        # Workers may have forgotten these when they tell that they are encoded.
        encoding = (each for each in self.items.values() if each.state is State.ENCODING)
        self._outdated.update(each.mm_hash for each in encoding)
        for item in [each for each in self.items.values() if each.is_here]:
            for claim in self._held(item):
                self._unserve(claim)
            item.holders.clear()  # Transfers to others have what they send.
            self._rest(item)
            self._evict(item)

    def check_and_update_cache(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the item is here and the request's claim on it is served."""
        claimant = self.requests.get(request.request_id)
        if claimant is None:
            return False
        if claimant.items and claimant.items[input_id].end <= claimant.num_computed_tokens:
            # The engine has taken computed tokens back: it asks before the next step.
            self.unsettled.add(claimant.request_id)
        claim = claimant.claims.get(request.mm_features[input_id].identifier)
        return claim is not None and claim.served and claim.item.is_here

    def get_cached_input_ids(
        self, request: MultiModalRequest, *args: Any, **kwargs: Any
    ) -> set[int]:
        """Return the indices of the request's items that it holds and has not passed."""
        claimant = self.requests.get(request.request_id)
        if claimant is None:
            return set()
        return {
            input_id
            for claim in claimant.claims.values()
            if claim.item.is_here and claim.served
            for input_id, end in claim.inputs.items()
            if end > claimant.num_computed_tokens
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
        """Return whether the item is to be encoded here, in this step, and has room for that."""
        item = self.items.get(request.mm_features[input_id].identifier)
        if item is None or not self.may_encode(item, request.request_id):
            return False
        together = num_embeds_to_schedule + item.num_embeds
        if num_embeds_to_schedule and 0 < self._encode_together < together:
            return False
        return item.num_embeds <= encoder_compute_budget

    def may_encode(self, item: Item, request_id: str) -> bool:
        """Return whether a request may encode an item now: it has room, the request media."""
        if item.state is not State.LOCAL or request_id not in item.holders:
            return False
        return not self.requests[request_id].claims[item.mm_hash].metadata_only

    def allocate(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """The step that is being scheduled encodes the item; `can_allocate` said yes."""
        item = self.items[request.mm_features[input_id].identifier]
        if item.state is State.LOCAL:
            item.state = State.PRESENT
            self._is_here(item)

    def free_encoder_input(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """The request has computed past the item; its claim ends with the last occurrence."""
        claimant = self.requests.get(request.request_id)
        claim = claimant.claims.get(request.mm_features[input_id].identifier) if claimant else None
        if claimant is not None and claim is not None:
            passed = max(claim.inputs[input_id], claimant.num_computed_tokens)
            self.moved(claimant, passed, running=True)

    def free(self, request: MultiModalRequest, *args: Any, **kwargs: Any) -> None:
        """The request was preempted, or could not be started: it keeps the room that it has.

        vLLM calls this as well when a request has ended, and its claims are over.
        """
        claimant = self.requests.get(request.request_id)
        if claimant is not None:
            self.moved(claimant, claimant.num_computed_tokens, running=False)
            self.unsettled.add(claimant.request_id)

    # -- claims ----------------------------------------------------------------------------------

    def _claim_again(self, claimant: Claimant) -> None:
        """Claim what a request had passed, and must compute again."""
        for place in claimant.items[claimant.next_item :]:
            if place.end <= claimant.num_computed_tokens or place.mm_hash in claimant.lost:
                continue
            if self.claim(claimant, place) is None:
                claimant.lost[place.mm_hash] = "another item of that name has taken its place"

    def _find_place(self, claim: Claim) -> None:
        """Give a claim the place of its first occurrence that is not computed."""
        computed = claim.claimant.num_computed_tokens
        ahead = (index for index, end in claim.inputs.items() if end > computed)
        place = min(ahead, default=COMPUTED)
        if place != claim.place:
            claim.place = place
            self._push(claim)
            if claim.item.state is State.LOCAL:
                self._settle(claim.item)

    def _push(self, claim: Claim) -> None:
        """Note that a claim has another place in the order; it is queued there if it waits."""
        self._stirred = True
        self._queue.push(claim)

    def _held(self, item: Item) -> list[Claim]:
        """Return the claims for which an item's room is kept; transfers to others keep it, too."""
        requests = (self.requests[name] for name in item.holders if name in self.requests)
        return [each.claims[item.mm_hash] for each in requests]

    def _note_room(self, claimant: Claimant) -> None:
        """Keep `_with_room` true of a request whose claims have changed."""
        if any(claim.served for claim in claimant.claims.values()):
            self._with_room[claimant.request_id] = claimant
        else:
            self._with_room.pop(claimant.request_id, None)

    def _serve(self, claim: Claim) -> bool:
        """Give a claim its item's room, or tell that there is none."""
        item = claim.item
        if item.state is State.WAITING:
            if claim.by_transfer:
                if not self._reserve(item):
                    return False
            elif claim.metadata_only:
                self._lose(claim, "it is not here any more")
                return True
            elif self._make_room(item.num_embeds):
                self._occupy(item, State.ENCODING if self._encode(claim) else State.LOCAL)
            else:
                return False
        self._keep(claim)
        if item.is_here:
            self._is_here(item)
        elif item.state is State.RESERVED:
            self._deliveries.room_given(item)
        elif item.state is State.LOCAL:
            self._settle(item)
        return True

    def _keep(self, claim: Claim) -> None:
        """Keep an item's room for a request."""
        claimant, item = claim.claimant, claim.item
        del item.wanted[claimant.request_id]
        self._hold(item, claimant.request_id)
        self._note_room(claimant)
        self._changed[claimant.request_id] = None

    def _reserve(self, item: Item) -> bool:
        """Give an item room and a slot, or neither; begin to make room where that is possible."""
        assert item.tensor is not None
        # Workers may still read the slot that an item had before.
        if item.mm_hash in self._resident or not self.can_preallocate(item.num_embeds):
            return False
        item.slot = self._slots.take_slot(item.tensor.nbytes)
        if item.slot is None:
            if not self._slot_returns:
                resident = (each for each in self._idle.values() if each.mm_hash in self._resident)
                if (idle := next(resident, None)) is not None:
                    self._evict(idle)
            return False
        self.preallocate(item.mm_hash, item.num_embeds)
        return True

    @property
    def _slot_returns(self) -> bool:
        """Whether a slot comes back by itself, as the workers forget its item or its writer."""
        return self._retiring > 0 or any(mm_hash in self._resident for mm_hash in self._freed)

    def _make_way(self, first: Claim) -> bool:
        """Let the last claim behind the first give its room back; return whether one did.

        To a running request those give way as well that have all their room and were not started:
        they may wait for its seat.
        """
        lacks_slot = first.by_transfer and self.can_preallocate(first.item.num_embeds)
        if lacks_slot and (self._slot_returns or first.item.mm_hash in self._resident):
            return False
        running = first.claimant.running
        behind = [
            claim
            for claimant in self._with_room.values()
            if (not claimant.has_all if claimant.running == running else running)
            for claim in claimant.claims.values()
            if claim.served and order(claim) > order(first)
        ]
        count = Counter(claim.item.mm_hash for claim in behind)
        able = [
            claim
            for claim in sorted(behind, key=order, reverse=True)
            if claim.item.state not in _UNDER_WAY
            and count[claim.item.mm_hash] == len(claim.item.holders)
            and (not lacks_slot or claim.item.slot or claim.item.mm_hash in self._resident)
        ]
        last = next((claim for claim in able if not claim.is_last_chance), None)
        revoked = lacks_slot and self._deliveries.has_revoked_slots
        if last is None and able and not (revoked or self._room_returns(first.claimant)):
            last = able[0]
        if last is not None:
            self._unserve(last)
            self._settle(last.item)
        return last is not None

    def _room_returns(self, first: Claimant) -> bool:
        """Return whether room comes back by itself: of running requests, or what is under way.

        A request that has all that it needs will compute, unless the first has the seat that it
        waits for.
        """
        going_on = (each for each in self._with_room.values() if each.running or not first.running)
        return any(claimant.has_all for claimant in going_on) or any(
            item.state in _UNDER_WAY or not item.holders <= self.requests.keys()
            for item in self.items.values()
        )

    def _unserve(self, claim: Claim) -> None:
        """Take an item's room from a request, whose claim queues again."""
        claimant, item = claim.claimant, claim.item
        self._release(item, claimant.request_id)
        item.wanted[claimant.request_id] = claim
        self._note_room(claimant)
        self._push(claim)

    def _wait_again(self, item: Item) -> None:
        """An item has lost its room on its way: all its holders queue again."""
        for claim in self._held(item):
            self._unserve(claim)
        self._give_room_back(item)

    def _settle(self, item: Item) -> None:
        """Give back room without holders, and end the transfers of what is not wanted."""
        if item.is_here:
            self._end_vain_transfers(item)
            return
        if item.holders:
            held = self._held(item)
            in_vain = (
                not any(claim.by_transfer for claim in held)
                if item.state is State.RESERVED
                else item.state is State.LOCAL and encoded_in_vain(held)
            )
            if in_vain:
                self._wait_again(item)
            return
        if not item.wanted:
            self._deliveries.not_wanted(item)
        if item.state is State.ENCODING:
            return
        if item.state is not State.GRANTED or not item.wanted:
            self._give_room_back(item)

    def _give_room_back(self, item: Item) -> None:
        slot, item.slot = item.slot, None
        if slot is not None:
            self._slots.give_back(slot)
        self.depreallocate(item.mm_hash)
        self._forget_if_unused(item)
        self._stirred = True

    def _is_here(self, item: Item) -> None:
        """Let all holders of an item compute with it.

        It may be evicted before the turn of others, whose own transfers may be used up. For those
        that cannot do without it is kept from now on.
        """
        self.changes[item.mm_hash] = True
        self.progress += 1
        self._changed.update(dict.fromkeys(item.holders))
        for claim in self._end_vain_transfers(item):
            if claim.metadata_only:
                self._keep(claim)

    def _end_vain_transfers(self, item: Item) -> list[Claim]:
        """End the transfers of an item that is here, but one for each request that waits its turn.

        A request whose own transfer brought it to another takes over one that an encoder has ready.

        Returns:
            Claims for which there is none.
        """
        waiting = [each for each in item.wanted.values() if each.transfer_id or each.metadata_only]
        kept = {each.transfer_id for each in waiting} & item.transfers.keys()
        without = [each for each in waiting if each.transfer_id not in kept]
        ready = [each for each in self._deliveries.announced(item) if each not in kept]
        kept.update(ready[: len(without)])
        self._deliveries.not_wanted(item, but=kept)
        return without[len(ready) :]

    def _lose(self, claim: Claim, reason: str) -> None:
        claim.claimant.lost[claim.item.mm_hash] = reason
        self._end_claim(claim)
        self._changed[claim.claimant.request_id] = None

    def _end_claims(self, claimant: Claimant) -> None:
        for claim in list(claimant.claims.values()):
            self._end_claim(claim)

    def _end_claim(self, claim: Claim) -> None:
        """A request needs an item no more."""
        claimant, item = claim.claimant, claim.item
        del claimant.claims[item.mm_hash]
        item.wanted.pop(claimant.request_id, None)
        self._release(item, claimant.request_id)
        self._note_room(claimant)
        self._settle(item)
        self._stirred = True
