"""Media that requests name by URL: fetched once for all requests, and cached.

`LinkedItems` stands between the reader of a request, which may run in a thread, and the fetching of
what it finds, which begins at once. `MediaFetcher` has one fetch of a URL under way, however many
requests wait for it, and cancels it when none waits any more. `WebFiles` asks for a file by HTTP,
from where that is allowed, bounded in every way:

The addresses of a name are looked up once, all of them are checked, and one of these is connected
to: a name that is another machine's a moment later leads nowhere. Each redirect goes the same way.
A server's headers about a file are not believed: the engine finds its type from its content, and
its length is counted. Pieces are encoded as base64 as they come, so that a large file blocks no
other request.
"""

from __future__ import annotations

import asyncio
import binascii
import collections
import contextlib
import functools
import logging
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio
import msgspec

from epd_portable.config.routing import MediaUrls
from epd_portable.errors import RequestError
from epd_portable.media.addresses import (
    AddressPolicy,
    Domains,
    MediaUrlError,
    WebTarget,
    read_url,
    redirected,
)
from epd_portable.placement.replies import RETRY_AFTER_S, unavailable
from epd_portable.router.contents.body import Body
from epd_portable.router.contents.cut_text import Bytes
from epd_portable.router.http.upstream import InstanceAnswer, Upstream, UpstreamError
from epd_portable.router.observability.metrics import Metrics
from epd_portable.wire.outcomes import FailureKind

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a name; blocks, and raises `OSError`."""

TIMEOUT_S = 10.0
"""Longest time of fetching one file, redirects included, and longest wait for a turn."""
MAX_REDIRECTS = 3
MAX_FETCHES = 64
MAX_FETCHES_OF_HOST = 8
"""At a time, in all and from one host."""
MAX_ADDRESSES = 4
"""Of one name, that are tried one after the other."""
CONNECT_S = 3.0
"""Longest time of connecting to one of them."""
AGAIN_AFTER_S = 0.2
"""Pause before a file is asked for once more."""
LOOKUPS = 64
LOOKUPS_OF_DOMAIN = 4
"""Names that are looked up at a time, in all and below one domain."""
PIECES_ANYWAY = 2048
SMALLEST_PIECES = 128
"""So many pieces of a file may be of any size; of more, each must have so many bytes on average."""

_HEADERS = {
    "accept": "image/*, video/*, audio/*, */*;q=0.5",
    "user-agent": "epd-portable",
    "connection": "close",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LATER = frozenset({408, 425, 429})
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=\"?(\d{1,9})")
_NOT_KEPT = re.compile(r"(?:^|[,\s])(?:no-store|no-cache|private)(?:$|[,\s=])")
CACHE_S = 300.0
"""How long a file is kept; its server can ask for less."""
OVERHEAD_BYTES = 512
"""Of a cached file, in addition to its text and its URL."""

_RESULTS = {
    "media_url_failed": "error",
    "media_url_timeout": "timeout",
    "media_too_large": "too_large",
    "body_too_large": "too_large",
    "too_many_fetches": "full",
    "too_many_bytes": "full",
}
"""How a fetch that an error ended is counted, by the error's code; the others as ``refused``."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A file on its way, or kept.

    Attributes:
        waiting: Requests that wait for it.
        nbytes: That it takes while it is kept; 0 before.
        until: When it is not kept any more.
    """

    key: str
    task: asyncio.Task[FetchedFile]
    waiting: int = 0
    nbytes: int = 0
    until: float = math.inf

    @property
    def file(self) -> FetchedFile | None:
        """The file, if it is there."""
        task = self.task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


class MediaFetcher:
    """Fetches files for all requests; the one longest not asked for is dropped first.

    Args:
        settings: What may be fetched, and how much.
        body: Returns what counts the memory of a file that is on its way.
        resolve: Looks names up; the system unless given.
    """

    def __init__(
        self,
        settings: MediaUrls,
        body: Callable[[], Body],
        metrics: Metrics,
        *,
        resolve: Resolve | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._files = WebFiles(settings, body, resolve)
        self._fetches: collections.OrderedDict[str, _Fetch] = collections.OrderedDict()
        self._kept_bytes = 0

    async def close(self) -> None:
        """End what is on its way."""
        tasks = [fetch.task for fetch in self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()

    def of_request(self) -> contextlib.closing[LinkedItems]:
        """Return what one request names; what it alone waits for at the end is given up."""
        return contextlib.closing(LinkedItems(self))

    def target(self, url: bytes) -> WebTarget:
        """Return what a URL of a client asks for.

        Raises:
            MediaUrlError: It is not fetched.
        """
        try:
            target = read_url(url.decode())
            self._files.domains.check(target)
        except UnicodeDecodeError:
            raise MediaUrlError("it is no text") from None
        except MediaUrlError:
            self._metrics.fetches.labels("refused").inc()
            raise
        return target

    def join(self, target: WebTarget) -> _Fetch:
        """Return a file that is kept, or wait with others for the one that is on its way."""
        key = target.url
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.until < time.monotonic():
            self._drop(fetch)
            fetch = None
        if fetch is not None:
            source = "cache" if fetch.nbytes else "joined"
            self._fetches.move_to_end(key)
        else:
            source = "fetch"
            task = asyncio.get_running_loop().create_task(self._fetch(target))
            fetch = self._fetches[key] = _Fetch(key, task)
            task.add_done_callback(functools.partial(self._ended, fetch))
        self._metrics.media_urls.labels(source).inc()
        fetch.waiting += 1
        return fetch

    def leave(self, fetch: _Fetch) -> None:
        """Wait no longer; a fetch without waiting requests is cancelled."""
        fetch.waiting -= 1
        if not fetch.waiting and not fetch.task.done():
            fetch.task.cancel()
            # Who comes in this moment must not join what ends.
            self._fetches.pop(fetch.key, None)

    def _ended(self, fetch: _Fetch, _: asyncio.Task[FetchedFile]) -> None:
        """Keep a file, if it was obtained, may be kept, and there is room."""
        if self._fetches.get(fetch.key) is not fetch:  # Given up.
            return
        file = fetch.file
        keep_s = 0.0 if file is None else min(CACHE_S, file.keep_s)
        nbytes = 0 if file is None else len(file.text) + len(fetch.key) + OVERHEAD_BYTES
        if keep_s <= 0 or nbytes > self._settings.cache_bytes:
            self._drop(fetch)
            return
        fetch.nbytes, fetch.until = nbytes, time.monotonic() + keep_s
        self._kept_bytes += nbytes
        while self._kept_bytes > self._settings.cache_bytes:
            self._drop(next(each for each in self._fetches.values() if each.nbytes))

    def _drop(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.key]
        self._kept_bytes -= fetch.nbytes

    async def _fetch(self, target: WebTarget) -> FetchedFile:
        """Fetch a file, and count how that ended."""
        started = time.monotonic()
        result = "error"
        try:
            file = await self._files.fetch(target)
            result = "ok"
            self._metrics.fetched_bytes.inc(file.nbytes)
            self._metrics.fetch_s.observe(time.monotonic() - started)
            return file
        except RequestError as error:
            result = _RESULTS.get(error.code, "refused")
            level = logging.INFO if error.status < 500 else logging.WARNING
            logger.log(level, "%s: %s (%s)", target.shown, error, error.__cause__ or result)
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._metrics.fetches.labels(result).inc()


class LinkedItems:
    """What one request names by URL.

    Attributes:
        wanted: Something was asked for that was not there.
        nbytes: Of what was fetched, as often as it is in the request.
    """

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher
        self._loop = asyncio.get_running_loop()
        self._places: dict[WebTarget, str] = {}
        self._fetches: dict[WebTarget, _Fetch] = {}
        self._closed = False
        self.wanted = False
        self.nbytes = 0

    def find_media(self, url: Bytes, where: str) -> Bytes | None:
        """Return base64 text; see `epd_portable.router.contents.media.FindMedia`.

        What is not there is on its way at once; this may be called in another thread.
        """
        try:
            target = self._fetcher.target(bytes(url))
        except MediaUrlError as error:
            raise _of_item(error, where, _shown(bytes(url[:200]))) from error
        fetch = self._fetches.get(target)
        if fetch is not None and (file := fetch.file) is not None:
            self.nbytes += len(file.text)
            return file.text
        self.wanted = True
        if target not in self._places:
            self._places[target] = where
            self._loop.call_soon_threadsafe(self._begin, target)
        return None

    async def fetch(self) -> int:
        """Return when everything is there, and how many bytes it has.

        Raises:
            RequestError: Something cannot be obtained; the first of it in the request, of what is
                known by then.
        """
        self.nbytes = 0
        for target in self._places:
            self._begin(target)
        waits = [fetch.task for fetch in self._fetches.values()]
        await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        nbytes = 0
        for target, where in self._places.items():
            task = self._fetches[target].task
            try:
                nbytes += len(task.result().text) if task.done() else 0
            except RequestError as error:
                raise _of_item(error, where, target.shown) from error
            except asyncio.CancelledError:
                # The fetcher was closed: a request that was given up does not get here.
                raise unavailable("the router is stopping") from None
        return nbytes

    def close(self) -> None:
        """Wait for nothing any more."""
        self._closed = True
        for fetch in self._fetches.values():
            self._fetcher.leave(fetch)
        self._fetches.clear()

    def _begin(self, target: WebTarget) -> None:
        if not self._closed and target not in self._fetches:
            self._fetches[target] = self._fetcher.join(target)


def _shown(url: bytes) -> str:
    """Return the beginning of a URL that cannot be taken apart; never what signs or opens it."""
    if b"@" in url:
        return repr(url[: url.find(b":") + 1].decode("latin-1")) + "…"
    head = re.split(rb"[?#]", url, maxsplit=1)[0]
    shown = repr(head[:80].decode("utf-8", "replace"))
    return shown + ("…" if len(head) > 80 or len(head) < len(url) else "")


def _of_item(error: RequestError, where: str, shown: str) -> RequestError:
    """Return an error with the item that it is about."""
    return RequestError(
        f"{where}: {shown}: {error}",
        status=error.status,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


# One file, by HTTP.


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
    """Fetches files, one call for each; see `MediaFetcher`."""

    def __init__(
        self, settings: MediaUrls, body: Callable[[], Body], resolve: Resolve | None
    ) -> None:
        # Loaded where files are fetched only.
        import httpx

        self._settings = settings
        self._body = body
        self.domains = Domains(settings.allowed_domains)
        self._policy = AddressPolicy(settings.allowed_networks)
        self._resolve = resolve or _resolve
        self._names = ThreadPoolExecutor(LOOKUPS, "epd-names")
        self._lookups = _Turns(LOOKUPS, LOOKUPS_OF_DOMAIN)
        self._tls = httpx.create_ssl_context(trust_env=True)
        self._turns = _Turns(MAX_FETCHES, MAX_FETCHES_OF_HOST)

    def close(self) -> None:
        """Look up no more; a thread that waits for a name server is left alone."""
        self._names.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, target: WebTarget) -> FetchedFile:
        """Fetch a file, which was checked to be allowed, from where redirects lead.

        A turn at a host is given back before the next host's is waited for.

        Raises:
            RequestError: It cannot be obtained, or there is no memory for it.
        """
        seen = {target}
        left_s = within_s = TIMEOUT_S
        while True:
            async with self._turns.at(target.host, within_s):
                begun = time.monotonic()
                try:
                    with anyio.fail_after(left_s), self._body() as held:
                        answer = await self._ask_twice(target, held)
                except TimeoutError as error:
                    problem = f"it did not come within {within_s:g} s"
                    raise MediaUrlError(problem, status=504, code="media_url_timeout") from error
            left_s = max(left_s - (time.monotonic() - begun), 0.0)
            if isinstance(answer, FetchedFile):
                return answer
            target = redirected(target, answer)
            if target in seen:
                raise MediaUrlError("its redirects go round in a circle")
            seen.add(target)
            if len(seen) > MAX_REDIRECTS + 1:
                raise MediaUrlError(f"more than {MAX_REDIRECTS} redirects are not followed")
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
        # Of its own: what a server sends beyond its answer must not answer the next request.
        upstream = Upstream(_HEADERS, addresses=self._addresses, tls=self._tls)
        try:
            answer = await upstream.request("GET", target.url, connect_s=CONNECT_S)
            return await self._taken(answer, held)
        except UpstreamError as error:
            if error.kind in (FailureKind.UNREACHABLE, FailureKind.UNAVAILABLE):
                raise _failed("no connection could be made to its host") from error
            problem = "its server broke off, or what it answered is no HTTP"
            raise _ServerFailedError(problem) from error
        finally:
            await upstream.close()

    async def _taken(self, answer: InstanceAnswer, held: Body) -> FetchedFile | str:
        status, headers = answer.status, answer.headers
        if status in _REDIRECTS:
            if "location" not in headers:
                raise _failed(f"its server answered {status} without a place to go to")
            return headers["location"]
        if status >= 500:
            raise _ServerFailedError(f"its server answered {status}")
        if status != 200:
            theirs = status >= 400 and status not in _LATER
            raise _failed(f"its server answered {status}", status=400 if theirs else 502)
        content = headers.get("content-encoding", "identity").lower()
        transfer = headers.get("transfer-encoding", "chunked").lower()
        if content not in ("", "identity") or transfer != "chunked":
            raise _failed("its server sent it compressed, which it was not asked for")
        announced = headers.get("content-length", "")
        if announced and int(announced) > self._settings.max_bytes:
            raise self._too_large(f"it has {announced} bytes")
        text, rest, nbytes = bytearray(), b"", 0
        while piece := await answer.piece():
            nbytes += len(piece)
            if nbytes > self._settings.max_bytes:
                raise self._too_large("it does not end there")
            if answer.pieces > PIECES_ANYWAY and nbytes < answer.pieces * SMALLEST_PIECES:
                raise _failed("it comes in too many too small pieces")
            piece = rest + piece
            whole = len(piece) - len(piece) % 3
            rest = piece[whole:]
            text += binascii.b2a_base64(memoryview(piece)[:whole], newline=False)
            held.count(len(text))
        if not nbytes:
            raise _failed("its server sent nothing", status=400)
        text += binascii.b2a_base64(rest, newline=False)
        keep_s = _keep_s(headers.get("cache-control", "").lower())
        return FetchedFile(text=memoryview(text), nbytes=nbytes, keep_s=keep_s)

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name that are to be tried.

        Raises:
            MediaUrlError: One of them is not to be connected to, or there is none.
        """
        turn = contextlib.AsyncExitStack()
        domain = ".".join(host.rsplit(".", 2)[-2:])
        await turn.enter_async_context(self._lookups.at(domain, math.inf))
        try:
            found = await asyncio.shield(self._looked_up(turn, host, port))
        except (OSError, UnicodeError) as error:
            raise _failed("its host is not known") from error
        if not found:
            raise _failed("its host is not known")
        if not all(map(self._policy.allows, found)):
            # The same for all addresses: clients learn no address of a network.
            raise MediaUrlError(
                "its host has an address that is not public, and of none of "
                "router.media_urls.allowed_networks"
            )
        return found[:MAX_ADDRESSES]

    async def _looked_up(self, turn: contextlib.AsyncExitStack, host: str, port: int) -> list[str]:
        # The system waits for a name server that does not answer for longer than a fetch does, and
        # the turn is that of the thread.
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._names, self._resolve, host, port)

    def _too_large(self, what: str) -> MediaUrlError:
        return MediaUrlError(
            f"{what}: at most {self._settings.max_bytes} bytes are fetched; send a smaller one, or "
            "raise router.media_urls.max_bytes",
            status=413,
            code="media_too_large",
        )


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
