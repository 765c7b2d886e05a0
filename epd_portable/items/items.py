"""What a prefill+decode instance knows of items: one `Item` a name, one `Claim` a request and item.

An item takes room in the encoder cache, and a receive slot if it comes from elsewhere. Requests
*claim* it. A claim is *served* when the item has room that is kept for the request; it is *over*
when the request has computed past the item, has ended, or cannot have it::

    WAITING ──room──▶ RESERVED ──▶ GRANTED ──▶ LANDED ──▶ PRESENT      by a transfer
       ▲  │               │           │           │          │
       │  └────room──▶ LOCAL ─────────────────────────▶ PRESENT        encoded in a step
       │  └────room──▶ ENCODING ──────────────────────▶ PRESENT        in the background
       └──────────────────┴───────────┴───────────┴──────────┘
              transfer lost, room given up, entry evicted

Whether an item that waits will be reserved or encoded here depends on whether a transfer of it is
under way when there is room.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from epd_portable.log import trace
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome


class State(enum.Enum):
    """How far an item has come."""

    WAITING = enum.auto()
    """It has no room."""
    LOCAL = enum.auto()
    """It has room, and is to be encoded here, in a step."""
    ENCODING = enum.auto()
    """It has room, and is encoded here in the background; nothing stops that before its end."""
    RESERVED = enum.auto()
    """It has room and a slot, which is not written yet."""
    GRANTED = enum.auto()
    """An encoder may write its slot."""
    LANDED = enum.auto()
    """It is in its slot; the workers have not placed it."""
    PRESENT = enum.auto()
    """It is in the workers' encoder caches, or computed by the step that was scheduled."""


@dataclass(slots=True, eq=False)
class Item:
    """One encoder output, by the engine's name for it.

    Attributes:
        num_embeds: Room that it takes in the encoder cache.
        tensor: What it is; ``None`` where nothing is received.
        state: How far it has come.
        holders: Of its room: ids of requests whose claims are served, and of transfers to others.
        wanted: Claims that are not served, by request.
        transfers: On their way here, by ``transfer_id``.
        slot: Where it is written, from its reservation until it is in the workers' hands.
    """

    mm_hash: str
    num_embeds: int
    tensor: TensorSpec | None = None
    state: State = State.WAITING
    holders: set[str] = field(default_factory=set)
    wanted: dict[str, Claim] = field(default_factory=dict)
    transfers: dict[str, Any] = field(default_factory=dict)
    slot: SlotDescriptor | None = None

    @property
    def kept_transfers(self) -> set[str]:
        """Transfers of requests that wait for their turn and cannot do without the item."""
        return {claim.transfer_id for claim in self.wanted.values() if claim.metadata_only}

    @property
    def is_here(self) -> bool:
        """Whether a step may compute with it."""
        return self.state is State.PRESENT or self.state is State.LANDED


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """One place of an item in a prompt.

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
class Claimant:
    """One request with items, in a prefill+decode instance.

    Attributes:
        items: Places of items in its prompt, in the order of the prompt.
        metadata_only: ``mm_hash`` of items that it cannot encode here: it holds no media, or the
            instance has no encoder.
        claims: By ``mm_hash``; those that are over are not among them.
        running: The engine has begun to compute it. It then has a seat and memory that others wait
            for, so what it waits for comes before what waiting requests wait for.
        num_computed_tokens: Tokens whose KV is there, prefix cache included; before the request is
            running, what would be there if it began.
        lost: Why it cannot have an item, by ``mm_hash``: it is not delivered, and cannot be
            encoded here.
        failed: It will be ended without an answer, and claims nothing any more.
        transfers: Of its items, by ``mm_hash``.
        arrived_s: When it was added.
        outcomes: Where each item came from, by ``mm_hash``.
        mm_inputs_done: Items that lie wholly in what was computed, prefix cache included.
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
    transfers: Mapping[str, ExpectedTransfer] = field(default_factory=dict)
    arrived_s: float = 0.0
    outcomes: dict[str, ItemOutcome] = field(default_factory=dict)
    mm_inputs_done: int = 0
    _reach: list[int] = field(default_factory=list)
    """One past the last token of each item and of those before it."""

    def __post_init__(self) -> None:
        self._reach = list(accumulate((item.end for item in self.items), max))

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among requests: the smaller comes first."""
        return (not self.running, self.number)

    @property
    def waits(self) -> bool:
        """Whether it needs an item that has no room for it."""
        return any(claim.waits for claim in self.claims.values())

    @property
    def has_all(self) -> bool:
        """Whether room is kept for all items that it needs, and it waits for no other's encode."""
        return not (self.waits or self.to_be_encoded)

    @property
    def to_be_encoded(self) -> list[Item]:
        """Items that have room for it, and that another request must encode in a step."""
        if not self.metadata_only:
            return []
        return [
            claim.item
            for claim in self.claims.values()
            if claim.metadata_only
            and claim.item.state is State.LOCAL
            and claim.served
            and claim.place != COMPUTED
        ]

    @property
    def next_item(self) -> int:
        """Index of the first item that is not wholly computed; their number if there is none."""
        return bisect_right(self._reach, self.num_computed_tokens)

    def note(self, outcome: ItemOutcome) -> None:
        """Remember where an item came from: the first source counts, but for a local encode."""
        if outcome.source == "local" or outcome.mm_hash not in self.outcomes:
            self.outcomes[outcome.mm_hash] = outcome

    def note_local(self, mm_hash: str) -> None:
        """Remember that an item is encoded on this instance."""
        self.note(ItemOutcome(mm_hash=mm_hash, source="local"))
        trace("item.local", request=self.request_id, mm_hash=mm_hash)


