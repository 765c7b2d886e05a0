"""Bounds on decoding in an API server of the front, applied where media files are opened.

When the server starts, `bound_process`

- lets Pillow open `IMAGE_FORMATS` only, up to ``max_item_pixels``, with bounded headers and pixels;
- puts a subclass of vLLM's media connector in its place, which counts the items and the pixels of
  each request, frames of films included, before they are decoded;
- limits the memory of the process, if ``max_memory_bytes`` is set.

What is refused raises `ValueError`, for which vLLM returns 400. The pixels of a film's frame and
the seconds of sound are bounded by vLLM (``VLLM_MAX_IMAGE_PIXELS``,
``VLLM_MAX_AUDIO_DECODE_DURATION_S``), which the launcher sets.
"""

from __future__ import annotations

import binascii
import io
import logging
import resource
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import cv2
import vllm.envs
from PIL import Image, ImageFile, UnidentifiedImageError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.video import VideoBackend

from epd_portable.config.front import MediaSection
from epd_portable.vllm_plugin import avif

logger = logging.getLogger(__name__)

IMAGE_FORMATS = frozenset(
    {
        *("AVIF", "BMP", "DDS", "DIB", "GIF", "ICO", "IM", "JPEG", "JPEG2000", "MSP", "PCX"),
        *("PNG", "PPM", "QOI", "SGI", "SPIDER", "TGA", "TIFF", "WEBP", "XBM"),
    }
)
"""Pillow's names of the formats that are opened: those that it writes and vLLM reads.

Not BLP and ICNS: they hold a JPEG or PNG, which Pillow decodes regardless of the stated size.
"""
FEWEST_READS = 4096
BYTES_A_READ = 64
"""Reads of an image's headers: a fixed number, and one for each so many bytes of the file. Headers
of single bytes or empty chunks would otherwise take seconds."""
READS_A_PIXEL = 4
"""Further reads for each pixel of a format that Pillow decodes in Python."""
PYTHON_PIXELS = 32
"""Pixels in the request's budget for each pixel that Pillow decodes in Python: QOI, 16-bit PPM,
run-length BMP and others take a microsecond a pixel."""
_UNREADABLE = (
    *(SyntaxError, EOFError, LookupError, ArithmeticError, TypeError, AttributeError),
    *(AssertionError, OSError, struct.error, zlib.error, cv2.error),
)
"""Exceptions that decoders raise for a broken file, in addition to `ValueError`."""


class MediaRefusedError(ValueError):
    """A media file is not decoded; vLLM returns 400 with the message."""


class RequestBudget:
    """Counts the media of one request: at most ``max_items`` and ``max_request_pixels``."""

    def __init__(self, limits: MediaSection) -> None:
        self._limits = limits
        self._items = 0
        self._pixels = 0
        self._lock = threading.Lock()

    def add_item(self) -> None:
        """Count an item before it is fetched or decoded."""
        with self._lock:
            self._items += 1
        self.check_items()

    def check_items(self) -> None:
        """Raise `MediaRefusedError` if the request has too many items."""
        if self._items > self._limits.max_items:
            raise _too_large(
                f"this request has {self._items} images, videos and audio clips or more",
                self._limits.max_items,
                "max_items",
            )

    def charge(self, pixels: int) -> None:
        """Count pixels before they are decoded; `MediaRefusedError` if there are too many."""
        with self._lock:
            self._pixels += pixels
            total = self._pixels
        if total > self._limits.max_request_pixels:
            raise _too_large(
                f"the media of this request have {total} pixels or more",
                self._limits.max_request_pixels,
                "max_request_pixels",
            )


_budget: ContextVar[RequestBudget | None] = ContextVar("epd_request_budget", default=None)


def begin_request(limits: MediaSection) -> None:
    """Give the request of the present task a `RequestBudget`."""
    _budget.set(RequestBudget(limits))


def bound_process(limits: MediaSection, *fetching: type[MediaConnector]) -> None:
    """Bound what this process decodes from here on; a second call replaces the first.

    Args:
        fetching: Mixins for vLLM's media connector: what they fetch is bounded as well.
    """
    bound_pillow(limits)
    if not hasattr(VideoBackend, "read_frames"):
        _bound_opencv()
    name = vllm.envs.VLLM_MEDIA_CONNECTOR
    base = MEDIA_CONNECTOR_REGISTRY.name2class[name]
    base = getattr(base, "base", base)
    given = {"limits": limits, "base": base}
    made = type(f"Bounded{base.__name__}", (_Bounded, *fetching, base), given)
    MEDIA_CONNECTOR_REGISTRY.register(name)(made)
    if limits.max_memory_bytes is not None:
        limit_memory(limits.max_memory_bytes)


