"""The PD side of the control protocol, as a state machine without I/O.

::

    expect ─▶ EXPECTED ──Announce──▶ ANNOUNCED ──room reserved──▶ GRANTED ──Written──▶ landed
                 │                       │ (Later)                   │
                 └── EncodeFailed, Abort, Nack, deadline, lease ─────┴──▶ failed

An item may be on its way by several transfers, for several requests: one is granted, and when it
has landed the others are answered *not needed*.

An encoder whose announcement does not fit is refused alone: another may still deliver the item. A
second encoder takes over from the first, which is refused then.

A slot whose grant failed is quarantined until nobody can write it any more: the producer said so,
it is gone, or the path is fenced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from epd_portable.connector.events import Event, FailureCause, Landed, Released
from epd_portable.connector.incoming import (
    EarlyAnnouncements,
    IncomingTransfer,
    State,
    writer_of,
)
from epd_portable.connector.quarantine import Quarantine, Writer, abort
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

MAX_ENDED = 4096
"""Ended transfers that are remembered at most."""
MAX_EARLY = 1024
"""Announcements that came before their request, and are remembered at most."""
MAX_REFUSED = 8
"""Attempts at one transfer that are refused before it fails."""
LEASE_MARGIN_S = 1.0
"""The producer's lease begins when the grant arrives; ours ends this much later."""


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
        self._transfers: dict[str, IncomingTransfer] = {}
        self._by_item: dict[str, list[IncomingTransfer]] = {}
        self._early = EarlyAnnouncements(limit=MAX_EARLY, keep_s=wait_timeout_s)
        self._ended: OrderedDict[str, bool] = OrderedDict()  # whether before it was asked for
        self._quarantine = Quarantine(is_gone, ask_every_s=lease_s)
        self._revoked: set[int] = set()
        self._messages: list[tuple[bytes, AnyMessage]] = []
        self._events: list[Event] = []

    def expect(
        self,
        transfer_id: str,
        mm_hash: str,
        tensor: TensorSpec,
        now: float,
        *,
        encoder: str = "",
        asked: bool = True,
    ) -> None:
        """An item is to come by this transfer: for a request, or accepted before its request.

        The request of an accepted one calls again. If it means something else by the item, the
        encoder is refused. A transfer that ended before its request came fails at once.

        Args:
            transfer_id: Unique name.
            mm_hash: The item.
            tensor: What it is.
            now: Seconds.
            encoder: Instance that was asked first, for the log.
            asked: A request waits for it.
        """
        deadline_s = now + self._wait_timeout_s
        known = self._transfers.get(transfer_id)
        if known is not None:
            if (known.mm_hash, known.tensor) == (mm_hash, tensor):
                known.deadline_s, known.asked = deadline_s, asked
                self._events += known.refusals()
                return
            reason = "its request describes the item differently"
            self._fail(known, NackCode.UNEXPECTED, "refused", reason)
            del self._ended[transfer_id]
        transfer = IncomingTransfer(transfer_id, mm_hash, tensor, encoder, deadline_s, asked=asked)
        self._transfers[transfer_id] = transfer
        self._by_item.setdefault(mm_hash, []).append(transfer)
        early = self._early.take(transfer_id)
        if self._ended.pop(transfer_id, False):
            self._fail(transfer, NackCode.UNAVAILABLE, "early", "it ended before its request came")
        elif known is not None and known.writer is not None:
            detail = f"announced {known.mm_hash} {known.tensor}, expected {mm_hash} {tensor}"
            self._turn_away(transfer, known.writer, NackCode.UNEXPECTED, detail)
        elif early is not None:
            self.receive(*early, now)

    def early(self) -> list[Announce]:
        """Return announcements that fit this instance and that nobody expects yet, in order."""
        return self._early.announced(self._fingerprint)

    def decline(self, transfer_id: str) -> None:
        """A request has this item from elsewhere: its announcement gets *not needed*."""
        early = self._early.take(transfer_id)
        if early is not None:
            self._not_needed(writer_of(*early))
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
            elif transfer.writer is not None:
                self._not_needed(transfer.writer)
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
                self._quarantine.release(writer_of(sender, message))
        elif isinstance(message, EncodeFailed):
            if transfer is not None:
                self._fail(transfer, NackCode.UNAVAILABLE, "no_encoder", message.reason)
        elif isinstance(message, Abort):
            self._aborted(writer_of(sender, message), message, transfer)

    def poll(self, now: float) -> tuple[list[tuple[bytes, AnyMessage]], list[Event]]:
        """Return messages to send, as ``(identity, message)``, and what happened since.

        The caller acts on the events before it calls anything else: until then `slot_for` may
        still return a slot that was revoked, which is not granted to anybody.
        """
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline_s:
                reason = (
                    f"not delivered within {self._wait_timeout_s} s (transfer.wait_timeout_s): "
                    f"{transfer.stage}"
                )
                self._fail(transfer, NackCode.UNAVAILABLE, "timeout", reason)
            elif transfer.state is State.GRANTED and now >= transfer.lease_end_s:
                reason = f"granted, but not written within {self._lease_s} s (transfer.lease_s)"
                self._fail(transfer, NackCode.UNAVAILABLE, "lease", reason)
            elif transfer.state is State.ANNOUNCED:
                self._try_grant(transfer, now)
        self._messages += self._quarantine.poll(now)
        for writer in self._early.expire(now):
            self._not_needed(writer)
        self._events += (Released(slot=slot) for slot in self._quarantine.take_released())
        messages, self._messages = self._messages, []
        events, self._events = self._events, []
        self._revoked.clear()
        return messages, events

    # --------------------------------------------------------------------------------------------

    def _announced(
        self, sender: bytes, message: Announce, transfer: IncomingTransfer | None, now: float
    ) -> None:
        writer = writer_of(sender, message)
        if transfer is None:
            if message.transfer_id in self._ended:
                self._not_needed(writer)
            else:
                self._early.keep(sender, message, now)
        elif writer in transfer.refused:
            self._messages.append((sender, transfer.refused[writer]))
        elif writer in self._quarantine:
            return  # It is asked to stop already.
        elif problem := transfer.mismatch(message, self._fingerprint):
            code, detail = problem
            self._turn_away(transfer, writer, code, detail)
        elif transfer.writer == writer:
            transfer.answered = False
            if transfer.grant is not None:
                transfer.lease_end_s = now + self._lease_s + LEASE_MARGIN_S
                self._messages.append((sender, transfer.grant))
        else:
            if transfer.writer is not None:
                reason = f"{message.producer.instance} took over"
                self._refuse(transfer, transfer.writer, abort(transfer.writer, reason))
            transfer.state = State.ANNOUNCED
            transfer.writer, transfer.producer = writer, message.producer
            transfer.answered = False

    def _turn_away(
        self, transfer: IncomingTransfer, writer: Writer, code: NackCode, detail: str
    ) -> None:
        """Refuse one encoder for good; another may still deliver the item."""
        transfer_id = writer.transfer_id
        nack = Nack(transfer_id=transfer_id, attempt=writer.attempt, code=code, detail=detail)
        self._messages.append((writer.sender, nack))
        self._events.append(transfer.refusal(nack))
        self._refuse(transfer, writer, nack)

    def _refuse(self, transfer: IncomingTransfer, writer: Writer, answer: Abort | Nack) -> None:
        """Let an attempt take no more part in a transfer; what it was granted is taken back."""
        transfer.refused[writer] = answer
        if transfer.writer == writer:
            reason = answer.reason if isinstance(answer, Abort) else answer.detail
            cause: FailureCause = "other_encoder" if isinstance(answer, Abort) else "refused"
            slot = self._revoke(transfer, reason)
            if slot is not None:
                code = NackCode.UNAVAILABLE
                self._events.append(transfer.failure(code, cause, reason, slot, last=False))
            transfer.state = State.EXPECTED
            transfer.writer = transfer.producer = None
        if len(transfer.refused) > MAX_REFUSED:
            reason = f"{len(transfer.refused)} attempts were refused (at most {MAX_REFUSED})"
            self._fail(transfer, NackCode.UNAVAILABLE, "refused", reason)

    def _aborted(self, writer: Writer, message: Abort, transfer: IncomingTransfer | None) -> None:
        self._early.withdraw(writer)
        if transfer is not None and transfer.writer == writer:
            self._fail(transfer, NackCode.UNAVAILABLE, "aborted", message.reason)
        self._quarantine.release(writer)

    def _try_grant(self, transfer: IncomingTransfer, now: float) -> None:
        writer, producer = transfer.writer, transfer.producer
        assert writer is not None and producer is not None
        others = self._by_item[transfer.mm_hash]
        slot = self._slot_for(transfer.mm_hash)
        if (
            slot is None
            or slot.generation in self._revoked
            or any(other.state is State.GRANTED for other in others)
        ):
            if not transfer.answered:
                transfer.answered = True
                later = Later(transfer_id=writer.transfer_id, attempt=writer.attempt)
                self._messages.append((writer.sender, later))
            return
        try:
            endpoint = self._choose(producer)
        except NoCommonPathError as error:
            self._turn_away(transfer, writer, NackCode.NO_COMMON_PATH, str(error))
            return
        transfer.state = State.GRANTED
        transfer.granted_s = now
        transfer.lease_end_s = now + self._lease_s + LEASE_MARGIN_S
        transfer.grant = Grant(
            transfer_id=writer.transfer_id,
            attempt=writer.attempt,
            slot=slot,
            path=endpoint.path,
            address=endpoint.address,
            lease_s=self._lease_s,
        )
        self._fence.allow(slot)
        self._messages.append((writer.sender, transfer.grant))

    def _written(
        self, sender: bytes, message: Written, transfer: IncomingTransfer | None, now: float
    ) -> None:
        writer = writer_of(sender, message)
        injected = Injected(transfer_id=message.transfer_id, attempt=message.attempt)
        if transfer is None:
            if message.transfer_id in self._ended:
                self._messages.append((sender, injected))
            else:  # Forgotten, or granted by a former life of this process.
                self._not_needed(writer)
            return
        if writer in transfer.refused:
            self._messages.append((sender, transfer.refused[writer]))
        grant = transfer.grant
        fits = grant is not None and grant.slot.generation == message.generation
        if transfer.writer != writer or grant is None or not fits:
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
                digest=message.digest,
            )
        )
        self._messages.append((sender, injected))
        self._end(transfer)
        self.item_not_needed(transfer.mm_hash)

    def _fail(
        self, transfer: IncomingTransfer, code: NackCode, cause: FailureCause, reason: str
    ) -> None:
        slot = self._revoke(transfer, reason)
        self._end(transfer)
        last = transfer.mm_hash not in self._by_item
        self._events.append(transfer.failure(code, cause, reason, slot, last=last))

    def _revoke(self, transfer: IncomingTransfer, reason: str) -> SlotDescriptor | None:
        if transfer.state is not State.GRANTED:
            return None
        writer, producer, grant = transfer.writer, transfer.producer, transfer.grant
        assert writer is not None and producer is not None and grant is not None
        transfer.grant = None
        transfer.state = State.EXPECTED
        self._fence.forbid(grant.slot)
        self._revoked.add(grant.slot.generation)
        self._quarantine.add(writer, grant.slot, producer, reason)
        if grant.path in self._fenced_paths:
            self._messages.append((writer.sender, abort(writer, reason)))
            self._quarantine.release(writer)
        return grant.slot

    def _not_needed(self, writer: Writer) -> None:
        message = NotNeeded(transfer_id=writer.transfer_id, attempt=writer.attempt)
        self._messages.append((writer.sender, message))

    def _end(self, transfer: IncomingTransfer) -> None:
        del self._transfers[transfer.transfer_id]
        siblings = self._by_item[transfer.mm_hash]
        siblings.remove(transfer)
        if not siblings:
            del self._by_item[transfer.mm_hash]
        self._remember(transfer.transfer_id, unasked=not transfer.asked)

    def _remember(self, transfer_id: str, *, unasked: bool = False) -> None:
        self._early.take(transfer_id)
        self._ended[transfer_id] = unasked
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
