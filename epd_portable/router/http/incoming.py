"""Requests as a server takes them in, and limits of their bodies that hold while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import anyio

from epd_portable.delivery.replies import DRAIN_TIMEOUT_S, RETRY_AFTER_S
from epd_portable.errors import EPDError, RequestError
from epd_portable.router.contents.cut_text import Data

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are not counted: there are no more of them than connections."""


class ClientGoneError(EPDError):
    """The client has closed its connection."""


class IncomingRequest(Protocol):
    """A request as a server took it in, and the way for its answer.

    Attributes:
        method: Of HTTP.
        path: Without escapes.
        query: As it was sent, without the question mark.
        headers: Names in lower case; those whose values are not ASCII are left out.
        port: At which it came.
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


class HeldBytes:
    """What all large bodies that are held may take together, and take.

    Attributes:
        limit: Of the sum.
        count: The sum.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0


class Bodies:
    """Reads bodies.

    Args:
        max_bytes: Of one body.
        held: Where they are counted.
        remedy: Of the error for a larger one.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        held: HeldBytes,
        remedy: str = "send smaller images, or raise router.max_body_bytes",
    ) -> None:
        self._max_bytes = max_bytes
        self._remedy = remedy
        self._held = held

    @contextlib.contextmanager
    def holding(self) -> Iterator[Body]:
        """Yield what reads a body and counts it until it is not needed any more."""
        body = Body(self)
        try:
            yield body
        finally:
            self._held.count -= body.counted
            body.counted = 0

    def check(self, nbytes: int) -> None:
        """Check the length of one body.

        Raises:
            RequestError: 413; it is too large.
        """
        if nbytes > self._max_bytes:
            raise RequestError(
                f"request body of at least {nbytes} bytes: at most {self._max_bytes} bytes are "
                f"accepted; {self._remedy}",
                status=413,
                code="body_too_large",
            )

    def count(self, body: Body, nbytes: int) -> None:
        """Count what has come of a body.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
        """
        self.check(nbytes)
        if nbytes <= SMALL_BYTES:
            return
        more = nbytes - body.counted
        held = self._held
        if held.count + more > held.limit:
            raise RequestError(
                f"{held.count} bytes of request bodies are held, and another {more} would be "
                f"more than router.max_bodies_bytes of {held.limit}; try again later",
                status=503,
                code="too_many_bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        held.count += more
        body.counted = nbytes


class Body:
    """One body.

    Attributes:
        counted: Its bytes that are part of the sum.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.counted = 0

    async def read(self, request: IncomingRequest) -> Data:
        """Return the whole body.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
            ClientGoneError: The client is gone.
        """
        announced = request.headers.get("content-length", "")
        if announced == "0" or (not announced and "transfer-encoding" not in request.headers):
            return b""
        try:
            if announced.isdecimal():
                self._bodies.check(int(announced))
            return await request.body(self._count)
        except RequestError:
            if request.headers.get("expect", "").lower() != "100-continue":
                with anyio.move_on_after(DRAIN_TIMEOUT_S):
                    await request.drop_body()
            raise

    def grow(self, nbytes: int) -> None:
        """Count what has been put into the body, too.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
        """
        self._bodies.count(self, nbytes)

    def _count(self, nbytes: int) -> None:
        self._bodies.count(self, nbytes)
