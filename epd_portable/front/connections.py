"""Bounds of connections: uvicorn's HTTP/1.1 protocol limits neither time nor size of a head."""

from __future__ import annotations

import asyncio

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 30.0
"""Longest time from a connection, or the first byte of a further request, to the end of a head."""
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a request besides its body: its head, and what frames a body in chunks. A read of
the socket may go beyond."""
FRAMING = 8
"""Further bytes of framing for each byte of the body: a chunk of one byte takes six."""

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Headers Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when a head is slow or large."""

    _timer: asyncio.TimerHandle | None = None
    _extra_bytes = 0
    _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See uvicorn."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, _TIMED_OUT)

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn."""
        self._head_ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        self._extra_bytes += len(data)
        super().data_received(data)
        if self._extra_bytes > MAX_HEAD_BYTES + FRAMING * self._body_bytes:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._extra_bytes = self._body_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, _TIMED_OUT)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._extra_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._head_ended()
        super().on_headers_complete()

    def _head_ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, response: bytes) -> None:
        self._head_ended()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(response)
        self.transport.close()


def install() -> None:
    """Let uvicorn use it in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:BoundedProtocol"
