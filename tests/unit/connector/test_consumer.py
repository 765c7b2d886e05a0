"""The consumer's session: items that arrive, and messages that come twice, late or unasked."""

from __future__ import annotations

import pytest

from epd_portable.connector import consumer
from epd_portable.connector.consumer import LEASE_MARGIN_S
from epd_portable.scheduling.items import State
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
    Landed,
    Refused,
    Released,
    announce,
    released,
    written,
)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- the straight way ----------------------------------------------------------------------------


def test_an_announced_item_with_room_is_granted_its_slot(desk: Desk) -> None:
    grant = desk.granted()
    assert grant.slot == slot(1)
    assert (grant.path, grant.lease_s) == ("shm", LEASE_S)
    assert desk.allowed(slot(1))
    assert desk.item().state is State.GRANTED


def test_a_written_item_lands_and_is_acknowledged(desk: Desk) -> None:
    desk.granted()
    desk.now += 2.5
    desk.receive(A, written(digest="crc"))
    assert desk.poll() == [Injected(transfer_id="t")]
    assert desk.events == [Landed("item", "t", "encode-a", "shm", 2.5, "crc")]
    assert not desk.allowed(slot(1))
    assert not desk.item().transfers


def test_an_item_without_room_is_told_later_at_each_announcement_and_granted_with_its_room(
    desk: Desk,
) -> None:
    desk.expect()
    desk.receive(A, announce())
    assert desk.poll() == [Later(transfer_id="t")]
    assert desk.poll(1.0) == []
    desk.receive(A, announce())
    assert desk.poll() == [Later(transfer_id="t")]
    desk.give_room(3)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert grant.slot.generation == 3


def test_messages_go_out_at_once(desk: Desk) -> None:
    """A peer waits neither for the engine's next step nor for anybody's deadline."""
    desk.expect()
    desk.give_room()
    desk.receive(A, announce(), written())
    assert [type(message) for _, message in desk.sent] == [Grant, Injected]
    assert desk.landings() == ["encode-a"]


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


@pytest.mark.parametrize("message", [released(), Abort(transfer_id="t", reason=""), announce()])
def test_messages_of_an_unknown_transfer_change_nothing(desk: Desk, message: AnyMessage) -> None:
    desk.receive(A, message, message)
    assert desk.poll() == []
    assert desk.events == []


def test_written_for_a_transfer_that_is_forgotten_is_not_needed(desk: Desk) -> None:
    desk.receive(A, written(attempt=7))
    assert desk.poll() == [NotNeeded(transfer_id="t", attempt=7)]


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
    assert desk.landings() == ["encode-a"]


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
    desk.give_room()
    assert desk.poll() == []
    desk.expect()
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert desk.session.early() == []


def test_who_announces_early_is_told_of_once_and_only_where_it_fits(desk: Desk) -> None:
    desk.receive(A, announce(), announce(), announce(transfer_id="u", mm_hash="other"))
    unfit = peer("encode-c", fingerprint="other")
    desk.receive(b"c", Announce(transfer_id="v", mm_hash="item", tensor=SPEC, producer=unfit))
    assert desk.announcements == ["t", "u"]
    assert desk.session.early() == [announce(), announce(transfer_id="u", mm_hash="other")]
    desk.expect("v")
    (nack,) = desk.poll()
    assert isinstance(nack, Nack)
    assert nack.code is NackCode.INCOMPATIBLE
    desk.session.decline("t")
    assert [early.transfer_id for early in desk.session.early()] == ["u"]


def test_an_early_announcement_that_was_passed_over_waits_for_its_request(desk: Desk) -> None:
    desk.receive(A, announce(), announce(transfer_id="u", mm_hash="other"))
    desk.session.pass_over("t")
    assert [early.transfer_id for early in desk.session.early()] == ["u"]
    desk.give_room()
    desk.expect()
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    desk.session.pass_over("t")


def test_an_accepted_transfer_goes_on_for_its_request_with_a_deadline_of_its_own(
    desk: Desk,
) -> None:
    desk.receive(A, announce())
    desk.give_room()
    desk.expect(asked=False)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    for _ in range(5):
        desk.now += LEASE_S / 2
        desk.receive(A, announce())
        assert desk.poll() == [grant]
    desk.expect()
    for _ in range(5):
        desk.now += LEASE_S / 2
        desk.receive(A, announce())
        assert desk.poll() == [grant], "the deadline is the request's"
    desk.receive(A, written())
    assert desk.landings() == ["encode-a"]


