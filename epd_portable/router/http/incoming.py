"""Requests as a server takes them in, and limits of their bodies that hold while they are read."""

from __future__ import annotations

import asyncio
import functools
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import unquote

import anyio
import httptools

from epd_portable.delivery.replies import DRAIN_TIMEOUT_S, RETRY_AFTER_S
from epd_portable.errors import EPDError, RequestError
from epd_portable.router.contents.body import MAX_JSON_BYTES
from epd_portable.router.contents.cut_text import Data

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are not counted: there are no more of them than connections."""
LARGE_BYTES = 64 * 1024
"""When more than this of a body is still to come, nothing of it is taken before it is asked for."""
CLEARED_BYTES = MAX_JSON_BYTES + (1 << 20)
"""Bodies from this size on lie in memory that is cleared page by page, as they come. No text that
is read at once is as long."""
MEMORY_FROM = 32
"""A shorter one gets all its memory when one part in so many of it has come: an announced body need
not come, but growing step by step to the end copies it several times over."""
READ_BYTES = 512 * 1024
"""That are read at a time."""

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_BODILESS = frozenset({204, 304})


class ClientGoneError(EPDError):
    """The client has closed its connection."""


class IncomingRequest(Protocol):
    """A request as a server took it in, and the way for its answer.

    Attributes:
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


