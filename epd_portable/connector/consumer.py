"""The PD side of the control protocol, as a state machine without I/O.

::

    expect ─▶ EXPECTED ──Announce──▶ ANNOUNCED ──room reserved──▶ GRANTED ──Written──▶ landed
                 │                       │ (Later)                   │
                 └── EncodeFailed, Abort, Nack, deadline, lease ─────┴──▶ failed

An item may be on its way by several transfers, for several requests: one is granted, and when it
has landed the others are answered *not needed*.

A slot whose grant failed is quarantined until nobody can write it any more: the producer said so,
it is gone, or the path is fenced.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from epd_portable.connector.events import Event, Failed, Landed, Released
from epd_portable.connector.quarantine import Quarantine
from epd_portable.connector.registry import PathChooser
from epd_portable.connector.transport import LeaseFence
from epd_portable.errors import NoCommonPathError
from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    EncodeFailed,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)

MAX_REMEMBERED = 4096
"""Early announcements, and ended transfers, that are remembered at most."""
LEASE_MARGIN_S = 1.0
"""The producer's lease begins when the grant arrives; ours ends this much later."""


class _State(enum.Enum):
    EXPECTED = enum.auto()
    ANNOUNCED = enum.auto()
    GRANTED = enum.auto()


@dataclass(slots=True)
class _Transfer:
    transfer_id: str
    mm_hash: str
    tensor: TensorSpec
    deadline_s: float
    state: _State = _State.EXPECTED
    sender: bytes = b""
    producer: PeerDescriptor | None = None
    answered: bool = False
    grant: Grant | None = None
    granted_s: float = 0.0
    lease_end_s: float = 0.0


