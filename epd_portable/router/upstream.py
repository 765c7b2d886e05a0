"""HTTP to the instances, and the one place where a library's errors become the package's own."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping

import aiohttp

from epd_portable.errors import EPDError
from epd_portable.router.cut_text import Segments

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the five seconds after which servers close them."""
LARGE_BYTES = 256 * 1024
"""Bodies from this size on are written piece by piece, and others are served in between."""
_PIECE_BYTES = 256 * 1024
_READ_BYTES = 256 * 1024
"""Buffer of an answer: above twice this its sender waits."""


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
    """An instance's answer whose headers have come.

    Attributes:
        status: HTTP status.
        headers: Of the answer; names in any case.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            UpstreamError: It did not come whole.
        """
        try:
            return await self._response.read()
        except _ERRORS as error:
            raise _translated(error) from error

    async def piece(self) -> bytes:
        """Return what has come since, at least a byte; nothing at the end.

        Raises:
            UpstreamError: There is an end, but not of the answer.
        """
        try:
            return await self._response.content.readany()
        except _ERRORS as error:
            raise _translated(error) from error

    def close(self) -> None:
        """Let the connection go: to others if the answer is whole.

        Else it is closed, on which an instance aborts the request.
        """
        self._response.close()


class Upstream:
    """Connections to all instances.

    Args:
        headers: Of every request, such as the token that instances ask for.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self.headers = {"accept-encoding": "identity", **(headers or {})}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Get ready; from within the event loop."""
        self._session = aiohttp.ClientSession(
            # The engine bounds its own concurrency; a bound here would only hide its queue.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self.headers,
            skip_auto_headers=("user-agent", "accept", "content-type"),
            read_bufsize=_READ_BYTES,
            # Instances are named one by one: no proxy of the environment may come between.
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

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
            method: Of HTTP.
            url: Whole.
            body: As it is sent.
            headers: To send.
            connect_s: Longest time of connecting.
            silent_s: Longest silence of the instance, before the answer and within it.
            total_s: Longest time until the answer is whole.

        Raises:
            UpstreamError: There is no answer.
        """
        assert self._session is not None
        outgoing = dict(headers) if headers else {}
        data: bytes | AsyncIterator[bytes] | None = None
        if body:
            if isinstance(body, bytes):
                body = (body,)
            nbytes = sum(map(len, body))
            if nbytes < LARGE_BYTES:
                data = b"".join(body)
            else:
                outgoing["content-length"] = str(nbytes)
                data = _in_pieces(body)
        timeout = aiohttp.ClientTimeout(
            total=total_s, sock_connect=connect_s, sock_read=silent_s, ceil_threshold=60
        )
        try:
            return InstanceAnswer(
                await self._session.request(
                    method,
                    url,
                    data=data,
                    headers=outgoing,
                    timeout=timeout,
                    allow_redirects=False,
                )
            )
        except _ERRORS as error:
            raise _translated(error) from error

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


async def _in_pieces(body: Segments) -> AsyncIterator[bytes]:
    for segment in body:
        view = memoryview(segment)
        for begin in range(0, len(view), _PIECE_BYTES):
            # The client library takes views as it takes bytes; its annotations say less.
            yield view[begin : begin + _PIECE_BYTES]  # type: ignore[misc]


_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


def _translated(error: BaseException) -> UpstreamError:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamError(Fault.REFUSED, "it does not accept connections in time")
    if isinstance(error, asyncio.TimeoutError):
        return UpstreamError(Fault.SILENT, "nothing came from it in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamError(Fault.REFUSED, text)
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return UpstreamError(Fault.CUT, text)
    return UpstreamError(Fault.BROKEN, text)
