"""What can go wrong between the router and its instances, and what is done then: one table."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from epd_portable.delivery.replies import Reply
from epd_portable.errors import EPDError
from epd_portable.router.observability.record import RequestRecord, Rung

RETRIES_AT_ONCE = 100
REQUESTS_A_RETRY = 5
"""Requests and jobs may be sent again that often: some at once, and then a part of what comes, so
that a topology in trouble does not get twice the work."""


class Trouble(enum.Enum):
    """What can go wrong between the router and its instances."""

    NOT_STORED = "a PD instance cannot load an item from the store"
    ENCODER_FULL = "an encoder answers 429"
    ENCODER_FAILED = "an encoder is lost, silent or fails, or its item is refused at the PD side"
    ITEM_REFUSED = "an encoder finds fault with the item itself"
    NO_ENCODER = "none is usable for an item"
    NO_METADATA = "an item cannot be described in place of its media"
    NO_PD = "no PD instance is usable"
    PD_LOST = "the PD instance cannot be reached, has gone down, or ended the connection"
    PD_FAILED = "the PD instance answers 5xx"
    PD_SILENT = "nothing came from the PD instance for router.idle_timeout_s"
    NO_PREFILL = "no prefill instance is usable for a decode instance"
    PREFILL_FAILED = "a prefill instance is lost, silent or fails, or says nothing of the KV"
    PD_TOO_LARGE = "the PD instance says that an item never fits"
    PD_UNAVAILABLE = "the PD instance says that an item will not come"


class Point(enum.Enum):
    """How far a request has come."""

    ENCODING = "an item is with an encoder"
    PREFILLING = "a prefill instance has, or is to have, the request"
    ASKED = "the PD instance has, or is to have, the request"
    ANSWERING = "a part of the answer is with the client"


LADDER: Mapping[tuple[Trouble, Point], tuple[Rung, ...]] = {
    (Trouble.NOT_STORED, Point.ENCODING): ("from_encoder", "local_encode"),
    (Trouble.ENCODER_FULL, Point.ENCODING): ("encoder_full", "local_encode"),
    (Trouble.ENCODER_FAILED, Point.ENCODING): ("other_encoder", "local_encode"),
    (Trouble.ITEM_REFUSED, Point.ENCODING): ("local_encode",),
    (Trouble.NO_ENCODER, Point.ENCODING): ("local_encode",),
    (Trouble.NO_PREFILL, Point.PREFILLING): ("local_prefill",),
    (Trouble.PREFILL_FAILED, Point.PREFILLING): ("prefill_again", "local_prefill"),
    # Only where items travel without their media, before the PD instance is asked.
    (Trouble.NO_ENCODER, Point.ASKED): ("original_media", "without_items", "unavailable"),
    (Trouble.NO_METADATA, Point.ASKED): ("original_media", "without_items", "unavailable"),
    (Trouble.ITEM_REFUSED, Point.ASKED): ("original_media", "refused"),
    (Trouble.PD_UNAVAILABLE, Point.ASKED): ("original_media", "without_items", "unavailable"),
    (Trouble.PD_TOO_LARGE, Point.ASKED): ("refused",),
    (Trouble.NO_PD, Point.ASKED): ("unavailable",),
    (Trouble.PD_LOST, Point.ASKED): ("pd_again", "unavailable"),
    (Trouble.PD_FAILED, Point.ASKED): ("pd_again", "passed_on"),
    (Trouble.PD_SILENT, Point.ASKED): ("timeout",),
    (Trouble.PD_LOST, Point.ANSWERING): ("broken_off",),
    (Trouble.PD_SILENT, Point.ANSWERING): ("broken_off",),
}
"""What is done, by what went wrong and when: the first rung that is possible.

``from_encoder``: an encoder gets the item. ``encoder_full``: another encoder is asked, or the same
when it has room. ``other_encoder``: another one gets the item. ``local_encode``: the PD instance is
told to encode it. ``original_media``: the request goes with its media. ``without_items``: it goes
without those that nobody has, where ``router.partial_results`` allows it. ``prefill_again``:
another prefill instance is asked. ``local_prefill``: the decode instance gets the request as it is,
and prefills. ``pd_again``: it is sent once more, if the budget of retries allows. ``broken_off``:
the client is told within the answer, if that has events. ``passed_on``: it gets the instance's own
error. ``refused``: 400 or 413.
``unavailable``: 503. ``timeout``: 504.
"""


class Failed(EPDError):
    """A request has met trouble.

    Attributes:
        trouble: Which.
        point: When.
        reply: The instance's own answer, with `Trouble.PD_FAILED`.
        items: Names of those that cannot be obtained, where it is about some.
    """

    def __init__(
        self,
        trouble: Trouble,
        point: Point,
        message: str,
        reply: Reply | None = None,
        *,
        items: Collection[str] = (),
    ) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.point = point
        self.reply = reply
        self.items = items


def descend(
    trouble: Trouble, point: Point, possible: Collection[Rung], record: RequestRecord
) -> Rung:
    """Return what is done next, the last rung if nothing else is possible, and note it."""
    rungs = LADDER[trouble, point]
    rung = next((rung for rung in rungs if rung in possible), rungs[-1])
    record.step(trouble.name.lower(), rung)
    return rung


class RetryBudget:
    """How often something may be sent again."""

    def __init__(self) -> None:
        self._requests = RETRIES_AT_ONCE * REQUESTS_A_RETRY

    def request(self) -> None:
        """Count a request: for several of them, something may be sent again."""
        self._requests = min(self._requests + 1, RETRIES_AT_ONCE * REQUESTS_A_RETRY)

    def take(self) -> bool:
        """Tell whether one more may be sent again, and count it."""
        if self._requests < REQUESTS_A_RETRY:
            return False
        self._requests -= REQUESTS_A_RETRY
        return True
