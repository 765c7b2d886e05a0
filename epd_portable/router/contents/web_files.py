"""Files of the web: asked for by HTTP, from where that is allowed, and bounded in every way.

The addresses of a name are looked up once, all of them are checked, and one of these is connected
to: a name that is another machine's a moment later leads nowhere. Each redirect goes the same way.
A server's headers about a file are not believed: its type is found from its content, and its length
is counted. Pieces are encoded as base64 as they come, so that a large file blocks no other request.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import math
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpcore
import httpx
import msgspec

from epd_portable.delivery.replies import RETRY_AFTER_S
from epd_portable.media.addresses import (
    AddressPolicy,
    Domains,
    MediaUrlError,
    WebTarget,
    redirected,
)
from epd_portable.router.contents.cut_text import Bytes
from epd_portable.router.http.incoming import Body
from epd_portable.router.settings import MediaFetching

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a name; blocks, and raises `OSError`."""

MAX_ADDRESSES = 4
"""Of one name, that are tried one after the other."""
CONNECT_S = 3.0
"""Longest time of connecting to one of them."""
AGAIN_AFTER_S = 0.2
"""Pause before a file is asked for once more."""
LOOKUPS = 64
LOOKUPS_OF_DOMAIN = 4
"""Names that are looked up at a time, in all and below one domain."""
MAX_HEAD_BYTES = 64 * 1024
"""Of an answer's headers, with all that comes before them."""
HEAD_PIECE_BYTES = 4096
PIECES_ANYWAY = 2048
SMALLEST_PIECES = 128
"""So many pieces of a file may be of any size; of more, each must have so many bytes on average."""
PIECES_AT_ONCE = 8
"""Others are served after so many pieces at the latest."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LATER = frozenset({408, 425, 429})
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=\"?(\d{1,9})")
_NOT_KEPT = re.compile(r"(?:^|[,\s])(?:no-store|no-cache|private)(?:$|[,\s=])")


class FetchedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was fetched.

    Attributes:
        text: Of base64.
        keep_s: How long its server lets others have it.
    """

    text: Bytes
    nbytes: int
    keep_s: float = float("inf")


