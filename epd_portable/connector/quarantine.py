"""Slots whose grant failed, until nobody can write them any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor
from epd_portable.wire.messages import Abort, AnyMessage


@dataclass(slots=True)
class _Entry:
    slot: SlotDescriptor
    producer: PeerDescriptor
    reason: str
    next_ask_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Who may be writing: one attempt of a producer at a transfer, which is granted one slot.

    Attributes:
        transfer_id: The grant's transfer.
        sender: ZMQ identity of the producer.
        attempt: Its number for the attempt.
    """

    transfer_id: str
    sender: bytes
    attempt: int


class Quarantine:
    """Asks producers to let go of slots, and keeps the slots until they did or are gone.

    Args:
        is_gone: Tells whether a producer's process has certainly ended.
        ask_every_s: Time after which an unanswered question is asked again.
    """

    def __init__(self, is_gone: Callable[[PeerDescriptor], bool], *, ask_every_s: float) -> None:
        self._is_gone = is_gone
        self._ask_every_s = ask_every_s
        self._entries: dict[Writer, _Entry] = {}
        self._released: list[SlotDescriptor] = []

    def __len__(self) -> int:
        """Return the number of slots that are kept."""
        return len(self._entries)

    def __contains__(self, writer: Writer) -> bool:
        """Tell whether a slot of this writer is kept."""
        return writer in self._entries

    def add(
        self, writer: Writer, slot: SlotDescriptor, producer: PeerDescriptor, reason: str
    ) -> None:
        """Keep the slot of a grant that failed.

        Args:
            writer: Who was granted it.
            slot: What was granted.
            producer: The writer's end.
            reason: Why it failed, for the producer's log.
        """
        assert writer not in self._entries, "an attempt is granted one slot"
        self._entries[writer] = _Entry(slot, producer, reason)

    def release(self, writer: Writer) -> None:
        """The producer does not write for this attempt any more; unknown ones are ignored."""
        entry = self._entries.pop(writer, None)
        if entry is not None:
            self._released.append(entry.slot)

    def poll(self, now: float) -> list[tuple[bytes, AnyMessage]]:
        """Let go of slots whose producers are gone; return ``(identity, question)`` for others."""
        questions: list[tuple[bytes, AnyMessage]] = []
        for writer, entry in list(self._entries.items()):
            if self._is_gone(entry.producer):
                self.release(writer)
            elif now >= entry.next_ask_s:
                entry.next_ask_s = now + self._ask_every_s
                questions.append((writer.sender, abort(writer, entry.reason)))
        return questions

    def take_released(self) -> list[SlotDescriptor]:
        """Return the slots that became free since the last call."""
        released, self._released = self._released, []
        return released


def abort(writer: Writer, reason: str) -> Abort:
    """Return the question whether a writer has stopped for good."""
    return Abort(transfer_id=writer.transfer_id, attempt=writer.attempt, reason=reason)
