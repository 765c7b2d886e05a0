"""Items of one engine: the only code that changes an item's state, slot or holders.

An item takes space in the encoder cache, and a receive slot if another engine encodes it. Requests
*claim* it. A claim is *served* while the request is among the item's holders, and *pending* while
the request has to wait for that. It ends when the request has computed past the item, has ended, or
cannot have the item::

    WAITING ──space──▶ RESERVED ──▶ GRANTED ──▶ LANDED ──▶ PRESENT      by a transfer
       ▲  │                │           │           │          │
       │  └─────space──▶ LOCAL ──────────────────────────▶ PRESENT      encoded in a step
       │                 │ │ ▲         │           │          │
       │                 │ ▼ │ failed  │           │          │
       │                 │ ENCODING ─────────────────────▶ PRESENT      in the background
       └─────────────────┴─────────────┴───────────┴──────────┘
              transfer lost, space released, entry evicted

`ItemTable` is the table of both roles. Its users are `epd_portable.encode.two_levels` (an encode
engine) and `epd_portable.items.encoder_cache` (a prefill+decode engine), which add the methods
that vLLM's scheduler calls (0.26 to 0.33). Space is counted in encoder embeddings.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from epd_portable.items.slots import Slot
from epd_portable.log import trace
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome


class State(enum.Enum):
    """Progress of an item."""

    WAITING = enum.auto()
    """No space."""
    LOCAL = enum.auto()
    """Space, to be encoded here in a step."""
    ENCODING = enum.auto()
    """Space, encoded here in the background; nothing stops that before its end."""
    RESERVED = enum.auto()
    """Space and a slot, which no encoder may write yet."""
    GRANTED = enum.auto()
    """An encoder may write the slot."""
    LANDED = enum.auto()
    """The slot is written; the workers have not placed it."""
    PRESENT = enum.auto()
    """In the workers' encoder caches, or computed by the step that was scheduled."""


_NEXT = {
    State.WAITING: {State.RESERVED, State.LOCAL, State.PRESENT},
    State.LOCAL: {State.ENCODING, State.PRESENT, State.WAITING},
    State.ENCODING: {State.LOCAL, State.PRESENT},
    State.RESERVED: {State.GRANTED, State.WAITING},
    State.GRANTED: {State.LANDED, State.WAITING},
    State.LANDED: {State.PRESENT, State.WAITING},
    State.PRESENT: {State.WAITING},
}
UNDER_WAY = (State.GRANTED, State.ENCODING)
"""States of items whose space cannot be released before something has ended."""


@dataclass(slots=True, eq=False)
class Item:
    """Encoder output, by the engine's name for it.

    Attributes:
        num_embeds: Space that it takes in the encoder cache.
        tensor: Its shape and dtype; ``None`` where nothing is received.
        holders: Ids of requests whose claims are served, and of transfers to other engines.
        pending: Claims that are not served, by request.
        transfers: Transfers that may bring it, by ``transfer_id``.
        slot: Its slot, from the reservation until it is written.
    """

    mm_hash: str
    num_embeds: int
    tensor: TensorSpec | None = None
    state: State = State.WAITING
    holders: set[str] = field(default_factory=set)
    pending: dict[str, Claim] = field(default_factory=dict)
    transfers: dict[str, Any] = field(default_factory=dict)
    slot: Slot | None = None

    @property
    def promised_transfers(self) -> set[str]:
        """Transfers of pending requests that have no other way to the item."""
        return {claim.transfer_id for claim in self.pending.values() if claim.metadata_only}

    @property
    def is_here(self) -> bool:
        """Return whether a step may compute with it: it is an entry of the encoder cache."""
        return self.state is State.PRESENT or self.state is State.LANDED

    @property
    def is_idle(self) -> bool:
        """Return whether it is an entry that may be evicted."""
        return self.is_here and not self.holders


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """Place of an item in a prompt.

    Attributes:
        input_id: Index in the request's ``mm_features``.
        mm_hash: The engine's identifier.
        begin: First prompt token of the item.
        end: One past its last.
        num_embeds: Embeddings that the encoder puts out for it.
        tensor: Shape and dtype of that output.
        modality: The engine's: ``image``, ``video`` or ``audio`` with most models.
        has_media: Whether the request holds the item's media, so that it can be encoded here.
        media: These (vLLM's ``MultiModalKwargsItem``), if it can be encoded in the background.
    """

    input_id: int
    mm_hash: str
    begin: int
    end: int
    num_embeds: int
    tensor: TensorSpec
    modality: str = "image"
    has_media: bool = True
    media: Any = None


