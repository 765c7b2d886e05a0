"""Sites of the web for what fetches from them: real sockets, and answers byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.listening import stop_listening

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def plain(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return an answer."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def once(event: asyncio.Event, data: bytes) -> Answer:
    """Answer when the event is set."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await event.wait()
        writer.write(data)

    return answer


async def never(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def moved(location: str, status: str = "302 Found") -> bytes:
    """Return an answer that sends elsewhere."""
    return plain(b"", f"location: {location}", status=status)


@dataclass
class Site:
    """A server whose answers a test sets, by path; what it does not know is 404."""

    pages: dict[str, bytes | Answer] = field(default_factory=dict)
    heads: list[bytes] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    port: int = 0
    open: int = 0
    most_open: int = 0
    closed_early: int = 0
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        await stop_listening(self._server)
        for serving in tuple(self._serving):
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0.01)

    @property
    def paths(self) -> list[str]:
        return [head.split()[1].decode() for head in self.heads]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._serving.discard(serving)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        page = self.pages.get(head.split()[1].decode(), plain(b"", status="404 Not Found"))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        gone = asyncio.ensure_future(reader.read())
        answering = asyncio.ensure_future(_write(writer, page))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            # Who writes may be the first to notice.
            self.closed_early += not answering.done() or answering.exception() is not None
        finally:
            self.open -= 1
            gone.cancel()
            answering.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)


async def _write(writer: asyncio.StreamWriter, page: bytes | Answer) -> None:
    if isinstance(page, bytes):
        writer.write(page)
        await writer.drain()
    else:
        await page(writer)
