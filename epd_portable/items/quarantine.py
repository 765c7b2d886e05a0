"""Slots whose grant failed, until they cannot be written any more.

A slot is released when its producer says that it does not write, or when the producer's process is
gone. On this host that can be seen; elsewhere a later life of the same instance proves it
(`is_later_life`). What could still be written when a process is gone:

- ``shm``, ``ipc``: nothing. Its stores and the copies that it queued end before the process does.
- ``nixl`` by RDMA: what the network carries. The kernel destroys the queue pairs of a
  process when it ends, so nothing is sent, or sent again, after that.
- The same by TCP: what the kernel took from the process. It goes on to send that, and tries again
  after `SETTLED_S` at most when the network was cut.
- ``tcp``, ``collective``: nothing ever; they are fenced, and their slots do not stay here.

So for a process elsewhere that time must have passed since the first message of the later life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from epd_portable.transfer.sessions import is_later_life
from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor
from epd_portable.wire.messages import Abort, AnyMessage, Message

MessageT = TypeVar("MessageT", bound=Message)

SETTLED_S = 120.0
"""Linux's TCP never waits longer before it sends something again."""


@dataclass(slots=True)
class _Entry:
    slot: SlotDescriptor
    producer: PeerDescriptor
    reason: str
    next_ask_s: float = 0.0
    settled_s: float | None = None
    """When no write of its producer, which has a later life, can be under way any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """One attempt of a producer, by its ZMQ identity, at a transfer; it is granted one slot."""

    transfer_id: str
    sender: bytes
    attempt: int

    def message(self, kind: type[MessageT], **fields: Any) -> MessageT:
        """Return a message about this attempt."""
        return kind(transfer_id=self.transfer_id, attempt=self.attempt, **fields)


class Quarantine:
    """Asks producers to release slots, and keeps the slots until they have or are gone.

    Args:
        is_gone: Returns whether a producer's process has certainly ended.
        released: Called with each slot that is kept no more.
    """

    def __init__(
        self,
        is_gone: Callable[[PeerDescriptor], bool],
        released: Callable[[SlotDescriptor], None],
        *,
        ask_every_s: float,
    ) -> None:
        self._is_gone = is_gone
        self._ask_every_s = ask_every_s
        self._entries: dict[Writer, _Entry] = {}
        self._released = released

    def __len__(self) -> int:
        """Return the number of slots that are kept."""
        return len(self._entries)

    def add(
        self, writer: Writer, slot: SlotDescriptor, producer: PeerDescriptor, reason: str
    ) -> None:
        """Keep the slot of a writer's failed grant; ``reason`` is for the producer's log."""
        assert writer not in self._entries, "an attempt is granted one slot"
        self._entries[writer] = _Entry(slot, producer, reason)

    def release(self, writer: Writer) -> None:
        """The producer does not write for this attempt any more; unknown ones are ignored."""
        entry = self._entries.pop(writer, None)
        if entry is not None:
            self._released(entry.slot)

    def note_life(self, peer: PeerDescriptor, now: float) -> None:
        """A producer has sent a message: former lives of its instance are gone."""
        for entry in self._entries.values():
            if entry.settled_s is None and is_later_life(peer, entry.producer):
                entry.settled_s = now + SETTLED_S

    def poll(self, now: float) -> list[tuple[bytes, AnyMessage]]:
        """Release slots whose producers are gone; return ``(identity, question)`` for others."""
        questions: list[tuple[bytes, AnyMessage]] = []
        for writer, entry in list(self._entries.items()):
            settled = entry.settled_s is not None and now >= entry.settled_s
            if settled or self._is_gone(entry.producer):
                self.release(writer)
            elif now >= entry.next_ask_s:
                entry.next_ask_s = now + self._ask_every_s
                questions.append((writer.sender, writer.message(Abort, reason=entry.reason)))
        return questions
