"""A desk to work a consumer's session by hand: messages and a clock made up by the test."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_portable.errors import NoCommonPathError
from epd_portable.items.consumer import ConsumerSession, FailureCause, Transfer
from epd_portable.items.items import Item, State
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import Abort, Announce, AnyMessage, Grant, Nack, NackCode, Written
from tests.unit.builders import FINGERPRINT, SPEC, peer, slot

A, B = b"encode-a", b"encode-b"
PEERS = {A: peer("encode-a"), B: peer("encode-b")}
LEASE_S, TIMEOUT_S = 10.0, 30.0


@dataclass
class Desk:
    """A session, the items whose room it decides, and everything that came out of it.

    It stands for the preallocator and the receiver: an item that lost its slot has no room, and
    other transfers of one that has landed are in vain.

    Attributes:
        events: What became of transfers, in order; slots by their generation.
        reasons: Of failures, for the log.
    """

    fingerprint: str = FINGERPRINT
    fenced_paths: frozenset[str] = frozenset()
    path: PathEndpoint | None = field(default_factory=lambda: PathEndpoint(path="shm"))
    now: float = 100.0
    items: dict[str, Item] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    sent: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    events: list[tuple[object, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fence = LeaseFence()
        self.session = ConsumerSession(self, self, wait_timeout_s=TIMEOUT_S, lease_s=LEASE_S)

    # -- the endpoint ------------------------------------------------------------------------------

    def send(self, identity: bytes, message: AnyMessage) -> None:
        self.sent.append((identity, message))

    def choose(self, producer: PeerDescriptor) -> PathEndpoint:
        if self.path is None:
            raise NoCommonPathError("no path")
        return self.path

    def verify_transfer(self, message: Announce) -> bool:
        return message.transfer_id != "forged"

    def is_gone(self, producer: PeerDescriptor) -> bool:
        return producer.session in self.gone

    # -- what becomes of transfers -----------------------------------------------------------------

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        return True

    def landed(self, transfer: Transfer, grant: Grant, *, transfer_s: float) -> None:
        item = transfer.item
        assert transfer.producer is not None
        assert item.slot == grant.slot
        name = transfer.producer.instance
        self.events.append(("landed", transfer.transfer_id, name, grant.path, transfer_s))
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
        left = "others left" if item.transfers else "last"
        generation = None if slot is None else slot.generation
        self.events.append(("failed", transfer.transfer_id, generation, cause, left))
        self.reasons.append(reason)
        if slot is not None:
            assert item.slot is None
            item.state = State.WAITING

    def refused(self, transfer: Transfer, nack: Nack) -> None:
        assert nack.transfer_id == transfer.transfer_id
        self.events.append(("refused", transfer.transfer_id, nack.code.value))

    def needs_another(self, transfer: Transfer) -> bool:
        return False

    def may_wait(self, transfer: Transfer) -> bool:
        return False

    def not_needed(self, transfer_id: str) -> None:
        pass

    def released(self, slot: SlotDescriptor) -> None:
        self.events.append(("released", slot.generation))

    # -- what a test does --------------------------------------------------------------------------

    def item(self, mm_hash: str = "item", tensor: TensorSpec = SPEC) -> Item:
        return self.items.setdefault(mm_hash, Item(mm_hash, tensor.shape[0], tensor))

    def expect(
        self,
        transfer_id: str = "t",
        mm_hash: str = "item",
    ) -> None:
        item = self.item(mm_hash)
        self.session.expect(transfer_id, item, self.now, owner="r")

    def give_room(self, generation: int = 1, mm_hash: str = "item") -> None:
        """Reserve a slot for an item."""
        item = self.item(mm_hash)
        assert item.state is State.WAITING
        item.state, item.slot = State.RESERVED, slot(generation)
        self.session.room_given(item)

    def receive(self, sender: bytes, *messages: AnyMessage) -> None:
        for message in messages:
            self.session.receive(sender, message, self.now)

    def said(self, after_s: float = 0.0) -> list[str]:
        """Advance the clock, judge deadlines, and return what was sent since the last call."""
        self.now += after_s
        self.session.tick(self.now)
        sent, self.sent = self.sent, []
        return [f"{to.decode()[-1]} {each.transfer_id} {words(each)}" for to, each in sent]

    def get_grant(self) -> None:
        """Expect, reserve and announce."""
        self.expect()
        self.give_room()
        self.receive(A, announce())
        assert self.said() == ["a t grant 1"]

    def landings(self) -> list[object]:
        """Return which encoders have delivered."""
        return [event[2] for event in self.events if event[0] == "landed"]

    def allowed(self, generation: int = 1) -> bool:
        with self.fence.writing(slot(generation)) as leased:
            return leased


def words(message: AnyMessage) -> str:
    """A message in few words."""
    word = message.__struct_config__.tag
    if isinstance(message, Grant):
        return f"{word} {message.slot.generation}"
    return f"{word} {message.code.value}" if isinstance(message, Nack) else str(word)


def announce(
    sender: bytes = A,
    transfer_id: str = "t",
    mm_hash: str = "item",
    tensor: TensorSpec = SPEC,
    attempt: int = 0,
    producer: PeerDescriptor | None = None,
) -> Announce:
    return Announce(
        transfer_id=transfer_id,
        attempt=attempt,
        mm_hash=mm_hash,
        tensor=tensor,
        producer=producer or PEERS[sender],
    )


def written(generation: int = 1, transfer_id: str = "t", attempt: int = 0) -> Written:
    return Written(transfer_id=transfer_id, attempt=attempt, generation=generation)


def released(transfer_id: str = "t", attempt: int = 0) -> Nack:
    return Nack(transfer_id=transfer_id, attempt=attempt, code=NackCode.RELEASED, detail="")


def abort(transfer_id: str = "t", attempt: int = 0) -> Abort:
    return Abort(transfer_id=transfer_id, attempt=attempt, reason="gave up")