@dataclass(slots=True, eq=False)
class ItemRequest:
    """Request with items, in a prefill+decode engine.

    Attributes:
        number: Its place in the order of arrival.
        items: Places of items in its prompt, in the order of the prompt.
        metadata_only: ``mm_hash`` of items that it cannot encode here: it holds no media, or the
            engine has no encoder.
        claims: By ``mm_hash``; claims that have ended are not among them.
        running: The engine has begun to compute it.
        num_computed_tokens: Tokens whose KV is there, prefix cache included; before the request is
            running, tokens whose KV would be there if it began.
        lost: Reason for which it cannot have an item, by ``mm_hash``.
        failed: It will be ended without a response, and claims nothing any more.
        expired: It has waited for others to bring its items as long as it may: from now on it
            encodes an item that is not here, or has lost it.
        transfers: Transfers of its items, by ``mm_hash``.
        arrived_s: Time at which it was added.
        outcomes: Source of each item, by ``mm_hash``.
        mm_inputs_done: Items that lie wholly in the computed tokens, prefix cache included.
    """

    request_id: str
    number: int
    items: Sequence[PromptItem] = ()
    metadata_only: frozenset[str] = frozenset()
    claims: dict[str, Claim] = field(default_factory=dict)
    running: bool = False
    num_computed_tokens: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    expired: bool = False
    transfers: Mapping[str, ExpectedTransfer] = field(default_factory=dict)
    arrived_s: float = 0.0
    outcomes: dict[str, ItemOutcome] = field(default_factory=dict)
    mm_inputs_done: int = 0
    _reach: list[int] = field(default_factory=list)
    """Index past the last token of each item and of those before it."""

    def __post_init__(self) -> None:
        self._reach = list(accumulate((item.end for item in self.items), max))

    @property
    def is_pending(self) -> bool:
        """Return whether one of its claims is pending."""
        return any(claim.is_pending for claim in self.claims.values())

    @property
    def next_item(self) -> int:
        """Index of the first item that is not wholly computed; their number if there is none."""
        return bisect_right(self._reach, self.num_computed_tokens)

    def note(self, outcome: ItemOutcome) -> None:
        """Remember the source of an item: the first one counts, but for a local encode."""
        if outcome.source == "local" or outcome.mm_hash not in self.outcomes:
            self.outcomes[outcome.mm_hash] = outcome

    def note_local(self, mm_hash: str) -> None:
        """Remember that an item is encoded on this engine."""
        self.note(ItemOutcome(mm_hash=mm_hash, source="local"))
        trace("item.local", request=self.request_id, mm_hash=mm_hash)


COMPUTED = 1 << 30
"""Place of a claim of which every occurrence is computed."""


@dataclass(slots=True, eq=False)
class Claim:
    """Claim of a request on one item.

    Attributes:
        inputs: The item's places in the prompt, by index among the request's items.
        transfer_id: The request's own transfer of it; empty if it has none.
        place: Index of the first occurrence that is not computed, else `COMPUTED`.
    """

    request: ItemRequest
    item: Item
    transfer_id: str = ""
    inputs: dict[int, PromptItem] = field(default_factory=dict)
    place: int = COMPUTED

    @property
    def metadata_only(self) -> bool:
        """Return whether the request cannot encode the item here."""
        return self.item.mm_hash in self.request.metadata_only

    @property
    def is_served(self) -> bool:
        """Return whether the request holds the item."""
        return self.request.request_id in self.item.holders

    @property
    def is_pending(self) -> bool:
        """Return whether the request does not hold the item, and needs it next or later."""
        return self.place != COMPUTED and self.item.pending.get(self.request.request_id) is self

    @property
    def by_transfer(self) -> bool:
        """Return whether another engine may deliver the item to this request, if it is not here.

        The transfer of a pending request that has no other way to the item serves others only if it
        serves that request: the item may be evicted before its turn.
        """
        item = self.item
        if self.request.expired or not item.transfers:
            return False
        if self.transfer_id in item.transfers or (self.metadata_only and not self.transfer_id):
            return True
        return not item.transfers.keys() <= item.promised_transfers


