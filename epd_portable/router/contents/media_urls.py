"""Media that requests name by URL: fetched once for all requests, and cached.

`LinkedItems` stands between the reader of a request, which may run in a thread, and the fetching of
what it finds, which begins at once. `MediaFetcher` has one fetch of a URL under way, however many
requests wait for it, and cancels it when none waits any more.
"""

from __future__ import annotations

import asyncio
import binascii
import collections
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping

from epd_portable.delivery.replies import unavailable
from epd_portable.errors import RequestError
from epd_portable.media.addresses import MediaUrlError, WebTarget, read_url
from epd_portable.media.limits import Modality
from epd_portable.router.contents.cut_text import Bytes
from epd_portable.router.contents.web_files import FetchedFile, Resolve, WebFiles
from epd_portable.router.http.incoming import Body
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.settings import MediaFetching

logger = logging.getLogger(__name__)

OVERHEAD_BYTES = 512
"""Of a cached file, in addition to its text and its URL."""

_MEDIA_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF....WEBP", "image/webp"),
    (b"BM", "image/bmp"),
    (b"II[*+]\0", "image/tiff"),
    (b"MM\0[*+]", "image/tiff"),
    (b"....ftyp(?:avi[fs]|mif1)", "image/avif"),
    (b"....ftyp", "video/mp4"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
    (b"RIFF....WAVE", "audio/wav"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3|\xff[\xe2-\xff]", "audio/mpeg"),
)
"""How files begin, and what is written into their data URLs. Items are named by it, too: of a file
that came by URL and one that a client inlined it should be the same."""
_FAMILIES: Mapping[Modality, tuple[str, ...]] = {
    "image": ("image/",),
    "video": ("video/", "image/"),
    "audio": ("audio/", "video/"),
}
"""What an item of a modality may be a file of."""


def media_type_of(text: Bytes, modality: Modality) -> str:
    """Return the media type of a file.

    Args:
        text: Its base64 text.
        modality: What it is to the model.
    """
    head = binascii.a2b_base64(bytes(text[:24]))
    for beginning, media_type in _MEDIA_TYPES:
        if re.match(beginning, head, re.DOTALL) and media_type.startswith(_FAMILIES[modality]):
            family, _, subtype = media_type.partition("/")
            return f"{modality if modality == 'video' else family}/{subtype}"
    return f"{modality}/octet-stream"


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
    """A file on its way, and how many requests wait for it."""

    def __init__(self, key: str, task: asyncio.Task[FetchedFile]) -> None:
        self.key = key
        self.task = task
        self.waiting = 0


class MediaFetcher:
    """Fetches files for all requests.

    Args:
        settings: What may be fetched, and how much.
        body: Returns what counts the memory of a file that is on its way.
        resolve: Looks names up; the system unless given.
    """

    def __init__(
        self,
        settings: MediaFetching,
        body: Callable[[], Body],
        metrics: Metrics,
        *,
        resolve: Resolve | None = None,
    ) -> None:
        self._metrics = metrics
        self._files = WebFiles(settings, body, resolve)
        self._under_way: dict[str, _Fetch] = {}
        self._kept = _Kept(settings.cache_bytes, settings.cache_s)

    async def close(self) -> None:
        """End what is on its way."""
        tasks = [fetch.task for fetch in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()

    @contextlib.contextmanager
    def of_request(self) -> Iterator[LinkedItems]:
        """Yield what one request names; what it alone waits for at the end is given up."""
        linked = LinkedItems(self)
        try:
            yield linked
        finally:
            linked.close()

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

    def join(self, target: WebTarget) -> FetchedFile | _Fetch:
        """Return a file that is kept, or wait with others for the one that is on its way."""
        key = target.url
        kept = self._kept.get(key)
        if kept is not None:
            self._metrics.media_urls.labels("cache").inc()
            return kept
        fetch = self._under_way.get(key)
        if fetch is None:
            self._metrics.media_urls.labels("fetch").inc()
            fetch = _Fetch(key, asyncio.get_running_loop().create_task(self._fetch(target)))
            self._under_way[key] = fetch
            fetch.task.add_done_callback(lambda task: self._ended(key, task))
        else:
            self._metrics.media_urls.labels("joined").inc()
        fetch.waiting += 1
        return fetch

    def leave(self, fetch: _Fetch) -> None:
        """Wait no longer; a fetch without waiting requests is cancelled."""
        fetch.waiting -= 1
        if not fetch.waiting and not fetch.task.done():
            fetch.task.cancel()
            # Who comes in this moment must not join what ends.
            self._under_way.pop(fetch.key, None)

    def _ended(self, key: str, task: asyncio.Task[FetchedFile]) -> None:
        fetch = self._under_way.get(key)
        if fetch is not None and fetch.task is task:
            del self._under_way[key]
        if not task.cancelled() and task.exception() is None:
            self._kept.put(key, task.result())

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
        self._files: dict[WebTarget, FetchedFile] = {}
        self._fetches: dict[WebTarget, _Fetch] = {}
        self._closed = False
        self.wanted = False
        self.nbytes = 0

    def find(self, url: Bytes, modality: Modality, where: str) -> tuple[str, Bytes] | None:
        """Return media type and base64 text; see `epd_portable.router.contents.media.Find`.

        What is not there is on its way at once; this may be called in another thread.
        """
        try:
            target = self._fetcher.target(bytes(url))
        except MediaUrlError as error:
            raise _of_item(error, where, _shown(bytes(url[:200]))) from error
        file = self._files.get(target)
        if file is not None:
            self.nbytes += len(file.text)
            return media_type_of(file.text, modality), file.text
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
        waits = {fetch.task for fetch in self._fetches.values()}
        if waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for target, where in self._places.items():
            fetch = self._fetches.get(target)
            if fetch is None or not fetch.task.done():
                continue
            try:
                self._files[target] = fetch.task.result()
            except RequestError as error:
                raise _of_item(error, where, target.shown) from error
            except asyncio.CancelledError:
                # The fetcher was closed: a request that was given up does not get here.
                raise unavailable("the router is stopping") from None
        return sum(len(file.text) for file in self._files.values())

    def close(self) -> None:
        """Wait for nothing any more."""
        self._closed = True
        for fetch in self._fetches.values():
            self._fetcher.leave(fetch)
        self._fetches.clear()

    def _begin(self, target: WebTarget) -> None:
        if self._closed or target in self._fetches or target in self._files:
            return
        found = self._fetcher.join(target)
        if isinstance(found, FetchedFile):
            self._files[target] = found
        else:
            self._fetches[target] = found


class _Kept:
    """Files that were fetched, for a while; the one longest not asked for goes first."""

    def __init__(self, most_bytes: int, most_s: float) -> None:
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._files: collections.OrderedDict[str, tuple[FetchedFile, float]] = (
            collections.OrderedDict()
        )
        self._nbytes = 0

    def get(self, key: str) -> FetchedFile | None:
        """Return a file that is there and not too old."""
        file, until = self._files.get(key, (None, 0.0))
        if file is not None and until < time.monotonic():
            self._drop(key)
            return None
        if file is not None:
            self._files.move_to_end(key)
        return file

    def put(self, key: str, file: FetchedFile) -> None:
        """Keep a file, if it may be and there is room."""
        keep_s = min(self._most_s, file.keep_s)
        nbytes = _size(key, file)
        if keep_s <= 0 or nbytes > self._most_bytes:
            return
        if key in self._files:
            self._drop(key)
        self._files[key] = file, time.monotonic() + keep_s
        self._nbytes += nbytes
        while self._nbytes > self._most_bytes:
            self._drop(next(iter(self._files)))

    def _drop(self, key: str) -> None:
        file, _ = self._files.pop(key)
        self._nbytes -= _size(key, file)


def _size(key: str, file: FetchedFile) -> int:
    return len(file.text) + len(key) + OVERHEAD_BYTES


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
