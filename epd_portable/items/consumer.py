"""The PD side of the control protocol, as a state machine without I/O.

A transfer is expected, announced by an encoder, granted the slot of its item once that has one, and
written; or it fails: its encoder ends it, its deadline passes, or its lease.

Several transfers, for several requests, may bring one item: one is granted, and when the item is
here the others are answered *not needed*.

An encoder whose announcement does not fit is refused alone: another may still deliver the item. A
second encoder takes over from the first, which is refused then.

A slot whose grant failed is quarantined until it cannot be written any more: the producer has
confirmed that, it is gone, or the path is fenced.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from epd_portable.errors import NoCommonPathError
from epd_portable.items.items import Item, State
from epd_portable.items.quarantine import Quarantine, Writer
from epd_portable.log import trace
from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor
from epd_portable.wire.fingerprint import differences
from epd_portable.wire.messages import (
    Abort,
    Announce,
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

if TYPE_CHECKING:
    from epd_portable.transfer.endpoint import ConsumerEndpoint

MAX_ENDED = 4096
"""Ended transfers that are remembered."""
MAX_EARLY = 1024
"""Announcements that are kept until their request comes."""
MAX_REFUSED = 8
"""Attempts at one transfer that are refused before it fails."""
LEASE_MARGIN_S = 1.0
"""The producer's lease begins when the grant arrives; the consumer's ends this much later."""

FailureCause = Literal["timeout", "cancelled", "refused", "retried"]
"""Why a transfer failed. ``timeout``: not written within the lease, or not delivered in time.
``cancelled``: by its encoder, or its request does not need it any more. ``refused``: its encoder
was refused after a slot was granted to it, or too many were. ``retried``: another encoder announced
it after a slot was granted to one."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer to this instance.

    Attributes:
        owners: Requests whose own transfer it is.
        deadline_s: When it has failed.
        writer: The announced attempt.
        grant: The slot that the writer was granted.
        refused: Answers to attempts that were refused.
    """

    transfer_id: str
    item: Item
    deadline_s: float
    owners: set[str] = field(default_factory=set)
    writer: Writer | None = None
    producer: PeerDescriptor | None = None
    grant: Grant | None = None
    granted_s: float = 0.0
    lease_end_s: float = 0.0
    refused: dict[Writer, Abort | Nack] = field(default_factory=dict)

    @property
    def progress(self) -> str:
        """What it waits for, for the log."""
        if self.producer is None:
            return "its encoder has not announced it"
        if self.grant is not None:
            return f"{self.producer.instance} has not written it"
        return f"announced by {self.producer.instance}, no room here"

    @property
    def due_s(self) -> float:
        """When its lease or deadline ends."""
        return self.deadline_s if self.grant is None else min(self.deadline_s, self.lease_end_s)

    def mismatch(self, message: Announce) -> str:
        """Return why an announcement is not of this item, or an empty string."""
        if message.mm_hash == self.item.mm_hash and message.tensor == self.item.tensor:
            return ""
        return (
            f"{message.producer.instance} announced {message.mm_hash} {message.tensor}, expected "
            f"{self.item.mm_hash} {self.item.tensor}: the two instances process this item "
            "differently"
        )


@dataclass(slots=True)
class _Early:
    """An announcement whose request is to come.

    Attributes:
        aborted: Why its encoder ended it since; empty if it did not.
    """

    expires_s: float
    sender: bytes
    message: Announce | Foreign
    aborted: str = ""

    @property
    def writer(self) -> Writer:
        return _writer_of(self.sender, self.message)


class TransferEvents(Protocol):
    """Callbacks of a `ConsumerSession`, whose own state has changed before each."""

    def may_bring(self, item: Item, transfer_id: str) -> bool:
        """Return whether a transfer may use the slot of its item."""
        ...

    def landed(self, transfer: Transfer, grant: Grant, *, transfer_s: float) -> None:
        """An item is in its slot, ``transfer_s`` after the grant, and the transfer is over."""
        ...

    def failed(
        self,
        transfer: Transfer,
        slot: SlotDescriptor | None,
        *,
        cause: FailureCause,
        reason: str,
    ) -> None:
        """A transfer ended without its item, or goes on without the slot that it had.

        It is over unless the item still has it. The slot is the item's no more, see `released`.
        """
        ...

    def refused(self, transfer: Transfer, nack: Nack) -> None:
        """One encoder cannot deliver an item; its transfer goes on, for another encoder."""
        ...

    def may_wait(self, transfer: Transfer) -> bool:
        """Return whether an item that was not delivered in time has as much time again."""
        ...

    def needs_another(self, transfer: Transfer) -> bool:
        """Return whether an item whose encoder gives it up is to come from another one."""
        ...

    def not_needed(self, transfer_id: str) -> None:
        """An encoder is told that its item is there already, or not wanted."""
        ...

    def released(self, slot: SlotDescriptor) -> None:
        """A slot whose grant failed or was revoked can not be written any more."""
        ...


class ConsumerSession:
    """All transfers to one PD instance.

    Args:
        endpoint: Sends messages, and knows producers and their paths.
        wait_timeout_s: Longest wait for one item.
        lease_s: Longest time from a grant to its *written*; renewed while the producer encodes.
    """

    def __init__(
        self,
        endpoint: ConsumerEndpoint,
        events: TransferEvents,
        *,
        wait_timeout_s: float,
        lease_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._events = events
        self._wait_timeout_s = wait_timeout_s
        self._lease_s = lease_s
        self._now = 0.0
        self._transfers: dict[str, Transfer] = {}
        self._announced: set[Transfer] = set()
        """Those with a writer."""
        self._granted: set[Transfer] = set()
        """Of these, those with a grant."""
        self._next_due_s = math.inf
        """No transfer is due before."""
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._quarantine = Quarantine(endpoint.is_gone, events.released, ask_every_s=lease_s)

    def expect(self, transfer_id: str, item: Item, now: float, *, owner: str) -> bool:
        """Expect an item by a transfer of the request ``owner``, which others may share.

        Returns:
            Whether it is the first request of the transfer, and the transfer has not ended before.
        """
        self._now = now
        deadline_s = now + self._wait_timeout_s
        if (known := self._transfers.get(transfer_id)) is not None:
            known.deadline_s = deadline_s
            known.owners.add(owner)
            return False
        if transfer_id in self._ended:
            return False
        transfer = Transfer(transfer_id, item, deadline_s, owners={owner})
        self._transfers[transfer_id] = item.transfers[transfer_id] = transfer
        self._watch(transfer)
        if (early := self._early.pop(transfer_id, None)) is None:
            return True
        if early.aborted:
            self._given_up(transfer, early.writer, "cancelled", early.aborted)
        elif isinstance(early.message, Foreign):
            self._refuse_foreign(early.sender, early.message, transfer)
        else:
            self._take_announcement(early.sender, early.message, transfer)
        return True

    def owner_left(self, transfer_id: str, owner: str) -> None:
        """A request has ended whose own transfer it was; others may await the item by it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.owners.discard(owner)
            self._fail_if_abandoned(transfer)

    def decline(self, transfer_id: str) -> None:
        """Answer *not needed* to the announcement of a transfer, whenever it comes."""
        self._forget_early(transfer_id)
        self._remember(transfer_id)

    def room_given(self, item: Item) -> None:
        """Grant the item's slot to the first encoder that has announced it."""
        assert item.slot is not None
        trace("item.reserved", mm_hash=item.mm_hash, nbytes=item.slot.nbytes)
        for transfer in list(item.transfers.values()):
            if transfer.writer is not None:
                self._grant_if_free(transfer)

    @property
    def has_revoked_slots(self) -> bool:
        """Whether slots are quarantined."""
        return len(self._quarantine) > 0

    def count_transfers(self) -> tuple[int, int]:
        """Return how many transfers have a slot to be written, and how many announced ones none."""
        return len(self._granted), len(self._announced) - len(self._granted)

    def announced(self, item: Item) -> list[str]:
        """Return the transfers of an item that encoders have announced."""
        return [key for key, each in item.transfers.items() if each.writer is not None]

    def not_wanted(self, item: Item, but: Iterable[str] = ()) -> None:
        """End the transfers of an item except ``but``; a slot that was granted is quarantined."""
        for transfer in [each for key, each in item.transfers.items() if key not in but]:
            slot = self._revoke(transfer, "not needed any more")
            if slot is None and transfer.writer is not None:
                self._not_needed(transfer.writer)
            self._end(transfer)

    def renew(self, now: float) -> None:
        """Let every transfer wait for its item as long as if it were expected now."""
        for transfer in self._transfers.values():
            transfer.deadline_s = now + self._wait_timeout_s
        self._next_due_s = min(self._next_due_s, now + self._wait_timeout_s)

    def reset(self, now: float) -> None:
        """Let what is being written come to nothing: other weights may have made it.

        Its encoder, or another one, may deliver the item by another attempt. What is only announced
        was not granted anything yet, and an encoder that was reset writes for no attempt of before.
        """
        self._now = now
        for transfer in list(self._granted):
            if transfer.writer is not None and transfer in self._granted:
                reason = "the encoder cache was reset while it was written"
                self._given_up(transfer, transfer.writer, "cancelled", reason)

    def receive(self, sender: bytes, message: Received, now: float) -> None:
        """Process a message of a ZMQ identity; ignores those that make no sense here."""
        self._now = now
        transfer = self._transfers.get(message.transfer_id)
        if isinstance(message, Announce):
            self._quarantine.note_life(message.producer, now)
            if transfer is not None:
                self._take_announcement(sender, message, transfer)
            elif message.transfer_id in self._ended:
                self._not_needed(_writer_of(sender, message))
            else:
                self._keep_early(sender, message)
        elif isinstance(message, Foreign):
            if message.kind == "announce" and transfer is not None:
                self._refuse_foreign(sender, message, transfer)
            elif message.kind == "announce" and message.transfer_id not in self._ended:
                self._keep_early(sender, message)
        elif isinstance(message, Written):
            self._written(sender, message, transfer)
        elif isinstance(message, Nack):
            writer = _writer_of(sender, message)
            if message.code is NackCode.RELEASED:
                self._quarantine.release(writer)
            elif message.code is not NackCode.NOT_STORED or transfer is None:
                return
            elif writer not in transfer.refused:
                self._left_to_others(transfer, writer, message)
        elif isinstance(message, Abort):
            self._aborted(_writer_of(sender, message), message, transfer)

    def tick(self, now: float) -> None:
        """Fail transfers that are due, and ask for quarantined slots."""
        self._now = now
        if now >= self._next_due_s:
            due = [each for each in self._transfers.values() if each.due_s <= now]
            for transfer in due:
                self._fail_due(transfer)
            left = (each.due_s for each in self._transfers.values())
            self._next_due_s = min(left, default=math.inf)
        if len(self._quarantine):
            for sender, question in self._quarantine.poll(now):
                self._endpoint.send(sender, question)
        while self._early:
            transfer_id, early = next(iter(self._early.items()))
            if early.expires_s > now:
                break
            self._forget_early(transfer_id)

    def _refuse_foreign(self, sender: bytes, message: Foreign, transfer: Transfer) -> None:
        """Let an encoder with another protocol version, which was answered, take no part."""
        writer = _writer_of(sender, message)
        if writer not in transfer.refused:
            detail = f"the encoder: {message.problem}"
            nack = writer.message(Nack, code=NackCode.INCOMPATIBLE, detail=detail)
            self._left_to_others(transfer, writer, nack)

    def _take_announcement(self, sender: bytes, message: Announce, transfer: Transfer) -> None:
        writer = _writer_of(sender, message)
        if writer in transfer.refused:
            self._endpoint.send(sender, transfer.refused[writer])
        elif differing := differences(self._endpoint.fingerprint, message.producer.fingerprint):
            detail = f"{message.producer.instance} differs in {differing}. Start both with the same"
            self._turn_away(transfer, writer, NackCode.INCOMPATIBLE, detail)
        elif detail := transfer.mismatch(message):
            self._turn_away(transfer, writer, NackCode.UNEXPECTED, detail)
        elif transfer.writer == writer and transfer.grant is not None:
            transfer.lease_end_s = self._now + self._lease_s + LEASE_MARGIN_S
            self._endpoint.send(sender, transfer.grant)
        else:
            if transfer.writer not in (writer, None):
                reason = f"{message.producer.instance} took over"
                taken_over = transfer.writer.message(Abort, reason=reason)
                if transfer.grant is None:
                    self._endpoint.send(transfer.writer.sender, taken_over)
                self._refuse(transfer, transfer.writer, taken_over, "retried")
                if self._transfers.get(transfer.transfer_id) is not transfer:
                    return  # That was one too many.
            transfer.writer, transfer.producer = writer, message.producer
            self._announced.add(transfer)
            self._grant_if_free(transfer)
            if transfer.grant is None and transfer.writer == writer:
                self._endpoint.send(sender, writer.message(Later))

    def _turn_away(self, transfer: Transfer, writer: Writer, code: NackCode, detail: str) -> None:
        """Refuse one encoder for good; another may still deliver the item."""
        nack = writer.message(Nack, code=code, detail=detail)
        self._endpoint.send(writer.sender, nack)
        self._left_to_others(transfer, writer, nack)

    def _left_to_others(self, transfer: Transfer, writer: Writer, nack: Nack) -> None:
        """An attempt has failed for good; another encoder may deliver the item, if one is asked."""
        self._events.refused(transfer, nack)
        self._refuse(transfer, writer, nack)
        self._fail_if_abandoned(transfer)

    def _refuse(
        self,
        transfer: Transfer,
        writer: Writer,
        answer: Abort | Nack,
        cause: FailureCause = "refused",
    ) -> None:
        """Let an attempt take no more part in a transfer; its grant is revoked."""
        transfer.refused[writer] = answer
        slot = None
        reason = answer.reason if isinstance(answer, Abort) else answer.detail
        if transfer.writer == writer:
            slot = self._revoke(transfer, reason)
            transfer.writer = transfer.producer = None
            self._announced.discard(transfer)
        if len(transfer.refused) > MAX_REFUSED:
            reason = f"{len(transfer.refused)} attempts were refused (at most {MAX_REFUSED})"
            self._fail(transfer, "refused", reason, slot)
        elif slot is not None:
            self._events.failed(transfer, slot, cause=cause, reason=reason)

    def _aborted(self, writer: Writer, message: Abort, transfer: Transfer | None) -> None:
        early = self._early.get(writer.transfer_id)
        if early is not None and early.writer == writer:
            early.aborted = message.reason or "aborted"
        if transfer is not None and transfer.writer == writer:
            self._given_up(transfer, writer, "cancelled", message.reason)
        self._quarantine.release(writer)

    def _grant_if_free(self, transfer: Transfer) -> None:
        """Grant an item's reserved slot to an announced transfer, if that may bring the item."""
        item = transfer.item
        if item.state is State.RESERVED and self._events.may_bring(item, transfer.transfer_id):
            self._grant(transfer)

    def _grant(self, transfer: Transfer) -> None:
        writer, producer, item = transfer.writer, transfer.producer, transfer.item
        assert writer is not None and producer is not None and item.slot is not None
        try:
            endpoint = self._endpoint.choose(producer)
        except NoCommonPathError as error:
            self._turn_away(transfer, writer, NackCode.NO_COMMON_PATH, str(error))
            return
        item.state = State.GRANTED
        transfer.granted_s = self._now
        transfer.lease_end_s = self._now + self._lease_s + LEASE_MARGIN_S
        transfer.grant = writer.message(
            Grant,
            slot=item.slot,
            path=endpoint.path,
            address=endpoint.address,
            lease_s=self._lease_s,
        )
        self._granted.add(transfer)
        self._watch(transfer)
        self._endpoint.fence.allow(item.slot)
        self._endpoint.send(writer.sender, transfer.grant)

    def _written(self, sender: bytes, message: Written, transfer: Transfer | None) -> None:
        writer = _writer_of(sender, message)
        injected = writer.message(Injected)
        if transfer is None:
            if message.transfer_id in self._ended:
                self._endpoint.send(sender, injected)
            else:  # Forgotten, or granted by a former life of this process.
                self._not_needed(writer)
            return
        if writer in transfer.refused:
            self._endpoint.send(sender, transfer.refused[writer])
        grant = transfer.grant
        fits = grant is not None and grant.slot.generation == message.generation
        if transfer.writer != writer or grant is None or not fits:
            return
        self._endpoint.fence.forbid(grant.slot)
        self._end(transfer)
        transfer_s = self._now - transfer.granted_s
        self._events.landed(transfer, grant, transfer_s=transfer_s)
        # Last: requests wait for the item, and none for this.
        self._endpoint.send(sender, injected)

    def _fail_due(self, transfer: Transfer) -> None:
        if self._transfers.get(transfer.transfer_id) is not transfer:
            return  # The failure of another one has ended it.
        if self._now >= transfer.deadline_s and self._events.may_wait(transfer):
            transfer.deadline_s = self._now + self._wait_timeout_s
        if self._now < transfer.due_s:
            return
        if self._now >= transfer.deadline_s:
            reason = (
                f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s): "
                f"{transfer.progress}"
            )
        else:
            assert transfer.writer is not None
            reason = f"granted, but not written within {self._lease_s} s (transfer.lease_s)"
            self._given_up(transfer, transfer.writer, "timeout", reason)
            return
        self._fail(transfer, "timeout", reason)

    def _given_up(
        self, transfer: Transfer, writer: Writer, cause: FailureCause, reason: str
    ) -> None:
        """An encoder does not deliver: its attempt alone fails if another one is to be asked."""
        if self._events.needs_another(transfer):
            nack = writer.message(Nack, code=NackCode.MISSING, detail=reason)
            self._events.refused(transfer, nack)
            self._refuse(transfer, writer, nack, cause)
        else:
            if transfer.grant is None:
                transfer.writer = None  # It has ended the attempt itself.
            self._fail(transfer, cause, reason)

    def _fail_if_abandoned(self, transfer: Transfer) -> None:
        """Fail a transfer that no encoder has announced, and that none will: its requests ended."""
        known = self._transfers.get(transfer.transfer_id) is transfer
        if known and transfer.writer is None and not transfer.owners:
            reason = "its request has ended, and no encoder has announced it"
            self._fail(transfer, "cancelled", reason)

    def _fail(
        self,
        transfer: Transfer,
        cause: FailureCause,
        reason: str,
        slot: SlotDescriptor | None = None,
    ) -> None:
        """End a transfer without its item; ``slot`` was revoked before."""
        slot = slot or self._revoke(transfer, reason)
        if slot is None and transfer.writer is not None:
            self._not_needed(transfer.writer)
        self._end(transfer)
        self._events.failed(transfer, slot, cause=cause, reason=reason)

    def _revoke(self, transfer: Transfer, reason: str) -> SlotDescriptor | None:
        """Quarantine the slot that a transfer was granted, if any, and return it."""
        writer, producer, grant = transfer.writer, transfer.producer, transfer.grant
        if grant is None:
            return None
        assert writer is not None and producer is not None
        transfer.grant = None
        self._granted.discard(transfer)
        transfer.item.slot = None
        self._endpoint.fence.forbid(grant.slot)
        self._quarantine.add(writer, grant.slot, producer, reason)
        if grant.path in self._endpoint.fenced_paths:
            self._endpoint.send(writer.sender, writer.message(Abort, reason=reason))
            self._quarantine.release(writer)
        return grant.slot

    def _not_needed(self, writer: Writer) -> None:
        self._endpoint.send(writer.sender, writer.message(NotNeeded))
        self._events.not_needed(writer.transfer_id)

    def _keep_early(self, sender: bytes, message: Announce | Foreign) -> None:
        """Keep an announcement until its request comes; its producer sends one that is not kept."""
        known = self._early.get(message.transfer_id)
        if known is not None and not known.aborted:
            return
        if known is None and len(self._early) >= MAX_EARLY:
            return
        if isinstance(message, Foreign) or self._endpoint.verify_transfer(message):
            expires_s = self._now + self._wait_timeout_s
            self._early.pop(message.transfer_id, None)  # The oldest are the first.
            self._early[message.transfer_id] = _Early(expires_s, sender, message)

    def _forget_early(self, transfer_id: str) -> None:
        early = self._early.pop(transfer_id, None)
        if early is not None and isinstance(early.message, Announce) and not early.aborted:
            self._not_needed(early.writer)

    def _watch(self, transfer: Transfer) -> None:
        """Have `tick` look at a transfer when it is due."""
        self._next_due_s = min(self._next_due_s, transfer.due_s)

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        del transfer.item.transfers[transfer.transfer_id]
        self._announced.discard(transfer)
        self._granted.discard(transfer)
        self._remember(transfer.transfer_id)

    def _remember(self, transfer_id: str) -> None:
        self._ended[transfer_id] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _writer_of(sender: bytes, message: Received) -> Writer:
    return Writer(transfer_id=message.transfer_id, sender=sender, attempt=message.attempt)