COMPUTED = 1 << 30
"""The place of a claim of which every occurrence is computed."""


@dataclass(slots=True, eq=False)
class Claim:
    """One request's claim on one item.

    Attributes:
        inputs: One past the last token of each occurrence, by index among the request's items.
        transfer_id: Of the request's own transfer of it; empty if it has none.
        place: Index of the first occurrence that is not computed, else `COMPUTED`.
        expired: The request has waited for others to bring the item as long as it may.
    """

    claimant: Claimant
    item: Item
    transfer_id: str = ""
    inputs: dict[int, int] = field(default_factory=dict)
    place: int = COMPUTED
    expired: bool = False

    @property
    def metadata_only(self) -> bool:
        """Whether the request cannot encode it here."""
        return self.item.mm_hash in self.claimant.metadata_only

    @property
    def served(self) -> bool:
        """Whether the item's room is kept for the request."""
        return self.claimant.request_id in self.item.holders

    @property
    def waits(self) -> bool:
        """Whether the item has no room for the request, which needs it next or later."""
        return self.place != COMPUTED and self.item.wanted.get(self.claimant.request_id) is self

    @property
    def by_transfer(self) -> bool:
        """Whether the item, if it is not here, comes from elsewhere as far as the request goes.

        Transfers that others cannot do without are theirs: the item may be evicted before their
        turn. Only a request that never had one waits for them all the same.
        """
        item = self.item
        if self.expired or not item.transfers:
            return False
        if self.transfer_id in item.transfers or (self.metadata_only and not self.transfer_id):
            return True
        return not item.transfers.keys() <= item.kept_transfers

    @property
    def is_last_chance(self) -> bool:
        """Whether the request cannot have the item again once it has given it up."""
        return self.metadata_only and not self.by_transfer


Order = tuple[tuple[bool, int], int]
"""A claim's place among all: its request's rank, and its own in the prompt."""


def order(claim: Claim) -> Order:
    """Return a claim's place among all: the smaller comes first."""
    return (claim.claimant.rank, claim.place)


def encoded_in_vain(held: Sequence[Claim]) -> bool:
    """Return whether holders of a `State.LOCAL` item wait in vain for one of them to encode it.

    Those with metadata only cannot; one that is past the item, if by the prefix cache, does not;
    and one that was not started may wait for a seat that those have which need the item.
    """
    awaits = any(claim.metadata_only for claim in held)
    encodes = [claim for claim in held if not claim.metadata_only and claim.place != COMPUTED]
    computing = [claim for claim in held if claim.claimant.running]
    seatless = computing and all(claim.metadata_only for claim in computing)
    return awaits and (not encodes or bool(seatless))


class ClaimQueue:
    """Claims that wait, by `order`.

    A claim is pushed whenever its place changes; entries of former places, and of claims that wait
    no more, are skipped and dropped in time.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Order, int, Claim]] = []
        self._numbers = itertools.count()
        self._bound = 64

    def push(self, claim: Claim) -> None:
        """Queue a claim at its place, if it waits."""
        if not claim.waits:
            return
        if len(self._entries) > self._bound:
            self._entries = [each for each in self._entries if _is_current(each)]
            heapq.heapify(self._entries)
            self._bound = 2 * len(self._entries) + 64
        heapq.heappush(self._entries, (order(claim), next(self._numbers), claim))

    @property
    def first(self) -> Claim | None:
        """The claim whose turn it is; ``None`` if none waits."""
        while self._entries and not _is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][-1] if self._entries else None


def _is_current(entry: tuple[Order, int, Claim]) -> bool:
    return entry[-1].waits and entry[0] == order(entry[-1])


class Deliveries(Protocol):
    """The transfers that bring items from elsewhere."""

    @property
    def has_revoked_slots(self) -> bool:
        """Whether producers are asked for slots that they had been granted."""
        ...

    def room_given(self, item: Item) -> None:
        """The item has a slot: an encoder that has announced it may write."""
        ...

    def announced(self, item: Item) -> list[str]:
        """Return the transfers of an item that encoders have announced."""
        ...

    def not_wanted(self, item: Item, but: Iterable[str] = ()) -> None:
        """End the transfers of an item, all but these.

        A granted slot is taken from the item, and comes back when it cannot be written any more.
        """
        ...
