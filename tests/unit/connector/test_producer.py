"""The producer's session: every edge of its diagram, with messages and a clock made up here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec
import pytest

from epd_portable.connector.producer import (
    Actions,
    Finished,
    ProducerSession,
    TransferOrder,
    Write,
)
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
from tests.unit.builders import SPEC, peer, slot

PD = "tcp://pd:1"
OTHER = "tcp://other:1"
LEASE_S, TIMEOUT_S, RESEND_S = 10.0, 30.0, 1.0
RELEASED = Nack(transfer_id="t", code=NackCode.RELEASED, detail="the slot is not written any more")
ANNOUNCED = Announce(transfer_id="t", mm_hash="item", tensor=SPEC, producer=peer())


def order(transfer_id: str = "t", consumer: str = PD, mm_hash: str = "item") -> TransferOrder:
    return TransferOrder(transfer_id=transfer_id, mm_hash=mm_hash, consumer=consumer, tensor=SPEC)


def grant(generation: int = 1, transfer_id: str = "t", attempt: int = 0) -> Grant:
    return Grant(
        transfer_id=transfer_id,
        attempt=attempt,
        slot=slot(generation),
        path="shm",
        address="there",
        lease_s=LEASE_S,
    )


def finished(problem: str = "") -> Finished:
    return Finished(transfer_id="t", mm_hash="item", problem=problem)


@dataclass
class Desk:
    now: float = 100.0
    session: ProducerSession = field(
        default_factory=lambda: ProducerSession(peer(), wait_timeout_s=TIMEOUT_S, resend_s=RESEND_S)
    )

    def submit(self, ready: bool = False, **changes: str) -> None:
        self.session.submit(order(**changes), ready=ready, now=self.now)

    def receive(self, *messages: AnyMessage, consumer: str = PD) -> None:
        for message in messages:
            self.session.receive(consumer, message, self.now)

    def poll(self, after_s: float = 0.0) -> Actions:
        self.now += after_s
        return self.session.poll(self.now)

    def messages(self, after_s: float = 0.0) -> list[AnyMessage]:
        """Poll and return the messages, which are all for the consumer."""
        out = self.poll(after_s).messages
        assert {consumer for consumer, _ in out} <= {PD}
        return [message for _, message in out]

    def writing(self) -> Write:
        """Bring a transfer to the state in which its write is under way."""
        self.submit(ready=True)
        self.receive(grant())
        (write,) = self.poll().writes
        return write


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose submissions are attempts 0, 1, 2 and so on."""
    monkeypatch.setattr(secrets, "randbits", lambda _: 0)
    return Desk()


# -- the straight way ----------------------------------------------------------------------------


def test_an_order_is_announced_at_once_and_again_until_there_is_an_answer(desk: Desk) -> None:
    desk.submit()
    assert desk.messages() == [ANNOUNCED]
    assert desk.messages(RESEND_S - 0.1) == []
    assert desk.messages(0.1) == [ANNOUNCED]


def test_a_write_begins_when_both_the_grant_and_the_output_are_there(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    desk.receive(grant())
    assert desk.poll().writes == []
    desk.session.output_ready("item")
    assert desk.poll(1.0).writes == [
        Write(
            transfer_id="t",
            mm_hash="item",
            slot=slot(1),
            path="shm",
            address="there",
            deadline_s=desk.now - 1.0 + LEASE_S,
        )
    ]
    assert desk.poll().writes == []


def test_an_output_that_was_there_before_is_written_on_the_grant(desk: Desk) -> None:
    assert desk.writing().slot == slot(1)


def test_an_output_is_for_every_transfer_of_its_item_only(desk: Desk) -> None:
    desk.submit()
    desk.submit(transfer_id="u")
    desk.submit(transfer_id="v", mm_hash="another")
    for number, transfer_id in enumerate("tuv"):
        desk.receive(grant(number, transfer_id, attempt=number))
    desk.session.output_ready("item")
    assert [write.transfer_id for write in desk.poll().writes] == ["t", "u"]


def test_written_is_said_until_it_is_acknowledged(desk: Desk) -> None:
    desk.writing()
    desk.session.write_done("t", desk.now)
    said = Written(transfer_id="t", generation=1)
    assert desk.messages() == [said]
    assert desk.messages(RESEND_S) == [said]
    desk.receive(Injected(transfer_id="t"))
    assert desk.poll().finished == [finished()]
    assert len(desk.session) == 0


def test_a_digest_goes_along_with_written(desk: Desk) -> None:
    desk.writing()
    desk.session.write_done("t", desk.now, digest="d1")
    assert desk.messages() == [Written(transfer_id="t", generation=1, digest="d1")]


def test_a_failed_write_is_told_and_ends_the_transfer(desk: Desk) -> None:
    desk.writing()
    desk.session.write_failed("t", "no such pool", desk.now)
    out = desk.poll()
    assert out.messages == [(PD, Abort(transfer_id="t", reason="no such pool"))]
    assert out.finished == [finished("no such pool")]
    assert len(desk.session) == 0


# -- answers that end it -------------------------------------------------------------------------


@pytest.mark.parametrize("is_granted", [False, True])
@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (NotNeeded(transfer_id="t"), ""),
        (Injected(transfer_id="t"), ""),
        (Nack(transfer_id="t", code=NackCode.TOO_LARGE, detail="huge"), "too_large: huge"),
    ],
)
def test_a_final_answer_ends_the_transfer(
    desk: Desk, message: AnyMessage, problem: str, is_granted: bool
) -> None:
    desk.submit()
    desk.poll()
    if is_granted:
        desk.receive(grant())
    desk.receive(message)
    assert desk.poll() == Actions(finished=[finished(problem)])
    desk.session.output_ready("item")
    assert desk.poll(RESEND_S) == Actions()


