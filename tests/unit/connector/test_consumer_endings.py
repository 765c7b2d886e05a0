"""The consumer's session: refusals, failures, deadlines and leases."""

from __future__ import annotations

import pytest

from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.connector.quarantine import SETTLED_S
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    EncodeFailed,
    Grant,
    Injected,
    Nack,
    NackCode,
    NotNeeded,
)
from tests.unit.builders import SPEC, peer, slot
from tests.unit.connector.desk import (
    LEASE_S,
    PEERS,
    TIMEOUT_S,
    A,
    B,
    Desk,
    Failed,
    Refused,
    Released,
    Revoked,
    announce,
    released,
    written,
)


@pytest.fixture
def desk() -> Desk:
    return Desk()


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
def test_an_encoder_that_does_not_match_is_refused_and_another_delivers(
    desk: Desk, changed: dict[str, object], code: NackCode
) -> None:
    desk.expect()
    desk.give_room()
    values: dict[str, object] = {
        "transfer_id": "t",
        "mm_hash": "item",
        "tensor": SPEC,
        "producer": PEERS[A],
    }
    unfit = Announce(**(values | changed))  # type: ignore[arg-type]
    desk.receive(A, unfit)
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert nack.code is code
    desk.receive(A, unfit)
    assert desk.poll() == [nack]
    assert desk.events == [Refused("t", code)]
    desk.receive(B, announce(B))
    desk.receive(A, unfit)
    desk.poll()
    desk.receive(B, written())
    desk.poll()
    assert desk.landings() == ["encode-b"]


def test_an_encoder_that_does_not_match_leaves_the_grant_of_another(desk: Desk) -> None:
    desk.granted()
    unfit = TensorSpec(shape=(5, 8), dtype="float32")
    desk.receive(B, announce(B, tensor=unfit))
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert desk.sent[-1][0] == B
    desk.receive(A, written())
    desk.poll()
    assert desk.landings() == ["encode-a"]


def test_a_granted_encoder_that_announces_something_else_loses_its_slot(desk: Desk) -> None:
    desk.granted()
    desk.receive(A, announce(tensor=TensorSpec(shape=(5, 8), dtype="float32")))
    nack, question = desk.poll()
    assert isinstance(nack, Nack) and isinstance(question, Abort)
    assert not desk.allowed(slot(1))
    failed = desk.events[-1]
    assert isinstance(failed, Failed)
    assert (failed.slot, failed.last) == (slot(1), False)
    assert "t" in desk.item().transfers


def test_a_producer_without_a_common_path_is_refused_alone(desk: Desk) -> None:
    path, desk.path = desk.path, None
    desk.expect()
    desk.give_room()
    desk.receive(A, announce())
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.NO_COMMON_PATH
    assert desk.events == [Refused("t", NackCode.NO_COMMON_PATH)]
    desk.path = path
    desk.receive(B, announce(B))
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


@pytest.mark.parametrize("announced", [False, True])
def test_encode_failed_from_the_router_fails_the_transfer(desk: Desk, announced: bool) -> None:
    desk.expect()
    if announced:
        desk.receive(A, announce())
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason="no encoder"))
    desk.poll()
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert (event.cause, event.reason, event.last) == ("unavailable", "no encoder", True)


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
    desk.expect(encoder="encode-9")
    if announced:
        desk.receive(A, announce())
    desk.poll(TIMEOUT_S - 0.1)
    assert desk.events == []
    desk.poll(0.1)
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert "transfer.wait_timeout_s" in event.reason
    assert ("announced by encode-a" in event.reason) is announced
    assert ("encode-9 has not announced it" in event.reason) is not announced


def test_a_lease_that_runs_out_quarantines_the_slot_until_the_producer_answers(desk: Desk) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S - 0.1)
    assert desk.events == []
    (question,) = desk.poll(0.1)
    assert isinstance(question, Abort)
    assert "transfer.lease_s" in question.reason
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


def by(producer: PeerDescriptor) -> Announce:
    """Return what somebody announces of another item."""
    return Announce(transfer_id="u", mm_hash="other", tensor=SPEC, producer=producer)


def test_a_quarantined_slot_comes_back_when_a_later_life_of_its_producer_has_spoken_for_long(
    desk: Desk,
) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S)
    later = peer(PEERS[A].instance, session="another life")
    desk.receive(b"later", by(later))
    desk.poll(SETTLED_S - 1)
    assert not any(isinstance(event, Released) for event in desk.events)
    desk.poll(1.0)
    assert desk.events[-1] == Released(slot=slot(1))


@pytest.mark.parametrize(
    "other",
    [peer("encode-c"), peer("encode-a", session="moved", host="another"), PEERS[A]],
    ids=["another instance", "another machine", "itself"],
)
def test_who_may_be_alive_keeps_its_quarantined_slot(desk: Desk, other: PeerDescriptor) -> None:
    desk.granted()
    desk.poll(LEASE_S + LEASE_MARGIN_S)
    desk.receive(b"other", by(other))
    desk.poll(10 * SETTLED_S)
    assert not any(isinstance(event, Released) for event in desk.events)


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
    assert desk.landings() == []


# -- giving up -----------------------------------------------------------------------------------


def test_an_item_nobody_waits_for_ends_its_transfers(desk: Desk) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.receive(A, announce(transfer_id="t"))
    desk.poll()
    desk.session.not_wanted(desk.item())
    assert desk.poll() == [NotNeeded(transfer_id="t")]
    assert not desk.item().transfers
    assert desk.events == []


def test_giving_up_a_granted_item_takes_its_slot_and_quarantines_it(desk: Desk) -> None:
    desk.granted()
    desk.session.not_wanted(desk.item())
    assert desk.events == [Revoked(slot(1))]
    assert desk.item().slot is None
    assert not desk.allowed(slot(1))
    (question,) = desk.poll()
    assert isinstance(question, Abort)
    desk.receive(A, released())
    assert desk.events == [Revoked(slot(1)), Released(slot(1))]


def test_giving_up_a_granted_item_on_a_fenced_path_frees_its_slot_at_once() -> None:
    desk = Desk(fenced=frozenset({"tcp"}), path=PathEndpoint(path="tcp", address="tcp://x:1"))
    desk.granted()
    desk.session.not_wanted(desk.item())
    assert desk.events == [Revoked(slot(1)), Released(slot(1))]
    assert [type(message) for message in desk.poll()] == [Abort]
