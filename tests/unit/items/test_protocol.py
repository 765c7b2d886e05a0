"""The consumer's session: arrivals, refusals, deadlines, and messages twice, late or unasked."""

from __future__ import annotations

from typing import Any

import pytest

from epd_portable.errors import NoCommonPathError
from epd_portable.items import transfers
from epd_portable.items.quarantine import SETTLED_S
from epd_portable.items.table import State
from epd_portable.items.transfers import LEASE_MARGIN_S
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    AnyMessage,
    Foreign,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
)
from tests.unit.builders import peer, slot
from tests.unit.items.transfers_desk import (
    LEASE_S,
    PEERS,
    TIMEOUT_S,
    A,
    B,
    Desk,
    abort,
    announce,
    released,
    written,
)

ELSEWHERE = peer("encode-a", host="another")
OTHER_SPEC = TensorSpec(shape=(5, 8), dtype="float32")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_announced_item_is_granted_and_lands_when_written(desk: Desk) -> None:
    desk.expect()
    desk.give_room()
    desk.receive(A, announce())
    ((_, grant),) = desk.sent
    assert isinstance(grant, Grant)
    assert (grant.slot, grant.path, grant.lease_s) == (slot(1), "shm", LEASE_S)
    assert desk.allowed()
    assert desk.item().state is State.GRANTED
    desk.now += 2.5
    desk.receive(A, written())
    assert [type(message) for _, message in desk.sent] == [Grant, Injected], "nothing waits"
    assert desk.events == [("landed", "t", "encode-a", "shm", 2.5)]
    assert not desk.allowed()
    assert not desk.item().transfers


def test_written_for_a_transfer_that_is_forgotten_is_not_needed(desk: Desk) -> None:
    desk.receive(A, written(attempt=7))
    assert desk.sent == [(A, NotNeeded(transfer_id="t", attempt=7))]


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (A, Grant(transfer_id="t", slot=slot(9), path="shm", address="", lease_s=1.0)),
        (A, Later(transfer_id="t")),
        (A, NotNeeded(transfer_id="t")),
        (A, Injected(transfer_id="t")),
        (A, Nack(transfer_id="t", code=NackCode.UNEXPECTED, detail="")),
        (A, written(generation=2)),
        (B, written()),
        (B, abort()),
    ],
)
def test_other_messages_leave_a_grant_alone(desk: Desk, sender: bytes, message: AnyMessage) -> None:
    desk.get_grant()
    desk.receive(sender, message)
    assert (desk.said(), desk.events) == ([], [])
    desk.receive(A, written())
    assert desk.landings() == ["encode-a"]


def test_announcement_without_request_ends_as_not_needed(desk: Desk) -> None:
    # One that no front has asked for is not even cached: the table of these is bounded.
    desk.receive(A, announce(transfer_id="forged"), announce())
    assert desk.said(TIMEOUT_S - 0.1) == []
    desk.receive(A, announce())
    assert desk.said(0.1) == ["a t not_needed"]
    desk.session.decline("later")
    desk.expect("ended")
    desk.leave()
    for transfer_id in ("later", "ended"):
        desk.receive(A, announce(transfer_id=transfer_id))
        assert desk.said() == [f"a {transfer_id} not_needed"]
    desk.receive(A, announce(transfer_id="early"))
    desk.session.decline("early")
    assert desk.said() == ["a early not_needed"]


def test_an_early_announcement_that_is_aborted_is_forgotten(desk: Desk) -> None:
    desk.receive(A, announce(), abort())
    desk.receive(B, announce(B), abort(attempt=1))
    desk.expect()
    desk.give_room()
    assert desk.said() == ["b t later", "b t grant 1"]


def test_tables_of_ended_and_early_transfers_are_bounded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "MAX_ENDED", 2)
    monkeypatch.setattr(transfers, "MAX_EARLY", 2)
    desk.receive(A, *(announce(transfer_id=name) for name in "uvw"))
    assert desk.said(TIMEOUT_S) == ["a u not_needed", "a v not_needed"]
    for name in "xyz":
        desk.session.decline(name)
    desk.receive(A, announce(transfer_id="x"), announce(transfer_id="z"))
    assert desk.said() == ["a z not_needed"], "x is forgotten, and waits for its request"


