"""HTTP to the instances: their addresses, and connections that stay open between requests."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.http import open_files
from epd_portable.router.http.upstream_connection import (
    NEVER,
    InstanceAnswer,
    UpstreamConnection,
    UpstreamError,
    silence,
)
from epd_portable.wire.outcomes import FailureKind

logger = logging.getLogger(__name__)

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the five seconds after which servers close them."""
_SWEEP_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_REPEATABLE = frozenset({"GET"})
"""Methods of requests that may be sent again when nothing of an answer has come."""


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
        self._connections: set[UpstreamConnection] = set()
        self._resting: dict[str, list[UpstreamConnection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
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
        due_at = NEVER if total_s is None else asyncio.get_running_loop().time() + total_s
        connection = self._rested(origin)
        fresh = connection is None
        while True:
            if connection is None:
                connection = await self._connect(origin, connect_s, due_at)
            try:
                return await connection.ask(
                    head,
                    segments,
                    silent_s=NEVER if silent_s is None else silent_s,
                    due_at=due_at,
                )
            except UpstreamError as error:
                stale = not fresh and not connection.heard and error.kind is FailureKind.LOST
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

    async def _connect(
        self, url: str, connect_s: float | None, due_at: float
    ) -> UpstreamConnection:
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
        connection = UpstreamConnection(
            self._connections.discard, lambda each: self._rest(url, each)
        )
        try:
            with anyio.move_on_after(within_s) as limit:
                await loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.secure else None,
                )
        except OSError as error:
            if error.errno in open_files.USED_UP:
                raise self._used_up(error) from error
            raise UpstreamError(
                FailureKind.UNREACHABLE, f"{type(error).__name__}: {error}"
            ) from error
        if not limit.cancelled_caught:
            self._connections.add(connection)
            return connection
        if within_s == left_s:
            raise silence()
        raise UpstreamError(FailureKind.UNREACHABLE, "it does not accept connections in time")

    def _used_up(self, error: OSError) -> UpstreamError:
        """Return what it is that no connection can be opened here; also say so, now and then."""
        why = (
            f"the router can open no more connections: {error}; it has {len(self._connections)} to "
            "instances: raise its limit of open files (ulimit -Hn), or start more routers"
        )
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            logger.error(why)
        return UpstreamError(FailureKind.UNAVAILABLE, why)

    # Connections that no request uses.

    def _rested(self, url: str) -> UpstreamConnection | None:
        resting = self._resting.get(url)
        while resting:
            connection = resting.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def _rest(self, url: str, connection: UpstreamConnection) -> None:
        connection.rested_at = asyncio.get_running_loop().time()
        self._resting.setdefault(url, []).append(connection)
        if self._sweeping is None:
            self._sweep()

    def _sweep(self) -> None:
        """Close those that were idle for long, as long as there are some at rest."""
        loop = asyncio.get_running_loop()
        before = loop.time() - KEEPALIVE_S
        for url, resting in tuple(self._resting.items()):
            while resting and resting[0].rested_at < before:
                resting.pop(0).drop()
            if not resting:
                del self._resting[url]
        self._sweeping = loop.call_later(_SWEEP_EVERY_S, self._sweep) if self._resting else None
