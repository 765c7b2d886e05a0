"""Messages between the parts of a small engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_portable.encode.producer import TransferOrder
from epd_portable.items.placer import WorkerOrders
from tests.faults.small.pictures import Shown

STATES = "EPD_TEST_STATES"
"""Variable: folder of a Unix socket for each engine, over which tests query its counts."""


@dataclass(frozen=True)
class Item:
    """An image of a request.

    Attributes:
        identifier: Key of the item.
        num_tokens: Tokens of its encoder output.
        shown: Content; ``None`` where the request has no pixels.
    """

    identifier: str
    num_tokens: int
    shown: Shown | None


@dataclass(frozen=True)
class Request:
    """Request of a scheduler: the fields of vLLM's own that the bookkeeping reads."""

    request_id: str
    mm_features: tuple[Item, ...]
    params: dict[str, object] | None
    client_index: int = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.mm_features[input_id].num_tokens


@dataclass(frozen=True)
class Answer:
    """The end of a request, well or not.

    Attributes:
        text: Response; ``None`` of an encode job.
    """

    request_id: str
    text: str | None = ""
    params: dict[str, object] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Step:
    """A step of the worker.

    Attributes:
        freed: Items to forget.
        encode: Items to encode first.
        read: ``(request_id, input_id, mm_hash)`` to compute with.
        orders: Encode instance: transfers to begin.
        receipts: PD instance: items to place.
    """

    freed: list[str]
    encode: list[Item]
    read: list[tuple[str, int, str]] = field(default_factory=list)
    orders: list[TransferOrder] = field(default_factory=list)
    receipts: WorkerOrders = field(default_factory=WorkerOrders)


@dataclass(frozen=True)
class Done:
    """Report of the worker on a step.

    Attributes:
        digests: Of what it read, in order.
        ended: Transfers that ended.
        state: Counts of what it keeps.
    """

    digests: list[str]
    ended: set[str]
    state: dict[str, int]
