"""Encode and PD instances, their memory and the network between them, without processes or sockets.

What is real: both sessions, the shell around the consumer's, encoder cache, pool and fence. What is
modelled: the network, which loses, repeats, delays and reorders; clocks, one a process; and memory,
as units that remember who wrote them. A write has no sense of time here: it may go on long after
its lease, as that of a stopped process does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from epd_portable.encode.producer import Write
from epd_portable.items.placer import Placement
from epd_portable.items.table import State
from epd_portable.wire.messages import AnyMessage, Grant
from tests.unit.builders import FINGERPRINT, Clock
from tests.unit.items.harness import TOKEN_BYTES, EncodeSide, Item, PrefillSide

POOL_TOKENS, CACHE_TOKENS = 5, 7


class Unit(NamedTuple):
    """Content of one unit of a pool."""

    mm_hash: str
    index: int
    generation: int


@dataclass(frozen=True)
class Parcel:
    """A message on its way; identities and addresses are of instances, whichever life they have."""

    encoder: str
    identity: bytes
    pd: str
    to_pd: bool
    message: AnyMessage


@dataclass
class Memory:
    """The pool of one life of a PD instance, in units of one token."""

    units: list[Unit | None] = field(default_factory=lambda: [None] * POOL_TOKENS)


class Pd:
    """A PD instance through all its lives."""

    def __init__(self, name: str, *, path: str, copies: bool) -> None:
        self.address = f"tcp://{name}:1"
        self.path = path
        self.copies = copies
        self.life = 0
        self.gone: set[str] = set()
        self.placed = self.placed_early = 0
        self.start()

    def start(self) -> None:
        """Begin another life, with nothing of the last but the address."""
        self.life += 1
        self.side = PrefillSide(
            pool_tokens=POOL_TOKENS, cache_tokens=CACHE_TOKENS, copies=self.copies, path=self.path
        )
        self.side.mailbox.gone = self.gone
        self.side.mailbox.address = f"{self.address}/{self.life}"
        self.memory = Memory()
        self.granted: dict[int, tuple[bytes, int]] = {}
        self.resident: list[Placement] = []
        self.unread: dict[str, Placement] = {}
        self.arrivals: dict[str, float] = {}

    @property
    def clock(self) -> Clock:
        return self.side.clock

    def step(self, *, computes: bool = True) -> None:
        """Run one step of the engine, and look at what the workers place.

        Where they copy it, they may do so as late as in the next step that computes.
        """
        for placement in self.side.step(computes=computes):
            self.placed += 1
            self.placed_early += not computes
            self.side.encoded.discard(placement.mm_hash)
            self.check(placement)
            self.resident.append(placement)
            self.unread[placement.mm_hash] = placement
        self.unread = {
            mm_hash: each for mm_hash, each in self.unread.items() if self.is_entry(mm_hash)
        }
        if computes:
            for placement in self.unread.values() if self.copies else ():
                self.check(placement)
            self.unread.clear()
        used = self.side.pool.slots
        self.resident = [each for each in self.resident if each.slot.generation in used]
        for identity, message in self.side.mailbox.outbox:
            if isinstance(message, Grant):
                holder = (identity, message.attempt)
                assert self.granted.setdefault(message.slot.generation, holder) == holder, (
                    "one slot was granted to two writers"
                )

    def is_entry(self, mm_hash: str) -> bool:
        """Tell whether the workers have what was placed, and may compute with it."""
        item = self.side.cache.items.get(mm_hash)
        is_here = item is not None and item.state is State.PRESENT
        return is_here and mm_hash not in self.side.encoded

    def check(self, placement: Placement) -> None:
        """Assert that a slot holds its own item, written under its own grant."""
        slot = placement.slot
        first = slot.offset // TOKEN_BYTES
        count = slot.nbytes // TOKEN_BYTES
        expected = [Unit(placement.mm_hash, index, slot.generation) for index in range(count)]
        assert self.memory.units[first : first + count] == expected

    def may_be_touched(self, write: Write) -> bool:
        """Tell whether a slot still is the writer's."""
        placed = {each.slot.generation for each in self.resident}
        generation = write.slot.generation
        return generation in self.side.pool.slots and generation not in placed

    def is_leased(self, write: Write) -> bool:
        """Ask the fence, as receivers of fenced paths do."""
        with self.side.shell._transfers._endpoint.fence.writing(write.slot) as leased:
            return leased


class Encoder:
    """An encode instance through all its lives; `progress` counts the units that were written."""

    def __init__(self, name: str, fingerprint: str = FINGERPRINT) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.clock = Clock()
        self.life = 0
        self.start()

    def start(self) -> None:
        """Begin another life; writes of the last end in the middle."""
        self.life += 1
        self.side = EncodeSide(self.name, self.clock, self.life, fingerprint=self.fingerprint)
        self.progress: dict[str, int] = {}

    def poll(self) -> list[tuple[str, AnyMessage]]:
        """Let the session act; return what it sends, as ``(address, message)``."""
        self.side.poll()
        sent, self.side.sent = self.side.sent, []
        self.side.outbox.clear()
        return sent


def write_unit(encoder: Encoder, transfer_id: str, pd: Pd) -> str:
    """Write one more unit of an item; return the problem that ends the write, if any."""
    write = encoder.side.writes[transfer_id]
    index = encoder.progress.get(transfer_id, 0)
    if pd.path == "tcp":
        # The receiver in the consumer's own process does it, and looks at the lease.
        if not pd.is_leased(write):
            return "the slot is not leased any more"
    elif write.address != pd.side.mailbox.address:
        # The file of a former life, which nobody reads.
        encoder.progress[transfer_id] = index + 1
        return ""
    assert pd.may_be_touched(write), "a slot was written that is somebody else's"
    place = write.slot.offset // TOKEN_BYTES + index
    pd.memory.units[place] = Unit(write.order.mm_hash, index, write.slot.generation)
    encoder.progress[transfer_id] = index + 1
    return ""


def tokens(write: Write) -> int:
    """Return the size of an item in units."""
    return write.slot.nbytes // TOKEN_BYTES


__all__ = ["Encoder", "Item", "Parcel", "Pd", "tokens", "write_unit"]
