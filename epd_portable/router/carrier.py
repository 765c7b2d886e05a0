"""Who carries a request to an instance, and who takes its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from epd_portable.delivery.replies import Reply
from epd_portable.router.choice.selection_types import Explanation
from epd_portable.router.chooser import Choosing
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.delivery import Attempt
from epd_portable.router.fleet.instances import Instance
from epd_portable.router.ingress.hop_headers import HopWish
from epd_portable.router.observability.record import RequestRecord


class Outgoing(Protocol):
    """Where an answer goes.

    Attributes:
        begun: Whether its status and headers are sent.
        gone: Nobody waits for it any more.
        explanation: Is told who was chosen and why, if somebody asked for that.
        record: Of the request.
        left_out: Items that the request is answered without.
        named: What a trusted hop says of who gets what; ``None`` for a client's request.
    """

    begun: bool
    gone: bool
    explanation: Explanation | None
    record: RequestRecord
    left_out: int
    named: HopWish | None

    def whole(self, reply: Reply) -> None:
        """Send a whole answer."""

    def encoded(self) -> None:
        """Note that no item of the request is with an encoder any more; may come twice."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers of an answer that comes in pieces."""

    def write(self, data: bytes) -> bool:
        """Send a piece; tell whether the client takes more at once."""

    async def writable(self) -> None:
        """Return when the client takes more."""

    def end(self) -> None:
        """Send the end."""


class Carrier(Protocol):
    """Brings requests to PD instances and their answers to clients.

    `epd_portable.router.exchange.Exchange` is one itself.
    """

    def choose(self, choosing: Choosing, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer a request; ``None`` if there is none.

        Args:
            choosing: Of the request.
            tried: Names of instances that must not get it.
        """

    async def carry(self, call: Call, one: Attempt, body: Segments, out: Outgoing) -> int:
        """Send a request, pass the answer on to its end, and return the answer's status.

        Calls `Attempt.begin` as soon as the instance has begun to answer.

        Args:
            call: The request.
            one: Says who answers, and with which headers the request goes.
            body: Of the request.
            out: Takes the answer.

        Raises:
            RequestFailure: There is no answer, or only a part of it.
            RequestError: The same, and nothing can be done about it.
        """
