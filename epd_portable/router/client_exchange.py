"""One request of a client, as it came in and as the router works on it, and its answer.

A server hands it over as an `IncomingRequest`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from epd_portable.errors import EPDError, RequestError
from epd_portable.placement.profiles.selection_types import EXPLAIN_HEADER, Explanation
from epd_portable.placement.replies import DRAIN_TIMEOUT_S, Reply, error_event, error_reply
from epd_portable.router.contents.body import Body
from epd_portable.router.contents.cut_text import Data
from epd_portable.router.observability.record import RequestRecord

if TYPE_CHECKING:
    from epd_portable.router.hops import RoutingHints

LEFT_OUT = "x-epd-items-left-out"
"""Header of an answer that says how many items it was made without."""

EVENTS = "text/event-stream"
"""Content type of answers that come event by event."""
USAGE_BYTES = 4096
"""At the end of an answer, in which its ``usage`` is looked for."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOKENS = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')


class ClientGoneError(EPDError):
    """The client has closed its connection."""


class IncomingRequest(Protocol):
    """A request as a server took it in, and the way for its answer.

    Attributes:
        path: Without escapes.
        query: As it was sent, without the question mark.
        headers: Names in lower case; those whose values are not ASCII are left out.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    port: int

    async def body(self, count: Callable[[int], None]) -> Data:
        """Return the whole body.

        Args:
            count: Told how many bytes have come. What it raises ends the reading.

        Raises:
            ClientGoneError: The client is gone.
        """

    async def drop_body(self) -> None:
        """Forget the body, and return when all of it has come.

        Raises:
            ClientGoneError: The client is gone.
        """

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Have a function called when the client goes away before its answer has ended."""

    def begin_answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers; they may wait for what comes after them."""

    def write(self, data: bytes) -> bool:
        """Send a piece, at least a byte; return whether the client takes more at once."""

    async def writable(self) -> None:
        """Return when the client takes more."""

    def end_answer(self) -> None:
        """Send the end. A request that is left without it breaks off."""


async def read_body(request: IncomingRequest, held: Body) -> Data:
    """Return the whole body.

    Raises:
        RequestError: 413 or 503; it is too large, or all are together.
        ClientGoneError: The client is gone.
    """
    announced = request.headers.get("content-length", "")
    if announced == "0" or (not announced and "transfer-encoding" not in request.headers):
        return b""
    try:
        if announced.isdecimal() and int(announced) > held.max_bytes:
            raise held.too_large(int(announced))
        return await request.body(held.count)
    except RequestError:
        if request.headers.get("expect", "").lower() != "100-continue":
            with anyio.move_on_after(DRAIN_TIMEOUT_S):
                await request.drop_body()
        raise


class ClientExchange:
    """One request of a client, and its answer.

    Attributes:
        request_id: The client's own or a new one.
        explanation: Why it went where it went, if the client asked and may know.
        left_out: How many items it is answered without.
        named: What a trusted hop says of it.
        for_hop: Returns the headers of the answer for such a hop.
        begun: Status and headers of the answer are sent.
        overdue: Its body did not come in time.
        reading_since: When its body was first waited for, 0 afterwards.
        last: No other request is taken on its connection.
        sending_since: When the client took no more, 0 while it does.
        key: Digest of the client's key; empty if none is asked for.
        encoded: Called when no item of it is with an encoder any more; perhaps twice.
    """

    def __init__(
        self, request: IncomingRequest, passed_on: tuple[str, ...], for_client: Mapping[str, str]
    ) -> None:
        self.request = request
        self.method = request.method
        self.headers = headers = request.headers
        given = headers.get("x-request-id", "")
        named = given and _REQUEST_ID.fullmatch(given)
        self.request_id = given if named else f"{random.getrandbits(128):032x}"
        self.for_instances = {name: headers[name] for name in passed_on if name in headers}
        self.for_instances["x-request-id"] = self.request_id
        self.explanation: Explanation | None = None
        self.left_out = 0
        self.named: RoutingHints | None = None
        self.for_hop: Callable[[], Mapping[str, str]] = dict
        self.begun = False
        self.record = RequestRecord(self.request_id, request.path)
        self.record.traceparent = self.for_instances.get("traceparent", "")
        self.overdue = False
        self.last = False
        self.work: asyncio.Task[Any]
        self.reading_since = time.monotonic()
        self.sending_since = 0.0
        self.key = b""
        self.encoded: Callable[[], None] = lambda: None
        self._for_client = for_client
        self._of_events = False
        self._last = self._before = b""

    @property
    def target(self) -> str:
        """Path and query."""
        query = self.request.query
        return f"{self.request.path}?{query}" if query else self.request.path

    def note_read(self) -> None:
        """Note that its body is there: a client that leaves is given up from now on."""
        self.reading_since = 0.0
        self.record.read_at = self.record.read_at or time.monotonic()
        self.request.on_gone(self.give_up)

    def give_up(self) -> None:
        """Treat the client as gone."""
        self.record.gone = True
        self.work.cancel()

    def send_reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        if reply.status in (408, 413):
            # Part of the body may still be on its way: this connection serves no other request.
            self.last = True
        self.begin_answer(reply.status, {**reply.headers, "content-length": str(len(reply.body))})
        if reply.body and self.method != "HEAD":
            self.record.nbytes_out = len(reply.body)
            self._last = reply.body[-USAGE_BYTES:]
            self.request.write(reply.body)
        self.end_answer()

    def fail(self, error: RequestError) -> None:
        """Send an error, within the answer if that has begun; one without events breaks off."""
        if not self.begun:
            self.send_reply(error_reply(error, self.request.path))
        elif self._of_events:
            event = error_event(
                str(error),
                status=error.status,
                code=error.code,
                path=self.request.path,
                after=self._before[-USAGE_BYTES:] + self._last[-USAGE_BYTES:],
            )
            within = self._last and not self._last.endswith((b"\n\n", b"\r\n\r\n"))
            self.write(b"\n\n" + event if within else event)
            self.request.end_answer()

    def begin_answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.begun = True
        self.record.status = status
        self.record.first_at = time.monotonic()
        self._of_events = headers.get("content-type", "").startswith(EVENTS)
        given = {**headers, **self.for_hop(), **self._for_client}
        given["x-request-id"] = self.request_id
        if self.explanation is not None:
            given[EXPLAIN_HEADER] = self.explanation.text()
        if self.left_out:
            given[LEFT_OUT] = str(self.left_out)
        if self.last:
            given["connection"] = "close"
        self.request.begin_answer(status, given)

    def write(self, data: bytes) -> bool:
        """Send a piece; return whether the client takes more at once."""
        record = self.record
        record.nbytes_out += len(data)
        if self._of_events:
            record.events += data.count(b"\n\n")
        self._before, self._last = self._last, data
        return self.request.write(data)

    async def writable(self) -> None:
        """Return when the client takes more."""
        self.sending_since = time.monotonic()
        await self.request.writable()
        self.sending_since = 0.0

    def end_answer(self) -> None:
        """Send the end."""
        # Within a generated text such words have escapes, and are not found.
        found = _TOKENS.findall(self._before[-USAGE_BYTES:] + self._last[-USAGE_BYTES:])
        self.record.output_tokens = int(found[-1]) if found else None
        self.request.end_answer()
