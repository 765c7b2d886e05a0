"""The encode side of the control protocol, as a state machine without I/O.

::

    submit ─▶ ASKING ──Grant──▶ GRANTED ──output ready──▶ WRITING ──ok──▶ WRITTEN ──Injected──▶ end
                │  ▲               │ (renews its lease         │               │
                │  └───────────────┘  while encoding)          └─error─▶ Abort, end
                └── NotNeeded, Nack, Abort, deadline, preempted ─▶ end

Unanswered messages are sent again; messages that arrive twice or too late change nothing. Every
submission has its own attempt number, which replies repeat.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

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

_PREEMPTED = "preempted: its consumer had no space for it, and other items needed its space"


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
    """Request to write an item and to call `ProducerSession.write_ended`.

    Attributes:
        output: From `ProducerSession.output_ready`; ``None`` if the item was not encoded.
        deadline_s: End of the lease on the session's clock.
    """

    order: TransferOrder
    attempt: int
    output: Any
    slot: SlotDescriptor
    path: str
    address: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a transfer.

    Attributes:
        problem: Empty if the consumer has the item or does not need it.
        output: The item's, if it was encoded and no other transfer needs it.
        is_outdated: `ProducerSession.reset` was called since it was submitted.
    """

    order: TransferOrder
    problem: str = ""
    output: Any = None
    is_outdated: bool = False


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
    output: Any = None
    state: _TransferState = _TransferState.ASKING
    grant: Grant | None = None
    lease_end_s: float = 0.0
    next_send_s: float = 0.0
    is_announced: bool = False
    has_space: bool = True
    """False from its consumer's *later* until a grant."""
    is_preempted: bool = False
    is_outdated: bool = False
    problem: str | None = None
    """End of the transfer once the write under way has ended, whose result does not matter."""
    last_message: AnyMessage | None = None
    """Sent when the slot is not written any more."""

    def write(self) -> Write:
        assert self.grant is not None
        return Write(
            order=self.order,
            attempt=self.attempt,
            output=self.output,
            slot=self.grant.slot,
            path=self.grant.path,
            address=self.grant.address,
            deadline_s=self.lease_end_s,
        )


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
        self._transfers: dict[int, _Transfer] = {}
        """Transfers by attempt: one may be writing yet when its transfer is submitted again."""
        self._out = Actions()
        # Not from 1: a reply to a former process must not fit.
        self._attempts = itertools.count(secrets.randbits(40) << 20)

    def __len__(self) -> int:
        """Return the number of transfers that have not ended."""
        return len(self._transfers)

    def submit(
        self, order: TransferOrder, *, now: float, output: Any = None, ready: bool = False
    ) -> None:
        """Begin a transfer.

        Args:
            output: The item, if it was encoded before.
            ready: Nothing is to be waited for, with an output or without.
        """
        attempt, deadline_s = next(self._attempts), now + self._wait_timeout_s
        transfer = _Transfer(order, attempt, deadline_s, ready, output, next_send_s=now)
        for each in self._transfers.values():
            if each.order.mm_hash == order.mm_hash and each.output is not None:
                transfer.ready, transfer.output = True, each.output
        self._transfers[attempt] = transfer

    def output_ready(self, mm_hash: str, output: Any = None) -> None:
        """Note that the encoder has put out an item, or will not: ``None``."""
        for transfer in self._transfers.values():
            if transfer.order.mm_hash == mm_hash and not transfer.is_outdated:
                transfer.ready, transfer.output = True, transfer.output or output

    def receive(self, consumer: str, message: Received, now: float) -> None:
        """Process a message from the address of a consumer; ignores those that make no sense."""
        transfer = self._transfers.get(message.attempt)
        sender = (consumer, message.transfer_id)
        if transfer is None or (transfer.order.consumer, transfer.order.transfer_id) != sender:
            if isinstance(message, Abort):
                self._out.messages.append((consumer, _released(message)))
        elif isinstance(message, Abort):
            reason = f"aborted by the consumer: {message.reason}"
            self._end(transfer, reason, _released(message))
        elif isinstance(message, Grant):
            if transfer.state in (_TransferState.ASKING, _TransferState.GRANTED):
                transfer.state = _TransferState.GRANTED
                transfer.grant, transfer.has_space = message, True
                transfer.lease_end_s = now + message.lease_s
                transfer.next_send_s = now + message.lease_s / 2
        elif isinstance(message, Later):
            transfer.next_send_s = now + self._resend_s
            transfer.has_space = False
        elif isinstance(message, Injected | NotNeeded):
            self._end(transfer)
        elif isinstance(message, Nack):
            self._end(transfer, f"{message.code.value}: {message.detail}")
        elif isinstance(message, Foreign):
            self._end(transfer, f"{NackCode.INCOMPATIBLE.value}: {message.problem}")

    def write_ended(self, attempt: int, problem: str, now: float) -> None:
        """Note that a `Write` is complete; abort its transfer if it failed."""
        transfer = self._transfers[attempt]
        transfer.state = _TransferState.WRITTEN
        if transfer.problem is not None:
            self._end(transfer, transfer.problem)
        elif problem:
            self._abort(transfer, problem)
        else:
            self._ask(transfer, now)

    def fail(self, attempt: int, problem: str) -> None:
        """Abort an attempt, if it is under way; a write that has begun ends first."""
        transfer = self._transfers.get(attempt)
        if transfer is not None:
            if not transfer.is_announced:
                self._ask(transfer, now=0.0)  # Consumers ignore what ends before that.
            self._abort(transfer, problem)

    def preempt(self, transfer_ids: Collection[str]) -> None:
        """End these transfers when they are encoded and their consumers have no space for them."""
        for transfer in self._transfers.values():
            transfer.is_preempted |= transfer.order.transfer_id in transfer_ids

    def reset(self, problem: str) -> None:
        """Abort all transfers, and forget all outputs."""
        for transfer in list(self._transfers.values()):
            transfer.output, transfer.is_outdated = None, True
            self.fail(transfer.attempt, problem)

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
        """Return the actions that follow from reports since the last call, as of `write_ended`.

        Saves a `poll` of all transfers between the end of a write and *written*.
        """
        out, self._out = self._out, Actions()
        return out

    def _advance(self, transfer: _Transfer, now: float) -> None:
        if transfer.state is _TransferState.WRITING:
            return
        if now >= transfer.deadline_s:
            problem = f"not acknowledged by {transfer.order.consumer} in {self._wait_timeout_s} s"
            self._abort(transfer, problem)
            return
        if transfer.is_preempted and transfer.ready and not transfer.has_space:
            self._abort(transfer, _PREEMPTED)
            return
        if transfer.state is _TransferState.GRANTED:
            if now >= transfer.lease_end_s:
                transfer.state, transfer.grant = _TransferState.ASKING, None
            elif transfer.ready:
                transfer.state = _TransferState.WRITING
                self._out.writes.append(transfer.write())
                return
        if now >= transfer.next_send_s:
            self._ask(transfer, now)

    def _ask(self, transfer: _Transfer, now: float) -> None:
        """Send *written* or the announcement, until a reply arrives."""
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

    def _abort(self, transfer: _Transfer, problem: str) -> None:
        """End a transfer with an `Abort` for its consumer."""
        transfer_id, attempt = transfer.order.transfer_id, transfer.attempt
        abort = Abort(transfer_id=transfer_id, attempt=attempt, reason=problem)
        self._end(transfer, problem, abort)

    def _end(
        self, transfer: _Transfer, problem: str = "", last_message: AnyMessage | None = None
    ) -> None:
        """End a transfer, once its slot is not being written any more."""
        transfer.last_message = last_message or transfer.last_message
        if transfer.state is _TransferState.WRITING:
            transfer.problem = problem
            return
        if transfer.last_message is not None:
            self._send(transfer, transfer.last_message)
        del self._transfers[transfer.attempt]
        order, output = transfer.order, transfer.output
        if any(each.order.mm_hash == order.mm_hash for each in self._transfers.values()):
            output = None
        self._out.finished.append(Finished(order, problem, output, transfer.is_outdated))

    def _send(self, transfer: _Transfer, message: AnyMessage) -> None:
        self._out.messages.append((transfer.order.consumer, message))


def _released(message: Abort) -> Nack:
    return Nack(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        code=NackCode.RELEASED,
        detail="the slot is not written any more",
    )
