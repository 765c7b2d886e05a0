from __future__ import annotations

from epd_portable.connector.quarantine import Quarantine
from epd_portable.wire.messages import Abort
from tests.unit.builders import peer, slot

PRODUCER = peer("encode-a")


def test_a_kept_slot_is_asked_for_at_once_and_then_at_intervals() -> None:
    quarantine = Quarantine(lambda _: False, ask_every_s=10)
    quarantine.add("t", b"a", slot(1), PRODUCER)
    ((sender, question),) = quarantine.poll(5.0)
    assert sender == b"a"
    assert isinstance(question, Abort)
    assert quarantine.poll(14.9) == []
    assert len(quarantine.poll(15.0)) == 1
    assert len(quarantine) == 1
    assert quarantine.take_released() == []


def test_an_answer_frees_every_slot_of_its_transfer_and_producer_once() -> None:
    quarantine = Quarantine(lambda _: False, ask_every_s=10)
    quarantine.add("t", b"a", slot(1), PRODUCER)
    quarantine.add("t", b"a", slot(2), PRODUCER)
    quarantine.add("t", b"b", slot(3), PRODUCER)
    quarantine.add("u", b"a", slot(4), PRODUCER)
    assert len(quarantine) == 4
    quarantine.release("t", b"a")
    quarantine.release("t", b"a")
    assert quarantine.take_released() == [slot(1), slot(2)]
    assert quarantine.take_released() == []
    assert len(quarantine) == 2


def test_a_slot_whose_producer_is_gone_is_free_without_a_question() -> None:
    quarantine = Quarantine(lambda producer: producer is PRODUCER, ask_every_s=10)
    quarantine.add("t", b"a", slot(1), PRODUCER)
    quarantine.add("t", b"b", slot(2), peer("encode-b"))
    assert [sender for sender, _ in quarantine.poll(0.0)] == [b"b"]
    assert quarantine.take_released() == [slot(1)]
