"""The encode side of the control protocol, as a state machine without I/O.

::

    submit ─▶ ASKING ──Grant──▶ GRANTED ──output ready──▶ WRITING ──ok──▶ WRITTEN ──Injected──▶ end
                │  ▲               │ (renews its lease         │               │
                │  └───────────────┘  while encoding)          └─error─▶ Abort, end
                └── NotNeeded, Nack, Abort, deadline ─▶ end

Unanswered messages are sent again; messages that arrive twice or too late change nothing. Every
submission has its own attempt number, which answers repeat.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from dataclasses import dataclass, field

import msgspec

from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Foreign,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Received,
    Written,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOrder:
    """An item to deliver to one consumer.

    Attributes:
        consumer: ZMQ address of the consumer's control channel.
        tensor: Shape and dtype of the encoder's output.
        item_uuid: As in `epd_portable.wire.params.EncodeTransfer`, as is ``proof``.
        kind: Modality as there.
        modality: The engine's: ``image``, ``video`` or ``audio``.
    """

    transfer_id: str
    mm_hash: str
    consumer: str
    tensor: TensorSpec
    item_uuid: str = ""
    proof: str = ""
    kind: str = "image"
    modality: str = "image"


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Asks the caller to write an item and to call `ProducerSession.write_done` or `write_failed`.

    Attributes:
        deadline_s: End of the lease on the session's clock.
    """

    transfer_id: str
    mm_hash: str
    slot: SlotDescriptor
    path: str
    address: str
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A transfer ended; ``problem`` is empty if the consumer has the item or does not need it."""

    transfer_id: str
    mm_hash: str
    problem: str = ""


@dataclass(slots=True)
class Actions:
    """Request of a session to its caller."""

    messages: list[tuple[str, AnyMessage]] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class _TransferState(enum.Enum):
    ASKING = enum.auto()
    GRANTED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()


@dataclass(slots=True)
class _Transfer:
    order: TransferOrder
    attempt: int
    deadline_s: float
    ready: bool = False
    state: _TransferState = _TransferState.ASKING
    grant: Grant | None = None
    lease_end_s: float = 0.0
    next_send_s: float = 0.0
    is_announced: bool = False
    problem: str | None = None
    """End of the transfer once the write under way has ended, whose result does not matter."""
    last_message: AnyMessage | None = None
    """Sent when the slot is not written any more."""
    next: _Transfer | None = None
    """Transfer of this id that was submitted when this one had a problem; begins at its end."""

    def abort(self, reason: str) -> Abort:
        return Abort(transfer_id=self.order.transfer_id, attempt=self.attempt, reason=reason)


class ProducerSession:
    """All transfers of one encode worker.

    Args:
        peer: This end, as announced.
        wait_timeout_s: Longest life of a transfer.
        resend_s: Time after which an unanswered message is sent again.
    """

    def __init__(
        self, peer: PeerDescriptor, *, wait_timeout_s: float, resend_s: float = 1.0
    ) -> None:
        self._peer = peer
        self._wait_timeout_s = wait_timeout_s
        self._resend_s = resend_s
        self._transfers: dict[str, _Transfer] = {}
        self._out = Actions()
        # Not from 1: an answer to another life of this process must not fit.
        self._attempts = itertools.count(secrets.randbits(40) << 20)

    def __len__(self) -> int:
        """Return the number of transfers that have not ended."""
        return len(self._transfers)

    def submit(self, order: TransferOrder, *, ready: bool, now: float) -> None:
        """Begin a transfer, unless it is under way; ``ready`` if the output is there already."""
        known = self._transfers.get(order.transfer_id)
        if known is not None and known.problem is None:
            return
        transfer = _Transfer(
            order, next(self._attempts), now + self._wait_timeout_s, ready, next_send_s=now
        )
        if known is None:
            self._transfers[order.transfer_id] = transfer
            return
        if known.next is not None:
            self._finish(known.next, "it was submitted again before it began")
        known.next = transfer

    def output_ready(self, mm_hash: str) -> None:
        """Note that the output of an item is ready."""
        for transfer in self._transfers.values():
            for each in (transfer, transfer.next):
                if each is not None and each.order.mm_hash == mm_hash:
                    each.ready = True

    def receive(self, consumer: str, message: Received, now: float) -> None:
        """Process a message from the address of a consumer; ignores those that make no sense."""
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or (transfer.order.consumer, transfer.attempt) != (
            consumer,
            message.attempt,
        ):
            if isinstance(message, Abort):
                self._out.messages.append((consumer, _released(message)))
        elif isinstance(message, Abort):
            transfer.last_message = _released(message)
            self._end(transfer, f"aborted by the consumer: {message.reason}")
        elif isinstance(message, Grant):
            if transfer.state in (_TransferState.ASKING, _TransferState.GRANTED):
                transfer.state = _TransferState.GRANTED
                transfer.grant = message
                transfer.lease_end_s = now + message.lease_s
                transfer.next_send_s = now + message.lease_s / 2
        elif isinstance(message, Later):
            transfer.next_send_s = now + self._resend_s
        elif isinstance(message, Injected | NotNeeded):
            self._end(transfer)
        elif isinstance(message, Nack):
            self._end(transfer, f"{message.code.value}: {message.detail}")
        elif isinstance(message, Foreign):
            self._end(transfer, f"{NackCode.INCOMPATIBLE.value}: {message.problem}")

    def write_done(self, transfer_id: str, now: float) -> None:
        """Note that a `Write` is complete."""
        transfer = self._transfers[transfer_id]
        if transfer.problem is not None:
            self._close(transfer, transfer.problem)
        else:
            transfer.state = _TransferState.WRITTEN
            self._ask(transfer, now)

    def write_failed(self, transfer_id: str, problem: str, now: float) -> None:
        """Abort and end a transfer whose `Write` failed."""
        transfer = self._transfers[transfer_id]
        if transfer.problem is not None:
            self._close(transfer, transfer.problem)
        else:
            self._send(transfer, transfer.abort(problem))
            self._close(transfer, problem)

    def fail(self, transfer_id: str, problem: str) -> None:
        """Abort a transfer, if it is under way; a write that has begun ends first.

        So does one of the same id that was submitted during that write.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        if transfer.next is not None:
            transfer.next.problem = problem
        if not transfer.is_announced:
            self._ask(transfer, now=0.0)  # Consumers ignore what ends before that.
        transfer.last_message = transfer.abort(problem)
        self._end(transfer, problem)

    def withdraw(self, path: str) -> None:
        """Stop offering a path by which this process cannot write."""
        paths = tuple(endpoint for endpoint in self._peer.paths if endpoint.path != path)
        self._peer = msgspec.structs.replace(self._peer, paths=paths)

    def poll(self, now: float) -> Actions:
        """Return everything to be done now."""
        for transfer in list(self._transfers.values()):
            self._advance(transfer, now)
        return self.take_actions()

    def take_actions(self) -> Actions:
        """Return the actions that follow from reports since the last call, as of `write_done`.

        Saves a `poll` of all transfers between the end of a write and *written*.
        """
        out, self._out = self._out, Actions()
        return out

    def _advance(self, transfer: _Transfer, now: float) -> None:
        if transfer.state is _TransferState.WRITING:
            return
        if now >= transfer.deadline_s:
            problem = f"not acknowledged by {transfer.order.consumer} in {self._wait_timeout_s} s"
            self._send(transfer, transfer.abort(problem))
            self._close(transfer, problem)
            return
        if transfer.state is _TransferState.GRANTED:
            if now >= transfer.lease_end_s:
                transfer.state, transfer.grant = _TransferState.ASKING, None
            elif transfer.ready:
                self._write(transfer)
                return
        if now >= transfer.next_send_s:
            self._ask(transfer, now)

    def _ask(self, transfer: _Transfer, now: float) -> None:
        """Send *written* or the announcement, until it is answered."""
        transfer.next_send_s = now + self._resend_s
        order = transfer.order
        question: AnyMessage
        if transfer.state is _TransferState.WRITTEN:
            assert transfer.grant is not None
            question = Written(
                transfer_id=order.transfer_id,
                attempt=transfer.attempt,
                generation=transfer.grant.slot.generation,
            )
        else:
            question = Announce(
                transfer_id=order.transfer_id,
                attempt=transfer.attempt,
                mm_hash=order.mm_hash,
                tensor=order.tensor,
                producer=self._peer,
                item_uuid=order.item_uuid,
                proof=order.proof,
            )
            transfer.is_announced = True
        self._send(transfer, question)

    def _write(self, transfer: _Transfer) -> None:
        grant = transfer.grant
        assert grant is not None
        transfer.state = _TransferState.WRITING
        self._out.writes.append(
            Write(
                transfer_id=transfer.order.transfer_id,
                mm_hash=transfer.order.mm_hash,
                slot=grant.slot,
                path=grant.path,
                address=grant.address,
                deadline_s=transfer.lease_end_s,
            )
        )

    def _end(self, transfer: _Transfer, problem: str = "") -> None:
        """End a transfer, once its slot is not being written any more."""
        if transfer.state is _TransferState.WRITING:
            transfer.problem = problem
        else:
            self._close(transfer, problem)

    def _close(self, transfer: _Transfer, problem: str) -> None:
        order = transfer.order
        if transfer.last_message is not None:
            self._send(transfer, transfer.last_message)
        del self._transfers[order.transfer_id]
        following = transfer.next
        if following is not None:
            self._transfers[order.transfer_id] = following
        self._finish(transfer, problem)
        if following is not None and following.problem is not None:
            self.fail(order.transfer_id, following.problem)

    def _finish(self, transfer: _Transfer, problem: str) -> None:
        order = transfer.order
        self._out.finished.append(
            Finished(transfer_id=order.transfer_id, mm_hash=order.mm_hash, problem=problem)
        )

    def _send(self, transfer: _Transfer, message: AnyMessage) -> None:
        self._out.messages.append((transfer.order.consumer, message))


def _released(message: Abort) -> Nack:
    return Nack(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        code=NackCode.RELEASED,
        detail="the slot is not written any more",
    )
