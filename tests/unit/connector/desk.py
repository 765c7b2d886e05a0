"""A desk to work a consumer's session by hand: messages and a clock made up by the test."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_portable.connector.consumer import ConsumerSession, FailureCause, Transfer
from epd_portable.connector.transport import LeaseFence
from epd_portable.errors import NoCommonPathError
from epd_portable.scheduling.items import Item, State
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Announce,
    AnyMessage,
    Grant,
    Nack,
    NackCode,
    Written,
)
from tests.unit.builders import FINGERPRINT, SPEC, peer, slot

A, B = b"encode-a", b"encode-b"
PEERS = {A: peer("encode-a"), B: peer("encode-b")}
LEASE_S, TIMEOUT_S = 10.0, 30.0


@dataclass(frozen=True)
class Landed:
    """An item is in its slot."""

    mm_hash: str
    transfer_id: str
    encoder: str
    path: str
    transfer_s: float
    digest: str = ""


@dataclass(frozen=True)
class Failed:
    """A transfer ended without its item, or lost its slot; `last`: no other is on its way."""

    mm_hash: str
    transfer_id: str
    slot: SlotDescriptor | None
    cause: FailureCause
    reason: str
    last: bool


@dataclass(frozen=True)
class Refused:
    """One encoder cannot deliver an item."""

    transfer_id: str
    code: NackCode


@dataclass(frozen=True)
class Revoked:
    """A grant was taken back because nobody wants the item."""

    slot: SlotDescriptor


@dataclass(frozen=True)
class Released:
    """A slot may be given to somebody else."""

    slot: SlotDescriptor


Event = Landed | Failed | Refused | Revoked | Released


@dataclass
class Desk:
    """A session, the items whose room it is told of, and everything that came out of it.

    It stands for the preallocator and the receiver: an item that lost its slot has no room, and
    other transfers of one that has landed are in vain.

    Attributes:
        sent: All messages, as ``(identity, message)``.
        events: What became of transfers, in order.
        announcements: Transfers that nobody had asked for when they were announced.
    """

    fenced: frozenset[str] = frozenset()
    now: float = 100.0
    items: dict[str, Item] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    forged: set[str] = field(default_factory=set)
    path: PathEndpoint | None = field(default_factory=lambda: PathEndpoint(path="shm"))
    sent: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    announcements: list[str] = field(default_factory=list)
    _looked_at: int = 0

    def __post_init__(self) -> None:
        self.fence = LeaseFence()
        self.session = ConsumerSession(
            send=lambda identity, message: self.sent.append((identity, message)),
            events=self,
            choose=self._choose,
            fingerprint=FINGERPRINT,
            vouched=lambda announce: announce.transfer_id not in self.forged,
            is_gone=lambda producer: producer.session in self.gone,
            fence=self.fence,
            fenced_paths=self.fenced,
            wait_timeout_s=TIMEOUT_S,
            lease_s=LEASE_S,
        )

    def _choose(self, producer: PeerDescriptor) -> PathEndpoint:
        if self.path is None:
            raise NoCommonPathError("no path")
        return self.path

    # -- what becomes of transfers -----------------------------------------------------------------

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        return True

    def announced(self, announce: Announce) -> None:
        self.announcements.append(announce.transfer_id)

    def landed(self, transfer: Transfer, grant: Grant, *, transfer_s: float, digest: str) -> None:
        item = transfer.item
        assert transfer.producer is not None
        assert item.slot == grant.slot
        encoder = transfer.producer.instance
        self.events.append(
            Landed(item.mm_hash, transfer.transfer_id, encoder, grant.path, transfer_s, digest)
        )
        item.state, item.slot = State.LANDED, None
        self.session.not_wanted(item)

    def failed(
        self,
        transfer: Transfer,
        slot: SlotDescriptor | None,
        *,
        cause: FailureCause,
        reason: str,
    ) -> None:
        item = transfer.item
        last = not item.transfers
        self.events.append(Failed(item.mm_hash, transfer.transfer_id, slot, cause, reason, last))
        if slot is not None:
            assert item.slot is None
            item.state = State.WAITING

    def refused(self, transfer: Transfer, nack: Nack) -> None:
        assert nack.transfer_id == transfer.transfer_id
        self.events.append(Refused(transfer.transfer_id, nack.code))

    def revoked(self, slot: SlotDescriptor) -> None:
        self.events.append(Revoked(slot))

    def released(self, slot: SlotDescriptor) -> None:
        self.events.append(Released(slot))

    # -- what a test does --------------------------------------------------------------------------

    def item(self, mm_hash: str = "item", tensor: TensorSpec = SPEC) -> Item:
        return self.items.setdefault(mm_hash, Item(mm_hash, tensor.shape[0], tensor))

    def expect(
        self,
        transfer_id: str = "t",
        mm_hash: str = "item",
        *,
        encoder: str = "",
        asked: bool = True,
    ) -> None:
        item = self.item(mm_hash)
        self.session.expect(transfer_id, item, self.now, encoder=encoder, asked=asked)

    def give_room(self, generation: int = 1, mm_hash: str = "item") -> None:
        """Reserve a slot for an item."""
        item = self.item(mm_hash)
        assert item.state is State.WAITING
        item.state, item.slot = State.RESERVED, slot(generation)
        self.session.room_given(item)

    def receive(self, sender: bytes, *messages: AnyMessage) -> None:
        for message in messages:
            self.session.receive(sender, message, self.now)

    def poll(self, after_s: float = 0.0) -> list[AnyMessage]:
        """Advance the clock, judge deadlines, and return the messages since the last call."""
        self.now += after_s
        self.session.tick(self.now)
        sent = [message for _, message in self.sent[self._looked_at :]]
        self._looked_at = len(self.sent)
        return sent

    def granted(self, sender: bytes = A, generation: int = 1) -> Grant:
        """Expect, reserve and announce; return the grant."""
        self.expect()
        self.give_room(generation)
        self.receive(sender, announce(sender))
        (grant,) = self.poll()
        assert isinstance(grant, Grant)
        return grant

    def landings(self) -> list[str]:
        """Return who has delivered."""
        return [event.encoder for event in self.events if isinstance(event, Landed)]

    def allowed(self, candidate: SlotDescriptor) -> bool:
        with self.fence.writing(candidate) as leased:
            return leased


def announce(
    sender: bytes = A,
    transfer_id: str = "t",
    mm_hash: str = "item",
    tensor: TensorSpec = SPEC,
    attempt: int = 0,
) -> Announce:
    return Announce(
        transfer_id=transfer_id,
        attempt=attempt,
        mm_hash=mm_hash,
        tensor=tensor,
        producer=PEERS[sender],
    )


def written(
    generation: int = 1, transfer_id: str = "t", attempt: int = 0, digest: str = ""
) -> Written:
    return Written(transfer_id=transfer_id, attempt=attempt, generation=generation, digest=digest)


def released(transfer_id: str = "t", attempt: int = 0) -> Nack:
    return Nack(transfer_id=transfer_id, attempt=attempt, code=NackCode.RELEASED, detail="")
