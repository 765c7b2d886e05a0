"""What happens to items on their way, as the consumer's session reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epd_portable.wire.descriptors import PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.messages import NackCode

FailureCause = Literal[
    "lease", "timeout", "no_encoder", "aborted", "refused", "other_encoder", "early"
]
"""Why a transfer failed. ``lease``: granted, but not written in time. ``timeout``: not delivered in
time at all. ``no_encoder``: the router says that none will deliver it. ``aborted``: by its encoder.
``refused``: its encoder was refused after a slot was granted to it, or too many were.
``other_encoder``: another encoder announced the same transfer after a slot was granted to one.
``early``: it was accepted before its request, and has ended when that came."""


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
        digest: Of the bytes that were written; empty if not to be checked.
    """

    mm_hash: str
    transfer_id: str
    tensor: TensorSpec
    producer: PeerDescriptor
    path: str
    transfer_s: float
    digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A transfer ended without its item.

    Attributes:
        mm_hash: The item.
        transfer_id: The transfer.
        reason: For the log.
        code: For the router.
        cause: For the metrics.
        slot: Was granted and is quarantined; comes back by `Released`.
        last: No other transfer of the item was under way then; one may have been added since.
    """

    mm_hash: str
    transfer_id: str
    reason: str
    code: NackCode
    cause: FailureCause
    slot: SlotDescriptor | None
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """One encoder cannot deliver an item; its transfer goes on, for another.

    Attributes:
        mm_hash: The item.
        transfer_id: The transfer.
        reason: For the log; names the encoder.
        code: For the router.
    """

    mm_hash: str
    transfer_id: str
    reason: str
    code: NackCode


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """A quarantined slot may be given to somebody else."""

    slot: SlotDescriptor


Event = Landed | Failed | Refused | Released
