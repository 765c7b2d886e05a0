"""Transfers to a prefill+decode engine: messages and time in, actions out; no I/O.

A transfer is expected, announced by an encoder, granted the slot of its item once that has one, and
written; or it fails: its encoder ends it, its deadline passes, or its lease.

Several transfers, for several requests, may bring one item: one is granted, and when the item is
here the reply to the others is *not needed*.

An encoder whose announcement does not fit is refused alone: another may still deliver the item. A
second encoder takes over from the first, which is refused then.

A slot whose grant failed is quarantined until it cannot be written any more: the producer has
confirmed that, it is gone, or the path is fenced.

Transfers change items in the table, and `Transfers.reconcile` brings them in line with items that
others have changed: it grants slots that were reserved, and ends transfers that no request needs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from epd_portable.errors import NoCommonPathError
from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.quarantine import Quarantine, Writer
from epd_portable.items.slots import SlotState
from epd_portable.items.table import Item, ItemRequest, State
from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor
from epd_portable.wire.fingerprint import differences
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
"""Cause of a transfer's failure. ``timeout``: not written within the lease, or not delivered in
time. ``cancelled``: by its encoder, or its request does not need it any more. ``refused``: its
encoder was refused after a slot was granted to it, or too many were. ``retried``: another encoder
announced it after a slot was granted to one."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer to this engine.

    Attributes:
        owners: Requests whose own transfer it is.
        deadline_s: Time at which it has failed.
        writer: The announced attempt.
        grant: The slot that the writer was granted.
        refused: Responses to attempts that were refused.
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
        """Next step that is missing, for the log."""
        if self.producer is None:
            return "its encoder has not announced it"
        if self.grant is not None:
            return f"{self.producer.instance} has not written it"
        return f"announced by {self.producer.instance}, no space here"

    @property
    def due_s(self) -> float:
        """End of its lease or deadline."""
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


# -- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a ZMQ identity."""

    identity: bytes
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Fence:
    """Allow or forbid writes into a slot on paths that are fenced."""

    slot: SlotDescriptor
    allowed: bool


@dataclass(frozen=True, slots=True)
class Landed:
    """An item is in its slot, ``transfer_s`` after the grant, and the transfer is over."""

    transfer: Transfer
    grant: Grant
    transfer_s: float
    requests: list[ItemRequest]
    """Requests that claim the item."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A transfer ended without its item, or continues without the slot that it had."""

    transfer: Transfer
    cause: FailureCause
    reason: str


@dataclass(frozen=True, slots=True)
class EncoderRefused:
    """Refusal of an encoder to deliver an item; its transfer continues, for another encoder."""

    transfer: Transfer
    nack: Nack
    wanted: bool
    """Need of a request for the transfer: another encoder is to be requested."""


Action = Send | Fence | Landed | TransferFailed | EncoderRefused


@dataclass(slots=True)
class _Early:
    """An announcement whose request is to come.

    Attributes:
        aborted: Reason for which its encoder ended it since; empty if it did not.
    """

    expires_s: float
    sender: bytes
    message: Announce | Foreign
    aborted: str = ""

    @property
    def writer(self) -> Writer:
        return _writer_of(self.sender, self.message)


