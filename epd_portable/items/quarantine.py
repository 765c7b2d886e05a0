"""Slots whose grant failed, until they cannot be written any more.

A slot is released when its producer confirms that it does not write, or when the producer's process
is gone. On this host that can be seen; elsewhere a later process of the same instance proves it
(`is_later_incarnation`). Writes that can still arrive when a process is gone:

- ``shm``, ``ipc``: none. Its stores and the copies that it queued end before the process does.
- ``nixl`` by RDMA: packets in the network. The kernel destroys the queue pairs of a
  process when it ends, so nothing is sent, or sent again, after that.
- ``nixl`` by TCP: bytes that the kernel took from the process. It sends these, and tries again
  after `SETTLED_S` at most when the network was cut.
- ``tcp``, ``collective``: none ever; they are fenced, and their slots do not stay here.

So for a process elsewhere that time must have passed since the first message of the later process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from epd_portable.items.slots import Slot
from epd_portable.transfer.sessions import is_later_incarnation
from epd_portable.wire.descriptors import PeerDescriptor
from epd_portable.wire.messages import Abort, AnyMessage, Message

MessageT = TypeVar("MessageT", bound=Message)

SETTLED_S = 120.0
"""Linux's TCP never waits longer before it sends something again."""


@dataclass(slots=True)
class _Entry:
    slot: Slot
    producer: PeerDescriptor
    reason: str
    next_ask_s: float = 0.0
    settled_s: float | None = None
    """End of all writes of its producer, after which a later process has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Attempt of a producer, by its ZMQ identity, at a transfer; it is granted one slot."""

    transfer_id: str
    sender: bytes
    attempt: int

    def message(self, kind: type[MessageT], **fields: Any) -> MessageT:
        """Return a message about this attempt."""
        return kind(transfer_id=self.transfer_id, attempt=self.attempt, **fields)


class Quarantine:
    """Slots of failed grants, by their writers.

    Args:
        is_gone: Returns whether a producer's process has certainly ended.
        ask_every_s: Pause between two requests to release a slot.
    """

    def __init__(self, is_gone: Callable[[PeerDescriptor], bool], *, ask_every_s: float) -> None:
        self._is_gone = is_gone
        self._ask_every_s = ask_every_s
        self._entries: dict[Writer, _Entry] = {}

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._entries)

    def add(self, writer: Writer, slot: Slot, producer: PeerDescriptor, reason: str) -> None:
        """Add the slot of a writer's failed grant; ``reason`` is for the producer's log."""
        assert writer not in self._entries, "an attempt is granted one slot"
        self._entries[writer] = _Entry(slot, producer, reason)

    def release(self, writer: Writer) -> Slot | None:
        """Return the slot of an attempt that does not write any more, if there is one."""
        entry = self._entries.pop(writer, None)
        return None if entry is None else entry.slot

    def note_incarnation(self, peer: PeerDescriptor, now: float) -> None:
        """Note a message of a producer: former processes of its instance are gone."""
        for entry in self._entries.values():
            if entry.settled_s is None and is_later_incarnation(peer, entry.producer):
                entry.settled_s = now + SETTLED_S

    def poll(self, now: float) -> tuple[list[Writer], list[tuple[bytes, AnyMessage]]]:
        """Return writers that are gone, and requests to the others with their identities."""
        gone: list[Writer] = []
        questions: list[tuple[bytes, AnyMessage]] = []
        for writer, entry in self._entries.items():
            settled = entry.settled_s is not None and now >= entry.settled_s
            if settled or self._is_gone(entry.producer):
                gone.append(writer)
            elif now >= entry.next_ask_s:
                entry.next_ask_s = now + self._ask_every_s
                questions.append((writer.sender, writer.message(Abort, reason=entry.reason)))
        return gone, questions
