"""Items of requests, and the limits of what requests set for the processing of their media. Pure.

Limits of decoding are applied where files are opened (`epd_portable.vllm_plugin.media_bounds`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from epd_portable.errors import RequestError

if TYPE_CHECKING:
    from epd_portable.config.front import MediaSection

Modality = Literal["image", "video", "audio"]

FRAMES_PER_S = 60
"""Films may have so many frames for each second that they may play."""
TILE_PIXELS = 448 * 448
"""Pixels of a tile, where a request sets the number of tiles of an image."""
MAX_SETTINGS_BYTES = 64 * 1024

_EDGES = frozenset({"size", "crop_size", "height", "width"})
_TILES = frozenset(
    {
        *("min_dynamic_patch", "max_dynamic_patch", "max_num", "num_crops", "max_crops"),
        *("max_image_tiles", "max_num_tiles"),
    }
)


class RequestItem(Protocol):
    """An image, video or clip of a request, as far as decisions need it."""

    @property
    def item_uuid(self) -> str:
        """Return its name by content."""

    @property
    def modality(self) -> Modality:
        """Return its modality."""

    @property
    def pixels(self) -> int:
        """Estimated from its bytes; 0 if that is not known."""


def check_settings(limits: MediaSection, name: str, raw: msgspec.Raw) -> None:
    """Check that a request's settings for the processing of media keep within the limits.

    Every number in them counts, at any depth: edges of images and numbers of tiles by what
    they mean, others as pixels.

    Args:
        name: ``mm_processor_kwargs`` or ``media_io_kwargs``.

    Raises:
        RequestError: 400; names the number, the limit and the remedy.
    """
    nbytes = len(memoryview(raw))
    if nbytes > MAX_SETTINGS_BYTES:
        raise _refused(
            f"{name} has {nbytes} bytes: at most {MAX_SETTINGS_BYTES} are allowed; send fewer "
            "settings"
        )
    try:
        _check(limits, msgspec.json.decode(raw), "", name)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"{name} cannot be read: {error}") from error


def _check(limits: MediaSection, value: Any, name: str, where: str) -> None:
    if isinstance(value, dict):
        _check_edges(limits, value.get("height"), value.get("width"), where)
        for key, each in value.items():
            _check(limits, each, key, f"{where}.{key[:64]}")
    elif (
        name == "backend" and where.startswith("media_io_kwargs.") and value not in (None, "opencv")
    ):
        # Pixels are counted where OpenCV reads frames; vLLM's other decoders do not pass there.
        raise _refused(
            f"{where} is {str(value)[:64]!r}: this front bounds the decoder 'opencv' only; leave "
            "it out"
        )
    elif isinstance(value, list):
        _check_within(len(value), limits.max_video_frames, where, "entries")
        if name in _EDGES and len(value) == 2:
            _check_edges(limits, value[0], value[1], where)
        for each in value:
            _check(limits, each, "height" if name in _EDGES else name, where)
    elif not _is_number(value):
        return
    elif name in _EDGES:
        _check_within(value, math.isqrt(limits.max_item_pixels), where, "pixels a side")
    elif name in _TILES:
        _check_within(value, limits.max_item_pixels // TILE_PIXELS, where, "tiles")
    else:
        _check_within(value, limits.max_item_pixels, where, "pixels")


def _check_edges(limits: MediaSection, height: Any, width: Any, where: str) -> None:
    if _is_number(height) and _is_number(width):
        _check_within(height * width, limits.max_item_pixels, where, "pixels")


def _check_within(value: float, most: float, where: str, what: str) -> None:
    # Not the other way round: NaN is not within anything.
    if not abs(value) <= most:
        shown = f"{value:.15g}" if abs(value) < 1e18 else "beyond all measure"
        raise _refused(
            f"{where} is {shown}: at most {most:.15g} {what} are allowed by this front's "
            "media limits (front.media.max_item_pixels, max_seconds); set less, or leave it "
            "out"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(message: str) -> RequestError:
    return RequestError(message, status=400, code="settings_too_large")
