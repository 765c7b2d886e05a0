"""Media by URL: the rules under which vLLM's media connector fetches files.

The addresses of a name are looked up once, all of them are checked, and one of them is connected
to: a name with another address a moment later has no effect. Every redirect is checked in the same
way. A server's headers about a file are not trusted: vLLM finds the type from the content, and the
length is counted. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import anyio
import certifi
from aiohttp.abc import AbstractResolver
from cachetools import TLRUCache
from vllm.multimodal.media import MediaConnector
from yarl import URL

from epd_portable.config.front import MediaUrls
from epd_portable.errors import RequestError
from epd_portable.front.exchange import refused
from epd_portable.front.metrics import FrontMetrics
from epd_portable.media.addresses import (
    AddressPolicy,
    Domains,
    MediaUrlError,
    WebTarget,
    is_web,
    read_url,
    redirected,
)
from epd_portable.responses import RETRY_AFTER_S

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a name; blocks, and raises `OSError`."""

TIMEOUT_S = 10.0
"""Longest time of fetching one file, redirects and the wait for a connection included."""
CONNECT_S = 3.0
"""Longest time of connecting to one address."""
MAX_REDIRECTS = 3
MAX_ADDRESSES = 4
"""Addresses of one name that are tried one after the other."""
MAX_FETCHES = 64
MAX_FETCHES_OF_HOST = 8
"""Files that are fetched at a time, in all and from one host."""
LOOKUPS_OF_DOMAIN = 4
"""Names that are looked up at a time below one domain."""
AGAIN_AFTER_S = 0.2
"""Pause before a file is requested once more."""
CACHE_S = 300.0
"""Longest time for which a file is cached; its server can set a shorter one."""

_HEADERS = {
    "accept": "image/*, video/*, audio/*, */*;q=0.5",
    "accept-encoding": "identity",
    "user-agent": "epd-portable",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LATER = frozenset({408, 425, 429})
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=\"?(\d{1,9})")
_NOT_CACHED = re.compile(r"(?:^|[,\s])(?:no-store|no-cache|private)(?:$|[,\s=])")
_RESULTS = {502: "error", 504: "timeout", 413: "too_large", 503: "full"}
"""Results of fetches that failed, by status; of the others ``refused``."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A file on its way, and how many requests wait for it."""

    task: asyncio.Task[bytes]
    waiting: int = 0


