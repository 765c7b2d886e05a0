"""A connection to an instance: requests out, one after the other, and their answers in.

The parser is httptools'; everything between it and the socket is here, because every byte of every
answer passes it. An answer that is passed on goes from the socket to its taker without waking a
task, and limits of time cost nothing as long as they are not reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from epd_portable.errors import EPDError
from epd_portable.router.contents.cut_text import Bytes, Segments
from epd_portable.wire.outcomes import FailureKind

LARGE_BYTES = 256 * 1024
"""Bodies from this size on are written piece by piece, and others are served in between."""
MAX_HEAD_BYTES = 256 * 1024
"""Of the headers of an answer together; the parser itself has no limit."""
MAX_WAITING_BYTES = 512 * 1024
"""Of an answer that is not taken: its sender waits."""
NEVER = float("inf")
"""A time that does not come."""
_NO_BODY = frozenset({204, 304})


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


class InstanceAnswer:
    """An instance's answer. One task at a time waits for it.

    Attributes:
        status: HTTP status, 0 until the headers have come.
        headers: Of the answer; names in lower case, and of equal ones the first.
    """

    def __init__(self, connection: UpstreamConnection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: UpstreamConnection | None = connection
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
        """Take a piece; return whether more may come."""
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


class UpstreamConnection(asyncio.Protocol):
    """A connection to an instance, which carries one request after the other.

    Args:
        lost: Called when it is closed.
        rest: Called when it can take another request.

    Attributes:
        transport: Of asyncio.
        heard: Something has come since the last request was sent.
        rested_at: When it was last used, by the event loop's clock.
    """

    transport: asyncio.Transport

    def __init__(
        self, lost: Callable[[UpstreamConnection], None], rest: Callable[[UpstreamConnection], None]
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
        self._silent_s = NEVER
        self._due_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
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
            self._end(UpstreamError(FailureKind.LOST, "the connection was closed here"))
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
        self._due_at = self._silent_s = NEVER
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
        self._timer, self._timer_at = None, NEVER
        due_at = self._due()
        if due_at > self._loop.time():
            self._watch(due_at)
        elif self._answer is not None:
            self._end(silence())
            self.transport.abort()

    # The transport's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # Those of other event loops need not be of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable = False

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable = True
        if self._answer is not None:
            self._answer.wake()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        answer = self._answer
        if answer is None:
            # No request was sent.
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
            broken = UpstreamError(FailureKind.ERROR, f"{type(reason).__name__}: {reason}")
        if not self._begun and self._head_bytes > MAX_HEAD_BYTES:
            broken = UpstreamError(
                FailureKind.ERROR, f"headers of more than {MAX_HEAD_BYTES} bytes"
            )
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
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        until_closed = self._begun and not self._framed and error is None
        why = "the connection was closed" if error is None else f"{type(error).__name__}: {error}"
        self._end(None if until_closed else UpstreamError(FailureKind.LOST, why))
        self._lost(self)

    # The parser's.

    def on_message_begin(self) -> None:
        """See `httptools.HttpResponseParser`."""
        if self._whole:
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `httptools.HttpResponseParser`."""
        if self._begun or self._answer is None:
            return
        # As text these are bytes, whatever they mean: clients get the same.
        text = value.decode("utf-8", "surrogateescape").strip()
        self._answer.headers.setdefault(name.decode("latin-1").lower(), text)

    def on_headers_complete(self) -> None:
        """See `httptools.HttpResponseParser`."""
        assert self._answer is not None
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
        self._begun = True
        self._answer.status = status

    def on_body(self, data: bytes) -> None:
        """See `httptools.HttpResponseParser`."""
        self._came.append(data)

    def on_message_complete(self) -> None:
        """See `httptools.HttpResponseParser`."""
        self._whole = self._begun
        # Afterwards the parser knows no more.
        self._keeps = self._parser.should_keep_alive()


def silence() -> UpstreamError:
    """Return the error of an instance from which nothing came in time."""
    return UpstreamError(FailureKind.TIMEOUT, "nothing came from it in time")
