"""Slots whose grant failed, until nobody can write them any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor
from epd_portable.wire.messages import Abort, AnyMessage


@dataclass(slots=True)
class _Entry:
    producer: PeerDescriptor
    slots: list[SlotDescriptor] = field(default_factory=list)
    next_ask_s: float = 0.0


class Quarantine:
    """Asks producers to let go of slots, and keeps the slots until they did or are gone.

    Args:
        is_gone: Tells whether a producer's process has certainly ended.
        ask_every_s: Time after which an unanswered question is asked again.
    """

    def __init__(self, is_gone: Callable[[PeerDescriptor], bool], *, ask_every_s: float) -> None:
        self._is_gone = is_gone
        self._ask_every_s = ask_every_s
        self._entries: dict[tuple[str, bytes], _Entry] = {}
        self._released: list[SlotDescriptor] = []

    def __len__(self) -> int:
        """Return the number of slots that are kept."""
        return sum(len(entry.slots) for entry in self._entries.values())

    def add(
        self, transfer_id: str, sender: bytes, slot: SlotDescriptor, producer: PeerDescriptor
    ) -> None:
        """Keep the slot of a grant that failed, beside others of the same transfer.

        Args:
            transfer_id: The grant's transfer.
            sender: ZMQ identity of the producer.
            slot: What was granted.
            producer: To whom.
        """
        self._entries.setdefault((transfer_id, sender), _Entry(producer)).slots.append(slot)

    def release(self, transfer_id: str, sender: bytes) -> None:
        """The producer does not write for this transfer any more; unknown ones are ignored."""
        entry = self._entries.pop((transfer_id, sender), None)
        if entry is not None:
            self._released += entry.slots

    def poll(self, now: float) -> list[tuple[bytes, AnyMessage]]:
        """Let go of slots whose producers are gone; return ``(identity, question)`` for others."""
        questions: list[tuple[bytes, AnyMessage]] = []
        for (transfer_id, sender), entry in list(self._entries.items()):
            if self._is_gone(entry.producer):
                self.release(transfer_id, sender)
            elif now >= entry.next_ask_s:
                entry.next_ask_s = now + self._ask_every_s
                message = Abort(transfer_id=transfer_id, reason="the slot was taken back")
                questions.append((sender, message))
        return questions

    def take_released(self) -> list[SlotDescriptor]:
        """Return the slots that became free since the last call."""
        released, self._released = self._released, []
        return released