class UrlFetcher(AbstractResolver):
    """Fetches files for all requests of one API server, and caches them.

    Args:
        most_bytes: Bytes of files that are on their way at a time.
        resolve: Looks names up; the system unless given.
    """

    def __init__(
        self,
        settings: MediaUrls,
        most_bytes: int,
        metrics: FrontMetrics,
        *,
        resolve: Resolve | None = None,
    ) -> None:
        self._settings = settings
        self._domains = Domains(settings.allowed_domains)
        self._policy = AddressPolicy(settings.allowed_networks)
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._coming_bytes = 0
        self._look_up = resolve or _look_up
        self._names = ThreadPoolExecutor(MAX_FETCHES, "epd-names")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._fetches: dict[str, _Fetch] = {}
        self._cache: TLRUCache[str, tuple[float, bytes]] = TLRUCache(
            settings.cache_bytes, lambda _, each, now: now + each[0], getsizeof=lambda x: len(x[1])
        )
        trusted = os.environ.get("SSL_CERT_FILE") or certifi.where()
        self._tls = ssl.create_default_context(cafile=trusted)
        self.loop = asyncio.get_running_loop()

    @cached_property
    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            resolver=self,
            use_dns_cache=False,
            force_close=True,
            limit=MAX_FETCHES,
            limit_per_host=MAX_FETCHES_OF_HOST,
            ssl=self._tls,
        )

    async def fetch(self, url: str) -> bytes:
        """Return a file; requests for one that is on its way wait for it together.

        Raises:
            MediaUrlError: The file is not fetched, or could not be.
        """
        try:
            target = self._allowed(read_url(url))
        except MediaUrlError:
            self._metrics.fetches.labels("refused").inc()
            raise
        key = target.url
        if (found := self._cache.get(key)) is not None:
            self._metrics.fetches.labels("cache").inc()
            return found[1]
        if (one := self._fetches.get(key)) is None:
            one = self._fetches[key] = _Fetch(self.loop.create_task(self._counted(target)))
        else:
            self._metrics.fetches.labels("joined").inc()
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting:
                one.task.cancel()
                if self._fetches.get(key) is one:
                    del self._fetches[key]

    async def _counted(self, target: WebTarget) -> bytes:
        result = "error"
        try:
            data = await self._within_time(target)
            result = "ok"
            return data
        except MediaUrlError as error:
            result = _RESULTS.get(error.status, "refused")
            level = logging.INFO if error.status < 500 else logging.WARNING
            logger.log(level, "%s: %s (%s)", target.shown, error, error.__cause__ or result)
            error.args = (f"media URL {target.shown}: {error}",)
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._metrics.fetches.labels(result).inc()

    async def _within_time(self, asked: WebTarget) -> bytes:
        target = asked
        try:
            with anyio.fail_after(TIMEOUT_S):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._ask_twice(target)
                    if isinstance(found, tuple):
                        with contextlib.suppress(ValueError):  # It is larger than the cache.
                            self._cache[asked.url] = found
                        return found[1]
                    target = self._allowed(redirected(target, found))
        except TimeoutError:
            problem = f"it did not come within {TIMEOUT_S:g} s"
            raise MediaUrlError(problem, status=504, code="media_url_timeout") from None
        raise MediaUrlError(f"more than {MAX_REDIRECTS} redirects are not followed")

    async def _ask_twice(self, target: WebTarget) -> str | tuple[float, bytes]:
        try:
            return await self._ask(target)
        except _ServerFailedError as error:
            logger.info("%s: %s: requested once more", target.shown, error)
        await asyncio.sleep(AGAIN_AFTER_S)
        return await self._ask(target)

    async def _ask(self, target: WebTarget) -> str | tuple[float, bytes]:
        """Return where a redirect leads, or how long a file may be cached and the file."""
        session = aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        url = URL(target.url, encoded=True)
        try:
            async with session, session.get(url, headers=_HEADERS, allow_redirects=False) as reply:
                return await self._taken(reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _failed("no connection could be made to its host") from error
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
            problem = "its server disconnected, or sent invalid HTTP"
            raise _ServerFailedError(problem) from error

    async def _taken(self, reply: aiohttp.ClientResponse) -> str | tuple[float, bytes]:
        status, headers, most = reply.status, reply.headers, self._settings.max_bytes
        if status in _REDIRECTS:
            if len(places := headers.getall("location", [])) != 1:
                raise _failed(f"its server responded {status} with {len(places)} locations")
            return places[0]
        if status >= 500:
            raise _ServerFailedError(f"its server responded {status}")
        if status != 200:
            theirs = status >= 400 and status not in _LATER
            raise _failed(f"its server responded {status}", status=400 if theirs else 502)
        coded = {each.strip().lower() for each in headers.getall("content-encoding", [])}
        if coded - {"", "identity"}:
            raise _failed("its server compressed it, unrequested")
        if (reply.content_length or 0) > most:
            raise _too_large(f"it has {reply.content_length} bytes", most)
        data = bytearray()
        try:
            async for piece in reply.content.iter_any():
                data += piece
                self._coming_bytes += len(piece)
                if len(data) > most:
                    raise _too_large("it is longer", most)
                if self._coming_bytes > self._most_bytes:
                    raise MediaUrlError(
                        "other files take the memory of front.max_bodies_bytes: try again later",
                        status=503,
                        code="busy",
                        retry_after_s=RETRY_AFTER_S,
                    )
        finally:
            self._coming_bytes -= len(data)
        if not data:
            raise _failed("its server sent nothing", status=400)
        return _cache_s(headers.get("cache-control", "").lower()), bytes(data)

    def _allowed(self, target: WebTarget) -> WebTarget:
        self._domains.check(target)
        # aiohttp looks up names only.
        if target.address is not None:
            self._check([str(target.address)])
        return target

    def _check(self, addresses: list[str]) -> None:
        if not all(map(self._policy.allows, addresses)):
            # One message for all addresses: clients learn no address of a network.
            raise MediaUrlError(
                "its host has an address that is not public, and of none of "
                "front.media.urls.allowed_networks"
            )

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[Any]:
        """Return checked addresses of a name; see aiohttp's ``AbstractResolver``.

        Raises:
            MediaUrlError: One of them may not be connected to, or there is none.
        """
        domain = ".".join(host.rsplit(".", 2)[-2:])
        turns = self._turns.setdefault(domain, asyncio.Semaphore(LOOKUPS_OF_DOMAIN))
        await turns.acquire()
        # The turn is the thread's: the system waits for a name server longer than a fetch does.
        lookup = self.loop.run_in_executor(self._names, self._look_up, host, port)
        lookup.add_done_callback(lambda _: turns.release())
        try:
            found = await asyncio.shield(lookup)
        except (OSError, UnicodeError) as error:
            raise _failed("its host is unknown") from error
        if not found:
            raise _failed("its host is unknown")
        self._check(found)
        return [
            {
                "hostname": host,
                "host": each,
                "port": port,
                "family": socket.AF_INET6 if ":" in each else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            }
            for each in found[:MAX_ADDRESSES]
        ]

    async def close(self) -> None:
        """Look up no more names; a thread that waits for a name server is not waited for."""
        self._names.shutdown(wait=False, cancel_futures=True)


class _Fetching(MediaConnector):
    """Mixin for vLLM's media connector: a `UrlFetcher` fetches what has an ``http(s)`` URL."""

    fetcher: UrlFetcher

    def load_from_url(self, url: str, media_io: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's ``MediaConnector``; called by other threads than the server's."""
        if not is_web(url[:6].encode("utf-8", "replace")):
            with _refusing(url):
                return super().load_from_url(url, media_io, *args, **kwargs)
        fetched = asyncio.run_coroutine_threadsafe(self._fetched(url), self.fetcher.loop)
        return media_io.load_bytes(fetched.result())

    async def load_from_url_async(self, url: str, media_io: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_web(url[:6].encode("utf-8", "replace")):
            with _refusing(url):
                return await super().load_from_url_async(url, media_io, *args, **kwargs)
        data = await self._fetched(url)
        return await asyncio.to_thread(media_io.load_bytes, data)

    async def _fetched(self, url: str) -> bytes:
        try:
            return await self.fetcher.fetch(url)
        except MediaUrlError as error:
            raise refused(error) from error


@contextlib.contextmanager
def _refusing(url: str) -> Iterator[None]:
    """Respond 400 where vLLM responds 500 or 501: to files, and to data that is not base64."""
    try:
        yield
    except NotImplementedError as error:
        problem = "data URL: only base64 is read. Send data:TYPE;base64,DATA"
        raise refused(RequestError(problem, status=400, code="invalid_request")) from error
    except (OSError, RuntimeError) as error:
        if url[:5].lower() != "file:":
            raise
        # No reason: clients learn nothing of the files of this machine.
        problem = (
            "file URL: the file is not below engine_args.allowed_local_media_path, or cannot be "
            "read. Send it as a data URL"
        )
        raise refused(RequestError(problem, status=400, code="invalid_request")) from error


def fetching_by(fetcher: UrlFetcher) -> type[MediaConnector]:
    """Return a mixin for vLLM's media connector, which then fetches by these rules only."""
    return type("Fetching", (_Fetching,), {"fetcher": fetcher})


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _cache_s(cache_control: str) -> float:
    if _NOT_CACHED.search(cache_control):
        return 0.0
    age = _MAX_AGE.search(cache_control)
    return min(CACHE_S, float(age[1])) if age else CACHE_S


class _ServerFailedError(MediaUrlError):
    """A server that could not send a file, but may a moment later."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, status=502, code="media_url_failed")


def _failed(problem: str, *, status: int = 502) -> MediaUrlError:
    return MediaUrlError(problem, status=status, code="media_url_failed")


def _too_large(what: str, most: int) -> MediaUrlError:
    return MediaUrlError(
        f"{what}: at most {most} bytes are fetched; send a smaller file, or raise "
        "front.media.urls.max_bytes",
        status=413,
        code="media_too_large",
    )