def test_transfers_of_item_end_but_those_still_wanted(desk: Desk) -> None:
    for transfer_id in ("t", "u", "v"):
        desk.expect(transfer_id)
    desk.give_room()
    desk.receive(A, announce(transfer_id="t"))
    desk.receive(B, announce(B, transfer_id="u"), announce(B, transfer_id="v"))
    desk.cache.preempt(desk.cache.requests["r2"].claims["item"])
    desk.said()
    desk.receive(A, written())
    assert desk.said() == ["a t injected", "b v not_needed"]
    assert set(desk.item().transfers) == {"u"}, "the item may be evicted before its turn"
    desk.give_room()
    assert desk.said() == ["b u not_needed"]
    assert desk.landings() == ["encode-a"]


def test_granted_transfer_moves_to_an_encoder_with_a_new_slot(desk: Desk) -> None:
    desk.get_grant()
    desk.receive(B, announce(B))
    assert desk.said() == ["b t later", "a t abort"]
    assert desk.events == [("failed", "t", "retried", "others left")]
    assert desk.session.count() == (0, 1)
    desk.give_room()
    assert desk.said() == ["b t grant 2"]
    desk.receive(A, announce(A))
    assert desk.sent == [(A, Abort(transfer_id="t", reason="encode-b took over"))]
    desk.receive(A, written(1))
    desk.receive(B, written(2))
    assert desk.landings() == ["encode-b"]


def test_a_transfer_that_has_ended_is_not_expected_again(desk: Desk) -> None:
    desk.get_grant()
    desk.receive(A, abort())
    desk.expect()
    assert desk.session.count() == (0, 0)
    desk.receive(A, announce(attempt=1))
    assert desk.said() == ["a t not_needed"]


