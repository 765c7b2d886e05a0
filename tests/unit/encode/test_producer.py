"""The producer's session: every edge of its diagram, with messages and a clock made up here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec
import pytest

from epd_portable.encode.producer import Actions, Finished, ProducerSession, TransferOrder
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)
from tests.unit.builders import SPEC, peer, slot

PD, OTHER = "tcp://pd:1", "tcp://other:1"
LEASE_S, TIMEOUT_S, RESEND_S = 10.0, 30.0, 1.0
ANNOUNCED = Announce(transfer_id="t", mm_hash="item", tensor=SPEC, producer=peer())
WRITTEN = Written(transfer_id="t", generation=1)
ABORT = Abort(transfer_id="t", reason="why")
RELEASED = Nack(transfer_id="t", code=NackCode.RELEASED, detail="the slot is not written any more")
OTHER_ITEM = Nack(transfer_id="t", code=NackCode.UNEXPECTED, detail="another size")
FINAL: list[tuple[AnyMessage, str]] = [
    (NotNeeded(transfer_id="t"), ""),
    (Injected(transfer_id="t"), ""),
    (OTHER_ITEM, "unexpected: another size"),
    (ABORT, "aborted by the consumer: why"),
]
"""Answers that end a transfer, and how."""


def grant(generation: int = 1, transfer_id: str = "t", attempt: int = 0) -> Grant:
    return Grant(
        transfer_id=transfer_id,
        attempt=attempt,
        slot=slot(generation),
        path="shm",
        address="there",
        lease_s=LEASE_S,
    )


def ended(problem: str, *messages: AnyMessage) -> Actions:
    finished = Finished(order("t"), problem)
    return Actions(messages=[(PD, each) for each in messages], finished=[finished])


def order(transfer_id: str, mm_hash: str = "item") -> TransferOrder:
    return TransferOrder(transfer_id=transfer_id, mm_hash=mm_hash, consumer=PD, tensor=SPEC)


@dataclass
class Desk:
    now: float = 100.0
    session: ProducerSession = field(
        default_factory=lambda: ProducerSession(peer(), wait_timeout_s=TIMEOUT_S, resend_s=RESEND_S)
    )

    def submit(self, transfer_id: str = "t", mm_hash: str = "item", *, ready: bool = False) -> None:
        self.session.submit(order(transfer_id, mm_hash), ready=ready, now=self.now)

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

    def reach(self, state: str) -> None:
        """Bring a transfer to a state of the diagram, with nothing left to do."""
        self.submit()
        assert self.messages() == [ANNOUNCED]
        if state != "asking":
            self.receive(grant())
        if state in ("writing", "written"):
            self.session.output_ready("item")
            assert len(self.poll().writes) == 1
        if state == "written":
            self.session.write_ended(0, "", self.now)
            assert self.messages() == [WRITTEN]

    def end_write(self, *, well: bool, attempt: int = 0) -> None:
        self.session.write_ended(attempt, "" if well else "no such pool", self.now)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose submissions are attempts 0, 1, 2 and so on."""
    monkeypatch.setattr(secrets, "randbits", lambda _: 0)
    return Desk()


@pytest.mark.parametrize(("state", "question"), [("asking", ANNOUNCED), ("written", WRITTEN)])
def test_message_without_reply_is_repeated(desk: Desk, state: str, question: AnyMessage) -> None:
    desk.reach(state)
    assert desk.messages(RESEND_S - 0.1) == []
    assert desk.messages(0.1) == [question]


def test_a_failed_write_is_reported_and_ends_the_transfer(desk: Desk) -> None:
    desk.reach("writing")
    desk.end_write(well=False)
    problem = "no such pool"
    assert desk.poll() == ended(problem, Abort(transfer_id="t", reason=problem))
    assert len(desk.session) == 0


@pytest.mark.parametrize("state", ["asking", "granted", "written"])
@pytest.mark.parametrize(("message", "problem"), FINAL)
def test_a_final_answer_ends_it(desk: Desk, message: AnyMessage, problem: str, state: str) -> None:
    desk.reach(state)
    desk.receive(message)
    assert desk.poll() == ended(problem, *([RELEASED] if message is ABORT else []))
    desk.session.output_ready("item")
    assert desk.poll(RESEND_S) == Actions()


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize(("message", "problem"), FINAL)
def test_a_write_outlasts_its_end(
    desk: Desk, message: AnyMessage, problem: str, well: bool
) -> None:
    desk.reach("writing")
    desk.receive(message, message)
    assert desk.poll(TIMEOUT_S) == Actions()
    assert len(desk.session) == 1
    desk.end_write(well=well)
    assert desk.poll() == ended(problem, *([RELEASED] if message is ABORT else []))
    assert len(desk.session) == 0


@pytest.mark.parametrize("state", ["asking", "writing"])
def test_a_transfer_that_fails_here_ends_with_its_write(desk: Desk, state: str) -> None:
    desk.reach(state)
    desk.session.fail(0, "no files")
    if state == "writing":
        assert desk.poll(TIMEOUT_S) == Actions()
        desk.end_write(well=True)
    desk.session.fail(77, "no files")
    assert desk.poll() == ended("no files", Abort(transfer_id="t", reason="no files"))


PREEMPTED = "preempted: its consumer had no space for it, and other items needed its space"


