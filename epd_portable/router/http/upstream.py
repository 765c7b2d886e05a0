"""HTTP to the instances: connections that stay open between requests, and the answers they bring.

The parser is httptools'. An answer that is passed on goes from the socket to its taker without
waking a task, and limits of time cost nothing as long as they are not reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import anyio
import httptools

from epd_portable.errors import EPDError
from epd_portable.router.contents.cut_text import Bytes, Segments
from epd_portable.wire.outcomes import FailureKind

logger = logging.getLogger(__name__)

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the five seconds after which servers close them."""
LARGE_BYTES = 512 * 1024
"""Bodies from this size on are written piece by piece, and others are served in between."""
MAX_HEAD_BYTES = 256 * 1024
"""Of what brings nothing of a body: headers together, trailers, the rest of a chunk's line. The
parser itself has no limit, and holds them."""
MAX_JOINED_CHARS = 16 * 1024
"""Of equal headers, before one more: each that is joined copies those before it."""
MAX_WAITING_BYTES = 512 * 1024
"""Of an answer that is not taken: its sender waits."""
_NEVER = math.inf
_SWEEP_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_NO_BODY = frozenset({204, 304})
_USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection that say nothing of its other end: this process, or this machine, has no
file, memory or port left."""


class UpstreamError(EPDError):
    """An instance could not be asked, or its answer did not come whole.

    Attributes:
        kind: ``UNREACHABLE``: no connection, or not within the limit. ``LOST``: it ended before
            the answer was whole. ``TIMEOUT``: nothing came for longer than the limit. ``ERROR``:
            what came is no HTTP. ``UNAVAILABLE``: this process can open no connection, which says
            nothing of the instance.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_Failure = tuple[FailureKind, str]
