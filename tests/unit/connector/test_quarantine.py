from __future__ import annotations

from epd_portable.connector.quarantine import Quarantine, Writer
from epd_portable.wire.messages import Abort
from tests.unit.builders import peer, slot

PRODUCER = peer("encode-a")


def writer(transfer_id: str = "t", sender: bytes = b"a", attempt: int = 1) -> Writer:
    return Writer(transfer_id=transfer_id, sender=sender, attempt=attempt)


def test_a_kept_slot_is_asked_for_at_once_and_then_at_intervals() -> None:
    quarantine = Quarantine(lambda _: False, ask_every_s=10)
    quarantine.add(writer("t", b"a"), slot(1), PRODUCER, "late")
    ((sender, question),) = quarantine.poll(5.0)
    assert sender == b"a"
    assert question == Abort(transfer_id="t", attempt=1, reason="late")
    assert quarantine.poll(14.9) == []
    assert len(quarantine.poll(15.0)) == 1
    assert len(quarantine) == 1
    assert quarantine.take_released() == []


def test_an_answer_frees_the_slot_of_that_attempt_of_that_producer_once() -> None:
    quarantine = Quarantine(lambda _: False, ask_every_s=10)
    kept = [writer(), writer(attempt=2), writer(sender=b"b"), writer("u")]
    for generation, each in enumerate(kept):
        quarantine.add(each, slot(generation), PRODUCER, "late")
    assert len(quarantine) == 4
    quarantine.release(kept[1])
    quarantine.release(kept[1])
    assert quarantine.take_released() == [slot(1)]
    assert quarantine.take_released() == []
    assert [each in quarantine for each in kept] == [True, False, True, True]


def test_a_slot_whose_producer_is_gone_is_free_without_a_question() -> None:
    quarantine = Quarantine(lambda producer: producer is PRODUCER, ask_every_s=10)
    quarantine.add(writer("t", b"a"), slot(1), PRODUCER, "late")
    quarantine.add(writer("t", b"b"), slot(2), peer("encode-b"), "late")
    assert [sender for sender, _ in quarantine.poll(0.0)] == [b"b"]
    assert quarantine.take_released() == [slot(1)]
