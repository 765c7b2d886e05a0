"""The control protocol between an encode instance, a PD instance and the router.

::

    encode                         PD                        router
      │ Announce ───────────────▶ │
      │ ◀──── Grant │ NotNeeded │ Later │ Nack
      │ (writes into the slot)    │
      │ Written ────────────────▶ │
      │ ◀──────────────── Injected│
      │ Abort ◀─────────────────▶ │ ◀──────────── EncodeFailed │
      │                           │ ◀─────────────── NotWanted │
      │                           │ Nack ────────────────────▶ │
      │                           │ ◀────────────── LoadWanted │
      │                           │ LoadReport ──────────────▶ │

Every message but the last two names its transfer and the producer's attempt at it, may arrive twice
or out of order, and changes nothing then. Text that explains is cut to `MAX_REASON` characters; a
message with a name that is longer than its limit is refused.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from epd_portable.wire.descriptors import (
    Address,
    Name,
    PeerDescriptor,
    SlotDescriptor,
    TensorSpec,
    Word,
)

PROTOCOL_VERSION = 3
MAX_REASON = 1000
"""Characters of an explanation; what is longer is cut."""
MAX_LEASE_S = 24 * 3600.0
LOAD_LEASE_S = 15.0
"""An instance tells a router its load for so long after it was asked to."""
LOAD_EVERY_S = 0.05
"""At most so often, and only if it has changed."""
LOAD_HEARTBEAT_S = 1.0
"""So often though nothing has changed."""
LOAD_PATH = "/epd/load"
"""Of an encode instance's HTTP server: ``GET`` answers as soon as its load differs from what the
query says was told, at the latest after `LOAD_HEARTBEAT_S`."""


class NackCode(str, enum.Enum):
    """Why a transfer, or a request's item, is refused for good."""

    INCOMPATIBLE = "incompatible"
    """Another model, dtype or processor setting at the other end."""
    NO_COMMON_PATH = "no_common_path"
    """No transfer path is usable at both ends."""
    TOO_LARGE = "too_large"
    """Larger than the whole receive pool or encoder cache."""
    UNEXPECTED = "unexpected"
    """The announced item is not the one that the request expects."""
    UNAVAILABLE = "unavailable"
    """Nobody delivered the item in time and the instance cannot encode it itself."""
    NOT_STORED = "not_stored"
    """The store did not bring the item; an encoder has to."""
    RELEASED = "released"
    """Answer to `Abort`: the slot will not be written any more."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages.

    Attributes:
        transfer_id: The router's name for one item on its way to one PD request.
        attempt: The producer's number for its work on this transfer, greater than that of every
            earlier one of its process; answers repeat it. An attempt that was aborted is over for
            good: nothing is written for it any more. 0 in messages from and to the router.
    """

    transfer_id: Name
    attempt: int = 0


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """Encode → PD: this item is being encoded for you.

    Attributes:
        mm_hash: The engine's identifier of the item.
        tensor: What will be written.
        producer: The announcing end.
        item: The router's name of the item, ``EncodeTransfer.mm_hash``.
        proof: As in `epd_portable.wire.params.EncodeTransfer`.
    """

    mm_hash: Name
    tensor: TensorSpec
    producer: PeerDescriptor
    item: Name = ""
    proof: Word = ""


class Grant(Message, frozen=True, kw_only=True, tag="grant"):
    """PD → encode: write into this slot.

    Attributes:
        slot: Where.
        path: Transport to use, with the address of the receiving end.
        address: See `PathEndpoint.address`.
        lease_s: Seconds, counted by the receiver of this message from its arrival, within which
            the write must have ended.
    """

    slot: SlotDescriptor
    path: Word
    address: Address
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class NotNeeded(Message, frozen=True, kw_only=True, tag="not_needed"):
    """PD → encode: the item is already there, or nobody waits for it any more."""


class Later(Message, frozen=True, kw_only=True, tag="later"):
    """PD → encode: no room yet; the item is queued and a `Grant` or `NotNeeded` will follow."""


class Written(Message, frozen=True, kw_only=True, tag="written"):
    """Encode → PD: the slot holds the whole item.

    Attributes:
        generation: Of the slot that was written.
        digest: Of the item's bytes, for the consumer to check; empty if not asked for.
    """

    generation: int
    digest: Word = ""


class Injected(Message, frozen=True, kw_only=True, tag="injected"):
    """PD → encode: received; the encode side may forget the item."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Either way: this transfer ends without success.

    From the PD side it asks the encode side to stop writing and to answer `Nack` with
    `NackCode.RELEASED`; until then the slot is not given to anybody else.

    Attributes:
        reason: For the log.
    """

    reason: str

    def __post_init__(self) -> None:
        _cut(self, "reason")


class Nack(Message, frozen=True, kw_only=True, tag="nack"):
    """Refused for good.

    Attributes:
        code: Machine-readable reason.
        detail: Sentence with the value, the limit and the remedy.
    """

    code: NackCode
    detail: str

    def __post_init__(self) -> None:
        _cut(self, "detail")


class EncodeFailed(Message, frozen=True, kw_only=True, tag="encode_failed"):
    """Router → PD: no encoder will deliver this item; walk on down the failure ladder.

    Attributes:
        reason: For the log.
    """

    reason: str

    def __post_init__(self) -> None:
        _cut(self, "reason")


class LoadWanted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load_wanted"):
    """Router → PD: tell me from now on how busy you are; to be said again before `LOAD_LEASE_S`.

    An instance that does not know the message drops it, and its load stays unknown.

    Attributes:
        transfer_id: Of none.
    """

    transfer_id: Name = ""


class LoadReport(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """PD → router: how busy the engine is; ``None`` for what it does not know of itself.

    Encode instances, which have no control channel, tell the same as JSON at `LOAD_PATH`.

    Attributes:
        transfer_id: Of none.
        waiting: Requests in the engine's queue, those that wait for items included.
        running: Requests that it computes for.
        kv_used: Used part of its KV cache, 0 to 1.
        items: Media items that an encode instance has taken on and not answered.
        pixels: Of these items; nothing for each whose size nobody knows.
    """

    transfer_id: Name = ""
    waiting: int | None = None
    running: int | None = None
    kv_used: float | None = None
    items: int | None = None
    pixels: int | None = None


class NotWanted(Message, frozen=True, kw_only=True, tag="not_wanted"):
    """Router → PD: nobody asks, or goes on asking, for the item by this transfer.

    The request was refused, given up by its client, or sent again by another transfer. The message
    may come before the item is announced, after it was used, and beside a request that reached the
    engine all the same.
    """


AnyMessage = (
    Announce
    | Grant
    | NotNeeded
    | Later
    | Written
    | Injected
    | Abort
    | Nack
    | EncodeFailed
    | NotWanted
    | LoadWanted
    | LoadReport
)


def _cut(message: Message, name: str) -> None:
    text = getattr(message, name)
    if len(text) > MAX_REASON:
        msgspec.structs.force_setattr(message, name, text[: MAX_REASON - 1] + "…")