def test_a_transfer_that_ended_before_its_request_came_fails_when_that_comes(desk: Desk) -> None:
    desk.receive(A, announce())
    desk.expect(asked=False)
    desk.receive(A, Abort(transfer_id="t", reason="gave up"))
    desk.expect()
    first, second = desk.events
    assert isinstance(first, Failed) and isinstance(second, Failed)
    assert (first.cause, second.cause) == ("cancelled", "missing")
    desk.expect()
    assert len(desk.events) == 2, "a request may name it once more, and another delivers it"
    desk.give_room()
    desk.receive(B, announce(B), written())
    assert desk.landings() == ["encode-b"]


def test_a_transfer_whose_request_means_another_item_begins_anew_without_its_encoder(
    desk: Desk,
) -> None:
    desk.receive(A, announce())
    desk.give_room()
    desk.expect(asked=False)
    desk.poll()
    desk.expect(mm_hash="another")
    failed, refused = desk.events
    assert isinstance(failed, Failed)
    assert (failed.mm_hash, failed.cause, failed.slot) == ("item", "refused", slot(1))
    assert refused == Refused("t", NackCode.UNEXPECTED)
    nack, question = desk.poll()
    assert isinstance(nack, Nack) and isinstance(question, Abort)
    assert nack.code is NackCode.UNEXPECTED
    assert "announced item" in nack.detail and "expected another" in nack.detail
    assert not desk.item().transfers
    desk.give_room(2, "another")
    desk.receive(B, announce(B, mm_hash="another"))
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


def test_a_request_hears_of_encoders_that_were_refused_before_it_came(desk: Desk) -> None:
    desk.expect(asked=False)
    desk.receive(A, announce(mm_hash="another"))
    desk.receive(B, announce(B), announce(B, attempt=1))
    assert desk.events == [Refused("t", NackCode.UNEXPECTED)]
    desk.expect()
    assert desk.events == [Refused("t", NackCode.UNEXPECTED)] * 2, "taking over is no refusal"


def test_an_early_announcement_whose_request_never_comes_is_not_needed(desk: Desk) -> None:
    desk.receive(A, announce())
    assert desk.poll(TIMEOUT_S - 0.1) == []
    desk.receive(A, announce())
    assert desk.poll(0.1) == [NotNeeded(transfer_id="t")]


def test_an_announcement_after_the_end_is_not_needed(desk: Desk) -> None:
    desk.expect()
    desk.session.not_wanted(desk.item())
    desk.receive(A, announce())
    assert desk.poll() == [NotNeeded(transfer_id="t")]


def test_a_declined_transfer_is_not_needed_before_and_after_its_announcement(desk: Desk) -> None:
    desk.session.decline("later")
    desk.receive(A, announce(transfer_id="later"), announce(transfer_id="early"))
    desk.session.decline("early")
    assert desk.poll() == [NotNeeded(transfer_id="later"), NotNeeded(transfer_id="early")]


def test_what_is_remembered_of_early_and_ended_transfers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "MAX_ENDED", 3)
    monkeypatch.setattr(consumer, "MAX_EARLY", 3)
    desk = Desk()
    for number in range(10):
        desk.receive(A, announce(transfer_id=f"early-{number}"))
    desk.now += TIMEOUT_S
    assert [message.transfer_id for message in desk.poll()] == ["early-0", "early-1", "early-2"]
    for number in range(10):
        desk.session.decline(f"ended-{number}")
    for number in range(10):
        desk.receive(A, announce(transfer_id=f"ended-{number}"))
    assert [message.transfer_id for message in desk.poll()] == ["ended-7", "ended-8", "ended-9"]


# -- several transfers of one item, several producers of one transfer ----------------------------


def test_one_of_two_transfers_of_an_item_is_granted_and_the_other_waits(desk: Desk) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.give_room()
    desk.receive(A, announce(transfer_id="t"))
    desk.receive(B, announce(B, transfer_id="u"))
    grant, later = desk.poll()
    assert isinstance(grant, Grant)
    assert later == Later(transfer_id="u")
    desk.receive(A, written())
    assert desk.poll() == [NotNeeded(transfer_id="u"), Injected(transfer_id="t")]
    assert len(desk.events) == 1


def test_the_first_that_was_announced_is_granted_when_there_is_room(desk: Desk) -> None:
    desk.expect("t")
    desk.expect("u")
    desk.receive(B, announce(B, transfer_id="u"))
    desk.poll()
    desk.give_room()
    assert [type(message) for message in desk.poll()] == [Grant]
    assert desk.sent[-1][0] == B


