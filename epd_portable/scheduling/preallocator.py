"""The order in which items get room on a prefill+decode instance, local encodes among them.

Room in the encoder cache, and a receive slot for what comes from elsewhere, are given to *claims*
(`epd_portable.scheduling.items`) strictly in one order: first what running requests wait for, then
by the arrival of the requests and, within one, by the prompt. The first claim that cannot be served
stops all behind it, whatever they need. So nobody is overtaken for ever.

What holds after every call:

- An item that is not `State.WAITING` has its room; only idle entries can lose theirs.
- `State.LOCAL` and `State.RESERVED` items are held by somebody; who leaves last gives room back.
  What is written by an encoder, or encoded beside the steps, keeps its room until that has ended.
- A claim that waits is in the queue; all served claims of its request keep their room meanwhile.
- A request is started only when all its claims are served, or when the first that waits is its own
  and nobody has room who was not started (`may_start`). So whoever computes can go on without room
  that waits for others, and whoever waits for room waits for requests that compute.
- One case is left: a request that loses room it had (it was preempted, or the cache was reset)
  queues again, before claims that have room already: of requests that came after and wait for
  more, or its own for what comes later in its prompt; if it computes, of all that were not started.
  The last of those gives its room back (`_make_way`).

Together: whenever the first claim waits, a request that came before computes, a transfer with a
deadline or an encoder is under way, or somebody gives way; so every claim is served.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from epd_portable.scheduling.encoder_cache import EncoderCacheManager, MultiModalRequest
from epd_portable.scheduling.items import Claim, Claimant, Item, State
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec

_UNDER_WAY = (State.GRANTED, State.ENCODING)
"""Of items whose room cannot be given to others before something has ended."""

Entry = tuple[tuple[bool, int], int, int, Claim]
"""A claim's place in the queue: its request's, its own, and the entry's number."""


class SlotSource(Protocol):
    """A bounded supply of receive slots."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole supply."""
        ...

    def take(self, nbytes: int) -> SlotDescriptor | None:
        """Return a slot of at least ``nbytes``, or ``None`` when none is free."""
        ...

    def give_back(self, slot: SlotDescriptor) -> None:
        """Make a slot free again."""
        ...


class Deliveries(Protocol):
    """Who brings items from elsewhere: the transfers of each."""

    def room_given(self, item: Item) -> None:
        """The item has a slot: whoever has announced it may write."""
        ...

    def not_wanted(self, item: Item, but: Iterable[str] = ()) -> None:
        """End the transfers of an item, all but these.

        A slot that was granted is taken from the item, and comes back when nobody can write it.
        """
        ...


