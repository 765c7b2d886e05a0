"""An encode instance, as a prefill+decode instance meets it: the encoder's half of the protocol."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import msgspec

from epd_portable.encode.producer import ProducerSession, TransferOrder, Write
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import PROTOCOL_VERSION, AnyMessage, Foreign, Nack, Received
from tests.kit.engine import ADDRESS
from tests.kit.memory import TORN, PoolMemory
from tests.kit.sizes import Sizes
from tests.unit.builders import Clock


@dataclass
class _Clock:
    """A process's clock, which may be ahead of that of others."""

    others: Clock
    ahead_s: float = 0.0

    @property
    def now(self) -> float:
        return self.others.now + self.ahead_s


@dataclass(eq=False)
class _Writing:
    write: Write
    turns: int
    problem: str = ""


class Encoder:
    """An encode instance through all its lives.

    A stopped one does nothing and hears nothing until it goes on; a killed one leaves its writes
    in the middle, and is another one afterwards.

    Attributes:
        is_foreign: It has another protocol version.
        clock: Its process's, which may jump.
    """

    def __init__(
        self,
        name: str,
        rng: Random,
        sizes: Sizes,
        clock: Clock,
        pool: PoolMemory,
        fence: LeaseFence,
        revoked: set[int],
        *,
        fingerprint: str = "same",
        is_perfect: bool = True,
        seen: Counter[str] | None = None,
    ) -> None:
        self.seen = Counter() if seen is None else seen
        self.name = name
        self._rng, self._sizes, self.clock = rng, sizes, _Clock(clock)
        self._pool, self._fence, self._revoked = pool, fence, revoked
        self.fingerprint = fingerprint
        self.is_perfect = is_perfect
        self.life = 0
        self.writes_ended = 0
        self.start()

    def start(self) -> None:
        """Begin another life."""
        self.life += 1
        self.is_foreign = self.life > 1 and not self.is_perfect and self._rng.random() < 0.2
        self.session_id = f"{self.name}-life-{self.life}"
        self.is_stopped = False
        self.inbox: list[AnyMessage] = []
        self._computing: dict[str, int] = {}
        self._outputs: dict[str, str] = {}
        self._writing: list[_Writing] = []
        self._under_way: set[str] = set()
        self.session = ProducerSession(
            PeerDescriptor(
                instance=self.name,
                session=self.session_id,
                host="host",
                device="cpu:0",
                fingerprint=self.fingerprint,
                paths=(PathEndpoint(path="shm"),),
            ),
            wait_timeout_s=self._sizes.wait_timeout_s,
        )

    @property
    def identity(self) -> bytes:
        return self.session_id.encode()

    def submit(self, transfer_id: str, name: str, tensor: TensorSpec) -> None:
        """An item is to be encoded, and brought to the instance; once, as by a `Dispatcher`."""
        if transfer_id in self._under_way:
            return
        self._under_way.add(transfer_id)
        if not self.is_perfect and self._rng.random() < 0.02:
            wrong = (tensor.shape[0] + 1, *tensor.shape[1:])
            tensor = msgspec.structs.replace(tensor, shape=wrong)
        order = TransferOrder(
            transfer_id=transfer_id, mm_hash=name, consumer=ADDRESS, tensor=tensor, item_uuid=name
        )
        output = self._outputs.get(name)
        self.session.submit(order, now=self.clock.now, output=output, ready=output is not None)
        if name not in self._outputs:
            self._computing.setdefault(name, self._rng.choice([0, 0, 1, 3, 10]))

    def reset(self) -> None:
        """Forget all outputs, as weights change; transfers that have not ended fail."""
        self._outputs.clear()
        self._under_way.clear()
        self.session.reset("the encoder cache was reset")

    def turn(self) -> list[Received]:
        """Go on for a turn; return what it sends, as the instance reads that."""
        if self.is_stopped:
            return []
        now = self.clock.now
        for message in self.inbox:
            # A refusal is in the version of its receiver.
            read = self._foreign(message) if not isinstance(message, Nack) else message
            self.session.receive(ADDRESS, read, now)
        self.inbox.clear()
        for name, left in list(self._computing.items()):
            self._computing[name] = left - 1
            if left <= 0:
                del self._computing[name]
                if not self.is_perfect and self._rng.random() < 0.04:
                    self.seen["items that an encoder had no memory for"] += 1
                else:
                    self._outputs[name] = self._pool.output(name)
                self.session.output_ready(name, self._outputs.get(name))
        for writing in list(self._writing):
            self._write(writing)
        actions = self.session.poll(now)
        for finished in actions.finished:
            if not finished.is_outdated:
                self._under_way.discard(finished.order.transfer_id)
        for write in actions.writes:
            self._begin(write)
        return [self._foreign(message) for _, message in actions.messages]

    def _foreign(self, message: AnyMessage) -> Received:
        """Return a message as the other end reads it."""
        if not self.is_foreign:
            return message
        self.seen["messages of another version"] += 1
        return Foreign(
            kind=str(type(message).__struct_config__.tag),
            transfer_id=message.transfer_id,
            attempt=message.attempt,
            protocol=PROTOCOL_VERSION + 1,
        )

    def _begin(self, write: Write) -> None:
        rng = self._rng
        writing = _Writing(write, rng.choice([0, 0, 1, 2, 6, 30]))
        if not self.is_perfect and rng.random() < 0.1:
            writing.problem = "the write failed"
        if write.output is None:
            self.session.write_ended(write.attempt, "it was not encoded", self.clock.now)
            return
        self._writing.append(writing)
        self._put(writing, TORN)
        if writing.turns == 0:
            self._write(writing)

    def _write(self, writing: _Writing) -> None:
        writing.turns -= 1
        if writing.turns >= 0:
            return
        self._writing.remove(writing)
        if not writing.problem:
            self._put(writing, writing.write.output)
        self.writes_ended += 1
        self.session.write_ended(writing.write.attempt, writing.problem, self.clock.now)

    def _put(self, writing: _Writing, content: str) -> None:
        slot = writing.write.slot
        is_leased = True
        if writing.write.path == "tcp":
            # The receiver in the instance's own process does it, and looks at the lease.
            with self._fence.writing(slot) as is_leased:
                pass
        elif writing.write.path == "collective":
            # The worker does, which knows only of grants that were taken back.
            is_leased = slot.generation not in self._revoked
        if is_leased:
            self._pool.write(slot, content)
        else:
            writing.problem = "the slot is not leased any more"