def test_transfers_of_an_item_end_but_those_that_somebody_may_still_want(desk: Desk) -> None:
    for transfer_id in ("t", "u", "v"):
        desk.expect(transfer_id)
    desk.receive(A, announce(transfer_id="t"), announce(transfer_id="u"))
    desk.poll()
    desk.session.not_wanted(desk.item(), but={"u"})
    assert desk.poll() == [NotNeeded(transfer_id="t")]
    assert set(desk.item().transfers) == {"u"}
    desk.receive(A, announce(transfer_id="v"))
    assert desk.poll() == [NotNeeded(transfer_id="v")]
    desk.give_room()
    desk.poll()
    desk.session.not_wanted(desk.item(), but={"u"})
    assert desk.poll() == []
    desk.receive(A, written(transfer_id="u"))
    assert desk.landings() == ["encode-a"]


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
    desk.give_room(2)
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
    desk.give_room(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert grant.slot.generation == 2


def test_another_encoder_takes_a_granted_transfer_over_with_another_slot(desk: Desk) -> None:
    desk.granted(A)
    desk.receive(B, announce(B))
    later, question = desk.poll()
    assert later == Later(transfer_id="t")
    assert isinstance(question, Abort)
    assert desk.sent[-1][0] == A
    (failed,) = desk.events
    assert isinstance(failed, Failed)
    assert (failed.slot, failed.last, failed.cause) == (slot(1), False, "retried")
    desk.give_room(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)
    assert desk.sent[-1][0] == B
    desk.receive(A, written(1))
    desk.receive(B, written(2))
    assert desk.landings() == ["encode-b"]


def test_a_restarted_encoder_takes_its_own_transfer_over(desk: Desk) -> None:
    desk.granted(A)
    reborn = peer("encode-a", session="encode-a-life-2")
    desk.gone.add(PEERS[A].session)
    desk.receive(
        b"encode-a-2", Announce(transfer_id="t", mm_hash="item", tensor=SPEC, producer=reborn)
    )
    desk.poll()
    assert [type(event) for event in desk.events] == [Failed, Released]
    desk.give_room(2)
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


def test_an_encoder_that_was_taken_over_from_does_not_take_over_again(desk: Desk) -> None:
    desk.granted(A)
    desk.receive(B, announce(B))
    desk.poll()
    desk.give_room(2)
    desk.poll()
    desk.receive(A, announce(A))
    assert desk.poll() == [Abort(transfer_id="t", reason="encode-b took over")]
    desk.receive(B, written(2))
    assert desk.landings() == ["encode-b"]


def test_a_release_of_an_earlier_attempt_leaves_the_slot_of_the_present_one(desk: Desk) -> None:
    desk.granted(A, generation=1)
    desk.receive(A, Abort(transfer_id="t", reason="gave up"))
    desk.poll()
    desk.expect()
    desk.give_room(2)
    desk.receive(A, announce(attempt=1))
    desk.poll()
    desk.receive(A, released(attempt=0))
    desk.poll(LEASE_S + LEASE_MARGIN_S)
    desk.receive(A, released(attempt=0))
    desk.poll()
    back = [event.slot.generation for event in desk.events if isinstance(event, Released)]
    assert back == [1]
    desk.receive(A, released(attempt=1))
    desk.poll()
    assert [event.slot for event in desk.events if isinstance(event, Released)][1:] == [slot(2)]


def test_an_attempt_that_is_asked_to_stop_is_granted_nothing(desk: Desk) -> None:
    desk.granted(A, generation=1)
    desk.receive(b"router", EncodeFailed(transfer_id="t", reason=""))
    desk.poll()
    desk.expect()
    desk.give_room(2)
    desk.receive(A, announce())
    assert desk.poll() == []
    desk.receive(A, announce(attempt=1))
    (grant,) = desk.poll()
    assert isinstance(grant, Grant)


def test_an_early_announcement_that_is_aborted_is_forgotten(desk: Desk) -> None:
    desk.receive(A, announce(), Abort(transfer_id="t", reason="gave up"))
    desk.receive(B, announce(B), Abort(transfer_id="t", attempt=1, reason="another"))
    desk.expect()
    desk.give_room()
    desk.poll()
    assert [sender for sender, _ in desk.sent] == [B, B]


def test_attempts_without_end_fail_the_transfer(desk: Desk) -> None:
    desk.expect()
    for attempt in range(consumer.MAX_REFUSED + 2):
        desk.receive(A, announce(attempt=attempt))
    desk.poll()
    (event,) = desk.events
    assert isinstance(event, Failed)
    assert f"at most {consumer.MAX_REFUSED}" in event.reason