def limit_memory(more_bytes: int) -> None:
    """Let this process take so many bytes of memory more; beyond them, `MemoryError` is raised.

    Private writable mappings count (``RLIMIT_DATA``), those without pages included.
    """
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    most = int(line.split()[1]) * 1024 + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    logger.info("memory limited to %d MiB (RLIMIT_DATA)", most >> 20)


def bound_pillow(limits: MediaSection) -> None:
    """Let Pillow open `IMAGE_FORMATS` only, each within the limits."""
    Image.init()
    # Pillow warns from this on, and refuses from twice as much on.
    Image.MAX_IMAGE_PIXELS = max(limits.max_item_pixels // 2, 1)
    for name, (factory, accept) in list(Image.OPEN.items()):
        if name in IMAGE_FORMATS:
            factory = getattr(factory, "bounded", factory)
            Image.register_open(name, _bounded_factory(factory, limits), accept)
        else:
            Image.register_open(name, factory, lambda prefix: False)


Factory = Callable[[IO[bytes], "str | bytes"], ImageFile.ImageFile]


def _bounded_factory(factory: Factory, limits: MediaSection) -> Factory:
    """Return a factory of Pillow's that opens images within limits.

    Raises:
        MediaRefusedError: By the factory; of its kind no other format is tried.
    """

    def open_bounded(file: IO[bytes], filename: str | bytes) -> ImageFile.ImageFile:
        data = file.getvalue() if isinstance(file, io.BytesIO) else file.read()
        counted = _CountedReads(data)
        try:
            image = factory(counted, filename)
        except Image.DecompressionBombError as error:
            raise _bomb(error, limits) from error
        tags: Any = getattr(image, "tag_v2", {})
        tile = int(tags.get(322, 0)) * int(tags.get(323, 0))
        if max(image.width * image.height, tile) > limits.max_item_pixels:
            raise _too_large(
                f"an image of {image.width} × {image.height} pixels"
                + (f" in tiles of {tile}" if tile else ""),
                limits.max_item_pixels,
                "max_item_pixels",
            )
        pixels = image.width * image.height
        in_python = any(each[0] in Image.DECODERS for each in getattr(image, "tile", ()))
        budget = _budget.get()
        if budget is not None:
            budget.charge(pixels * PYTHON_PIXELS if in_python else pixels)
        if in_python:
            counted.allow(READS_A_PIXEL * pixels)
        if image.format == "AVIF":
            image._decoder = avif.FrameDecoder(data, pixels)  # type: ignore[attr-defined]
        return image

    open_bounded.bounded = factory  # type: ignore[attr-defined]
    return open_bounded


class _CountedReads(io.BytesIO):
    """A file with a bounded number of reads, and of bytes that they return in all."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads = FEWEST_READS + len(data) // BYTES_A_READ
        self._nbytes = 4 * len(data) + (1 << 20)
        self._ends = FEWEST_READS

    def allow(self, reads: int) -> None:
        """Allow further reads."""
        self._reads += reads

    def read(self, size: int | None = -1) -> bytes:
        """Return what is there; raises `MediaRefusedError` beyond the bounds."""
        data = super().read(size)
        self._reads -= 1
        self._nbytes -= len(data)
        self._ends -= not data
        if self._reads < 0 or self._nbytes < 0:
            raise MediaRefusedError(
                "image: more reads than its bytes and pixels allow. Save it again without metadata"
            )
        if self._ends < 0:
            raise MediaRefusedError("image: truncated. Send the whole file")
        return data


class _Bounded(MediaConnector):
    """Mixin for vLLM's media connector: what it loads counts in the request's budget."""

    limits: MediaSection

    def load_from_url(self, url: str, media_io: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_from_url(url, self._bounded(media_io), *args, **kwargs)

    async def load_from_url_async(self, url: str, media_io: Any, *args: Any, **kwargs: Any) -> Any:
        return await super().load_from_url_async(url, self._bounded(media_io), *args, **kwargs)

    def _bounded(self, media_io: Any) -> _BoundedIO:
        budget = _budget.get() or RequestBudget(self.limits)
        budget.add_item()
        return _BoundedIO(media_io, self.limits, budget)


class _BoundedIO(MediaIO[Any]):
    """A media loader of vLLM, within a budget; runs in vLLM's threads."""

    def __init__(self, inner: Any, limits: MediaSection, budget: RequestBudget) -> None:
        self._inner = inner
        self._limits = limits
        self._budget = budget
        if hasattr(inner, "video_loader"):
            inner.video_loader = _bounded_films(type(inner.video_loader), limits, budget)()

    def get_max_bytes(self, *args: Any, **kwargs: Any) -> int | None:
        most: int | None = self._inner.get_max_bytes(*args, **kwargs)
        return most

    def load_bytes(self, data: bytes, *args: Any, **kwargs: Any) -> Any:
        return self._load(self._inner.load_bytes, data, *args, **kwargs)

    def load_base64(self, media_type: str, data: str, *args: Any, **kwargs: Any) -> Any:
        frames = data.count(",") + 1
        if frames > self._limits.max_video_frames:
            raise _too_large(
                f"a list of {frames} frames", self._limits.max_video_frames, "max_seconds"
            )
        return self._load(self._inner.load_base64, media_type, data, *args, **kwargs)

    def load_file(self, filepath: Path, *args: Any, **kwargs: Any) -> Any:
        return self._load(self._inner.load_file, filepath, *args, **kwargs)

    def _load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # vLLM starts to load all items of a request before it raises the first refusal.
        self._budget.check_items()
        self._budget.charge(0)  # Pillow decodes an icon before its pixels can be counted.
        token = _budget.set(self._budget)
        try:
            return load(*args, **kwargs)
        except Image.DecompressionBombError as error:
            raise _bomb(error, self._limits) from error
        except MemoryError as error:
            raise MediaRefusedError(
                "decoding this file needs more memory than there is: send a smaller one, or raise "
                "front.media.max_memory_bytes"
            ) from error
        except binascii.Error as error:
            raise MediaRefusedError(
                f"the data of this image, video or sound are no base64: {error}"
            ) from error
        except (ValueError, UnidentifiedImageError) as error:
            if not isinstance(error.__cause__ or error, UnidentifiedImageError):
                raise
            raise MediaRefusedError(
                "image: unknown format. Send " + ", ".join(sorted(IMAGE_FORMATS))
            ) from error
        except _UNREADABLE as error:
            raise MediaRefusedError(f"this file cannot be decoded: {error}") from error
        finally:
            _budget.reset(token)


def _bounded_films(loader: type[Any], limits: MediaSection, budget: RequestBudget) -> type[Any]:
    """Return a video loader of vLLM's that refuses a film before it makes space for its frames."""

    class BoundedFilms(loader):
        @classmethod
        def compute_frames_index_to_sample(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
            if source.duration > limits.max_seconds:
                raise _too_large(
                    f"a film of {source.duration:.1f} s",
                    limits.max_seconds,
                    "max_seconds",
                )
            if not 0 < source.total_frames_num <= limits.max_video_frames:
                raise _too_large(
                    f"a film of {source.total_frames_num} frames",
                    limits.max_video_frames,
                    "max_seconds",
                )
            return super().compute_frames_index_to_sample(source, *args, **kwargs)

        @classmethod
        def read_frames(cls, cap: Any, frame_idx: Any, *args: Any, **kwargs: Any) -> Any:
            budget.charge(_pixels(cap, frame_idx))
            return super().read_frames(cap, frame_idx, *args, **kwargs)

    return BoundedFilms


def _pixels(film: cv2.VideoCapture, frames: Sequence[int]) -> int:
    width, height = film.get(cv2.CAP_PROP_FRAME_WIDTH), film.get(cv2.CAP_PROP_FRAME_HEIGHT)
    return int(width) * int(height) * len(frames)


def _bound_opencv() -> None:
    """Count frames where vLLM reads them: its 0.29 does not call the loader's ``read_frames``."""
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    read = getattr(OpenCVVideoBackendMixin.read_frames, "read", OpenCVVideoBackendMixin.read_frames)

    def read_bounded(cap: Any, frame_idx: Any, *args: Any, **kwargs: Any) -> Any:
        if (budget := _budget.get()) is not None:
            budget.charge(_pixels(cap, frame_idx))
        return read(cap, frame_idx, *args, **kwargs)

    read_bounded.read = read  # type: ignore[attr-defined]
    OpenCVVideoBackendMixin.read_frames = staticmethod(read_bounded)


def _too_large(what: str, limit: float, key: str) -> MediaRefusedError:
    return MediaRefusedError(
        f"{what}: at most {limit:.15g} are allowed; send less, or raise front.media.{key}"
    )


def _bomb(error: Exception, limits: MediaSection) -> MediaRefusedError:
    return _too_large(
        str(error).partition(" exceeds")[0], limits.max_item_pixels, "max_item_pixels"
    )
