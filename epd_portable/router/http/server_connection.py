"""A client's connection: requests in, one after the other, and their answers out.

The parser is httptools'; everything between it and the socket is here, because every byte passes
it. Large bodies land in their place as they come, by neither the parser nor a task.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools

from epd_portable.router.contents.body import MAX_JSON_BYTES
from epd_portable.router.contents.cut_text import Data
from epd_portable.router.http.incoming import ClientGoneError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""How long an idle connection of a client stays open: longer than clients keep theirs, or one that
sends in the moment in which it is closed gets no answer."""
HEADERS_WITHIN_S = 30.0
"""In which a request's headers must have come, from the connection or its first byte on; and the
rest of a body that is not read."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's address and headers together, and of what stands between two pieces of a body in
chunks or after the last; the parser itself has no limit."""
MAX_HEADERS = 128
"""Of one request: each takes some 200 bytes besides its own."""
LARGE_BYTES = 64 * 1024
"""When more than this of a body is still to come, nothing of it is taken before it is asked for."""
CLEARED_BYTES = MAX_JSON_BYTES + (1 << 20)
"""Bodies from this size on lie in memory that is cleared page by page, as they come. No text that
is read at once is as long."""
MEMORY_FROM = 32
"""A shorter one gets all its memory when one part in so many of it has come: an announced body need
not come, but growing step by step to the end copies it several times over."""
_READ_BYTES = 256 * 1024
BREATH_BYTES = 512 * 1024
"""Of one body, until others are served."""

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_BODILESS = frozenset({204, 304})
_EMPTY_LINE = b"\r\n\r\n"
_NO_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 29\r\nconnection: close\r\n\r\nInvalid HTTP request received"
)