class WebFiles:
    """Fetches files, one call for each.

    Args:
        settings: What may be fetched, and how much.
        body: Returns what counts the memory of a file that is on its way.
        resolve: Looks names up; the system unless given.

    Attributes:
        domains: Hosts that are fetched from.
    """

    def __init__(
        self, settings: MediaFetching, body: Callable[[], Body], resolve: Resolve | None = None
    ) -> None:
        self._settings = settings
        self._body = body
        self.domains = Domains(settings.allowed_domains)
        self._network = _CheckedNetwork(
            AddressPolicy(settings.allowed_networks), resolve or _resolve
        )
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=True),
            max_connections=None,
            # What a server sends beyond its answer must not answer the next request.
            max_keepalive_connections=0,
            network_backend=self._network,
        )
        self._turns = _Turns(settings.max_fetches, settings.max_fetches_per_host)

    async def close(self) -> None:
        """Close connections."""
        await self._pool.aclose()
        self._network.close()

    async def fetch(self, target: WebTarget) -> FetchedFile:
        """Fetch a file, which was checked to be allowed, from where redirects lead.

        Raises:
            RequestError: It cannot be obtained, or there is no memory for it.
        """
        with self._body() as held:
            return await self._follow(target, held)

    async def _follow(self, target: WebTarget, held: Body) -> FetchedFile:
        """A turn at a host is given back before the next host's is waited for."""
        seen = {target}
        left_s = self._settings.timeout_s
        while True:
            async with self._turns.at(target.host, self._settings.timeout_s):
                begun = time.monotonic()
                try:
                    with anyio.fail_after(left_s):
                        answer = await self._ask_twice(target, held)
                except TimeoutError as error:
                    raise _too_slow(self._settings.timeout_s) from error
            left_s = max(left_s - (time.monotonic() - begun), 0.0)
            if isinstance(answer, FetchedFile):
                return answer
            target = redirected(target, answer)
            if target in seen:
                raise MediaUrlError("its redirects go round in a circle")
            seen.add(target)
            if len(seen) > self._settings.max_redirects + 1:
                raise MediaUrlError(
                    f"more than {self._settings.max_redirects} redirects are not followed"
                )
            try:
                self.domains.check(target)
            except MediaUrlError as error:
                raise MediaUrlError(f"it redirects to where nothing is fetched: {error}") from None

    async def _ask_twice(self, target: WebTarget, held: Body) -> FetchedFile | str:
        """Ask once more where a server fails."""
        try:
            return await self._ask(target, held)
        except _ServerFailedError as error:
            logger.info("%s: %s: asked for once more", target.shown, error)
        await asyncio.sleep(AGAIN_AFTER_S)
        return await self._ask(target, held)

    async def _ask(self, target: WebTarget, held: Body) -> FetchedFile | str:
        """Return what a server gives, or where it says that it is."""
        request = httpcore.Request(
            b"GET",
            httpcore.URL(
                scheme=target.scheme.encode(),
                host=target.host.encode(),
                port=target.port,
                target=target.path.encode(),
            ),
            headers=[
                (b"Host", target.authority.encode()),
                (b"Accept", b"image/*, video/*, audio/*, */*;q=0.5"),
                (b"Accept-Encoding", b"identity"),
                (b"User-Agent", b"epd-portable"),
                (b"Connection", b"close"),
            ],
            extensions={"timeout": {"connect": CONNECT_S}},
        )
        try:
            response = await self._pool.handle_async_request(request)
            stream = response.extensions["network_stream"]
            assert isinstance(stream, _Stream)
            stream.in_head = False
            try:
                return await self._taken(response, held)
            finally:
                await response.aclose()
        except httpcore.TimeoutException as error:
            raise _too_slow(CONNECT_S) from error
        except httpcore.ConnectError as error:
            raise _failed("no connection could be made to its host") from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            problem = "its server broke off, or what it answered is no HTTP"
            raise _ServerFailedError(problem) from error

    async def _taken(self, response: httpcore.Response, held: Body) -> FetchedFile | str:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in response.headers:
            headers.setdefault(name.lower(), []).append(value)
        status = response.status
        if status in _REDIRECTS:
            there = headers.get(b"location", [])
            if len(there) != 1:
                raise _failed(f"its server answered {status} without one place to go to")
            try:
                return there[0].decode()
            except UnicodeDecodeError:
                raise MediaUrlError("it redirects to what is no URL") from None
        if status >= 500:
            raise _ServerFailedError(f"its server answered {status}")
        if status != 200:
            theirs = status >= 400 and status not in _LATER
            raise _failed(f"its server answered {status}", status=400 if theirs else 502)
        encoding = b",".join(headers.get(b"content-encoding", [])).strip().lower()
        if encoding not in (b"", b"identity"):
            raise _failed("its server sent it compressed, which it was not asked for")
        announced = None
        if b"transfer-encoding" not in headers and b"content-length" in headers:
            announced = int(headers[b"content-length"][0])
        if announced is not None and announced > self._settings.max_bytes:
            raise self._too_large(f"it has {announced} bytes")
        written = await self._text(response, held)
        keep_s = _keep_s(b",".join(headers.get(b"cache-control", [])).decode("latin-1").lower())
        return FetchedFile(text=written.end(), nbytes=written.nbytes, keep_s=keep_s)

    async def _text(self, response: httpcore.Response, held: Body) -> _Base64Text:
        """Return base64 of an answer's body."""
        text = _Base64Text()
        pieces = 0
        async for piece in _pieces_of(response):
            if text.nbytes + len(piece) > self._settings.max_bytes:
                raise self._too_large("it does not end there")
            text.add(piece)
            held.count(len(text.text))
            pieces += 1
            if pieces > PIECES_ANYWAY and text.nbytes < pieces * SMALLEST_PIECES:
                raise _failed("it comes in too many too small pieces")
            if pieces % PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        if not text.nbytes:
            raise _failed("its server sent nothing", status=400)
        return text

    def _too_large(self, what: str) -> MediaUrlError:
        return MediaUrlError(
            f"{what}: at most {self._settings.max_bytes} bytes are fetched; send a smaller one, or "
            "raise router.media_urls.max_bytes",
            status=413,
            code="media_too_large",
        )


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to no other of a name."""

    def __init__(self, policy: AddressPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve
        self._names = ThreadPoolExecutor(LOOKUPS, "epd-names")
        self._lookups = _Turns(LOOKUPS, LOOKUPS_OF_DOMAIN)
        self._network = httpcore.AnyIOBackend()

    def close(self) -> None:
        """Look up no more; a thread that waits for a name server is left alone."""
        self._names.shutdown(wait=False, cancel_futures=True)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of a name's addresses.

        Raises:
            MediaUrlError: One of them is not to be connected to, or there is none.
        """
        last: Exception | None = None
        for address in (await self._addresses(host, port))[:MAX_ADDRESSES]:
            try:
                stream = await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
                continue
            peer = stream.get_extra_info("server_addr")
            if not self._policy.allows(peer[0]):
                await stream.aclose()
                raise _not_public()
            return _Stream(stream)
        assert last is not None
        raise last

    async def _addresses(self, host: str, port: int) -> list[str]:
        turn = contextlib.AsyncExitStack()
        domain = ".".join(host.rsplit(".", 2)[-2:])
        await turn.enter_async_context(self._lookups.at(domain, math.inf))
        try:
            found = await asyncio.shield(self._looked_up(turn, host, port))
        except (OSError, UnicodeError) as error:
            raise _failed("its host is not known") from error
        if not found:
            raise _failed("its host is not known")
        if not all(self._policy.allows(address) for address in found):
            raise _not_public()
        return found

    async def _looked_up(self, turn: contextlib.AsyncExitStack, host: str, port: int) -> list[str]:
        # The system waits for a name server that does not answer for longer than a fetch does, and
        # the turn is that of the thread.
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._names, self._resolve, host, port)


