"""Bounds of connections, which uvicorn's HTTP/1.1 protocol does not have.

They are: time and size of a head, time of a body that no handler reads, requests that wait for one
before them, and time in which a client reads nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import HTTP_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from epd_portable.certificates import Certificate
from epd_portable.responses import BODY_TIMEOUT_S, MAX_HEAD_BYTES

HEAD_TIMEOUT_S = 30.0
"""Longest time from a connection, or the first byte of a further request, to the end of a head."""
KEEP_ALIVE_S = 65
"""Longest time between two requests of a connection. Load balancers and clients close theirs
sooner, so none sends a request into a connection that closes."""
SEND_TIMEOUT_S = 60.0
"""A client that reads nothing of its response for so long is disconnected."""
MAX_PIPELINED = 16
"""Most requests of one connection that wait for the response before them."""
FRAMING = 8
"""Further bytes of framing for each byte of the body: a chunk of one byte takes six."""

_OF_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Headers Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _Parser:
    """uvicorn's parser; a request to upgrade to another protocol than WebSocket is one of HTTP/1.1.

    httptools takes it for the last of a connection, and drops its body. Java's client requests
    HTTP/2 with its first request.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._inner = protocol.parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def feed_data(self, data: bytes) -> None:
        try:
            self._inner.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if self._protocol._should_upgrade():
                raise
            head = self._protocol.plain_head()
            self._inner = HttpRequestParser(self._protocol)
            self.feed_data(head + data[upgrade.args[0] :])


@functools.cache
def _certificate(config: Config) -> Certificate | None:
    if config.ssl is None or config.ssl_certfile is None:
        return None
    cert_file = os.fspath(config.ssl_certfile)
    return Certificate(config.ssl, cert_file, os.fspath(config.ssl_keyfile or cert_file))


class BoundedProtocol(HttpToolsProtocol):
    """A connection within bounds; it is closed beyond them."""

    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _extra_bytes = 0
    _body_bytes = 0

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        if (certificate := _certificate(config)) is not None:
            certificate.renew()  # Before the handshake of this connection.
        super().__init__(config, *args, **kwargs)
        self.parser = _Parser(self)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" not in os.environ:
            self.timeout_keep_alive = KEEP_ALIVE_S
        self._set_timer(HEAD_TIMEOUT_S, self._refuse, _TIMED_OUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(0.0)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._extra_bytes += len(data)
        super().data_received(data)
        if self._extra_bytes > MAX_HEAD_BYTES + FRAMING * self._body_bytes:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._extra_bytes = self._body_bytes = 0
        if self._timer is None:
            self._set_timer(HEAD_TIMEOUT_S, self._refuse, _TIMED_OUT)

    def on_body(self, body: bytes) -> None:
        self._extra_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self._asks_for_other:
            return  # It comes again, without that.
        self._set_timer(BODY_TIMEOUT_S, self._end_body)
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise HttpParserError("too many requests at once")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._asks_for_other:
            self._set_timer(0.0)
            super().on_message_complete()

    def plain_head(self) -> bytes:
        """Return the present head without a wish for another protocol."""
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/1.1"))
        given = [b"%b: %b" % each for each in self.headers if each[0] not in _OF_UPGRADES]
        return b"\r\n".join((line, *given, b"", b""))

    @property
    def _asks_for_other(self) -> bool:
        if not self.parser.should_upgrade():
            return False
        return self._get_upgrade() is not None and not self._should_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def _set_timer(
        self, after_s: float, call: Callable[..., None] | None = None, *args: bytes
    ) -> None:
        """Call a function later, in place of what was to be called."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if call is None else self.loop.call_later(after_s, call, *args)

    def _end_body(self) -> None:
        """Close the connection if its response is complete, and its body is not."""
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self._set_timer(1.0, self._end_body)

    def _refuse(self, response: bytes) -> None:
        self._set_timer(0.0)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(response)
        self.transport.close()


def install() -> None:
    """Let uvicorn use it in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:BoundedProtocol"
