"""Limits on what a request's media become when they are decoded. Pure.

The instances apply them where they open a file (`epd_portable.vllm_plugin.media_bounds`). What a
request asks of the processing of its media is checked here, and pixels and tokens are estimated by
their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from epd_portable.errors import RequestError

Modality = Literal["image", "video", "audio"]

PIXELS_PER_BYTE = 4
"""Of a file, on average: a photograph as JPEG has some two bits for each pixel."""
PIXELS_PER_TOKEN = 1024
"""Of the prompt."""
_PICTURE_PIXELS = 640 * 360
_UNKNOWN_PIXELS: Mapping[Modality, int] = {
    "image": _PICTURE_PIXELS,
    "video": 20 * _PICTURE_PIXELS,
    "audio": 139 * PIXELS_PER_TOKEN,
}
"""What an item counts for whose pixels are not known."""
FRAMES_PER_S = 60
"""Films may have so many frames for each second that they may play."""
TILE_PIXELS = 448 * 448
"""Of one tile, where a request says into how many a picture is cut."""
MAX_SETTINGS_BYTES = 64 * 1024

_ENLARGING = frozenset({"min_pixels", "shortest_edge"})
_EDGES = frozenset({"size", "crop_size", "height", "width"})
_TILES = frozenset(
    {
        *("min_dynamic_patch", "max_dynamic_patch", "max_num", "num_crops", "max_crops"),
        *("max_image_tiles", "max_num_tiles"),
    }
)


class RequestItem(Protocol):
    """One picture, video or clip of a request, as far as is decided by it."""

    @property
    def item_uuid(self) -> str:
        """Its name by content."""

    @property
    def modality(self) -> Modality:
        """What it is to the model."""

    @property
    def pixels(self) -> int:
        """Estimated from its bytes; 0 if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """What media may become when they are decoded.

    Attributes:
        max_items: Images, videos and audio clips of one request.
        max_item_pixels: Of one image, or one frame of a video.
        max_request_pixels: Of all items of a request together: of films the frames that are taken.
        max_media_seconds: Of one film or clip of sound.
        max_memory_bytes: Memory of an API server beyond what it has when it starts to serve.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_items: int = 64
    max_item_pixels: int = 64 << 20
    max_request_pixels: int = 256 << 20
    max_media_seconds: float = 600.0
    max_memory_bytes: int | None = None

    @property
    def max_video_frames(self) -> int:
        """Frames in one film's file: those before one that is taken are decoded, too."""
        return int(self.max_media_seconds * FRAMES_PER_S)

    @classmethod
    def among(cls, settings: Any) -> MediaLimits:
        """Return the limits in the router's section of a topology file."""
        return cls(
            max_items=settings.max_media_items,
            max_item_pixels=settings.max_item_pixels,
            max_request_pixels=settings.max_request_pixels,
            max_media_seconds=settings.max_media_seconds,
            max_memory_bytes=settings.max_media_memory_bytes,
        )


def estimated_pixels(modality: Modality, text_bytes: int) -> int:
    """Return about how many pixels an item has; for weighing load only.

    Args:
        text_bytes: Length of its base64 text.
    """
    return 0 if modality == "audio" else text_bytes * 3 // 4 * PIXELS_PER_BYTE


def estimated_tokens(item: RequestItem) -> int:
    """Return how many tokens an item is taken for, at least one; for weighing load only."""
    return max(1, (item.pixels or _UNKNOWN_PIXELS[item.modality]) // PIXELS_PER_TOKEN)


def check_settings(limits: MediaLimits, name: str, raw: msgspec.Raw | None) -> int:
    """Check that a request's settings for the processing of media keep within the limits.

    Every number in them counts, at whatever depth: edges of pictures and numbers of tiles by what
    they mean, others as pixels.

    Args:
        name: ``mm_processor_kwargs`` or ``media_io_kwargs``.
        raw: As the client sent it; ``None`` or empty if it sent none.

    Returns:
        Pixels to which they have smaller pictures enlarged; 0 for none.

    Raises:
        RequestError: 400; names the number, the limit and the remedy.
    """
    nbytes = 0 if raw is None else len(memoryview(raw))
    if raw is None or not nbytes:
        return 0
    if nbytes > MAX_SETTINGS_BYTES:
        raise _refused(
            f"{name} has {nbytes} bytes: at most {MAX_SETTINGS_BYTES} are allowed; send fewer "
            "settings"
        )
    try:
        return _check(limits, msgspec.json.decode(raw), "", name)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"{name} cannot be read: {error}") from error


def _check(limits: MediaLimits, value: Any, name: str, where: str) -> int:
    if isinstance(value, dict):
        found = [_check_edges(limits, value.get("height"), value.get("width"), where)]
        found += [_check(limits, each, key, f"{where}.{key[:64]}") for key, each in value.items()]
        return max(found)
    if isinstance(value, list):
        _check_within(len(value), limits.max_video_frames, where, "entries")
        found = [0]
        if name in _EDGES and len(value) == 2:
            found.append(_check_edges(limits, value[0], value[1], where))
        name = "height" if name in _EDGES else name
        return max(found + [_check(limits, each, name, where) for each in value])
    if not _is_number(value):
        return 0
    if name in _EDGES:
        _check_within(value, math.isqrt(limits.max_item_pixels), where, "pixels a side")
        return int(value * value) if name in ("size", "crop_size") else 0
    if name in _TILES:
        _check_within(value, limits.max_item_pixels // TILE_PIXELS, where, "tiles")
        return int(value) * TILE_PIXELS
    _check_within(value, limits.max_item_pixels, where, "pixels")
    return int(value) if name in _ENLARGING else 0


def _check_edges(limits: MediaLimits, height: Any, width: Any, where: str) -> int:
    if not (_is_number(height) and _is_number(width)):
        return 0
    _check_within(height * width, limits.max_item_pixels, where, "pixels")
    return int(height * width)


def _check_within(value: float, most: float, where: str, what: str) -> None:
    # Not the other way round: NaN is not within anything.
    if not abs(value) <= most:
        shown = f"{value:.15g}" if abs(value) < 1e18 else "beyond all measure"
        raise _refused(
            f"{where} is {shown}: at most {most:.15g} {what} are allowed by this router's "
            "media limits (router.max_item_pixels, max_media_seconds); ask for less, or leave it "
            "out"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(message: str) -> RequestError:
    return RequestError(message, status=400, code="settings_too_large")
