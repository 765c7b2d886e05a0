"""One transfer as the PD side sees it, and announcements that come before their request."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from epd_portable.connector.events import Failed, FailureCause, Refused
from epd_portable.connector.quarantine import Writer
from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import Abort, Announce, AnyMessage, Grant, Nack, NackCode


class State(enum.Enum):
    """How far a transfer has come."""

    EXPECTED = enum.auto()
    ANNOUNCED = enum.auto()
    GRANTED = enum.auto()


@dataclass(slots=True)
class IncomingTransfer:
    """An item on its way to this instance.

    Attributes:
        transfer_id: Unique name.
        mm_hash: The item.
        tensor: What it is.
        encoder: Instance that was asked first, for the log.
        deadline_s: When it has failed.
        state: How far it has come.
        writer: Who will write it, once announced.
        producer: The writer's end.
        answered: The last announcement has an answer.
        grant: Once granted.
        granted_s: When that was.
        lease_end_s: When the grant ends.
        asked: A request waits for it; not yet, if it was accepted before its request.
        refused: What is answered to attempts that take no more part.
    """

    transfer_id: str
    mm_hash: str
    tensor: TensorSpec
    encoder: str
    deadline_s: float
    state: State = State.EXPECTED
    writer: Writer | None = None
    producer: PeerDescriptor | None = None
    answered: bool = False
    grant: Grant | None = None
    granted_s: float = 0.0
    lease_end_s: float = 0.0
    asked: bool = True
    refused: dict[Writer, Abort | Nack] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """What it waits for, for the log."""
        if self.producer is None:
            return f"{self.encoder or 'its encoder'} has not announced it"
        if self.state is State.GRANTED:
            return f"{self.producer.instance} has not written it"
        return f"announced by {self.producer.instance}, no room here"

    def failure(
        self,
        code: NackCode,
        cause: FailureCause,
        reason: str,
        slot: SlotDescriptor | None,
        *,
        last: bool,
    ) -> Failed:
        """Return the event for its end without an item, or for the loss of its slot."""
        return Failed(
            mm_hash=self.mm_hash,
            transfer_id=self.transfer_id,
            reason=reason,
            code=code,
            cause=cause,
            slot=slot,
            last=last,
        )

    def refusals(self) -> list[Refused]:
        """Return an event for each encoder that was refused for good."""
        nacks = (answer for answer in self.refused.values() if isinstance(answer, Nack))
        return [self.refusal(nack) for nack in nacks]

    def refusal(self, nack: Nack) -> Refused:
        """Return the event for an encoder that gets this answer."""
        return Refused(
            mm_hash=self.mm_hash,
            transfer_id=self.transfer_id,
            reason=nack.detail,
            code=nack.code,
        )

    def mismatch(self, message: Announce, fingerprint: str) -> tuple[NackCode, str] | None:
        """Return why an announcement does not fit, or ``None``.

        Args:
            message: The announcement.
            fingerprint: What producers must agree with.
        """
        if message.producer.fingerprint != fingerprint:
            return NackCode.INCOMPATIBLE, (
                f"{message.producer.instance} serves something else (fingerprint "
                f"{message.producer.fingerprint}, here {fingerprint}): give both instances "
                "the same model, revision, dtype and multimodal processor settings"
            )
        if message.mm_hash != self.mm_hash or message.tensor != self.tensor:
            return NackCode.UNEXPECTED, (
                f"{message.producer.instance} announced {message.mm_hash} {message.tensor}, "
                f"expected {self.mm_hash} {self.tensor}: the two instances process this item "
                "differently"
            )
        return None


class EarlyAnnouncements:
    """Announcements whose request has not come yet: the first of each transfer, a bounded number.

    Args:
        limit: Most that are kept; what does not fit is sent again by its producer.
        keep_s: Seconds that each is kept.
    """

    def __init__(self, *, limit: int, keep_s: float) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._kept: OrderedDict[str, tuple[bytes, Announce, float]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of announcements that are kept."""
        return len(self._kept)

    def keep(self, sender: bytes, message: Announce, now: float) -> None:
        """Remember an announcement, if there is room and none of that transfer yet."""
        if message.transfer_id not in self._kept and len(self._kept) < self._limit:
            self._kept[message.transfer_id] = (sender, message, now + self._keep_s)

    def announced(self, fingerprint: str) -> list[Announce]:
        """Return what is kept from producers with this fingerprint, in order."""
        kept = (message for _, message, _ in self._kept.values())
        return [message for message in kept if message.producer.fingerprint == fingerprint]

    def take(self, transfer_id: str) -> tuple[bytes, Announce] | None:
        """Return and forget the announcement of a transfer, as ``(identity, message)``."""
        kept = self._kept.pop(transfer_id, None)
        return kept and kept[:2]

    def withdraw(self, writer: Writer) -> None:
        """Forget an announcement that its producer has aborted."""
        kept = self._kept.get(writer.transfer_id)
        if kept is not None and writer_of(kept[0], kept[1]) == writer:
            del self._kept[writer.transfer_id]

    def expire(self, now: float) -> list[Writer]:
        """Forget those whose request did not come in time; return who announced them."""
        expired = []
        while self._kept and next(iter(self._kept.values()))[2] <= now:
            _, (sender, message, _) = self._kept.popitem(last=False)
            expired.append(writer_of(sender, message))
        return expired


def writer_of(sender: bytes, message: AnyMessage) -> Writer:
    """Return whose message it is."""
    return Writer(transfer_id=message.transfer_id, sender=sender, attempt=message.attempt)
