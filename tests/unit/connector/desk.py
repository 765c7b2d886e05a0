"""A desk to work a consumer's session by hand: messages and a clock made up by the test."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_portable.connector.consumer import ConsumerSession
from epd_portable.connector.events import Event
from epd_portable.connector.transport import LeaseFence
from epd_portable.errors import NoCommonPathError
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


@dataclass
class Desk:
    """A session, what it may grant, and everything that came out of it."""

    fenced: frozenset[str] = frozenset()
    now: float = 100.0
    slots: dict[str, SlotDescriptor] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    path: PathEndpoint | None = field(default_factory=lambda: PathEndpoint(path="shm"))
    sent: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fence = LeaseFence()
        self.session = ConsumerSession(
            choose=self._choose,
            fingerprint=FINGERPRINT,
            slot_for=self.slots.get,
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

    def expect(self, transfer_id: str = "t", mm_hash: str = "item") -> None:
        self.session.expect(transfer_id, mm_hash, SPEC, self.now)

    def receive(self, sender: bytes, *messages: AnyMessage) -> None:
        for message in messages:
            self.session.receive(sender, message, self.now)

    def poll(self, after_s: float = 0.0) -> list[AnyMessage]:
        """Advance the clock, poll, and return the messages of this poll."""
        self.now += after_s
        sent, events = self.session.poll(self.now)
        self.sent += sent
        self.events += events
        return [message for _, message in sent]

    def granted(self, sender: bytes = A, generation: int = 1) -> Grant:
        """Expect, announce and reserve; return the grant."""
        self.expect()
        self.slots["item"] = slot(generation)
        self.receive(sender, announce(sender))
        (grant,) = self.poll()
        assert isinstance(grant, Grant)
        return grant

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


def written(generation: int = 1, transfer_id: str = "t", attempt: int = 0) -> Written:
    return Written(transfer_id=transfer_id, attempt=attempt, generation=generation)


def released(transfer_id: str = "t", attempt: int = 0) -> Nack:
    return Nack(transfer_id=transfer_id, attempt=attempt, code=NackCode.RELEASED, detail="")
