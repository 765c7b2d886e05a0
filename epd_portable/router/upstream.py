"""HTTP to the instances: connections that stay open, and the ways in which asking can fail.

The parser is httptools'; everything between it and the socket is here, because every byte of every
answer passes it. An answer that is passed on goes from the socket to who takes it without waking a
task, and limits of time cost nothing as long as they are not reached.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

import anyio
import httptools

from epd_portable.errors import EPDError
from epd_portable.router.cut_text import Bytes, Segments

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the five seconds after which servers close them."""
LARGE_BYTES = 256 * 1024
"""Bodies from this size on are written piece by piece, and others are served in between."""
MAX_HEAD_BYTES = 256 * 1024
"""Of the headers of an answer together; the parser itself has no limit."""
MAX_WAITING_BYTES = 512 * 1024
"""Of an answer that nobody takes: its sender waits."""
_NEVER = float("inf")
_SWEEP_EVERY_S = 1.0
_REPEATABLE = frozenset({"GET"})
"""Methods of requests that may be sent again when nothing of an answer has come."""
_SWITCHED = 101
_NO_BODY = frozenset({204, 304})


class Fault(enum.Enum):
    """How a request to an instance failed below HTTP."""

    REFUSED = "refused"
    """No connection could be made: nobody listens there, or not within the limit."""
    CUT = "cut"
    """The connection ended before the answer was whole."""
    SILENT = "silent"
    """Nothing came for longer than the limit."""
    BROKEN = "broken"
    """What came is no HTTP."""


class UpstreamError(EPDError):
    """An instance could not be asked, or its answer did not come whole.

    Attributes:
        fault: How it failed.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class InstanceAnswer:
    """An instance's answer. One task at a time waits for it.

    Attributes:
        status: HTTP status, 0 until the headers have come.
        headers: Of the answer; names in lower case, and of equal ones the first.
    """

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._take: Callable[[bytes], bool] | None = None
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

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
            await self.changed()
        if self._pieces:
            return self._taken()
        if self._error is not None:
            raise self._error
        return b""

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
                await self.changed()
            finally:
                still, self._take = self._take is not None, None
            if not still:
                await ready()
                if self._connection is not None:
                    self._connection.resume()
        if self._error is not None:
            raise self._error

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

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self._connection is None and not self._pieces

    # For its connection.

    @property
    def error(self) -> UpstreamError | None:
        """Why it is over, if it is not whole."""
        return self._error

    async def changed(self) -> None:
        """Return when more of it has come, when it is over, or when its connection takes more."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let `changed` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, data: bytes) -> bool:
        """Take a piece; tell whether more may come."""
        if self._take is not None:
            if self._take(data):
                return True
            self._take = None
            self.wake()
            return False
        self._pieces.append(data)
        self._nbytes += len(data)
        self.wake()
        return self._nbytes <= MAX_WAITING_BYTES

    def end(self, error: UpstreamError | None = None) -> None:
        """Note that nothing more will come."""
        self._connection = None
        self._error = error
        self.wake()