class EncoderCachePreallocator(EncoderCacheManager, ABC):
    """The encoder cache of a prefill+decode instance: gives room to claims, in their order.

    Nothing here blocks or knows the time. The two kinds differ in what they do with an item that
    is announced before any request asks for it: `accept`.

    Args:
        cache_size: Room in encoder embeddings.
        slots: Where receive slots come from.
        deliveries: Is told what becomes of items.
        encode_together: One request has no more embeddings encoded in one step than this, but for a
            single item: in between others get their tokens. 0 for no limit.
        encode: Begins to encode an item beside the steps, by whose claim it got room, and says
            whether it does; a step encodes what it does not.

    Attributes:
        accepts_early: Whether it ever accepts an item that no request has asked for.
        unsettled: Requests of which not all items are computed: the engine asks before it computes
            any of them further.
    """

    accepts_early: ClassVar[bool] = False

    def __init__(
        self,
        cache_size: int,
        slots: SlotSource,
        deliveries: Deliveries,
        *,
        encode_together: int = 0,
        encode: Callable[[Claim], bool] = lambda claim: False,
    ) -> None:
        super().__init__(cache_size)
        self._encode_together = encode_together
        self._encode = encode
        self.unsettled: set[str] = set()
        self._slots = slots
        self._deliveries = deliveries
        self._claimants: dict[str, Claimant] = {}
        self._partial: dict[str, Claimant] = {}
        """Requests that have room for some items and wait for others."""
        self._queue: list[Entry] = []
        self._numbers = itertools.count()
        self._num_waiting = 0
        self._resident: dict[str, SlotDescriptor] = {}
        """Slots that workers may read, by item."""
        self._retiring = 0
        self._stirred = False
        self._woken: list[str] = []

    @abstractmethod
    def accept(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Reserve room for an announced item that no request has asked for, if that is wanted.

        Args:
            mm_hash: The item.
            tensor: What is announced, ``(num_embeds, width)``.

        Returns:
            The item, with room and a slot; ``None`` if it is to wait for its request.
        """

    # -- requests --------------------------------------------------------------------------------

    def fits_at_all(self, num_embeds: int, nbytes: int = 0) -> bool:
        """Tell whether an item could ever be held, or received, by this instance."""
        return num_embeds <= self.cache_size and nbytes <= self._slots.capacity_bytes

    def enter(self, who: Claimant) -> None:
        """A request has arrived."""
        self._claimants[who.request_id] = who
        self.unsettled.add(who.request_id)

    def open(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Return the item of a name, a new one if need be.

        What bears the name, is something else and is used by nobody is dropped. ``None`` if
        requests use something else of that name.
        """
        item = self.items.get(mm_hash)
        if item is not None and item.tensor != tensor:
            if item.holders or item.wanted or item.state is State.ENCODING:
                return None
            self._drop(item)
            item = None
        if item is None:
            item = self.items[mm_hash] = Item(mm_hash, tensor.shape[0], tensor)
        return item

    def claim(
        self,
        who: Claimant,
        item: Item,
        input_id: int,
        *,
        metadata_only: bool,
        transfer_id: str = "",
    ) -> Claim:
        """Let a request claim an item, or another occurrence of one; `advance` serves it."""
        claim = who.claims.get(item.mm_hash)
        if claim is not None:
            claim.inputs.add(input_id)
            if claim.served and item.is_here:
                self._inputs.setdefault(who.request_id, set()).add(input_id)
            return claim
        claim = Claim(who, item, input_id, metadata_only, {input_id}, transfer_id)
        who.claims[item.mm_hash] = claim
        self._enqueue(claim)
        return claim

    def may_start(self, who: Claimant) -> bool:
        """Tell whether a request may begin to compute: it has all room that it needs, or is first.

        The first must not take a seat that others wait for with room that it waits for; see the
        module.
        """
        if not who.num_waiting:
            return True
        if self._first() is not who:
            return False
        return not any(
            not other.running and _waits_with_room(other)
            for other in self._claimants.values()
            if other is not who
        )

    def take_woken(self) -> list[str]:
        """Return requests that slept (`Claimant.sleeps`) and may begin now; each once.

        Of each that sleeps an item came, got room or was lost; but the first in the order is
        always among them, since what it waits for may be another's seat.
        """
        first = self._first()
        if first is not None:
            self._wake(first)
        woken, self._woken = self._woken, []
        return woken

    def set_running(self, who: Claimant, running: bool) -> None:
        """The engine has begun to compute a request, or preempted it: its place is another now."""
        if who.running == running:
            return
        who.running = running
        for claim in who.claims.values():
            if not claim.served:
                self._push(claim)
        self._stirred = True

    def end(self, claim: Claim) -> None:
        """A request needs an item no more."""
        who, item = claim.who, claim.item
        del who.claims[item.mm_hash]
        claim.over = True
        if claim.served:
            self._release(item, who.request_id)
            self._drop_inputs(who.request_id, claim.inputs)
        else:
            self._wait_is_over(claim)
        self._count(who)
        self._settle(item)
        self._stirred = True

    def leave(self, who: Claimant) -> None:
        """A request has ended, well or not: all its claims are over."""
        for claim in list(who.claims.values()):
            self.end(claim)
        self._inputs.pop(who.request_id, None)
        self._claimants.pop(who.request_id, None)
        self.unsettled.discard(who.request_id)

    # -- room ------------------------------------------------------------------------------------

    def advance(self, *, scheduling: bool = False) -> None:
        """Serve claims in their order, up to the first for which there is no room.

        When slots are short, an entry that occupies one and that nobody holds is evicted; its slot
        comes back only after the workers forgot it (`retire`, `give_back`).

        Args:
            scheduling: A step is being scheduled, maybe with entries that requests would have to
                give up: nobody makes way until the next call.
        """
        if not self._stirred:
            return
        self._stirred = False
        while self._queue:
            entry = heapq.heappop(self._queue)
            claim = entry[-1]
            if not _counts(entry) or self._serve(claim):
                continue
            heapq.heappush(self._queue, entry)
            if scheduling:
                self._stirred = True
                return
            if not self._make_way(claim):
                return

    @property
    def is_blocked(self) -> bool:
        """Whether somebody waits for room."""
        return self._num_waiting > 0

    def landed(self, item: Item) -> None:
        """The bytes of a granted item are in its slot."""
        self.finalize_allocation(item.mm_hash)
        assert item.slot is not None
        self._resident[item.mm_hash] = item.slot
        item.slot = None
        self._is_here(item)
        self._stirred = True  # While it was written, its room could not be given to others.

    def encoded(self, mm_hash: str) -> None:
        """An item that was encoded beside the steps is in the workers' encoder caches."""
        item = self.items[mm_hash]
        item.state = State.PRESENT
        item.origin = None
        if not item.holders:
            self._rest(item)
        self._is_here(item)
        self._stirred = True  # Meanwhile its room could not be given to others.

    def not_encoded(self, mm_hash: str) -> None:
        """An item could not be encoded beside the steps: one of them has to."""
        item = self.items[mm_hash]
        item.state = State.LOCAL
        for request_id in item.holders:
            self._wake(self._claimants[request_id])
        self._settle(item)
        self._stirred = True

    def lost_slot(self, item: Item) -> None:
        """A transfer failed and its slot is not the item's any more: its claims queue again."""
        self._wait_again(item)

    def lost_transfer(self, item: Item, reason: str) -> None:
        """The last transfer of an item has ended without it: it is encoded here, where it can be.

        Args:
            item: Has no transfer any more.
            reason: For the requests that cannot encode it.
        """
        if item.state is State.RESERVED:
            self._wait_again(item)
        if item.state is State.WAITING:
            for claim in [each for each in item.wanted.values() if each.metadata_only]:
                self._lose(claim, reason)
            self._forget_if_unused(item)
            self._stirred = True

    def retire(self, mm_hash: str) -> SlotDescriptor | None:
        """The workers read an item's slot no more once this step has ended; return it.

        The caller hands it to `give_back` then.
        """
        slot = self._resident.pop(mm_hash, None)
        if slot is not None:
            self._retiring += 1
        return slot

    def give_back(self, retired: Iterable[SlotDescriptor]) -> None:
        """Make retired slots free again."""
        for slot in retired:
            self._retiring -= 1
            self._slots.give_back(slot)
            self._stirred = True

    def stir(self) -> None:
        """Something changed that `advance` cannot see: a slot came back from its producer."""
        self._stirred = True

    # -- what vLLM's scheduler calls -------------------------------------------------------------

    def reset(self) -> None:
        """See `EncoderCacheManager.reset`; who held entries queues for them again."""
        for item in [each for each in self.items.values() if each.is_here]:
            claims = [self._claimants[name].claims[item.mm_hash] for name in item.holders]
            for claim in claims:
                self._unserve(claim)
            self._evict(item)

    def check_and_update_cache(self, request: MultiModalRequest, input_id: int) -> bool:
        """Tell whether the item is here and the request's claim on it is served."""
        item = self.items.get(request.mm_features[input_id].identifier)
        return item is not None and item.is_here and request.request_id in item.holders

    def can_allocate(
        self,
        request: MultiModalRequest,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Tell whether the item is to be encoded here, in this step, and has its room for that."""
        item = self.items.get(request.mm_features[input_id].identifier)
        if item is None or not self.may_encode(item, request.request_id):
            return False
        together = num_embeds_to_schedule + item.num_embeds
        if num_embeds_to_schedule and 0 < self._encode_together < together:
            return False
        return item.num_embeds <= encoder_compute_budget

    def may_encode(self, item: Item, request_id: str) -> bool:
        """Tell whether a request may encode an item now: it has room, and the request its media."""
        if item.state is not State.LOCAL or request_id not in item.holders:
            return False
        return not self._claimants[request_id].claims[item.mm_hash].metadata_only

    def allocate(self, request: MultiModalRequest, input_id: int) -> None:
        """The step that is being scheduled encodes the item; `can_allocate` said yes."""
        item = self.items[request.mm_features[input_id].identifier]
        if item.state is State.LOCAL:
            item.state = State.PRESENT
            item.origin = None
            self._is_here(item)

    def free_encoder_input(self, request: MultiModalRequest, input_id: int) -> None:
        """The request has computed past the item; its claim ends with the last occurrence."""
        who = self._claimants.get(request.request_id)
        if who is None:
            return
        self._drop_inputs(request.request_id, {input_id})
        claim = who.claims.get(request.mm_features[input_id].identifier)
        if claim is not None:
            claim.inputs.discard(input_id)
            if not claim.inputs:
                self.end(claim)

    def free(self, request: MultiModalRequest) -> None:
        """The request was preempted, or could not be started: it keeps the room that it has.

        vLLM calls this as well when a request has ended, and its claims are over.
        """
        who = self._claimants.get(request.request_id)
        if who is not None:
            self.set_running(who, False)
            self.unsettled.add(who.request_id)

    # --------------------------------------------------------------------------------------------

    def _enqueue(self, claim: Claim) -> None:
        claim.served = False
        claim.who.noted_tokens = -1
        claim.item.wanted[claim.who.request_id] = claim
        claim.who.num_waiting += 1
        self._num_waiting += 1
        self._push(claim)
        self._count(claim.who)
        self._stirred = True

    def _push(self, claim: Claim) -> None:
        """Give a claim its place in the queue; entries for former places do not count any more."""
        if len(self._queue) > 4 * self._num_waiting + 64:
            self._queue = [each for each in self._queue if _counts(each)]
            heapq.heapify(self._queue)
        entry = (claim.who.rank, claim.place, next(self._numbers), claim)
        heapq.heappush(self._queue, entry)

    def _first(self) -> Claimant | None:
        """Return the request of the first claim that waits."""
        while self._queue and not _counts(self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][-1].who if self._queue else None

    def _wake(self, who: Claimant) -> None:
        if who.sleeps:
            who.sleeps = False
            self._woken.append(who.request_id)

    def _serve(self, claim: Claim) -> bool:
        """Give a claim its item's room, or tell that there is none."""
        item = claim.item
        reserved = False
        if item.state is State.WAITING:
            if item.transfers:
                reserved = self._reserve(item)
                if not reserved:
                    return False
            elif claim.metadata_only:
                self._lose(claim, "it is not here any more")
                return True
            elif self._make_room(item.num_embeds):
                self._occupy(item, State.ENCODING if self._encode(claim) else State.LOCAL)
            else:
                return False
        who = claim.who
        claim.served = True
        self._wait_is_over(claim)
        self._hold(item, who.request_id)
        self._count(who)
        self._wake(who)
        if item.is_here:
            self._is_here(item)
        elif reserved:
            self._deliveries.room_given(item)
        return True

    def _wait_is_over(self, claim: Claim) -> None:
        del claim.item.wanted[claim.who.request_id]
        claim.who.num_waiting -= 1
        self._num_waiting -= 1

    def _reserve(self, item: Item) -> bool:
        """Give an item room and a slot, or neither; begin to make room where that is possible."""
        assert item.tensor is not None
        if item.mm_hash in self._resident:  # the workers read its former slot
            return False
        if not self.can_preallocate(item.num_embeds):
            return False
        item.slot = self._slots.take(item.tensor.nbytes)
        if item.slot is None:
            if not self._retiring:
                self._evict_resident()
            return False
        self.preallocate(item.mm_hash, item.num_embeds)
        return True

    def _evict_resident(self) -> None:
        if any(mm_hash in self._resident for mm_hash in self._freed):
            return  # One went already, which the workers have not been told yet.
        for mm_hash, item in self._idle.items():
            if mm_hash in self._resident:
                self._evict(item)
                return

    def _make_way(self, first: Claim) -> bool:
        """Let the last claim that comes after, of a request that waits for more, give room back.

        For who computes, requests give way that have all their room and were not started: they may
        wait for its seat.
        """
        others: Iterable[Claimant] = self._partial.values()
        if first.who.running:
            others = [
                each for each in self._claimants.values() if not each.running or each.num_waiting
            ]
        for who in sorted(others, key=lambda each: each.rank, reverse=True):
            for claim in sorted(who.claims.values(), key=lambda each: each.place, reverse=True):
                if (who.rank, claim.place) <= (first.who.rank, first.place):
                    break
                if claim.served and claim.item.state not in _UNDER_WAY:
                    self._unserve(claim)
                    self._settle(claim.item)
                    return True
        return False

    def _unserve(self, claim: Claim) -> None:
        """Take an item's room from a request, whose claim queues again."""
        self._release(claim.item, claim.who.request_id)
        self._drop_inputs(claim.who.request_id, claim.inputs)
        self._enqueue(claim)

    def _drop_inputs(self, request_id: str, computed: set[int]) -> None:
        """Let the engine compute with these occurrences of a request's items no more."""
        inputs = self._inputs.get(request_id)
        if inputs is not None:
            inputs -= computed
            if not inputs:
                del self._inputs[request_id]

    def _wait_again(self, item: Item) -> None:
        """An item has lost its room on its way: everybody who held it queues again."""
        for request_id in list(item.holders):
            self._unserve(self._claimants[request_id].claims[item.mm_hash])
        self._give_room_back(item)

    def _settle(self, item: Item) -> None:
        """Give back what nobody keeps, and end the transfers of what nobody wants."""
        if item.is_here:
            self._end_vain_transfers(item)
            return
        if item.holders:
            if item.state is State.LOCAL and not any(
                self.may_encode(item, request_id) for request_id in item.holders
            ):
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

    def _drop(self, item: Item) -> None:
        """Forget an item that nobody uses, whatever its state."""
        self._deliveries.not_wanted(item)
        if item.is_here:
            self._evict(item)
        else:
            self._give_room_back(item)

    def _is_here(self, item: Item) -> None:
        """Let everybody who holds an item compute with it."""
        for request_id in item.holders:
            claim = self._claimants[request_id].claims[item.mm_hash]
            self._inputs.setdefault(request_id, set()).update(claim.inputs)
            self._wake(claim.who)
        self._end_vain_transfers(item)

    def _end_vain_transfers(self, item: Item) -> None:
        """End the transfers of an item that is here.

        But for those of requests that may still lose it: it may be evicted before their turn.
        """
        if item.transfers:
            wanted = {claim.transfer_id for claim in item.wanted.values()}
            self._deliveries.not_wanted(item, but=wanted)

    def _lose(self, claim: Claim, reason: str) -> None:
        who, item = claim.who, claim.item
        who.lost[item.mm_hash] = reason
        self.end(claim)
        self._wake(who)

    def _count(self, who: Claimant) -> None:
        if 0 < who.num_waiting < len(who.claims):
            self._partial[who.request_id] = who
        else:
            self._partial.pop(who.request_id, None)


class SyncEncoderCachePreallocator(EncoderCachePreallocator):
    """Gives room to what requests claim, and nothing else."""

    def accept(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Reserve nothing: the announcement waits for its request."""
        return None


class AsyncEncoderCachePreallocator(EncoderCachePreallocator):
    """Accepts items before any request has asked for them.

    An accepted item holds nobody up for good: none is accepted while a claim waits, what is
    accepted lands or ends at a deadline, and once landed it is evicted like every idle entry.
    """

    accepts_early = True

    def accept(self, mm_hash: str, tensor: TensorSpec) -> Item | None:
        """Reserve room unless a claim waits for some, the item is known, or could never fit."""
        num_embeds = tensor.shape[0]
        if self.is_blocked or mm_hash in self.items or mm_hash in self._resident:
            return None
        if not self.fits_at_all(num_embeds, tensor.nbytes):
            return None
        item = Item(mm_hash, num_embeds, tensor)
        self.items[mm_hash] = item
        if not self._reserve(item):
            del self.items[mm_hash]
            return None
        return item


PREALLOCATORS: dict[str, type[EncoderCachePreallocator]] = {
    "sync": SyncEncoderCachePreallocator,
    "async": AsyncEncoderCachePreallocator,
}
"""By the value of ``transfer.preallocation``."""


def _counts(entry: Entry) -> bool:
    """Tell whether the claim waits, and in this place."""
    claim = entry[-1]
    return not claim.served and not claim.over and entry[0] == claim.who.rank


def _waits_with_room(who: Claimant) -> bool:
    """Tell whether a request has room, and will not want another to encode its items first."""
    served = [claim for claim in who.claims.values() if claim.served]
    return bool(served) and not any(
        claim.metadata_only and claim.item.state is State.LOCAL for claim in served
    )