class ClientRequest:
    """An `IncomingRequest` of a connection, which feeds it. One task at a time waits for it.

    Attributes:
        keeps: The connection is open for others afterwards.
        begun: The answer's status and headers are sent.
        ended: All of it is.
        placed: The body has all of its memory.
        complete: The body is there.
        wanted: The body is waited for.
        dropped: The body is of no use any more.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        port: int,
        method: str,
        url: bytes,
        headers: dict[str, str],
        *,
        version: str,
        keeps: bool,
    ) -> None:
        self.method = method
        self.path, self.query = _address(url)
        self.headers = headers
        self.port = port
        self.keeps = keeps and version == "1.1"
        self.begun = self.ended = False
        self.placed = self.complete = self.wanted = self.dropped = False
        self._transport = transport
        chunked = "transfer-encoding" in headers
        self._announced = 0 if chunked else int(headers.get("content-length", "0"))
        self._takes_chunks = version != "1.0"
        self._asks_first = headers.get("expect", "").lower() == "100-continue"
        self._data: Data = bytearray()
        self._nbytes = 0
        self._count: Callable[[int], None] | None = None
        self._problem: Exception | None = None
        self._gone = False
        self._on_gone: Callable[[], None] | None = None
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False

    # What comes.

    async def body(self, count: Callable[[int], None]) -> Data:
        """Return the whole body; see `IncomingRequest`."""
        if self._nbytes:
            count(self._nbytes)
        self._count = count
        if self._asks_first and not self.complete:
            self._asks_first = False
            self._put(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._until_complete()
        return self._data

    async def drop_body(self) -> None:
        """Forget the body, and return when all of it has come; see `IncomingRequest`."""
        if not self._gone:
            self._problem = None
        self.drop()
        await self._until_complete()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Have a function called when the client goes away; see `IncomingRequest`."""
        if self._gone:
            callback()
        else:
            self._on_gone = callback

    async def _until_complete(self) -> None:
        self.wanted = True
        if not self.complete and not self._gone:
            self._transport.resume_reading()
        while not self.complete and self._problem is None:
            await self._changed()
        if self._problem is not None:
            raise self._problem

    async def _changed(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # For the connection.

    @property
    def left(self) -> int:
        """Bytes of a body of known length that are still to come."""
        return max(self._announced - self._nbytes, 0)

    def place(self, shared: memoryview) -> memoryview:
        """Return where the next bytes go: into the body, or ``shared`` if they are to be added."""
        nbytes = self._announced
        if self.dropped or nbytes <= LARGE_BYTES:
            return shared[: self.left]
        if not self.placed:
            cleared = nbytes >= CLEARED_BYTES
            first_bytes = 0 if cleared else -(-nbytes // MEMORY_FROM)
            if self._nbytes < first_bytes:
                return shared[: first_bytes - self._nbytes]
            beginning = self._data
            self._data = mmap.mmap(-1, nbytes) if cleared else bytearray(nbytes)
            self._data[: self._nbytes] = beginning
            self.placed = True
        return memoryview(self._data)[self._nbytes : self._nbytes + READ_BYTES]

    def add(self, data: bytes | memoryview) -> None:
        """Take a piece of the body."""
        if not self.dropped:
            cast("bytearray", self._data).extend(data)
        self.came(len(data))

    def came(self, nbytes: int) -> None:
        """Note that a piece of the body is in its place."""
        self._nbytes += nbytes
        if self._count is None or self.dropped:
            return
        held_bytes = len(self._data) if isinstance(self._data, bytearray) else self._nbytes
        try:
            self._count(held_bytes)
        except Exception as error:
            self._count = None
            self._problem = error
            self._wake()

    def drop(self) -> None:
        """Forget the body, and what comes of it."""
        self.dropped = True
        self._data = bytearray()

    def finish(self) -> None:
        """Note that the body is whole."""
        self.complete = True
        self._wake()

    def leave(self) -> None:
        """Note that the client has gone."""
        # The error keeps the frame that raises it, and so this request.
        self.drop()
        self._gone = True
        self._problem = ClientGoneError("while its request was read")
        self.resume()
        callback, self._on_gone = self._on_gone, None
        if callback is not None:
            callback()

    def pause(self) -> None:
        """Note that the client takes no more for now."""
        self._paused = True

    def resume(self) -> None:
        """Note that the client takes more, or nothing any more."""
        self._paused = False
        self._wake()

    # What goes.

    def begin_answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers, at once with what comes after them; see `IncomingRequest`."""
        self.begun = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines.append(_date_line(int(time.time())))
        # As bytes these are what an instance sent, whatever they mean.
        text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        lines.append(text.encode("utf-8", "surrogateescape"))
        if "content-length" not in headers and self.method != "HEAD" and status not in _BODILESS:
            self._chunked = self._takes_chunks
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        if self._asks_first and not self.complete:
            # Whether the body comes nevertheless, or another request, is unknown.
            self.keeps = False
        if headers.get("connection") == "close":
            self.keeps = False
        elif not self.keeps:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, data: bytes) -> bool:
        """Send a piece; see `IncomingRequest`."""
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._put(data)
        return not self._paused

    async def writable(self) -> None:
        """Return when the client takes more; see `IncomingRequest`."""
        while self._paused:
            await self._changed()

    def end_answer(self) -> None:
        """Send the end; see `IncomingRequest`."""
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        self._head = b""
        if last:
            self._put(last)
        self.ended = True
        # Who is called refers to this request, and both would be freed late.
        self._on_gone = None

    def _put(self, data: bytes) -> None:
        if not self._gone:
            self._transport.write(data)


@dataclass(slots=True)
class HeldBytes:
    """What all large bodies that are held may take together, and take."""

    limit: int
    count: int = 0


class Body:
    """A body within limits, as a context manager: it is counted until it is left.

    Args:
        held: Where it is counted.
        max_bytes: That it may have.
        remedy: Of the error for a larger one.

    Attributes:
        counted: Its bytes that are part of the sum.
    """

    def __init__(
        self,
        held: HeldBytes,
        max_bytes: int,
        remedy: str = "send smaller images, or raise router.max_body_bytes",
    ) -> None:
        self._held = held
        self._max_bytes = max_bytes
        self._remedy = remedy
        self.counted = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.count -= self.counted
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
                self._check(int(announced))
            return await request.body(self.count)
        except RequestError:
            if request.headers.get("expect", "").lower() != "100-continue":
                with anyio.move_on_after(DRAIN_TIMEOUT_S):
                    await request.drop_body()
            raise

    def count(self, nbytes: int) -> None:
        """Count what has come of the body, or has been put into it.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
        """
        self._check(nbytes)
        if nbytes <= SMALL_BYTES:
            return
        more = nbytes - self.counted
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
        self.counted = nbytes

    def _check(self, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise RequestError(
                f"request body of at least {nbytes} bytes: at most {self._max_bytes} bytes "
                f"are accepted; {self._remedy}",
                status=413,
                code="body_too_large",
            )


@functools.lru_cache(maxsize=1)
def _date_line(now: int) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode()


def _address(url: bytes) -> tuple[str, str]:
    """Return path and query, as they are meant and as they were sent.

    Raises:
        httptools.HttpParserInvalidURLError: It is none, as the next one.
        UnicodeDecodeError: It is not ASCII.
    """
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
    text = path.decode("ascii")
    return unquote(text) if "%" in text else text, query.decode("ascii")
