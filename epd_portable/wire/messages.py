"""The control protocol between an encode instance and a prefill+decode (PD) instance.

::

    encode                         PD
      │ Announce ───────────────▶ │
      │ ◀──── Grant │ NotNeeded │ Later │ Nack
      │ (writes into the slot)    │
      │ Written ────────────────▶ │
      │ ◀──────────────── Injected│
      │ Abort ◀─────────────────▶ │

Every message names its transfer and the producer's attempt at it; one that arrives
twice or out of order changes nothing. Explanations are cut to `MAX_REASON` characters; a message
with a name beyond its limit is refused.

Three things are equal in every version of the protocol, so that two versions that cannot exchange
items refuse each other at once: the `codec.Envelope`, the fields of `Foreign` in every message, and
`Nack`. A receiver refuses a message of another version by a `Nack` in the version of its sender.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from epd_portable.wire.descriptors import (
    Name,
    PathAddress,
    PeerDescriptor,
    SlotDescriptor,
    TensorSpec,
    Word,
)

PROTOCOL_VERSION = 4
MAX_REASON = 1000
"""Characters of an explanation."""
MAX_LEASE_S = 24 * 3600.0


class NackCode(enum.StrEnum):
    """Reason for which an attempt at a transfer is refused permanently."""

    INCOMPATIBLE = "incompatible"
    """Another model, dtype or processor setting at the other end."""
    NO_COMMON_PATH = "no_common_path"
    """No transfer path is usable at both ends."""
    UNEXPECTED = "unexpected"
    """The announced item is not the one that the request expects."""
    MISSING = "missing"
    """The encoder has cancelled the item; another one has to deliver it."""
    NOT_STORED = "not_stored"
    """The store does not have the item; an encoder has to deliver it."""
    RELEASED = "released"
    """Reply to `Abort`: the slot will not be written any more."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages.

    Attributes:
        transfer_id: The front's name for the transfer of one item to one PD request.
        attempt: The producer's number for its work on this transfer, greater than every earlier
            one of its process; replies repeat it. Nothing is written for an attempt once it was
            aborted.
    """

    transfer_id: Name
    attempt: int = 0


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """Encode → PD: this item is being encoded for you.

    Attributes:
        item_uuid: As in `epd_portable.wire.params.EncodeTransfer`.
    """

    mm_hash: Name
    tensor: TensorSpec
    producer: PeerDescriptor
    item_uuid: Name = ""
    proof: Word = ""


class Grant(Message, frozen=True, kw_only=True, tag="grant"):
    """PD → encode: write into this slot.

    Attributes:
        lease_s: Seconds from the arrival of this message within which the write must have ended.
    """

    slot: SlotDescriptor
    path: Word
    address: PathAddress
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class NotNeeded(Message, frozen=True, kw_only=True, tag="not_needed"):
    """PD → encode: the item is already there, or no request waits for it any more."""


class Later(Message, frozen=True, kw_only=True, tag="later"):
    """PD → encode: no space yet; the item is queued and a `Grant` or `NotNeeded` will follow."""


class Written(Message, frozen=True, kw_only=True, tag="written"):
    """Encode → PD: the slot holds the whole item.

    Attributes:
        generation: See `SlotDescriptor.generation`.
    """

    generation: int


class Injected(Message, frozen=True, kw_only=True, tag="injected"):
    """PD → encode: received; the encode side may forget the item."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Sent by either end: this transfer ends without success.

    The encode side stops writing and replies with `Nack` and `NackCode.RELEASED`; until then the
    slot is not granted again.
    """

    reason: str

    def __post_init__(self) -> None:
        _cut(self, "reason")


class Nack(Message, frozen=True, kw_only=True, tag="nack"):
    """Refused for good; the detail names value, limit and remedy."""

    code: NackCode
    detail: str

    def __post_init__(self) -> None:
        _cut(self, "detail")


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a message of another protocol version, whose rest cannot be read.

    Attributes:
        kind: Tag of the message.
        protocol: Version of the sender.
    """

    kind: Word = ""
    transfer_id: Name = ""
    attempt: int = 0
    protocol: int = 0

    @property
    def problem(self) -> str:
        """Return both versions, and the remedy."""
        return (
            f"protocol {self.protocol} at the sender, {PROTOCOL_VERSION} at the receiver. Run one "
            "release of epd-portable at both"
        )

    @property
    def awaits_reply(self) -> bool:
        """Return whether its sender repeats it until there is a reply."""
        return self.kind in ("announce", "written")

    def refusal(self) -> Nack:
        """Return the reply to its sender, in the sender's version."""
        return Nack(
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            code=NackCode.INCOMPATIBLE,
            detail=self.problem,
        )


AnyMessage = Announce | Grant | NotNeeded | Later | Written | Injected | Abort | Nack


Received = AnyMessage | Foreign


def _cut(message: Message, name: str) -> None:
    text = getattr(message, name)
    if len(text) > MAX_REASON:
        msgspec.structs.force_setattr(message, name, text[: MAX_REASON - 1] + "…")