class _Stream(httpcore.AsyncNetworkStream):
    """A connection of which little is read at a time until the headers are there.

    What comes in one piece is parsed in one go, and may be a thousand answers without an end.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self.in_head = True
        self._stream = stream
        self._nbytes = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has come."""
        if not self.in_head:
            return await self._stream.read(max_bytes, timeout)
        data = await self._stream.read(min(max_bytes, HEAD_PIECE_BYTES), timeout)
        self._nbytes += len(data)
        if self._nbytes > MAX_HEAD_BYTES:
            raise httpcore.RemoteProtocolError(f"more than {MAX_HEAD_BYTES} bytes of headers")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Return the connection, secured."""
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """Return what is known of the connection."""
        return self._stream.get_extra_info(info)


class _Turns:
    """So many at a time, in all and at each host; first come, first served at a host."""

    def __init__(self, most: int, most_of_host: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._most_of_host = most_of_host
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @contextlib.asynccontextmanager
    async def at(self, host: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a turn; that of the host first, so that a slow host takes no turns of others.

        Raises:
            MediaUrlError: None came in time.
        """
        turns, users = self._hosts.get(host) or (asyncio.Semaphore(self._most_of_host), 0)
        self._hosts[host] = (turns, users + 1)
        try:
            async with contextlib.AsyncExitStack() as held:
                try:
                    with anyio.fail_after(wait_s):
                        await held.enter_async_context(turns)
                        await held.enter_async_context(self._all)
                except TimeoutError as error:
                    raise MediaUrlError(
                        f"others were fetched for {wait_s:g} s; try again later",
                        status=503,
                        code="too_many_fetches",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                yield
        finally:
            turns, users = self._hosts.pop(host)
            if users > 1:
                self._hosts[host] = (turns, users - 1)


class _Base64Text:
    """Base64 of what comes in pieces.

    Attributes:
        text: That is written; one or two bytes wait for the next piece.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.text = bytearray()
        self._rest = b""

    def add(self, piece: bytes) -> None:
        """Write a piece."""
        self.nbytes += len(piece)
        if self._rest:
            piece = self._rest + piece
        whole = len(piece) - len(piece) % 3
        self._rest = piece[whole:]
        self.text += binascii.b2a_base64(memoryview(piece)[:whole], newline=False)

    def end(self) -> memoryview:
        """Return the text."""
        self.text += binascii.b2a_base64(self._rest, newline=False)
        return memoryview(self.text)


async def _pieces_of(response: httpcore.Response) -> AsyncIterator[bytes]:
    async for piece in response.aiter_stream():
        if piece:
            yield piece


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _keep_s(cache_control: str) -> float:
    if _NOT_KEPT.search(cache_control):
        return 0.0
    age = _MAX_AGE.search(cache_control)
    return float(age[1]) if age else float("inf")


class _ServerFailedError(MediaUrlError):
    """A server could not give a file, but may a moment later."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, status=502, code="media_url_failed")


def _failed(problem: str, *, status: int = 502) -> MediaUrlError:
    return MediaUrlError(problem, status=status, code="media_url_failed")


def _too_slow(within_s: float) -> MediaUrlError:
    return MediaUrlError(
        f"it did not come within {within_s:g} s",
        status=504,
        code="media_url_timeout",
    )


def _not_public() -> MediaUrlError:
    """Return the same for all addresses: clients learn no address of a network."""
    return MediaUrlError(
        "its host has an address that is not public, and of none of "
        "router.media_urls.allowed_networks"
    )