@pytest.mark.parametrize("is_granted", [False, True])
def test_an_abort_ends_the_transfer_and_is_answered(desk: Desk, is_granted: bool) -> None:
    desk.submit()
    desk.poll()
    if is_granted:
        desk.receive(grant())
    desk.receive(Abort(transfer_id="t", reason="why"))
    out = desk.poll()
    assert out.messages == [(PD, RELEASED)]
    assert out.finished == [finished("aborted by the consumer: why")]


def test_an_abort_after_written_ends_the_transfer_and_is_answered(desk: Desk) -> None:
    desk.writing()
    desk.session.write_done("t", desk.now)
    desk.messages()
    desk.receive(Abort(transfer_id="t", reason="why"))
    assert desk.messages() == [RELEASED]
    assert len(desk.session) == 0


@pytest.mark.parametrize("succeeds", [True, False])
def test_an_abort_during_a_write_is_answered_when_the_write_has_ended(
    desk: Desk, succeeds: bool
) -> None:
    desk.writing()
    desk.receive(Abort(transfer_id="t", reason="why"), Abort(transfer_id="t", reason="why"))
    assert desk.poll(TIMEOUT_S) == Actions()
    if succeeds:
        desk.session.write_done("t", desk.now)
    else:
        desk.session.write_failed("t", "lease", desk.now)
    out = desk.poll()
    assert out.messages == [(PD, RELEASED)]
    assert out.finished == [finished("aborted by the consumer: why")]


@pytest.mark.parametrize(
    "message",
    [
        NotNeeded(transfer_id="t"),
        Injected(transfer_id="t"),
        Nack(transfer_id="t", code=NackCode.UNAVAILABLE, detail=""),
    ],
)
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_transfer_that_ends_during_its_write_lasts_until_the_write_has_ended(
    desk: Desk, message: AnyMessage, succeeds: bool
) -> None:
    desk.writing()
    desk.receive(message)
    assert desk.poll() == Actions()
    assert len(desk.session) == 1
    if succeeds:
        desk.session.write_done("t", desk.now)
    else:
        desk.session.write_failed("t", "lease", desk.now)
    out = desk.poll()
    assert out.messages == []
    assert [done.transfer_id for done in out.finished] == ["t"]
    assert len(desk.session) == 0


# -- duplicates, late, unknown and foreign messages ----------------------------------------------


