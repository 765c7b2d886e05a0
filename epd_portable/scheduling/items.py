"""What a prefill+decode instance knows of items: one `Item` a name, one `Claim` a request and item.

An item takes room in the encoder cache, and a receive slot if it comes from elsewhere. Requests
*claim* it. A claim is *served* when the item has room that is kept for the request; it is *over*
when the request has computed past the item, has ended, or cannot have it::

    WAITING ──room──▶ RESERVED ──▶ GRANTED ──▶ LANDED ──▶ PRESENT      by a transfer
       ▲  │               │           │           │          │
       │  └────room──▶ LOCAL ─────────────────────────▶ PRESENT        encoded in a step
       │  └────room──▶ ENCODING ──────────────────────▶ PRESENT        encoded beside steps
       └──────────────────┴───────────┴───────────┴──────────┘
              transfer lost, room given up, entry evicted

Whether an item that waits will be reserved or encoded here depends on whether a transfer of it is
under way when there is room.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec


class State(enum.Enum):
    """How far an item has come."""

    WAITING = enum.auto()
    """It has no room."""
    LOCAL = enum.auto()
    """It has room, and is to be encoded here, in a step."""
    ENCODING = enum.auto()
    """It has room, and is encoded here beside the steps; nothing stops that before its end."""
    RESERVED = enum.auto()
    """It has room and a slot, and nobody writes yet."""
    GRANTED = enum.auto()
    """An encoder may write its slot."""
    LANDED = enum.auto()
    """It is in its slot; the workers have not placed it."""
    PRESENT = enum.auto()
    """It is in the workers' encoder caches, or computed by the step that was scheduled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """How an item came here from elsewhere.

    Attributes:
        transfer_id: The transfer that brought it.
        encoder: Instance that wrote it.
        path: By which path.
        transfer_s: From the grant of its slot to the news of its write.
    """

    transfer_id: str
    encoder: str
    path: str
    transfer_s: float


@dataclass(slots=True, eq=False)
class Item:
    """One encoder output, by the engine's name for it.

    Attributes:
        mm_hash: The name.
        num_embeds: Room that it takes in the encoder cache.
        tensor: What it is; ``None`` where nothing is received.
        state: How far it has come.
        holders: Who keeps its room: requests whose claims are served; in an encode instance also
            transfers.
        wanted: Claims that are not served, by request.
        transfers: On their way here, by ``transfer_id``.
        slot: Where it is written, from its reservation until it is in the workers' hands.
        origin: How it came here; ``None`` if it was encoded here, or has not come yet.
    """

    mm_hash: str
    num_embeds: int
    tensor: TensorSpec | None = None
    state: State = State.WAITING
    holders: set[str] = field(default_factory=set)
    wanted: dict[str, Claim] = field(default_factory=dict)
    transfers: dict[str, Any] = field(default_factory=dict)
    slot: SlotDescriptor | None = None
    origin: Origin | None = None

    @property
    def is_here(self) -> bool:
        """Whether a step may compute with it."""
        return self.state is State.PRESENT or self.state is State.LANDED


@dataclass(slots=True, eq=False)
class Claimant:
    """A request, as far as room is concerned.

    Attributes:
        request_id: The request.
        number: Of its arrival.
        claims: By ``mm_hash``; those that are over are not among them.
        num_waiting: Claims that are not served.
        running: The engine has begun to compute it. It then has a seat and memory that others wait
            for, so what it waits for comes before what waiting requests wait for.
        sleeps: It cannot begin before something changes about its claims.
        lost: Why it cannot have an item, by ``mm_hash``: nobody delivers it, and it cannot be
            encoded here.
        noted_tokens: How far it was computed when its claims were last looked at for items behind
            it; negative if one has queued since.
    """

    request_id: str
    number: int
    claims: dict[str, Claim] = field(default_factory=dict)
    num_waiting: int = 0
    running: bool = False
    sleeps: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    noted_tokens: int = -1

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among requests: the smaller comes first."""
        return (not self.running, self.number)


@dataclass(slots=True, eq=False)
class Claim:
    """One request's claim on one item.

    Attributes:
        who: The request.
        item: The item.
        place: Of its first occurrence in the prompt, among the request's items.
        metadata_only: The request cannot encode it here: it holds no media, or the instance has no
            encoder.
        inputs: Indices of its occurrences that are not computed.
        transfer_id: Of the request's own transfer of it; empty if it has none.
        served: The item's room is kept for the request.
        over: The request needs it no more.
    """

    who: Claimant
    item: Item
    place: int
    metadata_only: bool
    inputs: set[int]
    transfer_id: str = ""
    served: bool = False
    over: bool = False
