"""Request bodies from the socket, with limits that hold while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import anyio
from starlette.types import Receive

from epd_portable.errors import EPDError, RequestError
from epd_portable.router.replies import RETRY_AFTER_S
from epd_portable.router.tally import Tally

DRAIN_TIMEOUT_S = 10.0
"""How long the rest of a too large body is read and dropped.

Most clients read no answer before they have sent everything: one that came earlier would reach
them as a broken connection without a reason.
"""
SMALL_BYTES = 64 * 1024
"""Bodies up to this size are not counted: there are no more of them than connections."""


class ClientGoneError(EPDError):
    """The client has closed its connection."""


class Bodies:
    """Reads bodies.

    Args:
        max_bytes: Of one body.
        max_sum_bytes: Of all that are held at a time by all processes.
        tally: Where they are counted; one of this process alone unless given.
        remedy: What is said to who sends a larger one.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_sum_bytes: int,
        tally: Tally | None = None,
        remedy: str = "send smaller images, or raise router.max_body_bytes",
    ) -> None:
        self._max_bytes = max_bytes
        self._remedy = remedy
        self._max_sum_bytes = max_sum_bytes
        self._tally = tally or Tally()

    @property
    def held_bytes(self) -> int:
        """Bytes of large bodies that are held now."""
        return self._tally.body_bytes()

    @contextlib.contextmanager
    def holding(self) -> Iterator[Body]:
        """Yield what reads a body and counts it until it is not needed any more."""
        body = Body(self)
        try:
            yield body
        finally:
            self._tally.hold_body(-body.counted)
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
        held_bytes = self.held_bytes
        if held_bytes + more > self._max_sum_bytes:
            raise RequestError(
                f"{held_bytes} bytes of request bodies are held, and another {more} would be "
                f"more than router.max_bodies_bytes of {self._max_sum_bytes}; try again later",
                status=503,
                code="too_many_bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        self._tally.hold_body(more)
        body.counted = nbytes


class Body:
    """One body.

    Attributes:
        counted: Its bytes that are part of the sum.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.counted = 0

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes | bytearray:
        """Return the whole body.

        Args:
            headers: Of the request; names in lower case.
            receive: Of the request.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
            ClientGoneError: The client is gone.
        """
        announced = headers.get("content-length", "")
        if announced == "0" or (not announced and "transfer-encoding" not in headers):
            return b""
        more = True
        try:
            if announced.isdecimal():
                self._bodies.check(int(announced))
            data = bytearray()
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("while its request was read")
                more = message.get("more_body", False)
                data += message.get("body", b"")
                self._bodies.count(self, len(data))
            return data
        except RequestError:
            data = bytearray()
            if more and headers.get("expect", "").lower() != "100-continue":
                await drain(receive)
            raise


async def drain(receive: Receive) -> None:
    """Read and drop the rest of a body, for a limited time.

    Raises:
        ClientGoneError: The client is gone.
    """
    with anyio.move_on_after(DRAIN_TIMEOUT_S):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("while its request was dropped")
            if not message.get("more_body", False):
                return