def test_submitting_a_transfer_twice_changes_nothing(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    desk.submit(ready=True)
    assert desk.messages() == []
    desk.receive(grant())
    assert desk.poll().writes == []


def test_an_abort_of_an_unknown_transfer_is_answered_to_whoever_asks(desk: Desk) -> None:
    desk.receive(Abort(transfer_id="t", reason=""), consumer=OTHER)
    assert desk.poll().messages == [(OTHER, RELEASED)]


def test_another_consumer_cannot_end_or_grant_a_transfer(desk: Desk) -> None:
    desk.submit(ready=True)
    desk.poll()
    desk.receive(
        grant(),
        Injected(transfer_id="t"),
        Nack(transfer_id="t", code=NackCode.TOO_LARGE, detail=""),
        consumer=OTHER,
    )
    assert desk.poll() == Actions()
    assert len(desk.session) == 1


@pytest.mark.parametrize(
    "message",
    [
        grant(),
        Later(transfer_id="t"),
        NotNeeded(transfer_id="t"),
        Injected(transfer_id="t"),
        Nack(transfer_id="t", code=NackCode.TOO_LARGE, detail=""),
        Written(transfer_id="t", generation=1),
        EncodeFailed(transfer_id="t", reason=""),
    ],
)
def test_messages_of_an_unknown_transfer_change_nothing(desk: Desk, message: AnyMessage) -> None:
    desk.receive(message)
    assert desk.poll() == Actions()


def test_a_repeated_grant_during_and_after_the_write_does_not_write_again(desk: Desk) -> None:
    desk.writing()
    desk.receive(grant())
    assert desk.poll().writes == []
    desk.session.write_done("t", desk.now)
    desk.receive(grant())
    assert desk.poll().writes == []


def test_later_puts_the_next_announcement_off(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    desk.now += RESEND_S / 2
    desk.receive(Later(transfer_id="t"))
    assert desk.messages(RESEND_S / 2) == []
    assert desk.messages(RESEND_S / 2) == [ANNOUNCED]


# -- leases and deadlines ------------------------------------------------------------------------


def test_a_lease_is_renewed_at_half_time_while_the_encoder_is_slow(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    for _ in range(4):
        desk.receive(grant())
        assert desk.messages(LEASE_S / 2 - 0.1) == []
        assert desk.messages(0.1) == [ANNOUNCED]
    desk.receive(grant())
    desk.session.output_ready("item")
    (write,) = desk.poll().writes
    assert write.deadline_s == desk.now + LEASE_S


def test_a_lease_that_ran_out_is_not_written_under(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    desk.receive(grant(1))
    desk.now += LEASE_S
    desk.session.output_ready("item")
    out = desk.poll()
    assert out.writes == []
    assert out.messages == [(PD, ANNOUNCED)]
    desk.receive(grant(2))
    (write,) = desk.poll().writes
    assert write.slot.generation == 2


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_transfer_ends_at_its_deadline_and_says_so(desk: Desk, is_granted: bool) -> None:
    desk.submit()
    desk.poll()
    if is_granted:
        desk.receive(grant())
    assert desk.poll(TIMEOUT_S - 0.1).finished == []
    out = desk.poll(0.1)
    (ended,) = out.finished
    assert f"not acknowledged by {PD}" in ended.problem
    assert out.messages == [(PD, Abort(transfer_id="t", reason=ended.problem))]
    assert len(desk.session) == 0


def test_an_unacknowledged_written_ends_at_the_deadline(desk: Desk) -> None:
    desk.writing()
    desk.session.write_done("t", desk.now)
    (ended,) = desk.poll(TIMEOUT_S).finished
    assert ended.problem


def test_a_transfer_may_be_submitted_again_after_it_ended(desk: Desk) -> None:
    desk.submit()
    desk.receive(NotNeeded(transfer_id="t"))
    desk.poll()
    desk.submit()
    assert desk.messages() == [msgspec.structs.replace(ANNOUNCED, attempt=1)]


def test_a_grant_of_an_earlier_attempt_is_not_written_under(desk: Desk) -> None:
    desk.submit(ready=True)
    desk.receive(Abort(transfer_id="t", reason="taken back"))
    desk.submit(ready=True)
    desk.receive(grant(attempt=0), Injected(transfer_id="t", attempt=0))
    assert desk.poll().writes == []
    desk.receive(grant(2, attempt=1))
    assert [write.slot for write in desk.poll().writes] == [slot(2)]


def test_an_abort_of_an_earlier_attempt_is_answered_and_leaves_the_present_one(desk: Desk) -> None:
    desk.submit(ready=True)
    desk.receive(NotNeeded(transfer_id="t"))
    desk.poll()
    desk.submit(ready=True)
    desk.receive(Abort(transfer_id="t", attempt=0, reason="late"))
    assert RELEASED in desk.messages()
    assert len(desk.session) == 1


def test_attempts_of_another_life_have_other_numbers() -> None:
    lives = [Desk(), Desk()]
    for life in lives:
        life.submit()
    first, second = (life.messages()[0].attempt for life in lives)
    assert first != second


def test_a_path_that_was_withdrawn_is_not_announced_any_more(desk: Desk) -> None:
    desk.session.withdraw("shm")
    desk.session.submit(order(), ready=False, now=desk.now)
    ((_, announced),) = desk.poll().messages
    assert isinstance(announced, Announce)
    assert [endpoint.path for endpoint in announced.producer.paths] == ["tcp"]


# -- what this process cannot go on with ---------------------------------------------------------


def test_written_and_what_was_reported_can_be_had_without_a_poll(desk: Desk) -> None:
    desk.writing()
    desk.session.write_done("t", desk.now)
    assert desk.session.take() == Actions(messages=[(PD, Written(transfer_id="t", generation=1))])
    assert desk.messages(RESEND_S - 0.1) == []
    assert desk.messages(0.1) == [Written(transfer_id="t", generation=1)]


def test_a_transfer_that_fails_here_ends_and_its_consumer_is_told(desk: Desk) -> None:
    desk.submit()
    desk.poll()
    desk.session.fail("t", "no files")
    desk.session.fail("t", "again")
    assert desk.poll() == Actions(
        messages=[(PD, Abort(transfer_id="t", reason="no files"))],
        finished=[finished("no files")],
    )


def test_a_transfer_that_fails_during_its_write_ends_after_it(desk: Desk) -> None:
    desk.writing()
    desk.session.fail("t", "no files")
    assert desk.poll(TIMEOUT_S) == Actions()
    desk.session.write_done("t", desk.now)
    assert desk.poll() == Actions(
        messages=[(PD, Abort(transfer_id="t", reason="no files"))],
        finished=[finished("no files")],
    )
