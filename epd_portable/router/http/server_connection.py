"""A client's connection: its bytes to requests, one after the other, and their answers.

The parser is httptools'; everything between it and the socket is here, because every byte passes
it. Large bodies land in their place as they come, by neither the parser nor a task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import mmap
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools

from epd_portable.router.client_exchange import ClientGoneError
from epd_portable.router.contents.body import MAX_JSON_BYTES
from epd_portable.router.contents.cut_text import Data

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
BREATH_BYTES = 1024 * 1024
"""Of one body, until others are served."""
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
_BLOCK_BYTES = 30 << 20
"""glibc keeps freed memory for what comes next up to twice the largest block that was freed, of
those below 32 MiB. What it gives back, bodies take anew, and each page of it costs a fault."""

_EMPTY_LINE = b"\r\n\r\n"
_NO_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 29\r\nconnection: close\r\n\r\nInvalid HTTP request received"
)

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_BODILESS = frozenset({204, 304})


class Clients:
    """The connections of one server.

    Attributes:
        tasks: One for each request that is being answered.
        buffer: What is read into it is used before anything else is read, so all have the same.
    """

    def __init__(self, serve: Callable[[ClientRequest], Awaitable[None]]) -> None:
        self.serve = serve
        self.open: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.buffer = memoryview(bytearray(READ_BYTES))
        # Not kept: that it is freed is what counts, and none of it is written to.
        bytes(_BLOCK_BYTES)

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
    """One connection; methods without a description are the event loop's and the parser's."""

    transport: asyncio.Transport

    def __init__(self, clients: Clients, port: int) -> None:
        self._clients = clients
        self._port = port
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = False
        # The request that is answered, and the one whose body still comes.
        self._request: ClientRequest | None = None
        self._arriving: ClientRequest | None = None
        self._waiting = b""
        self._end = b""
        self._goes_on = False
        self._refused = False
        self._lost = False
        self._writable = True
        self._breath_bytes = 0
        self._used = False
        self._since = time.monotonic()
        self._unsent_bytes = -1

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)
        self._clients.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        self._clients.open.discard(self)
        self._lost = True
        self._waiting = b""
        request, self._request = self._request, None
        # What refers to each other is freed late, and a parser keeps what it has of a head.
        self._arriving = None
        del self._parser
        if request is not None:
            request.leave()

    def pause_writing(self) -> None:  # noqa: D102
        self._writable = False
        if self._request is not None:
            self._request.pause()

    def resume_writing(self) -> None:  # noqa: D102
        self._writable = True
        if self._request is not None:
            self._request.resume()
        if self._waiting:
            self._feed(self._waiting)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        arriving = self._arriving
        if arriving is None or not arriving.left:
            return self._clients.buffer[:LARGE_BYTES]
        return arriving.place(self._clients.buffer)

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
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
            if arriving is None and (self._request is not None or not self._writable):
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
        self._flow()

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
            if not self._lost:
                self.transport.write(_NO_REQUEST)
            self.transport.close()
        elif broken is self._request:
            broken.keeps = False
        else:
            self.transport.close()

    def _arrived(self, request: ClientRequest) -> None:
        self._arriving = None
        request.finish()

    def _breathe(self, nbytes: int) -> None:
        """Let others be served after every so many bytes."""
        self._breath_bytes += nbytes
        if self._breath_bytes >= BREATH_BYTES:
            self._breath_bytes = 0
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._flow)

    def _flow(self) -> None:
        """Let more come, unless something waits already or a large body is not asked for."""
        if self._lost:
            return
        arriving = self._arriving
        if arriving is None or arriving.wanted or arriving.dropped:
            unasked_bytes = 0
        else:
            unasked_bytes = arriving.left
        if self._waiting or unasked_bytes > LARGE_BYTES:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # The parser.

    def on_message_begin(self) -> None:  # noqa: D102
        self._url = b""
        self._headers = {}
        self._in_head = True
        self._since = time.monotonic()

    def on_url(self, url: bytes) -> None:  # noqa: D102
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
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

    def on_headers_complete(self) -> None:  # noqa: D102
        self._in_head = False
        self._head_bytes = 0
        if self._goes_on:
            return
        assert self._request is None
        request = ClientRequest(
            self.transport,
            self._port,
            self._parser.get_method().decode("ascii"),
            self._url,
            self._headers,
            version=self._parser.get_http_version(),
            keeps=self._parser.should_keep_alive(),
        )
        self._headers = {}
        self._used = True
        self._arriving = self._request = request
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._clients.tasks.add(task)
        task.add_done_callback(self._clients.tasks.discard)

    def on_body(self, data: bytes) -> None:  # noqa: D102
        self._head_bytes = 0
        if self._arriving is not None:
            self._arriving.add(data)

    def on_message_complete(self) -> None:  # noqa: D102
        arriving = self._arriving
        if arriving is None:
            return
        given = arriving.headers
        has_body = given.get("content-length", "0") != "0" or "transfer-encoding" in given
        if not (has_body and self._parser.should_upgrade()):
            self._arrived(arriving)

    # Answers, and the end.

    async def _answer(self, request: ClientRequest) -> None:
        """Have a request answered, and go on with the next one."""
        try:
            await self._clients.serve(request)
        except Exception:
            logger.exception("a request failed")
        finally:
            if request.ended:
                self._answered(request)
            else:
                # It is given up, or its answer breaks off.
                self.transport.abort()

    def _answered(self, request: ClientRequest) -> None:
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
            self._flow()

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