class ClientRequest:
    """One request of a connection, and the way for its answer; see `IncomingRequest`.

    Attributes:
        keeps: The connection is open for others afterwards.
        begun: The answer's status and headers are sent.
        ended: All of it is.
        announced: Length of the body, if that is known from the start.
        placed: The body has all of its memory.
        complete: The body is there.
        wanted: The body is waited for.
        dropped: The body is of no use any more.
    """

    def __init__(
        self,
        connection: ServerConnection,
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
        self.port = connection.port
        self.keeps = keeps and version == "1.1"
        self.begun = False
        self.ended = False
        chunked = "transfer-encoding" in headers
        self.announced = 0 if chunked else int(headers.get("content-length", "0"))
        self.placed = False
        self.complete = False
        self.wanted = False
        self.dropped = False
        self._connection = connection
        self._takes_chunks = version != "1.0"
        self._waits = headers.get("expect", "").lower() == "100-continue"
        self._data: Data = bytearray()
        self._nbytes = 0
        self._count: Callable[[int], None] | None = None
        self._problem: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._gone: Callable[[], None] | None = None
        self._head = b""
        self._chunked = False

    # What comes.

    async def body(self, count: Callable[[int], None]) -> Data:
        """Return the whole body; see `IncomingRequest`."""
        if self._nbytes:
            count(self._nbytes)
        self._count = count
        if self._waits and not self.complete:
            self._waits = False
            self._connection.put(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._until_complete()
        return self._data

    async def drop_body(self) -> None:
        """Forget the body, and return when all of it has come; see `IncomingRequest`."""
        if isinstance(self._problem, ClientGoneError):
            raise self._problem
        self._problem = None
        self.drop()
        await self._until_complete()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Have a function called when the client goes away; see `IncomingRequest`."""
        self._gone = callback
        if isinstance(self._problem, ClientGoneError):
            callback()

    async def _until_complete(self) -> None:
        self.wanted = True
        self._connection.flow()
        while not self.complete and self._problem is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._problem is not None:
            raise self._problem

    # For the connection.

    @property
    def left(self) -> int:
        """Bytes of a body of known length that are still to come."""
        return max(self.announced - self._nbytes, 0)

    def place(self, shared: memoryview) -> memoryview:
        """Return where the next bytes go: into the body, or ``shared`` if they are to be added."""
        nbytes = self.announced
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
        return memoryview(self._data)[self._nbytes : self._nbytes + _READ_BYTES]

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
            self.fail(error)

    def drop(self) -> None:
        """Forget the body, and what comes of it."""
        self.dropped = True
        self._data = bytearray()

    def finish(self) -> None:
        """Note that the body is whole."""
        self.complete = True
        self._wake()

    def fail(self, problem: Exception) -> None:
        """End the reading."""
        self._problem = problem
        self._wake()

    def leave(self) -> None:
        """Note that the client has gone."""
        # The error keeps the frame that raises it, and so this request.
        self.drop()
        self.fail(ClientGoneError("while its request was read"))
        if self._gone is not None:
            self._gone()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What goes.

    def begin_answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers, at once with what comes after them; see `IncomingRequest`."""
        self.begun = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._connection.date()]
        # As bytes these are what an instance sent, whatever they mean.
        text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        lines.append(text.encode("utf-8", "surrogateescape"))
        if "content-length" not in headers and self.method != "HEAD" and status not in _BODILESS:
            self._chunked = self._takes_chunks
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        if self._waits and not self.complete:
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
        self._connection.put(data)
        return self._connection.writable

    async def writable(self) -> None:
        """Return when the client takes more; see `IncomingRequest`."""
        await self._connection.until_writable()

    def end_answer(self) -> None:
        """Send the end; see `IncomingRequest`."""
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        self._head = b""
        self.ended = True
        if last:
            self._connection.put(last)
        self._connection.answered(self)


class Clients:
    """The connections of one server.

    Attributes:
        open: All of them.
        tasks: One for each request that is being answered.
        stopping: No connection takes another request.
        buffer: What is read into it is used before anything else is read, so all have the same.
    """

    def __init__(self, serve: Callable[[ClientRequest], Awaitable[None]]) -> None:
        self.open: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._serve = serve
        self._date = b""
        self._date_of = 0

    def date(self) -> bytes:
        """Return the line of the header ``date``."""
        now = int(time.time())
        if now != self._date_of:
            self._date_of = now
            self._date = f"date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._date

    def start(self, request: ClientRequest, connection: ServerConnection) -> None:
        """Have a request answered."""
        task = asyncio.get_running_loop().create_task(self._answer(request, connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, request: ClientRequest, connection: ServerConnection) -> None:
        try:
            await self._serve(request)
        except Exception:
            logger.exception("a request failed")
        finally:
            if not request.ended:
                # It is given up, or its answer breaks off.
                connection.transport.abort()

    def look(self, send_timeout_s: float) -> None:
        """Close connections on which no request comes, and those whose clients take nothing.

        Args:
            send_timeout_s: A connection that ends is not waited for when its client has taken
                nothing for as long of what it was sent.
        """
        now = time.monotonic()
        for each in tuple(self.open):
            each.look(now, send_timeout_s)

    def stop(self) -> None:
        """Close connections, those that answer a request after that."""
        self.stopping = True
        for each in tuple(self.open):
            each.stop()


class ServerConnection(asyncio.BufferedProtocol):
    """One connection.

    Attributes:
        transport: Of asyncio.
        port: At which it was made.
        writable: Whether the client takes what it is sent.
    """

    transport: asyncio.Transport

    def __init__(self, clients: Clients, port: int) -> None:
        self.port = port
        self.writable = True
        self._clients = clients
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = False
        self._request: ClientRequest | None = None
        self._arriving: ClientRequest | None = None
        self._waiting = b""
        self._end = b""
        self._goes_on = False
        self._refused = False
        self._lost = False
        self._paused = False
        self._breath_bytes = 0
        self._used = False
        self._since = time.monotonic()
        self._unsent_bytes = -1
        self._writers: list[asyncio.Future[None]] = []

    def date(self) -> bytes:
        """Return the line of the header ``date``."""
        return self._clients.date()

    def put(self, data: bytes) -> None:
        """Send bytes, unless the connection is lost."""
        if not self._lost:
            self.transport.write(data)

    # The transport's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BufferedProtocol`."""
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)
        self._clients.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._clients.open.discard(self)
        self._lost = True
        self._waiting = b""
        self.resume_writing()
        request, self._request = self._request, None
        # What refers to each other is freed late, and a parser keeps what it has of a head.
        self._arriving = None
        del self._parser
        if request is not None:
            request.leave()

    def pause_writing(self) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.writable = False

    def resume_writing(self) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.writable = True
        for writer in self._writers:
            if not writer.done():
                writer.set_result(None)
        self._writers.clear()
        if self._waiting:
            self._feed(self._waiting)

    async def until_writable(self) -> None:
        """Return when the client takes more, or nothing any more."""
        while not self.writable:
            writer = asyncio.get_running_loop().create_future()
            self._writers.append(writer)
            await writer

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        arriving = self._arriving
        if arriving is None or not arriving.left:
            return self._clients.buffer[:LARGE_BYTES]
        return arriving.place(self._clients.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        arriving = self._arriving
        if arriving is None or not arriving.left:
            if not self._refused:
                self._feed(self._waiting + self._clients.buffer[:nbytes])
            return
        if arriving.placed and not arriving.dropped:
            arriving.came(nbytes)
        else:
            arriving.add(self._clients.buffer[:nbytes])
        if arriving.left:
            self._breathe(nbytes)
        else:
            self._arrived(arriving)

    # What comes.

    def _feed(self, data: bytes) -> None:
        """Take what has come up to the end of a request; what is after it waits for the answer.

        It waits as it came, which takes less memory than requests, until the client has taken
        enough of what it was sent.
        """
        view, begin = memoryview(data), 0
        while begin < len(data) and not self._refused:
            arriving = self._arriving
            if arriving is None and (self._request is not None or not self.writable):
                break
            if arriving is not None and arriving.left:
                end = min(begin + arriving.left, len(data))
                arriving.add(view[begin:end])
                if not arriving.left:
                    self._arrived(arriving)
            else:
                end = self._end_of_lines(data, begin)
                self._parse(view[begin:end])
            begin = end
        self._waiting = data[begin:]
        self.flow()

    def _end_of_lines(self, data: bytes, begin: int) -> int:
        """Return the place after the next empty line, with which every head and last chunk ends."""
        before, self._end = self._end, b""
        across = (before + data[begin : begin + 3]).find(_EMPTY_LINE)
        if across >= 0:
            return begin + across + len(_EMPTY_LINE) - len(before)
        found = data.find(_EMPTY_LINE, begin)
        if found >= 0:
            return found + len(_EMPTY_LINE)
        self._end = (before + data[max(begin, len(data) - 3) :])[-3:]
        return len(data)

    def _parse(self, data: memoryview) -> None:
        self._head_bytes += len(data)
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                self._go_on()
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        elif self._arriving is not None and self._arriving.left:
            # The parser waits for the body, which it will never see.
            self._parser = httptools.HttpRequestParser(self)

    def _go_on(self) -> None:
        """Stay with HTTP/1.1 after a request that asks for another protocol.

        The parser takes it for the last one, and so without a body: another parser gets its chunks.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._arriving is not None and not self._arriving.left:
            given = self._arriving.headers
            named = [name for name in ("content-length", "transfer-encoding") if name in given]
            lines = "".join(f"{name}: {given[name]}\r\n" for name in named)
            self._goes_on = True
            try:
                self._parser.feed_data(f"POST / HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
            finally:
                self._goes_on = False

    def _refuse(self) -> None:
        """Say that what came is no request, unless an answer to it has begun; take nothing more."""
        self._refused = True
        broken, self._arriving = self._arriving, None
        if broken is None or (broken is self._request and not broken.begun):
            self.put(_NO_REQUEST)
            self.transport.close()
        elif broken is self._request:
            broken.keeps = False
        else:
            self.transport.close()

    def _breathe(self, nbytes: int) -> None:
        """Let others be served after every so many bytes."""
        self._breath_bytes += nbytes
        if self._breath_bytes >= BREATH_BYTES:
            self._breath_bytes = 0
            self._pause()
            asyncio.get_running_loop().call_soon(self.flow)

    def flow(self) -> None:
        """Let more come, unless something waits already or a large body is not asked for."""
        arriving = self._arriving
        if arriving is None or arriving.wanted or arriving.dropped:
            unasked_bytes = 0
        else:
            unasked_bytes = arriving.left
        if self._waiting or unasked_bytes > LARGE_BYTES:
            self._pause()
        elif self._paused and not self._lost:
            self._paused = False
            self.transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused and not self._lost:
            self._paused = True
            self.transport.pause_reading()

    # The parser's.

    def on_message_begin(self) -> None:
        """See `httptools.HttpRequestParser`."""
        self._url = b""
        self._headers = {}
        self._in_head = True
        self._since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        if self._arriving is not None:
            # Trailers are not read.
            return
        if len(self._headers) == MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")
        name = name.lower()
        if name == b"transfer-encoding":
            # One that is not ASCII is none, but must not look as if there were none.
            self._headers["transfer-encoding"] = value.decode("latin-1").strip()
        elif value.isascii():
            self._headers[name.decode("latin-1")] = value.decode("ascii").strip()

    def on_headers_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        self._in_head = False
        self._head_bytes = 0
        if self._goes_on:
            return
        assert self._request is None
        parser = self._parser
        request = ClientRequest(
            self,
            parser.get_method().decode("ascii"),
            self._url,
            self._headers,
            version=parser.get_http_version(),
            keeps=parser.should_keep_alive(),
        )
        self._headers = {}
        self._used = True
        self._arriving = self._request = request
        self._clients.start(request, self)

    def on_body(self, data: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._head_bytes = 0
        if self._arriving is not None:
            self._arriving.add(data)

    def on_message_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        arriving = self._arriving
        if arriving is not None and not (
            self._parser.should_upgrade() and _has_body(arriving.headers)
        ):
            self._arrived(arriving)

    def _arrived(self, request: ClientRequest) -> None:
        self._arriving = None
        request.finish()

    # What goes.

    def answered(self, request: ClientRequest) -> None:
        """Go on with the next request after one that is answered."""
        if not request.complete:
            request.drop()
        if self._request is not request or self.transport.is_closing():
            return
        self._request = None
        self._since = time.monotonic()
        if not request.keeps or self._clients.stopping:
            self.transport.close()
        elif self._waiting:
            self._feed(self._waiting)
        else:
            self.flow()

    def stop(self) -> None:
        """Close now, or after the answer that has begun."""
        if self._request is None:
            self.transport.close()

    def look(self, now: float, send_timeout_s: float) -> None:
        """Close if no request comes, or if its client takes nothing; see `Clients.look`."""
        closing = self.transport.is_closing()
        if self._request is not None and not closing:
            return
        unsent_bytes = self.transport.get_write_buffer_size()
        if closing or unsent_bytes:
            if unsent_bytes != self._unsent_bytes:
                self._unsent_bytes = unsent_bytes
                self._since = now
            elif now - self._since > send_timeout_s:
                self.transport.abort()
        else:
            rests = self._used and not self._in_head and self._arriving is None
            if now - self._since > (KEEP_ALIVE_S if rests else HEADERS_WITHIN_S):
                self.transport.close()


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


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