class MultiModalRequest(Protocol):
    """The part of vLLM's ``Request`` that the encoder caches read.

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


class ItemTable:
    """Items of one engine, and the space that they take in its encoder cache.

    An entry without holders stays until its space is needed; the one idle for longest is evicted
    first. The scheduler passes evictions on to the workers by `get_freed_mm_hashes`.

    Attributes:
        num_free_slots: Free space.
        num_freeable_slots: Free space and the space of idle entries.
        items: Items with space, claims or transfers, by ``mm_hash``.
        version: Number of changes of items so far.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self.items: dict[str, Item] = {}
        self.version = 0
        self._idle: OrderedDict[str, Item] = OrderedDict()
        self._freed: list[str] = []

    # -- transitions -----------------------------------------------------------------------------

    def occupy(self, item: Item, state: State, slot: Slot | None = None) -> None:
        """Give an item space that is free, and its slot if it has one."""
        assert item.num_embeds <= self.num_free_slots, "occupy without make_space"
        self.items[item.mm_hash] = item
        self.num_free_slots -= item.num_embeds
        self.num_freeable_slots -= item.num_embeds
        item.slot = slot
        self._move(item, state)

    def grant(self, item: Item) -> None:
        """Let an encoder write the item's slot."""
        self._move(item, State.GRANTED)

    def land(self, item: Item) -> None:
        """Make a written item an entry; the slot is the workers'."""
        item.slot = None
        self._move(item, State.LANDED)

    def placed(self, item: Item) -> None:
        """Note that the step that was scheduled places a written item."""
        self._move(item, State.PRESENT)

    def begin_encoding(self, item: Item) -> None:
        """Note that workers encode an item in the background."""
        self._move(item, State.ENCODING)

    def end_encoding(self, item: Item, *, failed: bool = False) -> None:
        """Make an encoded item an entry, or have a step encode it."""
        self._move(item, State.LOCAL if failed else State.PRESENT)

    def vacate(self, item: Item) -> Slot | None:
        """Take the space of an item that is no entry; return its slot, which it has no more."""
        assert not item.is_here and not item.holders
        slot, item.slot = item.slot, None
        self.num_free_slots += item.num_embeds
        self.num_freeable_slots += item.num_embeds
        self._move(item, State.WAITING)
        self.forget_if_unused(item)
        return slot

    def evict(self, item: Item) -> None:
        """Take the space of an idle entry."""
        del self._idle[item.mm_hash]
        self.num_free_slots += item.num_embeds
        self._freed.append(item.mm_hash)
        self._move(item, State.WAITING)
        self.forget_if_unused(item)

    def hold(self, item: Item, holder: str) -> None:
        """Keep an item's space for a request, or for a transfer that outlives its request."""
        item.holders.add(holder)
        if self._idle.pop(item.mm_hash, None) is not None:
            self.num_freeable_slots -= item.num_embeds
        self._touch(item)

    def release(self, item: Item, *holders: str) -> None:
        """End what `hold` began; does nothing the second time."""
        if not item.holders.isdisjoint(holders):
            item.holders.difference_update(holders)
            self._touch(item)

    def forget_if_unused(self, item: Item) -> None:
        """Drop an item without space, claims and transfers."""
        unused = item.state is State.WAITING and not item.pending and not item.transfers
        if unused and self.items.get(item.mm_hash) is item:
            del self.items[item.mm_hash]

    def make_space(self, num_embeds: int) -> bool:
        """Evict idle entries until so much is free; return whether that was possible."""
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            self.evict(next(iter(self._idle.values())))
        return True

    def _move(self, item: Item, state: State) -> None:
        assert state in _NEXT[item.state], f"{item.mm_hash}: {item.state.name} to {state.name}"
        item.state = state
        if state is State.LANDED or state is State.PRESENT:
            self._touch(item)
        else:
            self.version += 1

    def _touch(self, item: Item) -> None:
        """Note that an item has changed; an entry without holders is idle from now on."""
        self.version += 1
        if item.is_idle and item.mm_hash not in self._idle:
            self._idle[item.mm_hash] = item
            self.num_freeable_slots += item.num_embeds

    def holders(self, mm_hash: str) -> frozenset[str]:
        """Return the holders of an entry; none if there is no entry."""
        return frozenset(self.items[mm_hash].holders) if mm_hash in self else frozenset()

    def __contains__(self, mm_hash: str) -> bool:
        """Return whether the item has an entry."""
        item = self.items.get(mm_hash)
        return item is not None and item.is_here

    # -- calls of vLLM's scheduler ---------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget every entry; other items stay as they are.

        The workers forget at the same time, but `get_freed_mm_hashes` returns the entries all the
        same: their receive slots become free on that.
        """
        for item in [each for each in self.items.values() if each.is_here]:
            self.release(item, *item.holders)
            self.evict(item)

    def get_cached_num_encoder_embeds(
        self, request: MultiModalRequest, input_id: int, *args: Any, **kwargs: Any
    ) -> int | None:
        """Return the size of the item's entry, or ``None`` (called by vLLM 0.31 and later)."""
        item = self.items.get(request.mm_features[input_id].identifier)
        return item.num_embeds if item is not None and item.is_here else None

    def get_freed_mm_hashes(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return items that were evicted since the last call and are not entries again."""
        freed = [mm_hash for mm_hash in self._freed if mm_hash not in self]
        self._freed.clear()
        return freed

    def get_manager_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing for the workers (called by vLLM 0.29 and later)."""
