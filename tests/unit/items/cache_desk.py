"""A small encoder cache with a small pool, worked by hand."""

from __future__ import annotations

from epd_portable.items import room
from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.slots import ReceivePool, Slot, SlotState
from epd_portable.items.table import Claim, Item, ItemRequest, State
from epd_portable.wire.descriptors import TensorSpec
from tests.unit.builders import FakeRequest, place, request


def tensor(size: int) -> TensorSpec:
    """Return an output of ``size`` embeddings in as many bytes."""
    return TensorSpec(shape=(size, 1), dtype="float8_e5m2")


class Desk:
    """By default space for ten embeddings and ten bytes. Stands for the transfers as well.

    Attributes:
        cache: The encoder cache.
        given: Items that were given a slot, since `reserve` was called last.
        ended: Transfers that are not needed any more.
        background: Whether items are encoded beside the steps.
        writing: Slots that were granted and taken back; a producer may still write them.
    """

    def __init__(
        self, cache_embeds: int = 10, pool_bytes: int = 10, *, background: bool = False
    ) -> None:
        self.pool = ReceivePool("pool", pool_bytes, 1)
        self.background = background
        self.cache = PrefillEncoderCache(cache_embeds, self.pool)
        self.given: list[str] = []
        self.ended: list[str] = []
        self.writing: list[Slot] = []
        self._requests: dict[str, ItemRequest] = {}
        self._prompts: dict[str, dict[int, tuple[str, int]]] = {}
        self._granted: dict[str, str] = {}
        self._steps = 0

    def reconcile(self) -> bool:
        """Bring transfers in line with items that have changed; return whether any have."""
        touched = self.cache.take_touched()
        for item in touched:
            if item.is_here:
                pending = {each.transfer_id for each in item.pending.values()}
                self._end_all(item, but=pending)
            elif not item.holders and not item.pending:
                self._end_all(item)
            elif item.state is State.RESERVED and item.mm_hash not in self.given:
                self.given.append(item.mm_hash)
        return bool(touched)

    def grant(self, mm_hash: str) -> None:
        """Let the first transfer of an item write the item's slot."""
        item = self.cache.items[mm_hash]
        self.cache.grant(item)
        self._granted[mm_hash] = next(iter(item.transfers))

    def deliver(self, mm_hash: str) -> None:
        """Let an item land that has a slot."""
        item = self.cache.items[mm_hash]
        if item.state is State.RESERVED:
            self.grant(mm_hash)
        self._end(item, self._granted.pop(mm_hash))
        self.cache.land(item)
        self.reconcile()

    def lose_slot(self, mm_hash: str) -> None:
        """Take back what was granted; the transfer goes on, for another encoder."""
        self._revoke(self.cache.items[mm_hash])
        self.reconcile()

    def lose_transfers(self, mm_hash: str, reason: str = "") -> None:
        item = self.cache.items[mm_hash]
        self._end_all(item)
        self.cache.transfer_failed(item, reason)
        self.reconcile()

    def release(self) -> None:
        """Let producers confirm that they do not write; the next step frees their slots."""
        while self.writing:
            self.cache.pool.move(self.writing.pop(), SlotState.RETIRING)

    def _end_all(self, item: Item, but: set[str] | None = None) -> None:
        for transfer_id in [each for each in item.transfers if each not in (but or ())]:
            if self._granted.get(item.mm_hash) == transfer_id:
                self._revoke(item)
            self._end(item, transfer_id)
        self.cache.forget_if_unused(item)

    def _end(self, item: Item, transfer_id: str) -> None:
        del item.transfers[transfer_id]
        self.ended.append(transfer_id)

    def _revoke(self, item: Item) -> None:
        del self._granted[item.mm_hash]
        assert item.slot is not None
        self.writing.append(item.slot)
        self.cache.revoke(item)

    def who(self, request_id: str) -> ItemRequest:
        """Return a request; the first time, it arrives."""
        if request_id not in self._requests:
            self._requests[request_id] = ItemRequest(request_id, len(self._requests))
            self._prompts[request_id] = {}
            self.cache.enter(self._requests[request_id])
        return self._requests[request_id]

    def may_start(self, request_id: str) -> bool:
        return room.may_start(self.cache, self.who(request_id))

    def run(self, request_id: str, running: bool = True) -> None:
        """Let the engine begin to compute a request, or stop."""
        made = self.who(request_id)
        self.cache.moved(made, made.num_computed_tokens, running=running)
        self.reconcile()

    def preempt(self, request_id: str) -> None:
        """Preempt a request, and take back all that it has computed."""
        self.cache.free(self.request(request_id))
        self.cache.moved(self.who(request_id), 0, running=False)
        self.reconcile()

    def request(self, request_id: str) -> FakeRequest:
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
        made = self.who(request_id)
        if metadata_only:
            made.metadata_only |= {mm_hash}
        self._prompts[request_id][input_id] = (mm_hash, size)
        media = "media" if self.background else None
        item = place(mm_hash, tensor(size), input_id, 1, input_id=input_id, media=media)
        if input_id == len(made.items):
            made.items = [*made.items, item]
            made.__post_init__()
        transfer_id = f"t-{request_id}" if by_transfer else ""
        claim = self.cache.claim(made, item, transfer_id)
        assert claim is not None, "another item has the name"
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
        self.cache.leave(self._requests[request_id])
        self.reconcile()

    def reserve(self) -> list[str]:
        """Give out space; return the items that got a slot."""
        self.reconcile()
        self.given.clear()
        self.cache.serve()
        while self.reconcile():
            self.cache.serve()
        return [each for each in self.given if self.cache.items[each].slot is not None]

    def may_encode(self, request_id: str, input_id: int = 0) -> bool:
        return self.cache.can_allocate(self.request(request_id), input_id, 1 << 20, 0)

    def encode(self, request_id: str, input_id: int = 0) -> None:
        """Encode an item here, which has its space for that."""
        assert self.may_encode(request_id, input_id)
        self.cache.allocate(self.request(request_id), input_id)
        self.reconcile()

    def compute_past(self, request_id: str, input_id: int = 0) -> None:
        self.cache.free_encoder_input(self.request(request_id), input_id)
        self.reconcile()

    def begin_step(self, *placed: str) -> int:
        """Pass on to the workers what to forget; return the step, whose end frees slots."""
        self._steps += 1
        for mm_hash in (*self.cache.get_freed_mm_hashes(), *placed):
            self.cache.retire(mm_hash)
        self.pool.pass_on(self._steps)
        return self._steps

    def step(self) -> None:
        self.cache.step_ended(self.begin_step())

    def assert_everything_is_back(self) -> None:
        """Empty the cache; all space and every slot must be free then."""
        self.cache.reset()
        self.release()
        self.step()
        self.reconcile()
        assert self.pool.free_bytes == self.pool.capacity_bytes
        assert self.cache.num_free_slots == self.cache.num_freeable_slots == self.cache.cache_size
        assert not self.cache.items
        assert not self.cache.requests