"""Of an `UpstreamError`. One that is raised keeps its frames, so none is kept to be raised."""
_SILENCE: _Failure = (FailureKind.TIMEOUT, "nothing came from it in time")


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an instance listens.

    Attributes:
        host: Name or address, without brackets.
        lines: Of the head of every request.
    """

    host: str
    port: int
    secure: bool
    lines: bytes


class Upstream:
    """Connections to all instances.

    Args:
        headers: Of every request, such as the token that instances ask for.
        addresses: Looks up the addresses of a host at a port, which are tried in turn; the system
            unless given.
        tls: Checks certificates; by the system's list unless given.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        addresses: Callable[[str, int], Awaitable[Sequence[str]]] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.headers = {"accept-encoding": "identity", **(headers or {})}
        self._origins: dict[str, _Origin] = {}
        self._connections: set[_Connection] = set()
        self._idle: dict[_Origin, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._addresses = addresses
        self._tls = tls
        self._said_at = -math.inf

    async def close(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        while self._connections:
            for connection in tuple(self._connections):
                connection.drop()
            await asyncio.sleep(0)

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: Segments | bytes = b"",
        headers: Mapping[str, str] | None = None,
        connect_s: float | None = None,
        silent_s: float | None = None,
        total_s: float | None = None,
    ) -> InstanceAnswer:
        """Send a request and return its answer as soon as the headers are there.

        Args:
            method: Of HTTP; not HEAD, whose answers only look as if they had a body.
            silent_s: Longest silence of the instance, before the answer and within it; also while
                it takes a large body.
            total_s: Longest time until the answer is whole.

        Raises:
            UpstreamError: There is no answer.
        """
        scheme, _, rest = url.partition("://")
        authority, slash, target = rest.partition("/")
        origin = self._origin(f"{scheme}://{authority}")
        segments: Segments = (body,) if isinstance(body, bytes) else body
        head = _head(method, slash + target, origin, headers or {}, sum(map(len, segments)))
        silent_s = _NEVER if silent_s is None else silent_s
        due_at = _NEVER if total_s is None else asyncio.get_running_loop().time() + total_s
        idle = self._take_idle(origin)
        if idle is not None:
            try:
                return await idle.send_request(head, segments, silent_s, due_at)
            except UpstreamError as error:
                stale = error.kind is FailureKind.LOST and not idle.heard
                if not stale or method != "GET":
                    raise
        connection = await self._connect(origin, connect_s, due_at)
        return await connection.send_request(head, segments, silent_s, due_at)

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        body: Segments | bytes = b"",
        headers: Mapping[str, str] | None = None,
        connect_s: float | None = None,
        timeout_s: float,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of an answer that is whole within a time; see `request`.

        Raises:
            UpstreamError: There is none.
        """
        answer = await self.request(
            method, url, body=body, headers=headers, connect_s=connect_s, total_s=timeout_s
        )
        try:
            return answer.status, answer.headers, await answer.read()
        finally:
            answer.close()

    def _origin(self, url: str) -> _Origin:
        """Return where a URL without a path leads to."""
        known = self._origins.get(url)
        if known is None:
            scheme, _, authority = url.partition("://")
            secure = scheme == "https"
            host, colon, port = authority.rpartition(":")
            if not colon or port.endswith("]"):
                host, port = authority, "443" if secure else "80"
            lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            known = self._origins[url] = _Origin(
                host=host.strip("[]"),
                port=int(port),
                secure=secure,
                lines=f" HTTP/1.1\r\nhost: {authority}\r\n{lines}".encode(),
            )
        return known

    async def _connect(
        self, origin: _Origin, connect_s: float | None, due_at: float
    ) -> _Connection:
        """Return a new connection, to the first address of its host that takes one."""
        hosts: Sequence[str] = (origin.host,)
        if self._addresses is not None:
            hosts = await self._addresses(origin.host, origin.port)
        for host in hosts[:-1]:
            with contextlib.suppress(UpstreamError):
                return await self._connect_to(host, origin, connect_s, due_at)
        return await self._connect_to(hosts[-1], origin, connect_s, due_at)

    async def _connect_to(
        self, host: str, origin: _Origin, connect_s: float | None, due_at: float
    ) -> _Connection:
        loop = asyncio.get_running_loop()
        left_s = due_at - loop.time()
        within_s = left_s if connect_s is None else min(connect_s, left_s)
        if origin.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            with anyio.move_on_after(within_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin),
                    host,
                    origin.port,
                    ssl=self._tls if origin.secure else None,
                    server_hostname=origin.host if origin.secure else None,
                )
                self._connections.add(connection)
                return connection
        except OSError as error:
            if error.errno in _USED_UP:
                raise self._used_up(error) from error
            raise UpstreamError(FailureKind.UNREACHABLE, _shown(error)) from error
        if within_s == left_s:
            raise UpstreamError(*_SILENCE)
        raise UpstreamError(FailureKind.UNREACHABLE, "it does not accept connections in time")

    def _used_up(self, error: OSError) -> UpstreamError:
        """Return what it is that no connection can be opened here; also say so, now and then."""
        why = (
            f"the router can open no more connections: {error}; it has {len(self._connections)} to "
            "instances: raise its limit of open files (ulimit -Hn), or start more routers"
        )
        now = asyncio.get_running_loop().time()
        # Of a site whoever wants its file says so, once for each.
        if self._addresses is None and now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            logger.error(why)
        return UpstreamError(FailureKind.UNAVAILABLE, why)

    # Connections that no request uses.

    def _take_idle(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def _keep(self, connection: _Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeping is None:
            self._sweep()

    def _sweep(self) -> None:
        """Close those that were idle for long, as long as there are some at rest."""
        loop = asyncio.get_running_loop()
        before = loop.time() - KEEPALIVE_S
        for origin, idle in tuple(self._idle.items()):
            while idle and idle[0].idle_since < before:
                idle.pop(0).drop()
            if not idle:
                del self._idle[origin]
        self._sweeping = loop.call_later(_SWEEP_EVERY_S, self._sweep) if self._idle else None


def _head(
    method: str, target: str, origin: _Origin, headers: Mapping[str, str], nbytes: int
) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") + lines.count("\r") != 2 * len(headers) or "\n" in target or " " in target:
        raise ValueError(f"headers or a target that would be others to the instance: {lines!r}")
    length = f"content-length: {nbytes}\r\n" if nbytes or method != "GET" else ""
    return b"%b %b%b%b%b\r\n" % (
        method.encode(),
        target.encode("latin-1") or b"/",
        origin.lines,
        lines.encode("utf-8", "surrogateescape"),
        length.encode(),
    )


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class InstanceAnswer:
    """An instance's answer. One task at a time waits for it.

    Attributes:
        status: HTTP status, 0 until the headers have come.
        headers: Names in lower case; values of equal ones are joined by commas.
        pieces: In how many the body was sent so far.
    """

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces = 0
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._take: Callable[[bytes], bool] | None = None
        self._failure: _Failure | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self._connection is None and not self._pieces

    async def read(self, enough: int | None = None) -> bytes:
        """Return the whole body, or what is left of it.

        Args:
            enough: If more comes than so many bytes, return before the end; `over` tells.

        Raises:
            UpstreamError: It did not come whole.
        """
        pieces: list[bytes] = []
        nbytes = 0
        while (enough is None or nbytes <= enough) and (piece := await self.piece()):
            pieces.append(piece)
            nbytes += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def piece(self) -> bytes:
        """Return what has come since, at least a byte; nothing at the end.

        Raises:
            UpstreamError: There is an end, but not of the answer.
        """
        while not self._pieces and self._connection is not None:
            await self._changed()
        if not self._pieces:
            self._check_whole()
            return b""
        return self._taken()

    async def pass_on(
        self, take: Callable[[bytes], bool], ready: Callable[[], Awaitable[None]]
    ) -> None:
        """Hand over every piece as soon as it comes, and return after the last.

        Args:
            take: Called with each piece, from within the event loop; tells whether it takes more at
                once. Must not raise.
            ready: Waited for when it does not; meanwhile the instance waits.

        Raises:
            UpstreamError: There is an end, but not of the answer.
        """
        while True:
            while self._pieces:
                if not take(self._taken()):
                    await ready()
            if self._connection is None:
                break
            self._take = take
            try:
                await self._changed()
            finally:
                still, self._take = self._take is not None, None
            if not still:
                await ready()
                if self._connection is not None:
                    self._connection.resume()
        self._check_whole()

    def close(self) -> None:
        """Let the connection go: to others if the answer is whole.

        Else it is closed, on which an instance aborts the request.
        """
        if self._connection is not None:
            self._connection.drop()

    def _taken(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._nbytes > MAX_WAITING_BYTES and self._connection is not None:
            self._connection.resume()
        self._nbytes = 0
        return data

    def _check_whole(self) -> None:
        if self._failure is not None:
            raise UpstreamError(*self._failure)

    # For its connection.

    async def _changed(self) -> None:
        """Return when more of it has come, when it is over, or when its connection takes more."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _add(self, data: bytes) -> bool:
        """Take a piece; return whether more may come."""
        if self._take is not None:
            if self._take(data):
                return True
            self._take = None
            self._wake()
            return False
        self._pieces.append(data)
        self._nbytes += len(data)
        self._wake()
        return self._nbytes <= MAX_WAITING_BYTES

    def _end(self, failure: _Failure | None) -> None:
        self._connection = None
        self._failure = failure
        self._wake()


class _Connection(asyncio.Protocol):
    """A connection to an instance, which carries one request after the other.

    Attributes:
        heard: Something has come since the last request was sent.
        idle_since: When the last answer ended, by the event loop's clock.
    """

    transport: asyncio.Transport
    _parser: httptools.HttpResponseParser | None

    def __init__(self, pool: Upstream, origin: _Origin) -> None:
        self.origin = origin
        self.heard = False
        self.idle_since = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._answer: InstanceAnswer | None = None
        self._writable = True
        self._paused = False
        self._sent = True
        self._came: list[bytes] = []
        self._head_bytes = 0
        self._whole = False
        self._framed = False
        self._keeps = False
        self._heard_at = 0.0
        self._silent_s = self._due_at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    # A request.

    async def send_request(
        self, head: bytes, body: Segments, silent_s: float, due_at: float
    ) -> InstanceAnswer:
        """Send a request; see `Upstream.request`. ``due_at`` is by the event loop's clock."""
        answer = self._answer = InstanceAnswer(self)
        self.heard = self._whole = self._framed = False
        self._head_bytes = 0
        self._silent_s, self._due_at = silent_s, due_at
        self._heard_at = self._loop.time()
        self._watch()
        try:
            if sum(map(len, body)) < LARGE_BYTES:
                self.transport.write(b"".join((head, *body)))
            else:
                await self._send(answer, head, body)
            while not answer.status and not answer.over:
                await answer._changed()
        except BaseException:
            answer.close()  # Unless it is whole: the connection may be another request's already.
            raise
        if not answer.status:
            answer._check_whole()
        return answer

    async def _send(self, answer: InstanceAnswer, head: bytes, body: Segments) -> None:
        """Send a large body, unless the answer comes before its end."""
        self._sent = False
        waiting: list[Bytes] = [head]
        nbytes = 0
        for segment in body:
            view = memoryview(segment)
            for begin in range(0, len(view), LARGE_BYTES):
                piece = view[begin : begin + LARGE_BYTES]
                waiting.append(piece)
                nbytes += len(piece)
                if nbytes < LARGE_BYTES:
                    continue
                self.transport.writelines(waiting)
                waiting, nbytes = [], 0
                if self._writable:
                    await asyncio.sleep(0)
                while not self._writable and not answer.over and not answer.status:
                    await answer._changed()
                if answer.over or answer.status:
                    return
                self._heard_at = self._loop.time()
        self.transport.writelines(waiting)
        self._sent = True

    def drop(self) -> None:
        """Close the connection; what it does not bring any more is not waited for."""
        self._end((FailureKind.LOST, "the connection was closed here"))
        self.transport.abort()

    def resume(self) -> None:
        """Let more come."""
        if self._paused:
            self._paused = False
            self._heard_at = self._loop.time()
            self._watch()
            self.transport.resume_reading()

    def _end(self, failure: _Failure | None = None) -> None:
        answer, self._answer = self._answer, None
        self._due_at = self._silent_s = _NEVER
        if answer is not None:
            answer._end(failure)

    # Limits of time. A timer is set once and looks again when it fires: most never need another.

    def _due(self) -> float:
        return self._due_at if self._paused else min(self._due_at, self._heard_at + self._silent_s)

    def _watch(self) -> None:
        due_at = self._due()
        if due_at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_at, self._look)
            self._timer_at = due_at

    def _look(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        if self._due() > self._loop.time():
            self._watch()
        elif self._answer is not None:
            self._end(_SILENCE)
            self.transport.abort()

    # The transport's: see `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._answer is not None:
            self._answer._wake()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # No request was sent.
            self.transport.abort()
            return
        assert self._parser is not None
        self.heard = True
        self._heard_at = self._loop.time()
        self._head_bytes += len(data)
        broken: _Failure | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = (FailureKind.ERROR, _shown(error.__context__ or error))
        if came := self._came:
            self._came = []
            self._head_bytes = 0
            answer.pieces += len(came)
            more = answer._add(came[0] if len(came) == 1 else b"".join(came))
            if not more and not self._whole and not self._paused:
                self._paused = True
                self.transport.pause_reading()
        elif answer.status:
            answer._wake()
        if self._head_bytes > MAX_HEAD_BYTES:
            broken = (FailureKind.ERROR, f"headers of more than {MAX_HEAD_BYTES} bytes")
        if self._whole:
            self._end()
            if self._keeps and self._sent and broken is None:
                self._pool._keep(self)
            else:
                self.transport.abort()
        elif broken is not None:
            self._end(broken)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        answer = self._answer
        until_closed = answer is not None and answer.status and not self._framed and error is None
        why = "the connection was closed" if error is None else _shown(error)
        self._end(None if until_closed else (FailureKind.LOST, why))
        self._pool._connections.discard(self)
        # They refer to each other, and would be freed late.
        self._parser = None

    # The parser's: see `httptools.HttpResponseParser`.

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None and not self._answer.status:
            # As text these are bytes, whatever they mean: clients get the same.
            text = value.decode("utf-8", "surrogateescape").strip()
            headers, key = self._answer.headers, name.decode("latin-1").lower()
            if (before := headers.get(key)) is not None:
                if len(before) > MAX_JOINED_CHARS:
                    raise ValueError(f"equal headers of more than {MAX_JOINED_CHARS} characters")
                text = f"{before}, {text}"
            headers[key] = text

    def on_headers_complete(self) -> None:
        assert self._answer is not None and self._parser is not None
        status = self._parser.get_status_code()
        headers = self._answer.headers
        if 100 <= status < 200:
            headers.clear()
            return
        self._framed = (
            "content-length" in headers
            or headers.get("transfer-encoding", "").lower().endswith("chunked")
            or status in _NO_BODY
        )
        self._answer.status = status

    def on_body(self, data: bytes) -> None:
        self._came.append(data)

    def on_message_complete(self) -> None:
        assert self._answer is not None and self._parser is not None
        self._whole = self._answer.status > 0
        # Afterwards the parser knows no more.
        self._keeps = self._parser.should_keep_alive()
