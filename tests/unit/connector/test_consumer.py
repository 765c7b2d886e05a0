"""The consumer's session: every edge of its diagram, with messages and a clock made up here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from epd_portable.connector import consumer
from epd_portable.connector.consumer import LEASE_MARGIN_S, ConsumerSession
from epd_portable.connector.events import Event, Failed, Landed, Released
from epd_portable.connector.transport import LeaseFence
from epd_portable.errors import NoCommonPathError
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    EncodeFailed,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
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
    sender: bytes = A, transfer_id: str = "t", mm_hash: str = "item", tensor: TensorSpec = SPEC
) -> Announce:
    return Announce(transfer_id=transfer_id, mm_hash=mm_hash, tensor=tensor, producer=PEERS[sender])


def written(generation: int = 1, transfer_id: str = "t") -> Written:
    return Written(transfer_id=transfer_id, generation=generation)


def released(transfer_id: str = "t") -> Nack:
    return Nack(transfer_id=transfer_id, code=NackCode.RELEASED, detail="")


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- the straight way ----------------------------------------------------------------------------


def test_an_announced_item_with_room_is_granted_its_slot(desk: Desk) -> None:
    grant = desk.granted()
    assert grant.slot == slot(1)
    assert (grant.path, grant.lease_s) == ("shm", LEASE_S)
    assert desk.allowed(slot(1))


def test_a_written_item_lands_and_is_acknowledged(desk: Desk) -> None:
    desk.granted()
    desk.now += 2.5
    desk.receive(A, written())
    assert desk.poll() == [Injected(transfer_id="t")]
    assert desk.events == [
        Landed(
            mm_hash="item",
            transfer_id="t",
            tensor=SPEC,
            producer=PEERS[A],
            path="shm",
            transfer_s=2.5,
        )
    ]
    assert not desk.allowed(slot(1))
    assert not desk.session.expects("item")


def test_an_item_without_room_is_told_later_once_per_announcement(desk: Desk) -> None:
    desk.expect()
    desk.receive(A, announce())
    assert desk.poll() == [Later(transfer_id="t")]
    assert desk.poll(1.0) == []
    desk.receive(A, announce())
    assert desk.poll() == [Later(transfer_id="t")]
    desk.slots["item"] = slot(3)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert grant.slot.generation == 3


# -- duplicates, reordering, late and unknown messages -------------------------------------------


def test_a_repeated_announcement_gets_the_same_grant_again(desk: Desk) -> None:
    grant = desk.granted()
    desk.receive(A, announce())
    assert desk.poll() == [grant]


def test_a_repeated_written_is_acknowledged_but_lands_once(desk: Desk) -> None:
    desk.granted()
    desk.receive(A, written(), written())
    desk.receive(A, written())
    assert desk.poll() == [Injected(transfer_id="t")] * 3
    assert len(desk.events) == 1


@pytest.mark.parametrize(
    "message", [written(), released(), Abort(transfer_id="t", reason=""), announce()]
)
def test_messages_of_an_unknown_transfer_change_nothing(desk: Desk, message: AnyMessage) -> None:
    desk.receive(A, message, message)
    assert desk.poll() == []
    assert desk.events == []


@pytest.mark.parametrize(
    "message",
    [
        Grant(transfer_id="t", slot=slot(9), path="shm", address="", lease_s=1.0),
        Later(transfer_id="t"),
        NotNeeded(transfer_id="t"),
        Injected(transfer_id="t"),
        Nack(transfer_id="t", code=NackCode.TOO_LARGE, detail=""),
    ],
)
def test_messages_that_only_a_consumer_sends_are_ignored(desk: Desk, message: AnyMessage) -> None:
    desk.granted()
    desk.receive(A, message)
    assert desk.poll() == []
    desk.receive(A, written())
    desk.poll()
    assert isinstance(desk.events[-1], Landed)


def test_written_before_the_grant_is_ignored(desk: Desk) -> None:
    desk.expect()
    desk.receive(A, announce(), written())
    assert desk.poll() == [Later(transfer_id="t")]
    assert desk.events == []


@pytest.mark.parametrize(("sender", "generation"), [(A, 2), (B, 1)])
def test_written_of_another_grant_or_by_somebody_else_is_ignored(
    desk: Desk, sender: bytes, generation: int
) -> None:
    desk.granted(A, generation=1)
    desk.receive(sender, written(generation))
    assert desk.poll() == []
    assert desk.events == []


def test_expecting_a_transfer_twice_changes_nothing(desk: Desk) -> None:
    grant = desk.granted()
    desk.expect()
    desk.receive(A, announce())
    assert desk.poll() == [grant]


# -- early and late ------------------------------------------------------------------------------


def test_an_announcement_before_its_request_is_kept_for_it(desk: Desk) -> None:
    desk.receive(A, announce())
    assert desk.poll() == []
    desk.slots["item"] = slot(1)
    desk.expect()
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


def test_an_early_announcement_whose_request_never_comes_is_not_needed(desk: Desk) -> None:
    desk.receive(A, announce())
    assert desk.poll(TIMEOUT_S - 0.1) == []
    desk.receive(A, announce())
    assert desk.poll(0.1) == [NotNeeded(transfer_id="t")]


def test_an_announcement_after_the_end_is_not_needed(desk: Desk) -> None:
    desk.expect()
    desk.session.item_not_needed("item")
    desk.receive(A, announce())
    assert desk.poll() == [NotNeeded(transfer_id="t")]


def test_a_declined_transfer_is_not_needed_before_and_after_its_announcement(desk: Desk) -> None:
    desk.session.decline("later")
    desk.receive(A, announce(transfer_id="later"), announce(transfer_id="early"))
    desk.session.decline("early")
    assert desk.poll() == [NotNeeded(transfer_id="later"), NotNeeded(transfer_id="early")]


def test_what_is_remembered_of_early_and_ended_transfers_is_bounded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "MAX_REMEMBERED", 3)
    for number in range(10):
        desk.receive(A, announce(transfer_id=f"early-{number}"))
    desk.now += TIMEOUT_S
    assert [message.transfer_id for message in desk.poll()] == ["early-0", "early-1", "early-2"]
    for number in range(10):
        desk.session.decline(f"ended-{number}")
    for number in range(10):
        desk.receive(A, announce(transfer_id=f"ended-{number}"))
    assert [message.transfer_id for message in desk.poll()] == ["ended-7", "ended-8", "ended-9"]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"producer": peer("encode-a", fingerprint="other")}, NackCode.INCOMPATIBLE),
        ({"mm_hash": "another item"}, NackCode.UNEXPECTED),
        ({"tensor": TensorSpec(shape=(5, 8), dtype="float32")}, NackCode.UNEXPECTED),
        ({"tensor": TensorSpec(shape=(4, 8), dtype="float16")}, NackCode.UNEXPECTED),
    ],
)
def test_what_does_not_match_the_request_is_refused_and_fails(
    desk: Desk, changed: dict[str, object], code: NackCode
) -> None:
    desk.expect()
    desk.slots["item"] = slot(1)
    values: dict[str, object] = {
        "transfer_id": "t",
        "mm_hash": "item",
        "tensor": SPEC,
        "producer": PEERS[A],
    }
    desk.receive(A, Announce(**(values | changed)))  # type: ignore[arg-type]
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert nack.code is code
    assert [(event.code, event.slot, event.last) for event in desk.events] == [(code, None, True)]


def test_a_producer_without_a_common_path_is_refused(desk: Desk) -> None:
    desk.path = None
    desk.expect()
    desk.slots["item"] = slot(1)
    desk.receive(A, announce())
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.NO_COMMON_PATH
    assert [(event.code, event.slot) for event in desk.events] == [(NackCode.NO_COMMON_PATH, None)]


@pytest.mark.parametrize("announced", [False, True])
def test_encode_failed_from_the_router_fails_the_transfer(desk: Desk, announced: bool) -> None:
    desk.expect()
    if announced:
        desk.receive(A, announce())
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason="no encoder"))
    desk.poll()
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert (event.code, event.reason, event.last) == (NackCode.UNAVAILABLE, "no encoder", True)


def test_encode_failed_during_a_grant_quarantines_the_slot(desk: Desk) -> None:
    desk.granted()
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason="no encoder"))
    (question,) = desk.poll()
    assert isinstance(question, Abort)
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert event.slot == slot(1)


def test_an_abort_by_the_producer_fails_the_transfer_and_releases_its_slot(desk: Desk) -> None:
    desk.granted()
    desk.receive(A, Abort(transfer_id="t", reason="encoder crashed"))
    assert desk.poll() == []
    failed, release = desk.events
    assert isinstance(failed, Failed)
    assert failed.slot == slot(1)
    assert release == Released(slot=slot(1))


def test_an_abort_by_somebody_else_is_ignored(desk: Desk) -> None:
    desk.granted()
    desk.receive(B, Abort(transfer_id="t", reason="mine"))
    assert desk.poll() == []
    assert desk.events == []


# -- deadlines and leases ------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [False, True])
def test_a_transfer_that_is_not_granted_fails_at_its_deadline(desk: Desk, announced: bool) -> None:
    desk.expect()
    if announced:
        desk.receive(A, announce())
    desk.poll(TIMEOUT_S - 0.1)
    assert desk.events == []
    desk.poll(0.1)
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert "transfer.wait_timeout_s" in event.reason


def test_a_lease_that_runs_out_quarantines_the_slot_until_the_producer_answers(desk: Desk) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S - 0.1)
    assert desk.events == []
    (question,) = desk.poll(0.1)
    assert isinstance(question, Abort)
    (failed,) = desk.events
    assert isinstance(failed, Failed)
    assert "transfer.lease_s" in failed.reason
    assert failed.slot == slot(1)
    assert not desk.allowed(slot(1))
    desk.receive(A, released())
    desk.poll()
    assert desk.events[1:] == [Released(slot=slot(1))]


def test_announcing_again_while_encoding_renews_the_lease(desk: Desk) -> None:
    grant = desk.granted()
    for _ in range(5):
        desk.now += LEASE_S / 2
        desk.receive(A, announce())
        assert desk.poll() == [grant]
    assert desk.events == []


def test_renewing_a_lease_does_not_outlive_the_deadline(desk: Desk) -> None:
    desk.granted()
    for _ in range(6):
        desk.poll(LEASE_S / 2)
        desk.receive(A, announce())
    desk.poll()
    assert isinstance(desk.events[0], Failed)


def test_a_quarantined_slot_comes_back_when_its_producer_is_gone(desk: Desk) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S)
    assert len(desk.events) == 1
    desk.gone.add(PEERS[A].session)
    assert desk.poll(0.1) == []
    assert desk.events[1:] == [Released(slot=slot(1))]


def test_a_quarantined_slot_is_asked_for_again_until_there_is_an_answer(desk: Desk) -> None:
    desk.granted()
    assert len(desk.poll(LEASE_S + LEASE_MARGIN_S)) == 1
    assert desk.poll(LEASE_S - 0.1) == []
    (again,) = desk.poll(0.1)
    assert isinstance(again, Abort)
    desk.receive(B, released())
    assert len(desk.poll(LEASE_S)) == 1
    assert len(desk.events) == 1


def test_a_fenced_path_needs_no_quarantine() -> None:
    desk = Desk(fenced=frozenset({"tcp"}), path=PathEndpoint(path="tcp", address="tcp://x:1"))
    desk.granted()
    (abort,) = desk.poll(LEASE_S + LEASE_MARGIN_S)
    assert isinstance(abort, Abort)
    failed, release = desk.events
    assert isinstance(failed, Failed)
    assert release == Released(slot=slot(1))
    assert not desk.allowed(slot(1))


def test_written_after_the_lease_is_acknowledged_but_does_not_land(desk: Desk) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S)
    desk.receive(A, written())
    assert desk.poll() == [Injected(transfer_id="t")]
    assert not any(isinstance(event, Landed) for event in desk.events)


# -- giving up -----------------------------------------------------------------------------------


def test_an_item_nobody_waits_for_ends_its_transfers(desk: Desk) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.receive(A, announce(transfer_id="t"))
    desk.poll()
    assert desk.session.item_not_needed("item") is None
    assert desk.poll() == [NotNeeded(transfer_id="t")]
    assert not desk.session.expects("item")
    assert desk.events == []


def test_giving_up_a_granted_item_returns_its_slot_and_quarantines_it(desk: Desk) -> None:
    desk.granted()
    assert desk.session.item_not_needed("item") == slot(1)
    (question,) = desk.poll()
    assert isinstance(question, Abort)
    desk.receive(A, released())
    desk.poll()
    assert desk.events == [Released(slot=slot(1))]


# -- several transfers of one item, several producers of one transfer ----------------------------


def test_one_of_two_transfers_of_an_item_is_granted_and_the_other_waits(desk: Desk) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.slots["item"] = slot(1)
    desk.receive(A, announce(transfer_id="t"))
    desk.receive(B, announce(B, transfer_id="u"))
    grant, later = desk.poll()
    assert isinstance(grant, Grant)
    assert later == Later(transfer_id="u")
    desk.receive(A, written())
    assert desk.poll() == [Injected(transfer_id="t"), NotNeeded(transfer_id="u")]
    assert len(desk.events) == 1


def test_a_failure_is_not_the_last_while_another_transfer_of_the_item_is_under_way(
    desk: Desk,
) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason=""))
    desk.receive(b"router", EncodeFailed(transfer_id="u", reason=""))
    desk.poll()
    assert [event.last for event in desk.events if isinstance(event, Failed)] == [False, True]


def test_the_slot_of_a_failed_transfer_is_not_granted_to_its_sibling(desk: Desk) -> None:
    desk.granted()
    desk.expect("u")
    desk.receive(B, announce(B, transfer_id="u"))
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason=""))
    later, question = desk.poll()
    assert later == Later(transfer_id="u")
    assert isinstance(question, Abort)
    desk.slots["item"] = slot(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert grant.slot.generation == 2


def test_the_slot_of_an_expired_lease_is_not_granted_to_its_sibling(desk: Desk) -> None:
    desk.granted()
    desk.now += 1
    desk.expect("u")
    desk.receive(B, announce(B, transfer_id="u"))
    desk.poll()
    assert not any(isinstance(m, Grant) for m in desk.poll(LEASE_S + LEASE_MARGIN_S))


def test_another_encoder_takes_a_granted_transfer_over_with_another_slot(desk: Desk) -> None:
    desk.granted(A)
    desk.receive(B, announce(B))
    later, question = desk.poll()
    assert later == Later(transfer_id="t")
    assert isinstance(question, Abort)
    assert desk.sent[-1][0] == A
    (failed,) = desk.events
    assert isinstance(failed, Failed)
    assert (failed.slot, failed.last) == (slot(1), False)
    desk.slots["item"] = slot(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert desk.sent[-1][0] == B
    desk.receive(A, written(1))
    desk.receive(B, written(2))
    desk.poll()
    assert [event.producer for event in desk.events if isinstance(event, Landed)] == [PEERS[B]]


def test_a_restarted_encoder_takes_its_own_transfer_over(desk: Desk) -> None:
    desk.granted(A)
    reborn = peer("encode-a", session="encode-a-life-2")
    desk.gone.add(PEERS[A].session)
    desk.receive(
        b"encode-a-2", Announce(transfer_id="t", mm_hash="item", tensor=SPEC, producer=reborn)
    )
    desk.poll()
    assert [type(event) for event in desk.events] == [Failed, Released]
    desk.slots["item"] = slot(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


def test_slots_that_one_producer_lost_twice_all_come_back(desk: Desk) -> None:
    desk.granted(A, generation=1)
    for sender, generation in ((B, 2), (A, 3), (B, 4)):
        desk.receive(sender, announce(sender))
        desk.poll()
        desk.slots["item"] = slot(generation)
        desk.poll()
    desk.receive(A, released())
    desk.receive(B, released())
    desk.poll()
    back = {event.slot.generation for event in desk.events if isinstance(event, Released)}
    assert back == {1, 2, 3}
