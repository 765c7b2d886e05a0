"""Media that requests name by URL: fetched once for all requests, and cached.

`LinkedItems` stands between the reader of a request, which may run in a thread, and the fetching of
what it finds, which begins at once. `MediaFetcher` has one fetch of a URL under way, however many
requests wait for it, and cancels it when none waits any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable

from epd_portable.config.routing import MediaUrls
from epd_portable.delivery.replies import unavailable
from epd_portable.errors import RequestError
from epd_portable.media.addresses import MediaUrlError, WebTarget, read_url
from epd_portable.router.contents.body import Body
from epd_portable.router.contents.cut_text import Bytes
from epd_portable.router.contents.web_files import FetchedFile, Resolve, WebFiles
from epd_portable.router.observability.metrics import Metrics

logger = logging.getLogger(__name__)

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


class _Fetch:
    """A file on its way, or kept.

    Attributes:
        waiting: Requests that wait for it.
        nbytes: That it takes while it is kept.
        until: When it is not kept any more.
    """

    def __init__(self, key: str, task: asyncio.Task[FetchedFile]) -> None:
        self.key = key
        self.task = task
        self.waiting = 0
        self.nbytes = 0
        self.until = 0.0

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
        self._under_way: dict[str, _Fetch] = {}
        self._kept: collections.OrderedDict[str, _Fetch] = collections.OrderedDict()
        self._kept_bytes = 0

    async def close(self) -> None:
        """End what is on its way."""
        tasks = [fetch.task for fetch in self._under_way.values()]
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
        key, source = target.url, "cache"
        fetch = self._kept.get(key)
        if fetch is not None and fetch.until < time.monotonic():
            self._drop(fetch)
            fetch = None
        if fetch is not None:
            self._kept.move_to_end(key)
        elif (fetch := self._under_way.get(key)) is not None:
            source = "joined"
        else:
            source = "fetch"
            task = asyncio.get_running_loop().create_task(self._fetch(target))
            fetch = self._under_way[key] = _Fetch(key, task)
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
            self._under_way.pop(fetch.key, None)

    def _ended(self, fetch: _Fetch, _: asyncio.Task[FetchedFile]) -> None:
        """Keep a file, if it was obtained, may be kept, and there is room."""
        if self._under_way.get(fetch.key) is fetch:
            del self._under_way[fetch.key]
        if (file := fetch.file) is None:
            return
        keep_s = min(CACHE_S, file.keep_s)
        nbytes = len(file.text) + len(fetch.key) + OVERHEAD_BYTES
        if keep_s <= 0 or nbytes > self._settings.cache_bytes:
            return
        if fetch.key in self._kept:
            self._drop(self._kept[fetch.key])
        fetch.nbytes, fetch.until = nbytes, time.monotonic() + keep_s
        self._kept[fetch.key] = fetch
        self._kept_bytes += nbytes
        while self._kept_bytes > self._settings.cache_bytes:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, kept: _Fetch) -> None:
        del self._kept[kept.key]
        self._kept_bytes -= kept.nbytes

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

    def find(self, url: Bytes, where: str) -> Bytes | None:
        """Return base64 text; see `epd_portable.router.contents.media.Find`.

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