class Transfers:
    """All transfers to one prefill+decode engine.

    Args:
        endpoint: Knows producers and their paths; is only queried.
        table: Items, which transfers change.
        wait_timeout_s: Longest wait for one item.
        lease_s: Longest time from a grant to its *written*; renewed while the producer encodes.

    Attributes:
        paused: Of requests that run (``True``) or wait: those that the engine does not compute.
    """

    def __init__(
        self,
        endpoint: ConsumerEndpoint,
        table: PrefillEncoderCache,
        *,
        wait_timeout_s: float,
        lease_s: float,
    ) -> None:
        self.paused: set[bool] = set()
        self._endpoint = endpoint
        self._table = table
        self._wait_timeout_s = wait_timeout_s
        self._lease_s = lease_s
        self._now = 0.0
        self._transfers: dict[str, Transfer] = {}
        self._announced: set[Transfer] = set()
        """Transfers with a writer."""
        self._granted: set[Transfer] = set()
        """Transfers with a writer that have a grant."""
        self._unanswered: dict[Transfer, None] = {}
        """Announced since the last actions were taken."""
        self._next_due_s = math.inf
        """Time before which no transfer is due."""
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._quarantine = Quarantine(endpoint.is_gone, ask_every_s=lease_s)
        self._actions: list[Action] = []

    # -- requests --------------------------------------------------------------------------------

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
            self._encoder_failed(transfer, early.writer, "cancelled", early.aborted)
        elif isinstance(early.message, Foreign):
            self._refuse_foreign(early.sender, early.message, transfer)
        else:
            self._take_announcement(early.sender, early.message, transfer)
        return True

    def owner_left(self, transfer_id: str, owner: str) -> None:
        """Note that a request has ended whose own transfer it was; others may await the item."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.owners.discard(owner)
            self._fail_if_abandoned(transfer)

    def decline(self, transfer_id: str) -> None:
        """Reply *not needed* to the announcement of a transfer, whenever it comes."""
        self._forget_early(transfer_id)
        self._remember(transfer_id)

    def renew(self, now: float) -> None:
        """Let every transfer wait for its item as long as if it were expected now."""
        for transfer in self._transfers.values():
            transfer.deadline_s = now + self._wait_timeout_s
        self._next_due_s = min(self._next_due_s, now + self._wait_timeout_s)

    def reset(self, now: float) -> None:
        """Let writes that are under way come to nothing: other weights may have made the output.

        The encoder, or another one, may deliver the item by another attempt. A transfer that is
        only announced continues: an encoder that was reset writes for no attempt of before.
        """
        self._now = now
        for transfer in list(self._granted):
            if transfer.writer is not None:
                reason = "the encoder cache was reset while it was written"
                self._encoder_failed(transfer, transfer.writer, "cancelled", reason)

    # -- messages and time -----------------------------------------------------------------------

    def receive(self, sender: bytes, message: Received, now: float) -> None:
        """Process a message of a ZMQ identity; ignores those that make no sense here."""
        self._now = now
        transfer = self._transfers.get(message.transfer_id)
        if isinstance(message, Announce):
            self._quarantine.note_incarnation(message.producer, now)
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
                self._release(writer)
            elif message.code is NackCode.NOT_STORED and transfer is not None:
                self._leave_to_others(transfer, writer, message)
        elif isinstance(message, Abort):
            self._aborted(_writer_of(sender, message), message, transfer)

    def tick(self, now: float) -> None:
        """Fail transfers that are due, and request quarantined slots."""
        self._now = now
        if now >= self._next_due_s:
            for transfer in [each for each in self._transfers.values() if each.due_s <= now]:
                self._fail_due(transfer)
            left = (each.due_s for each in self._transfers.values())
            self._next_due_s = min(left, default=math.inf)
        if len(self._quarantine):
            gone, questions = self._quarantine.poll(now)
            for writer in gone:
                self._release(writer)
            for sender, question in questions:
                self._send(sender, question)
        while self._early:
            transfer_id, early = next(iter(self._early.items()))
            if early.expires_s > now:
                break
            self._forget_early(transfer_id)

    def reconcile(self, items: Iterable[Item], now: float) -> None:
        """Bring transfers in line with items that have changed.

        A reserved slot is granted to the first announced transfer that may bring the item. The
        transfers of an item that is here end, but those of requests whose claims are pending: it
        may be evicted before their turn. All end if no request claims the item.
        """
        self._now = now
        for item in items:
            if item.is_here:
                pending = {each.transfer_id for each in item.pending.values()}
                self._end_unneeded(item, item.transfers.keys() - pending)
            elif not item.holders and not item.pending:
                self._end_unneeded(item, set(item.transfers))
            elif item.state is State.RESERVED:
                self._grant_first(item)

    @property
    def has_actions(self) -> bool:
        """Return whether `take_actions` would return any."""
        return bool(self._actions or self._unanswered)

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in this order; to be called when the table is at rest."""
        for transfer in self._unanswered:
            if transfer.writer is not None and transfer.grant is None:
                self._send(transfer.writer.sender, transfer.writer.message(Later))
        self._unanswered.clear()
        actions, self._actions = self._actions, []
        return actions

    def count(self) -> tuple[int, int]:
        """Return how many transfers have a slot to be written, and how many announced ones none."""
        return len(self._granted), len(self._announced) - len(self._granted)

    # -- announcements ---------------------------------------------------------------------------

    def _refuse_foreign(self, sender: bytes, message: Foreign, transfer: Transfer) -> None:
        """Exclude an encoder with another protocol version, which has received a reply."""
        writer, detail = _writer_of(sender, message), f"the encoder: {message.problem}"
        nack = writer.message(Nack, code=NackCode.INCOMPATIBLE, detail=detail)
        self._leave_to_others(transfer, writer, nack)

    def _take_announcement(self, sender: bytes, message: Announce, transfer: Transfer) -> None:
        writer = _writer_of(sender, message)
        if writer in transfer.refused:
            self._send(sender, transfer.refused[writer])
        elif differing := differences(self._endpoint.fingerprint, message.producer.fingerprint):
            detail = f"{message.producer.instance} differs in {differing}. Start both with the same"
            self._turn_away(transfer, writer, NackCode.INCOMPATIBLE, detail)
        elif detail := transfer.mismatch(message):
            self._turn_away(transfer, writer, NackCode.UNEXPECTED, detail)
        elif transfer.writer == writer and transfer.grant is not None:
            transfer.lease_end_s = self._now + self._lease_s + LEASE_MARGIN_S
            self._send(sender, transfer.grant)
        elif transfer.writer in (writer, None) or self._replace_writer(transfer, message.producer):
            transfer.writer, transfer.producer = writer, message.producer
            self._announced.add(transfer)
            self._unanswered[transfer] = None
            if transfer.item.state is State.RESERVED:
                self._grant_first(transfer.item)

    def _replace_writer(self, transfer: Transfer, producer: PeerDescriptor) -> bool:
        """Refuse the encoder of a transfer for another one; return if the transfer continues."""
        assert transfer.writer is not None
        taken_over = transfer.writer.message(Abort, reason=f"{producer.instance} took over")
        if transfer.grant is None:
            self._send(transfer.writer.sender, taken_over)
        return self._refuse(transfer, transfer.writer, taken_over, "retried")

    def _turn_away(self, transfer: Transfer, writer: Writer, code: NackCode, detail: str) -> None:
        """Refuse one encoder for good; another may still deliver the item."""
        nack = writer.message(Nack, code=code, detail=detail)
        self._send(writer.sender, nack)
        self._leave_to_others(transfer, writer, nack)

    def _leave_to_others(self, transfer: Transfer, writer: Writer, nack: Nack) -> None:
        """Note that an attempt failed for good; another encoder may deliver the item."""
        if writer in transfer.refused:
            return
        self._note_refused(transfer, nack)
        if self._refuse(transfer, writer, nack):
            self._fail_if_abandoned(transfer)

    def _note_refused(self, transfer: Transfer, nack: Nack) -> None:
        self._actions.append(EncoderRefused(transfer, nack, bool(self._owners(transfer))))

    def _refuse(
        self,
        transfer: Transfer,
        writer: Writer,
        answer: Abort | Nack,
        cause: FailureCause = "refused",
    ) -> bool:
        """Exclude an attempt from a transfer, and revoke its grant.

        Returns:
            Whether the transfer continues: it fails when too many attempts were refused.
        """
        transfer.refused[writer] = answer
        reason = answer.reason if isinstance(answer, Abort) else answer.detail
        was_granted = False
        if transfer.writer == writer:
            was_granted = self._revoke(transfer, reason)
            transfer.writer = transfer.producer = None
            self._announced.discard(transfer)
        if len(transfer.refused) > MAX_REFUSED:
            reason = f"{len(transfer.refused)} attempts were refused (at most {MAX_REFUSED})"
            self._fail(transfer, "refused", reason)
            return False
        if was_granted:
            self._actions.append(TransferFailed(transfer, cause, reason))
            self._table.transfer_failed(transfer.item, reason)
        return True

    def _aborted(self, writer: Writer, message: Abort, transfer: Transfer | None) -> None:
        early = self._early.get(writer.transfer_id)
        if early is not None and early.writer == writer:
            early.aborted = message.reason or "aborted"
        if transfer is not None and transfer.writer == writer:
            self._encoder_failed(transfer, writer, "cancelled", message.reason)
        self._release(writer)

    def _keep_early(self, sender: bytes, message: Announce | Foreign) -> None:
        """Keep an announcement until its request comes; its producer repeats others."""
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

    # -- slots -----------------------------------------------------------------------------------

    def _grant_first(self, item: Item) -> None:
        """Grant an item's reserved slot to the first announced transfer that may bring the item."""
        for transfer in list(item.transfers.values()):
            if item.state is not State.RESERVED:
                return
            announced = transfer.writer is not None
            if announced and self._table.may_bring(item, transfer.transfer_id):
                self._grant(transfer)

    def _grant(self, transfer: Transfer) -> None:
        writer, producer, item = transfer.writer, transfer.producer, transfer.item
        assert writer is not None and producer is not None and item.slot is not None
        try:
            endpoint = self._endpoint.choose(producer)
        except NoCommonPathError as error:
            self._turn_away(transfer, writer, NackCode.NO_COMMON_PATH, str(error))
            return
        slot = item.slot.descriptor
        transfer.granted_s = self._now
        transfer.lease_end_s = self._now + self._lease_s + LEASE_MARGIN_S
        transfer.grant = writer.message(
            Grant,
            slot=slot,
            path=endpoint.path,
            address=endpoint.address,
            lease_s=self._lease_s,
        )
        self._table.grant(item)
        self._granted.add(transfer)
        self._watch(transfer)
        self._actions.append(Fence(slot, allowed=True))
        self._send(writer.sender, transfer.grant)

    def _written(self, sender: bytes, message: Written, transfer: Transfer | None) -> None:
        writer = _writer_of(sender, message)
        injected = writer.message(Injected)
        if transfer is None:
            if message.transfer_id in self._ended:
                self._send(sender, injected)
            else:  # Forgotten, or granted by a former process of this instance.
                self._not_needed(writer)
            return
        if writer in transfer.refused:
            self._send(sender, transfer.refused[writer])
        grant, item = transfer.grant, transfer.item
        fits = grant is not None and grant.slot.generation == message.generation
        if transfer.writer != writer or grant is None or not fits:
            return
        self._end(transfer)
        self._actions.append(Fence(grant.slot, allowed=False))
        requests = self._requests(item)
        self._table.land(item)
        self._actions.append(Landed(transfer, grant, self._now - transfer.granted_s, requests))
        # Last: requests wait for the item, and none for this.
        self._send(sender, injected)

    def _revoke(self, transfer: Transfer, reason: str) -> bool:
        """Quarantine the slot that a transfer was granted; return whether there was one."""
        writer, producer, grant = transfer.writer, transfer.producer, transfer.grant
        if grant is None:
            return False
        slot = transfer.item.slot
        assert writer is not None and producer is not None and slot is not None
        transfer.grant = None
        self._granted.discard(transfer)
        self._actions.append(Fence(grant.slot, allowed=False))
        self._table.revoke(transfer.item)
        self._quarantine.add(writer, slot, producer, reason)
        if grant.path in self._endpoint.fenced_paths:
            self._send(writer.sender, writer.message(Abort, reason=reason))
            self._release(writer)
        return True

    def _release(self, writer: Writer) -> None:
        """Free the quarantined slot of an attempt that does not write any more, if it has one."""
        slot = self._quarantine.release(writer)
        if slot is not None:
            self._table.pool.move(slot, SlotState.RETIRING)

    # -- ends ------------------------------------------------------------------------------------

    def _fail_due(self, transfer: Transfer) -> None:
        if self._now >= transfer.deadline_s and self._may_wait(transfer):
            transfer.deadline_s = self._now + self._wait_timeout_s
        if self._now < transfer.due_s:
            return
        if self._now >= transfer.deadline_s:
            reason = (
                f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s): "
                f"{transfer.progress}"
            )
            self._fail(transfer, "timeout", reason)
        else:
            assert transfer.writer is not None
            reason = f"granted, but not written within {self._lease_s} s (transfer.lease_s)"
            self._encoder_failed(transfer, transfer.writer, "timeout", reason)

    def _may_wait(self, transfer: Transfer) -> bool:
        """Return whether the engine computes none of the requests of a transfer at present."""
        owners = self._owners(transfer)
        return bool(owners) and all(each.running in self.paused for each in owners)

    def _encoder_failed(
        self, transfer: Transfer, writer: Writer, cause: FailureCause, reason: str
    ) -> None:
        """Fail a transfer whose encoder does not deliver, or only the attempt.

        Another encoder is requested if a request cannot encode the item.
        """
        mm_hash = transfer.item.mm_hash
        owners = [] if transfer.item.is_here else self._owners(transfer)
        if any(mm_hash in each.metadata_only for each in owners):
            nack = writer.message(Nack, code=NackCode.MISSING, detail=reason)
            self._note_refused(transfer, nack)
            self._refuse(transfer, writer, nack, cause)
        else:
            if transfer.grant is None:
                transfer.writer = None  # It has ended the attempt itself.
            self._fail(transfer, cause, reason)

    def _fail_if_abandoned(self, transfer: Transfer) -> None:
        """Fail a transfer without an encoder if its own requests do not need the item any more.

        No encoder is requested then, and other requests must not wait for one.
        """
        if transfer.writer is None and not self._owners(transfer):
            reason = "its request does not need it any more, and no encoder has announced it"
            self._fail(transfer, "cancelled", reason)

    def _fail(self, transfer: Transfer, cause: FailureCause, reason: str) -> None:
        """End a transfer without its item."""
        self._dismiss(transfer, reason)
        self._actions.append(TransferFailed(transfer, cause, reason))
        self._table.transfer_failed(transfer.item, reason)

    def _end_unneeded(self, item: Item, transfer_ids: Iterable[str]) -> None:
        for transfer in [each for key, each in item.transfers.items() if key in transfer_ids]:
            self._dismiss(transfer, "not needed any more")
        self._table.forget_if_unused(item)

    def _dismiss(self, transfer: Transfer, reason: str) -> None:
        """Inform the encoder of a transfer that ends; a slot that was granted is quarantined."""
        if not self._revoke(transfer, reason) and transfer.writer is not None:
            self._not_needed(transfer.writer)
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        del transfer.item.transfers[transfer.transfer_id]
        self._announced.discard(transfer)
        self._granted.discard(transfer)
        self._unanswered.pop(transfer, None)
        self._remember(transfer.transfer_id)

    def _remember(self, transfer_id: str) -> None:
        self._ended[transfer_id] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    # --------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: AnyMessage) -> None:
        self._actions.append(Send(identity, message))

    def _not_needed(self, writer: Writer) -> None:
        self._send(writer.sender, writer.message(NotNeeded))

    def _watch(self, transfer: Transfer) -> None:
        """Have `tick` look at a transfer when it is due."""
        self._next_due_s = min(self._next_due_s, transfer.due_s)

    def _requests(self, item: Item) -> list[ItemRequest]:
        """Return the requests that claim an item."""
        names = (*item.holders, *item.pending)  # Transfers to others hold items, too.
        requests = self._table.requests
        return [requests[each] for each in names if each in requests]

    def _owners(self, transfer: Transfer) -> list[ItemRequest]:
        """Return the requests that claim the item, and whose own transfer it is."""
        return [
            each for each in self._requests(transfer.item) if each.request_id in transfer.owners
        ]


def _writer_of(sender: bytes, message: Received) -> Writer:
    return Writer(transfer_id=message.transfer_id, sender=sender, attempt=message.attempt)