class ConsumerSession:
    """All transfers to one PD instance.

    Args:
        choose: Finds the path for a producer, see `PathChooser`.
        fingerprint: What producers must agree with.
        slot_for: Returns the slot that is reserved for an item, or ``None`` while there is none.
        is_gone: Tells whether a producer's process has certainly ended.
        fence: Lets writes through to leased slots only.
        fenced_paths: Paths whose writes go through the fence; their slots need no quarantine.
        wait_timeout_s: Longest wait for one item.
        lease_s: Longest time from a grant to its *written*; renewed while the producer encodes.
    """

    def __init__(
        self,
        *,
        choose: PathChooser,
        fingerprint: str,
        slot_for: Callable[[str], SlotDescriptor | None],
        is_gone: Callable[[PeerDescriptor], bool],
        fence: LeaseFence,
        fenced_paths: frozenset[str],
        wait_timeout_s: float,
        lease_s: float,
    ) -> None:
        self._choose = choose
        self._fingerprint = fingerprint
        self._slot_for = slot_for
        self._fence = fence
        self._fenced_paths = fenced_paths
        self._wait_timeout_s = wait_timeout_s
        self._lease_s = lease_s
        self._transfers: dict[str, _Transfer] = {}
        self._by_item: dict[str, list[_Transfer]] = {}
        self._early: OrderedDict[str, tuple[bytes, Announce, float]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._quarantine = Quarantine(is_gone, ask_every_s=lease_s)
        self._revoked: set[int] = set()
        self._messages: list[tuple[bytes, AnyMessage]] = []
        self._events: list[Event] = []

    def expect(self, transfer_id: str, mm_hash: str, tensor: TensorSpec, now: float) -> None:
        """A request waits for an item that this transfer will bring."""
        if transfer_id in self._transfers:
            return
        transfer = _Transfer(transfer_id, mm_hash, tensor, now + self._wait_timeout_s)
        self._transfers[transfer_id] = transfer
        self._by_item.setdefault(mm_hash, []).append(transfer)
        early = self._early.pop(transfer_id, None)
        if early is not None:
            self.receive(early[0], early[1], now)

    def decline(self, transfer_id: str) -> None:
        """A request has this item from elsewhere: its announcement gets *not needed*."""
        early = self._early.pop(transfer_id, None)
        if early is not None:
            self._messages.append((early[0], NotNeeded(transfer_id=transfer_id)))
        self._remember(transfer_id)

    def item_not_needed(self, mm_hash: str) -> SlotDescriptor | None:
        """Nobody waits for an item any more: end all its transfers.

        Returns:
            The slot that was granted to one of them; it is quarantined and comes back by
            `Released`.
        """
        granted = None
        for transfer in list(self._by_item.get(mm_hash, ())):
            slot = self._revoke(transfer, "not needed any more")
            if slot is not None:
                granted = slot
            elif transfer.sender:
                message = NotNeeded(transfer_id=transfer.transfer_id)
                self._messages.append((transfer.sender, message))
            self._end(transfer)
        return granted

    def expects(self, mm_hash: str) -> bool:
        """Tell whether a transfer of the item is under way."""
        return mm_hash in self._by_item

    def receive(self, sender: bytes, message: AnyMessage, now: float) -> None:
        """Take in a message; those that make no sense here are ignored.

        Args:
            sender: ZMQ identity to answer to.
            message: Any.
            now: Seconds.
        """
        transfer = self._transfers.get(message.transfer_id)
        if isinstance(message, Announce):
            self._announced(sender, message, transfer, now)
        elif isinstance(message, Written):
            self._written(sender, message, transfer, now)
        elif isinstance(message, Nack):
            if message.code is NackCode.RELEASED:
                self._quarantine.release(message.transfer_id, sender)
        elif isinstance(message, EncodeFailed):
            if transfer is not None:
                self._fail(transfer, NackCode.UNAVAILABLE, message.reason)
        elif isinstance(message, Abort):
            if transfer is not None and transfer.sender == sender:
                self._fail(transfer, NackCode.UNAVAILABLE, message.reason)
            self._quarantine.release(message.transfer_id, sender)

    def poll(self, now: float) -> tuple[list[tuple[bytes, AnyMessage]], list[Event]]:
        """Return messages to send, as ``(identity, message)``, and what happened since.

        The caller acts on the events before it calls anything else: until then `slot_for` may
        still return a slot that was revoked, which is not granted to anybody.
        """
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline_s:
                reason = f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s)"
                self._fail(transfer, NackCode.UNAVAILABLE, reason)
            elif transfer.state is _State.GRANTED and now >= transfer.lease_end_s:
                reason = f"granted, but not written within {self._lease_s} s (transfer.lease_s)"
                self._fail(transfer, NackCode.UNAVAILABLE, reason)
            elif transfer.state is _State.ANNOUNCED:
                self._try_grant(transfer, now)
        self._messages += self._quarantine.poll(now)
        while self._early and next(iter(self._early.values()))[2] <= now:
            transfer_id, (sender, _, _) = self._early.popitem(last=False)
            self._messages.append((sender, NotNeeded(transfer_id=transfer_id)))
        self._events += (Released(slot=slot) for slot in self._quarantine.take_released())
        messages, self._messages = self._messages, []
        events, self._events = self._events, []
        self._revoked.clear()
        return messages, events

    # --------------------------------------------------------------------------------------------

    def _announced(
        self, sender: bytes, message: Announce, transfer: _Transfer | None, now: float
    ) -> None:
        transfer_id = message.transfer_id
        if transfer is None:
            if transfer_id in self._ended:
                self._messages.append((sender, NotNeeded(transfer_id=transfer_id)))
            elif transfer_id in self._early or len(self._early) < MAX_REMEMBERED:
                self._early.setdefault(transfer_id, (sender, message, now + self._wait_timeout_s))
            return
        problem = self._mismatch(message, transfer)
        if problem:
            code, detail = problem
            self._messages.append((sender, Nack(transfer_id=transfer_id, code=code, detail=detail)))
            self._fail(transfer, code, detail)
            return
        same = transfer.producer and transfer.producer.session == message.producer.session
        if transfer.state is _State.GRANTED and same:
            assert transfer.grant is not None
            transfer.lease_end_s = now + self._lease_s + LEASE_MARGIN_S
            self._messages.append((sender, transfer.grant))
            return
        if transfer.state is _State.GRANTED:
            slot = self._revoke(transfer, "another encoder took over")
            assert slot is not None
            self._events.append(
                Failed(
                    mm_hash=transfer.mm_hash,
                    transfer_id=transfer_id,
                    reason="another encoder took over",
                    code=NackCode.UNAVAILABLE,
                    slot=slot,
                    last=False,
                )
            )
        transfer.state = _State.ANNOUNCED
        transfer.sender = sender
        transfer.producer = message.producer
        transfer.answered = False

    def _mismatch(self, message: Announce, transfer: _Transfer) -> tuple[NackCode, str] | None:
        if message.producer.fingerprint != self._fingerprint:
            return NackCode.INCOMPATIBLE, (
                f"{message.producer.instance} serves something else (fingerprint "
                f"{message.producer.fingerprint}, here {self._fingerprint}): give both instances "
                "the same model, revision, dtype and multimodal processor settings"
            )
        if message.mm_hash != transfer.mm_hash or message.tensor != transfer.tensor:
            return NackCode.UNEXPECTED, (
                f"announced {message.mm_hash} {message.tensor}, expected {transfer.mm_hash} "
                f"{transfer.tensor}: the two instances process this item differently"
            )
        return None

    def _try_grant(self, transfer: _Transfer, now: float) -> None:
        others = self._by_item[transfer.mm_hash]
        slot = self._slot_for(transfer.mm_hash)
        if (
            slot is None
            or slot.generation in self._revoked
            or any(other.state is _State.GRANTED for other in others)
        ):
            if not transfer.answered:
                transfer.answered = True
                self._messages.append((transfer.sender, Later(transfer_id=transfer.transfer_id)))
            return
        assert transfer.producer is not None
        try:
            endpoint = self._choose(transfer.producer)
        except NoCommonPathError as error:
            nack = Nack(
                transfer_id=transfer.transfer_id,
                code=NackCode.NO_COMMON_PATH,
                detail=str(error),
            )
            self._messages.append((transfer.sender, nack))
            self._fail(transfer, nack.code, nack.detail)
            return
        transfer.state = _State.GRANTED
        transfer.granted_s = now
        transfer.lease_end_s = now + self._lease_s + LEASE_MARGIN_S
        transfer.grant = Grant(
            transfer_id=transfer.transfer_id,
            slot=slot,
            path=endpoint.path,
            address=endpoint.address,
            lease_s=self._lease_s,
        )
        self._fence.allow(slot)
        self._messages.append((transfer.sender, transfer.grant))

    def _written(
        self, sender: bytes, message: Written, transfer: _Transfer | None, now: float
    ) -> None:
        if transfer is None:
            if message.transfer_id in self._ended:
                self._messages.append((sender, Injected(transfer_id=message.transfer_id)))
            return
        grant = transfer.grant
        if (
            transfer.state is not _State.GRANTED
            or transfer.sender != sender
            or grant is None
            or grant.slot.generation != message.generation
        ):
            return
        assert transfer.producer is not None
        self._fence.forbid(grant.slot)
        self._events.append(
            Landed(
                mm_hash=transfer.mm_hash,
                transfer_id=transfer.transfer_id,
                tensor=transfer.tensor,
                producer=transfer.producer,
                path=grant.path,
                transfer_s=now - transfer.granted_s,
            )
        )
        self._messages.append((sender, Injected(transfer_id=transfer.transfer_id)))
        self._end(transfer)
        self.item_not_needed(transfer.mm_hash)

    def _fail(self, transfer: _Transfer, code: NackCode, reason: str) -> None:
        slot = self._revoke(transfer, reason)
        self._end(transfer)
        self._events.append(
            Failed(
                mm_hash=transfer.mm_hash,
                transfer_id=transfer.transfer_id,
                reason=reason,
                code=code,
                slot=slot,
                last=transfer.mm_hash not in self._by_item,
            )
        )

    def _revoke(self, transfer: _Transfer, reason: str) -> SlotDescriptor | None:
        if transfer.state is not _State.GRANTED:
            return None
        assert transfer.grant is not None and transfer.producer is not None
        grant, transfer.grant = transfer.grant, None
        transfer.state = _State.EXPECTED
        self._fence.forbid(grant.slot)
        self._revoked.add(grant.slot.generation)
        self._quarantine.add(transfer.transfer_id, transfer.sender, grant.slot, transfer.producer)
        if grant.path in self._fenced_paths:
            message = Abort(transfer_id=transfer.transfer_id, reason=reason)
            self._messages.append((transfer.sender, message))
            self._quarantine.release(transfer.transfer_id, transfer.sender)
        return grant.slot

    def _end(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        siblings = self._by_item[transfer.mm_hash]
        siblings.remove(transfer)
        if not siblings:
            del self._by_item[transfer.mm_hash]
        self._remember(transfer.transfer_id)

    def _remember(self, transfer_id: str) -> None:
        self._early.pop(transfer_id, None)
        self._ended[transfer_id] = None
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