class _Connection(asyncio.Protocol):
    """A connection to an instance, which carries one request after the other.

    Args:
        lost: Called when it is closed.
        rest: Called when it can take another request.
    """

    transport: asyncio.Transport

    def __init__(
        self, lost: Callable[[_Connection], None], rest: Callable[[_Connection], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._rest = rest
        self._parser = httptools.HttpResponseParser(self)
        self._answer: InstanceAnswer | None = None
        self._writable = True
        self._paused = False
        self._sent = True
        self._came: list[bytes] = []
        self._head_bytes = 0
        self._begun = False
        self._whole = False
        self._framed = False
        self._keeps = False
        self._heard_at = 0.0
        self._silent_s = _NEVER
        self._due_at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self.heard = False
        self.rested_at = 0.0

    # A request.

    async def ask(
        self, head: bytes, body: Segments, *, silent_s: float, due_at: float
    ) -> InstanceAnswer:
        """Send a request and return its answer as soon as the headers are there.

        Args:
            head: First line and headers.
            body: To be sent after it.
            silent_s: Longest silence of the instance.
            due_at: When the whole answer must have come, by the event loop's clock.

        Raises:
            UpstreamError: There is no answer.
        """
        answer = self._answer = InstanceAnswer(self)
        self.heard = self._begun = self._whole = self._framed = False
        self._head_bytes = 0
        self._silent_s, self._due_at = silent_s, due_at
        self._heard_at = self._loop.time()
        self._watch(self._due())
        try:
            if sum(map(len, body)) < LARGE_BYTES:
                self.transport.write(b"".join((head, *body)))
            else:
                await self._send(answer, head, body)
            while not answer.status and not answer.over:
                await answer.changed()
        except BaseException:
            self.drop()
            raise
        if answer.error is not None and not answer.status:
            raise answer.error
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
                    await answer.changed()
                if answer.over or answer.status:
                    return
                self._heard_at = self._loop.time()
        self.transport.writelines(waiting)
        self._sent = True

    def drop(self) -> None:
        """Close the connection; what it does not bring any more is not waited for."""
        if self._answer is not None:
            self._end(UpstreamError(Fault.CUT, "the connection was closed here"))
        self.transport.abort()

    def resume(self) -> None:
        """Let more come."""
        if self._paused:
            self._paused = False
            self._heard_at = self._loop.time()
            self._watch(self._due())
            self.transport.resume_reading()

    def _end(self, error: UpstreamError | None = None) -> None:
        answer, self._answer = self._answer, None
        self._due_at = self._silent_s = _NEVER
        if answer is not None:
            answer.end(error)

    # Limits of time. A timer is set once and looks again when it fires: most never need another.

    def _due(self) -> float:
        return self._due_at if self._paused else min(self._due_at, self._heard_at + self._silent_s)

    def _watch(self, due_at: float) -> None:
        if due_at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_at, self._look)
            self._timer_at = due_at

    def _look(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        due_at = self._due()
        if due_at > self._loop.time():
            self._watch(due_at)
        elif self._answer is not None:
            self._end(_silent())
            self.transport.abort()

    # The transport's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._answer is not None:
            self._answer.wake()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Nobody asked.
            self.transport.abort()
            return
        self.heard = True
        self._heard_at = self._loop.time()
        if not self._begun:
            self._head_bytes += len(data)
        broken: UpstreamError | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            reason = error.__context__ or error
            broken = UpstreamError(Fault.BROKEN, f"{type(reason).__name__}: {reason}")
        if not self._begun and self._head_bytes > MAX_HEAD_BYTES:
            broken = UpstreamError(Fault.BROKEN, f"headers of more than {MAX_HEAD_BYTES} bytes")
        if came := self._came:
            self._came = []
            more = answer.add(came[0] if len(came) == 1 else b"".join(came))
            if not more and not self._whole and not self._paused:
                self._paused = True
                self.transport.pause_reading()
        elif self._begun:
            answer.wake()
        if self._whole:
            self._end()
            if self._keeps and self._sent and broken is None:
                self._rest(self)
            else:
                self.transport.abort()
        elif broken is not None:
            self._end(broken)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        until_closed = self._begun and not self._framed and error is None
        why = "the connection was closed" if error is None else f"{type(error).__name__}: {error}"
        self._end(None if until_closed else UpstreamError(Fault.CUT, why))
        self._lost(self)

    # The parser's.

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun or self._answer is None:
            return
        # As text these are bytes, whatever they mean: clients get the same.
        text = value.decode("utf-8", "surrogateescape").strip()
        self._answer.headers.setdefault(name.decode("latin-1").lower(), text)

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        status = self._parser.get_status_code()
        headers = self._answer.headers
        if status == _SWITCHED:
            raise ValueError("another protocol, for which nobody asked")
        if 100 <= status < 200:
            headers.clear()
            return
        self._framed = (
            "content-length" in headers
            or headers.get("transfer-encoding", "").lower().endswith("chunked")
            or status in _NO_BODY
        )
        self._begun = True
        self._answer.status = status

    def on_body(self, data: bytes) -> None:
        self._came.append(data)

    def on_message_complete(self) -> None:
        self._whole = self._begun
        # Afterwards the parser knows no more.
        self._keeps = self._parser.should_keep_alive()


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an instance listens.

    Attributes:
        host: Name or address, without brackets.
        port: Of TCP.
        secure: By TLS.
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
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self.headers = {"accept-encoding": "identity", **(headers or {})}
        self._origins: dict[str, _Origin] = {}
        self._connections: set[_Connection] = set()
        self._resting: dict[str, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

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
            url: Whole.
            body: As it is sent.
            headers: To send.
            connect_s: Longest time of connecting.
            silent_s: Longest silence of the instance, before the answer and within it; also while
                it takes a large body.
            total_s: Longest time until the answer is whole.

        Raises:
            UpstreamError: There is no answer.
        """
        scheme, _, rest = url.partition("://")
        authority, slash, target = rest.partition("/")
        origin = f"{scheme}://{authority}"
        segments: Segments = (body,) if isinstance(body, bytes) else body
        head = self._head(method, slash + target, self._origin(origin), headers or {}, segments)
        due_at = _NEVER if total_s is None else asyncio.get_running_loop().time() + total_s
        connection = self._rested(origin)
        fresh = connection is None
        while True:
            if connection is None:
                connection = await self._connect(origin, connect_s, due_at)
            try:
                return await connection.ask(
                    head,
                    segments,
                    silent_s=_NEVER if silent_s is None else silent_s,
                    due_at=due_at,
                )
            except UpstreamError as error:
                stale = not fresh and not connection.heard and error.fault is Fault.CUT
                if not stale or method not in _REPEATABLE:
                    raise
            connection, fresh = None, True

    async def ask(
        self,
        method: str,
        url: str,
        *,
        body: Segments | bytes = b"",
        headers: Mapping[str, str] | None = None,
        connect_s: float | None = None,
        timeout_s: float,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request and return status, headers and body of its answer.

        Args:
            method: Of HTTP.
            url: Whole.
            body: As it is sent.
            headers: To send.
            connect_s: Longest time of connecting.
            timeout_s: Longest time until the answer is whole.

        Raises:
            UpstreamError: There is no whole answer in time.
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

    @staticmethod
    def _head(
        method: str, target: str, origin: _Origin, headers: Mapping[str, str], body: Segments
    ) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if (
            lines.count("\n") + lines.count("\r") != 2 * len(headers)
            or "\n" in target
            or " " in target
        ):
            raise ValueError(f"headers or a target that would be others to the instance: {lines!r}")
        nbytes = sum(map(len, body))
        length = f"content-length: {nbytes}\r\n" if nbytes or method != "GET" else ""
        return b"%b %b%b%b%b\r\n" % (
            method.encode(),
            target.encode("latin-1") or b"/",
            origin.lines,
            lines.encode("utf-8", "surrogateescape"),
            length.encode(),
        )

    async def _connect(self, url: str, connect_s: float | None, due_at: float) -> _Connection:
        """Return a new connection.

        Raises:
            UpstreamError: There is none.
        """
        loop = asyncio.get_running_loop()
        origin = self._origins[url]
        left_s = due_at - loop.time()
        within_s = left_s if connect_s is None else min(connect_s, left_s)
        if origin.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        connection = _Connection(self._connections.discard, lambda each: self._rest(url, each))
        try:
            with anyio.move_on_after(within_s) as limit:
                await loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.secure else None,
                )
        except OSError as error:
            raise UpstreamError(Fault.REFUSED, f"{type(error).__name__}: {error}") from error
        if not limit.cancelled_caught:
            self._connections.add(connection)
            return connection
        if within_s == left_s:
            raise _silent()
        raise UpstreamError(Fault.REFUSED, "it does not accept connections in time")

    # Connections that no request uses.

    def _rested(self, url: str) -> _Connection | None:
        resting = self._resting.get(url)
        while resting:
            connection = resting.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def _rest(self, url: str, connection: _Connection) -> None:
        connection.rested_at = asyncio.get_running_loop().time()
        self._resting.setdefault(url, []).append(connection)
        if self._sweeping is None:
            self._sweep()

    def _sweep(self) -> None:
        """Close those that nobody has used for long, as long as there are some at rest."""
        loop = asyncio.get_running_loop()
        before = loop.time() - KEEPALIVE_S
        for url, resting in tuple(self._resting.items()):
            while resting and resting[0].rested_at < before:
                resting.pop(0).drop()
            if not resting:
                del self._resting[url]
        self._sweeping = loop.call_later(_SWEEP_EVERY_S, self._sweep) if self._resting else None


def _silent() -> UpstreamError:
    return UpstreamError(Fault.SILENT, "nothing came from it in time")
