"""What the parts of a small engine say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_portable.connector.producer import TransferOrder
from epd_portable.runners.placer import WorkerOrders
from tests.faults.small.pictures import Picture


@dataclass(frozen=True)
class Item:
    """One picture of a request, under the key that the router gave it."""

    identifier: str
    picture: Picture


@dataclass(frozen=True)
class Request:
    """A request as the scheduler sees it; what the bookkeeping reads of vLLM's own."""

    request_id: str
    mm_features: tuple[Item, ...]
    params: dict[str, object] | None

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.mm_features[input_id].picture.num_tokens


@dataclass(frozen=True)
class Abort:
    """The client of a request has gone."""

    request_id: str


@dataclass(frozen=True)
class Question:
    """Asks a scheduler for its state; `reset` empties the encoder cache before."""

    reset: bool


@dataclass(frozen=True)
class Answer:
    """The end of a request, well or not."""

    request_id: str
    text: str = ""
    params: dict[str, object] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Step:
    """One step of the worker.

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
    """What the worker reports of a step.

    Attributes:
        digests: Of what it read, in order.
        ended: Transfers that ended.
        state: Counts of what it keeps.
    """

    digests: list[str]
    ended: set[str]
    state: dict[str, int]
