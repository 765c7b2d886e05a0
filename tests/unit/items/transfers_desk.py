"""A desk to work a consumer's session by hand: messages and a clock made up by the test."""

from __future__ import annotations

from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.slots import ReceivePool
from epd_portable.items.table import Item, ItemRequest
from epd_portable.items.transfers import Fence, Landed, Send, TransferFailed, Transfers
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import Abort, Announce, AnyMessage, Grant, Nack, NackCode, Written
from tests.unit.builders import FINGERPRINT, SPEC, peer, place, slot

A, B = b"encode-a", b"encode-b"
PEERS = {A: peer("encode-a"), B: peer("encode-b")}
LEASE_S, TIMEOUT_S = 10.0, 30.0


class Desk:
    """Transfers over a real table, and everything that came out of them.

    Slots of one item each are numbered from 1. Claims are served by `give_room` only.

    Attributes:
        events: Ends of transfers, in order, and slots that were released.
        reasons: Of failures, for the log.
    """

    def __init__(
        self,
        fingerprint: str = FINGERPRINT,
        fenced_paths: frozenset[str] = frozenset(),
        path: PathEndpoint | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.fenced_paths = fenced_paths
        self.path = path or PathEndpoint(path="shm")
        self.now = 100.0
        self.gone: set[str] = set()
        self.sent: list[tuple[bytes, AnyMessage]] = []
        self.events: list[tuple[object, ...]] = []
        self.reasons: list[str] = []
        self.fence = LeaseFence()
        self.pool = ReceivePool("pool", 16 * SPEC.nbytes, SPEC.nbytes)
        self.pool._generation = 0
        self.cache = PrefillEncoderCache(16 * SPEC.shape[0], self.pool)
        self.session = Transfers(self, self.cache, wait_timeout_s=TIMEOUT_S, lease_s=LEASE_S)
        self._expected = 0

    def choose(self, producer: PeerDescriptor) -> PathEndpoint:
        return self.path

    def verify_transfer(self, message: Announce) -> bool:
        return message.transfer_id != "forged"

    def is_gone(self, producer: PeerDescriptor) -> bool:
        return producer.session in self.gone

    def apply(self) -> None:
        """Do what came out, as the shell does."""
        while touched := self.cache.take_touched():
            self.session.reconcile(touched, self.now)
        for action in self.session.take_actions():
            if isinstance(action, Send):
                self.sent.append((action.identity, action.message))
            elif isinstance(action, Fence):
                (self.fence.allow if action.allowed else self.fence.forbid)(action.slot)
            elif isinstance(action, Landed):
                transfer = action.transfer
                assert transfer.producer is not None
                name, path = transfer.producer.instance, action.grant.path
                self.events.append(("landed", transfer.transfer_id, name, path, action.transfer_s))
            elif isinstance(action, TransferFailed):
                transfer = action.transfer
                left = "others left" if transfer.item.transfers else "last"
                self.events.append(("failed", transfer.transfer_id, action.cause, left))
                self.reasons.append(action.reason)
            else:
                assert action.nack.transfer_id == action.transfer.transfer_id
                code = action.nack.code.value
                self.events.append(("refused", action.transfer.transfer_id, code))
        for each in self.pool.pass_on(0):
            self.events.append(("released", each.descriptor.generation))

    def item(self, mm_hash: str = "item") -> Item:
        return self.cache.items[mm_hash]

    def expect(self, transfer_id: str = "t", mm_hash: str = "item") -> None:
        """Let a request arrive that claims an item by a transfer of its own."""
        self._expected += 1
        made = ItemRequest(f"r{self._expected}", self._expected)
        self.cache.enter(made)
        claim = self.cache.claim(made, place(mm_hash, SPEC, tokens=1), transfer_id)
        assert claim is not None
        self.session.expect(transfer_id, claim.item, self.now, owner=made.request_id)
        self.apply()

    def leave(self) -> None:
        for made in list(self.cache.requests.values()):
            self.cache.leave(made)
        self.apply()

    def give_room(self) -> None:
        self.cache.serve()
        self.apply()

    def receive(self, sender: bytes, *messages: AnyMessage) -> None:
        for message in messages:
            self.session.receive(sender, message, self.now)
            self.apply()

    def said(self, after_s: float = 0.0) -> list[str]:
        """Advance the clock, judge deadlines, and return what was sent since the last call."""
        self.now += after_s
        self.session.tick(self.now)
        self.apply()
        sent, self.sent = self.sent, []
        return [f"{to.decode()[-1]} {each.transfer_id} {words(each)}" for to, each in sent]

    def get_grant(self) -> None:
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
