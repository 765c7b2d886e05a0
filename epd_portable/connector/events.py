"""What happens to items on their way, as the consumer's session reports it."""

from __future__ import annotations

from dataclasses import dataclass

from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import NackCode


@dataclass(frozen=True, kw_only=True, slots=True)
class Landed:
    """An item is in its slot.

    Attributes:
        mm_hash: The item.
        transfer_id: The transfer that brought it.
        tensor: Its shape and dtype.
        producer: Who wrote it.
        path: How.
        transfer_s: From the grant to *written*.
    """

    mm_hash: str
    transfer_id: str
    tensor: TensorSpec
    producer: PeerDescriptor
    path: str
    transfer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A transfer ended without its item.

    Attributes:
        mm_hash: The item.
        transfer_id: The transfer.
        reason: For the log.
        code: For the router.
        slot: Was granted and is quarantined; comes back by `Released`.
        last: No other transfer of the item was under way then; one may have been added since.
    """

    mm_hash: str
    transfer_id: str
    reason: str
    code: NackCode
    slot: SlotDescriptor | None
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """A quarantined slot may be given to somebody else."""

    slot: SlotDescriptor


Event = Landed | Failed | Released