@pytest.mark.parametrize("what", ["transfer", "output", "no space"])
def test_transfer_without_space_is_preempted_once_encoded(desk: Desk, what: str) -> None:
    desk.submit()
    assert desk.messages() == [ANNOUNCED]
    todo = {
        "transfer": lambda: desk.session.preempt(["another", "t"]),
        "output": lambda: desk.session.output_ready("item", "output"),
        "no space": lambda: desk.receive(Later(transfer_id="t")),
    }
    last = todo.pop(what)
    for change in todo.values():
        change()
    assert desk.poll() == Actions()
    last()
    aborted = ended(PREEMPTED, Abort(transfer_id="t", reason=PREEMPTED))
    aborted.finished[0] = Finished(order("t"), PREEMPTED, "output")
    assert desk.poll() == aborted


def test_transfer_that_gets_space_is_not_preempted(desk: Desk) -> None:
    desk.submit()
    assert desk.messages() == [ANNOUNCED]
    desk.receive(Later(transfer_id="t"), grant())
    desk.session.output_ready("item", "output")
    desk.session.preempt(["t"])
    assert len(desk.poll().writes) == 1


def test_transfer_failed_early_is_announced_first(desk: Desk) -> None:
    desk.submit()
    desk.session.fail(0, "reset")
    assert desk.poll() == ended("reset", ANNOUNCED, Abort(transfer_id="t", reason="reset"))


def test_output_of_a_write_is_dropped_at_a_reset(desk: Desk) -> None:
    desk.submit()
    desk.session.output_ready("item", "old")
    desk.receive(grant())
    assert [each.output for each in desk.poll().writes] == ["old"]
    desk.session.reset("reset")
    desk.session.output_ready("item", "new")
    desk.end_write(well=True)
    (finished,) = desk.poll().finished
    assert (finished.output, finished.is_outdated) == (None, True)


def test_output_is_returned_with_the_last_transfer_of_its_item(desk: Desk) -> None:
    desk.submit("t")
    desk.session.output_ready("item", "output")
    desk.submit("u")
    desk.submit("v", "other item")
    for attempt, transfer_id in enumerate("tuv"):
        desk.receive(NotNeeded(transfer_id=transfer_id, attempt=attempt))
    assert [each.output for each in desk.poll().finished] == [None, "output", None]


@pytest.mark.parametrize("consumer", [PD, OTHER])
@pytest.mark.parametrize(
    "message",
    [
        grant(),
        Later(transfer_id="t"),
        NotNeeded(transfer_id="t"),
        Injected(transfer_id="t"),
        OTHER_ITEM,
        WRITTEN,
        ABORT,
    ],
)
def test_foreign_messages_change_nothing(desk: Desk, message: AnyMessage, consumer: str) -> None:
    if consumer == OTHER:
        desk.submit(ready=True)
        desk.poll()
    desk.receive(message, consumer=consumer)
    answers = [(consumer, RELEASED)] if message is ABORT else []
    assert desk.poll() == Actions(messages=answers), "an abort is always answered"
    assert len(desk.session) == (consumer == OTHER)


def test_later_puts_the_next_announcement_off(desk: Desk) -> None:
    desk.reach("asking")
    desk.now += RESEND_S / 2
    desk.receive(Later(transfer_id="t"))
    assert desk.messages(RESEND_S / 2) == []
    assert desk.messages(RESEND_S / 2) == [ANNOUNCED]


def test_lease_is_renewed_at_half_time_while_encoder_is_slow(desk: Desk) -> None:
    desk.reach("asking")
    for _ in range(4):
        desk.receive(grant())
        assert desk.messages(LEASE_S / 2 - 0.1) == []
        assert desk.messages(0.1) == [ANNOUNCED]
    desk.receive(grant())
    desk.session.output_ready("item")
    (write,) = desk.poll().writes
    assert write.deadline_s == desk.now + LEASE_S


def test_a_lease_that_ran_out_is_not_written_under(desk: Desk) -> None:
    desk.reach("granted")
    desk.now += LEASE_S
    desk.session.output_ready("item")
    assert desk.poll() == Actions(messages=[(PD, ANNOUNCED)])
    desk.receive(grant(2))
    (write,) = desk.poll().writes
    assert write.slot.generation == 2


@pytest.mark.parametrize("state", ["asking", "granted", "written"])
def test_a_transfer_ends_at_its_deadline_and_says_so(desk: Desk, state: str) -> None:
    desk.reach(state)
    assert desk.poll(TIMEOUT_S - 0.1).finished == []
    out = desk.poll(0.1)
    problem = out.finished[0].problem
    assert f"not acknowledged by {PD}" in problem
    assert out == ended(problem, Abort(transfer_id="t", reason=problem))
    assert len(desk.session) == 0


def test_message_of_an_earlier_attempt_is_ignored(desk: Desk) -> None:
    desk.submit(ready=True)
    desk.receive(ABORT)
    desk.poll()
    desk.submit(ready=True)
    assert desk.messages() == [msgspec.structs.replace(ANNOUNCED, attempt=1)]
    desk.receive(grant(attempt=0), Injected(transfer_id="t", attempt=0), ABORT)
    assert desk.poll() == Actions(messages=[(PD, RELEASED)])
    desk.receive(grant(2, attempt=1))
    assert [write.slot for write in desk.poll().writes] == [slot(2)]


def test_attempts_of_another_life_have_other_numbers() -> None:
    lives = [Desk(), Desk()]
    for life in lives:
        life.submit()
    first, second = (life.messages()[0].attempt for life in lives)
    assert first != second


def test_a_path_that_was_withdrawn_is_not_announced_any_more(desk: Desk) -> None:
    desk.session.withdraw("shm")
    desk.submit()
    (announced,) = desk.messages()
    assert isinstance(announced, Announce)
    assert [endpoint.path for endpoint in announced.producer.paths] == ["tcp"]