def test_attempts_without_end_fail_the_transfer(desk: Desk) -> None:
    desk.expect()
    for attempt in range(transfers.MAX_REFUSED + 2):
        desk.receive(A, announce(attempt=attempt))
    assert [event[2] for event in desk.events] == ["refused"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"producer": peer("encode-a", fingerprint="other")}, "incompatible"),
        ({"mm_hash": "another item"}, "unexpected"),
        ({"tensor": OTHER_SPEC}, "unexpected"),
        ({"tensor": TensorSpec(shape=(4, 8), dtype="float16")}, "unexpected"),
        ({"producer": ELSEWHERE}, "no_common_path"),
    ],
)
def test_an_unfit_encoder_is_refused(
    desk: Desk, changed: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(producer: PeerDescriptor) -> PathEndpoint:
        if producer == ELSEWHERE:
            raise NoCommonPathError("other platforms")
        return desk.path

    monkeypatch.setattr(desk, "choose", choose)
    desk.expect()
    desk.give_room()
    for _ in range(2):
        desk.receive(A, announce(**changed))
        assert desk.said() == [f"a t nack {code}"]
    assert desk.events == [("refused", "t", code)]
    desk.receive(B, announce(B))
    desk.receive(A, announce(**changed))
    desk.receive(B, written())
    assert desk.landings() == ["encode-b"]


@pytest.mark.parametrize("early", [False, True])
def test_encoder_of_another_version_is_replaced(desk: Desk, early: bool) -> None:
    foreign = Foreign(kind="announce", transfer_id="t", attempt=1, protocol=1)
    if early:
        desk.receive(A, foreign)
    desk.expect()
    desk.give_room()
    if not early:
        desk.receive(A, foreign)
    assert desk.events == [("refused", "t", "incompatible")]
    desk.receive(B, announce(B))
    assert desk.said() == ["b t grant 1"]


def test_refused_fingerprint_is_reported_with_its_differences() -> None:
    desk = Desk(fingerprint="config=a dtype=bfloat16")
    desk.expect()
    desk.receive(A, announce(producer=peer("encode-a", fingerprint="config=b dtype=float16")))
    ((_, nack),) = desk.sent
    assert isinstance(nack, Nack)
    assert nack.detail == (
        "encode-a differs in the configuration files of the checkpoint (config.json, params.json), "
        "the dtype (--dtype): float16 at the sender, bfloat16 at the receiver. Start both with the "
        "same"
    )


@pytest.mark.parametrize("announced", [False, True])
def test_a_transfer_that_is_not_granted_fails_at_its_deadline(desk: Desk, announced: bool) -> None:
    desk.expect()
    if announced:
        desk.receive(A, announce())
    desk.said(TIMEOUT_S - 0.1)
    assert desk.events == []
    desk.said(0.1)
    assert desk.events == [("failed", "t", "timeout", "last")]
    assert "transfer.wait_timeout_s" in desk.reasons[0]
    assert ("announced by encode-a" in desk.reasons[0]) is announced
    assert ("its encoder has not announced it" in desk.reasons[0]) is not announced


def test_expired_lease_quarantines_the_slot_until_a_reply(desk: Desk) -> None:
    desk.get_grant()
    desk.said(LEASE_S + LEASE_MARGIN_S - 0.1)
    assert desk.events == []
    assert desk.said(0.1) == ["a t abort"]
    assert desk.events == [("failed", "t", "timeout", "last")]
    assert "transfer.lease_s" in desk.reasons[0]
    assert not desk.allowed()
    desk.receive(A, written())
    assert desk.said() == ["a t injected"]
    desk.receive(B, released())
    assert desk.said(LEASE_S - 0.1) == []
    assert desk.said(0.1) == ["a t abort"], "it is asked again"
    assert desk.events[1:] == []
    desk.receive(A, released())
    assert desk.events[1:] == [("released", 1)]


def test_announcing_again_renews_lease_but_not_beyond_deadline(desk: Desk) -> None:
    desk.get_grant()
    for _ in range(5):
        desk.now += LEASE_S / 2
        desk.receive(A, announce())
        assert desk.said() == ["a t grant 1"]
    assert desk.events == []
    desk.said(LEASE_S / 2)
    assert [event[0] for event in desk.events] == ["failed"]


@pytest.mark.parametrize(
    ("other", "is_later"),
    [
        (peer("encode-a", session="another life"), True),
        (peer("encode-c"), False),
        (peer("encode-a", session="moved", host="another"), False),
        (PEERS[A], False),
    ],
    ids=["a later life", "another instance", "another machine", "itself"],
)
def test_a_later_life_frees_slots(desk: Desk, other: PeerDescriptor, is_later: bool) -> None:
    desk.get_grant()
    desk.said(LEASE_S + LEASE_MARGIN_S)
    desk.receive(b"other", announce(transfer_id="u", mm_hash="other", producer=other))
    desk.said(SETTLED_S - 1)
    assert desk.events[1:] == []
    desk.said(1.0)
    assert (desk.events[1:] == [("released", 1)]) is is_later


@pytest.mark.parametrize("ends", ["lease", "not wanted"])
@pytest.mark.parametrize("fenced", [False, True])
def test_only_a_fenced_slot_is_free_at_once(ends: str, fenced: bool) -> None:
    desk = Desk(fenced_paths=frozenset({"tcp"}), path=PathEndpoint(path="tcp" if fenced else "shm"))
    desk.get_grant()
    if ends == "not wanted":
        desk.leave()
    assert desk.said(LEASE_S + LEASE_MARGIN_S if ends == "lease" else 0.0) == ["a t abort"]
    assert not desk.allowed()
    failed = [] if ends == "not wanted" else [("failed", "t", "timeout", "last")]
    assert {*desk.events} == {*failed, *([("released", 1)] if fenced else [])}
    desk.receive(A, released())
    assert {*desk.events} == {*failed, ("released", 1)}
