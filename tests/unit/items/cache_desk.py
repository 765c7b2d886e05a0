"""A preallocator between a small encoder cache and a small pool, worked by hand."""

from __future__ import annotations

from collections.abc import Iterable

from epd_portable.items.items import Claim, Claimant, Item, PromptItem, State
from epd_portable.items.preallocator import EncoderCachePreallocator
from epd_portable.items.slots import ReceivePool
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from tests.unit.builders import FakeRequest, request


def tensor(size: int) -> TensorSpec:
    """Return an output of ``size`` embeddings in as many bytes."""
    return TensorSpec(shape=(size, 1), dtype="float8_e5m2")


class Desk:
    """By default room for ten embeddings and ten bytes. Stands for the transfers as well.

    Attributes:
        cache: The preallocator.
        given: Items that were given a slot, since `reserve` was called last.
        ended: Transfers that nobody wants any more.
        background: Whether items are encoded beside the steps.
        writing: Slots that were granted and taken back; a producer may still write them.
    """

    def __init__(
        self, cache_embeds: int = 10, pool_bytes: int = 10, *, background: bool = False
    ) -> None:
        self.pool = ReceivePool("pool", pool_bytes, 1)
        self.background = background
        self.cache = EncoderCachePreallocator(
            cache_embeds,
            self.pool,
            self,
            encode=lambda claim: self.background,
        )
        self.given: list[str] = []
        self.ended: list[str] = []
        self.writing: list[SlotDescriptor] = []
        self._people: dict[str, Claimant] = {}
        self._prompts: dict[str, dict[int, tuple[str, int]]] = {}
        self._granted: dict[str, str] = {}

    # -- transfers: `Deliveries`, and what becomes of them -----------------------------------------

    def room_given(self, item: Item) -> None:
        if item.mm_hash not in self.given:
            self.given.append(item.mm_hash)

    @property
    def has_revoked_slots(self) -> bool:
        return bool(self.writing)

    def announced(self, item: Item) -> list[str]:
        return list(item.transfers)

    def not_wanted(self, item: Item, but: Iterable[str] = ()) -> None:
        for transfer_id in [each for each in item.transfers if each not in but]:
            self._end(item, transfer_id)
            if self._granted.get(item.mm_hash) == transfer_id:
                self._take_slot(item)

    def grant(self, mm_hash: str) -> None:
        """Let the first transfer of an item write the item's slot."""
        item = self.cache.items[mm_hash]
        assert item.state is State.RESERVED
        self._granted[mm_hash] = next(iter(item.transfers))
        item.state = State.GRANTED

    def deliver(self, mm_hash: str) -> None:
        """Let an item land that has a slot."""
        item = self.cache.items[mm_hash]
        if item.state is State.RESERVED:
            self.grant(mm_hash)
        self._end(item, self._granted.pop(mm_hash))
        self.cache.landed(item)

    def lose_slot(self, mm_hash: str) -> None:
        """Take back what was granted; the transfer goes on, for another encoder."""
        item = self.cache.items[mm_hash]
        self._take_slot(item)
        self.cache.lost_slot(item)

    def lose_transfers(self, mm_hash: str, reason: str = "") -> None:
        """Let every transfer of an item that was not granted fail."""
        item = self.cache.items[mm_hash]
        for transfer_id in list(item.transfers):
            self._end(item, transfer_id)
        self.cache.lost_transfer(item, reason)

    def release(self) -> None:
        """Nobody writes any more what was granted and taken back."""
        while self.writing:
            self.pool.give_back(self.writing.pop())
            self.cache.stir()

    def _end(self, item: Item, transfer_id: str) -> None:
        del item.transfers[transfer_id]
        self.ended.append(transfer_id)

    def _take_slot(self, item: Item) -> None:
        del self._granted[item.mm_hash]
        assert item.slot is not None
        self.writing.append(item.slot)
        item.slot = None

    # -- requests ----------------------------------------------------------------------------------

    def who(self, request_id: str) -> Claimant:
        """Return a request; the first time, it arrives."""
        if request_id not in self._people:
            self._people[request_id] = Claimant(request_id, len(self._people))
            self._prompts[request_id] = {}
            self.cache.enter(self._people[request_id])
        return self._people[request_id]

    def run(self, request_id: str, running: bool = True) -> None:
        """Let the engine begin to compute a request, or take its seat back."""
        claimant = self.who(request_id)
        self.cache.moved(claimant, claimant.num_computed_tokens, running=running)

    def preempt(self, request_id: str) -> None:
        """Take back a request's seat and all that it has computed."""
        self.cache.free(self.request(request_id))
        self.cache.moved(self.who(request_id), 0, running=False)

    def request(self, request_id: str) -> FakeRequest:
        """Return what the engine has of a request."""
        prompt = self._prompts[request_id]
        return request(request_id, *(prompt.get(i, ("", 0)) for i in range(max(prompt) + 1)))

    def claim(
        self,
        request_id: str,
        mm_hash: str,
        size: int,
        input_id: int = 0,
        *,
        by_transfer: bool = True,
        metadata_only: bool = False,
    ) -> Claim:
        """Let a request claim an item that a transfer of its own is to bring, or is encoded here.

        The transfer is called ``t-`` and the request.
        """
        claimant = self.who(request_id)
        if metadata_only:
            claimant.metadata_only |= {mm_hash}
        self._prompts[request_id][input_id] = (mm_hash, size)
        place = PromptItem(
            input_id=input_id,
            mm_hash=mm_hash,
            begin=input_id,
            end=input_id + 1,
            num_embeds=size,
            tensor=tensor(size),
        )
        transfer_id = f"t-{request_id}" if by_transfer else ""
        claim = self.cache.claim(claimant, place, transfer_id)
        assert claim is not None, "something else bears the name"
        if by_transfer:
            claim.item.transfers[transfer_id] = transfer_id
        return claim

    def claim_local(
        self,
        request_id: str,
        mm_hash: str,
        size: int,
        input_id: int = 0,
        *,
        metadata_only: bool = False,
    ) -> Claim:
        return self.claim(
            request_id, mm_hash, size, input_id, by_transfer=False, metadata_only=metadata_only
        )

    def leave(self, request_id: str) -> None:
        self.cache.leave(self._people[request_id])

    def reserve(self) -> list[str]:
        """Give out room; return the items that got a slot."""
        self.given.clear()
        self.cache.advance()
        return list(self.given)

    def may_encode(self, request_id: str, input_id: int = 0) -> bool:
        return self.cache.can_allocate(self.request(request_id), input_id, 1 << 20, 0)

    def encode(self, request_id: str, input_id: int = 0) -> None:
        """Encode an item here, which has its room for that."""
        assert self.may_encode(request_id, input_id)
        self.cache.allocate(self.request(request_id), input_id)

    def compute_past(self, request_id: str, input_id: int = 0) -> None:
        self.cache.free_encoder_input(self.request(request_id), input_id)

    def begin_step(self) -> list[SlotDescriptor]:
        """Tell the workers what to forget; return the slots that are free when they have."""
        slots = [self.cache.retire(gone) for gone in self.cache.get_freed_mm_hashes()]
        return [slot for slot in slots if slot is not None]

    def step(self) -> None:
        """Tell the workers what to forget, and end that step."""
        self.cache.give_back(self.begin_step())

    def assert_everything_is_back(self) -> None:
        """Empty the cache; all room and every slot must be free then."""
        self.cache.reset()
        self.step()
        self.release()
        assert self.pool.free_bytes == self.pool.capacity_bytes
        assert self.cache.num_free_slots == self.cache.num_freeable_slots == self.cache.cache_size
        assert not self.cache.items
        assert not self.cache.requests
