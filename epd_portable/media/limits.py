"""Limits on what a request's media become when they are decoded, checked before anything is. Pure.

What is counted is what vLLM (0.26 to 0.33) decodes: of a picture its first frame, and of a video as
many frames as its loaders sample. Pixels count as they are in the file, or as many as the request's
own settings have a picture enlarged to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import msgspec

from epd_portable.errors import MediaError, RequestError, UnknownMediaError
from epd_portable.media.extent import Extent
from epd_portable.media.formats import Modality, extent_of

FRAME_LIST = "video/jpeg"
"""Media type of a video that is a list of pictures, with commas between their base64 texts."""
FRAMES_SAMPLED = 32
"""Of a video, where neither model nor request says otherwise."""
FRAMES_SAMPLED_PER_S = 2
"""By the loaders of models that sample by time (Qwen-VL), up to `MOST_FRAMES_SAMPLED`."""
MOST_FRAMES_SAMPLED = 768
TILE_PIXELS = 448 * 448
"""Of one tile, where a request says into how many a picture is cut."""
MAX_SETTINGS_BYTES = 64 * 1024

_COMMA = re.compile(rb",")
_ENLARGING = frozenset({"min_pixels", "shortest_edge"})
_EDGES = frozenset({"size", "crop_size", "height", "width"})
_FRAMES = frozenset({"num_frames", "min_frames", "max_frames", "total_num_frames"})
_SAMPLING = frozenset({"num_frames", "min_frames"})
_TILES = frozenset(
    {
        "min_dynamic_patch",
        "max_dynamic_patch",
        "max_num",
        "num_crops",
        "max_crops",
        "max_image_tiles",
        "max_num_tiles",
    }
)
_SECONDS = frozenset({"duration", "max_duration"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """What media may become.

    Attributes:
        max_item_pixels: Of one picture, or one frame of a video.
        max_request_pixels: Of all items of a request together, see `check_item`.
        max_video_frames: In one video's file: those before a sampled one are decoded, too.
        max_media_seconds: Of one video or clip of sound.
        unknown_media: What happens to a file of which all that cannot be told.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_item_pixels: int = 64 << 20
    max_request_pixels: int = 256 << 20
    max_video_frames: int = 36_000
    max_media_seconds: float = 600.0
    unknown_media: Literal["refuse", "pass"] = "refuse"

    @classmethod
    def among(cls, settings: object) -> MediaLimits:
        """Return the limits that settings have under the same names."""
        return cls(
            **{name: getattr(settings, name) for name in (each.name for each in fields(cls))}
        )


class Processing(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's own settings ask of the processing of its media.

    Attributes:
        pixels: To which smaller pictures are enlarged.
        frames: Of each video; 0 where nothing is said, -1 for all.
        frames_per_s: The same, by time; 0 where nothing is said.
    """

    pixels: int = 0
    frames: int = 0
    frames_per_s: float = 0.0


DEFAULT_PROCESSING = Processing()


def check_item(
    limits: MediaLimits,
    modality: Modality,
    media_type: str,
    text: bytes | memoryview,
    where: str,
    processing: Processing = DEFAULT_PROCESSING,
) -> int:
    """Return how many pixels an item has once it is decoded, all frames of it that are taken.

    Args:
        limits: That hold.
        modality: What the item is to the model.
        media_type: As its data URL says.
        text: Base64 of the file, or of several with commas between them (`FRAME_LIST`).
        where: Its place in the request, for messages.
        processing: What the request's settings ask for, see `check_processor_settings`.

    Raises:
        RequestError: 413; it is larger than a limit. 400; it is no file of a known format.
    """
    try:
        if modality == "video" and media_type.lower() == FRAME_LIST:
            return _check_frames(limits, text, where, processing)
        return _check_file(limits, modality, text, where, processing)
    except MediaError as error:
        if limits.unknown_media == "pass":
            return 0
        unknown = isinstance(error, UnknownMediaError)
        remedy = (
            "; send one of these, or set router.unknown_media to pass, which lets everything in "
            "that cannot be bounded"
            if unknown
            else ""
        )
        raise RequestError(
            f"{where}: {error}{remedy}",
            status=400,
            code="unknown_media" if unknown else "invalid_media",
        ) from error


def check_request(limits: MediaLimits, pixels: int) -> None:
    """Check what the items of one request have together.

    Args:
        limits: That hold.
        pixels: Sum of what `check_item` returned.

    Raises:
        RequestError: 413.
    """
    if pixels > limits.max_request_pixels:
        raise _too_large(
            f"the media of this request have {pixels} pixels once they are decoded",
            limits.max_request_pixels,
            "max_request_pixels",
            "send fewer or smaller ones",
        )


def _check_file(
    limits: MediaLimits,
    modality: Modality,
    text: bytes | memoryview,
    where: str,
    processing: Processing,
) -> int:
    extent = extent_of(text, modality, count_frames=modality == "video")
    if extent.seconds > limits.max_media_seconds:
        raise _too_large(
            f"{where}: it plays for {extent.seconds:.1f} s",
            limits.max_media_seconds,
            "max_media_seconds",
            "send a part of it",
        )
    if modality == "audio":
        return 0
    pixels = _check_picture(limits, extent, where, processing)
    if modality == "image":
        return pixels
    _check_number(limits, extent.frames, where)
    return pixels * _sampled(extent, processing)


def _check_frames(
    limits: MediaLimits, text: bytes | memoryview, where: str, processing: Processing
) -> int:
    commas = sum(1 for _ in _COMMA.finditer(text))
    _check_number(limits, commas + 1, where)
    taken = _sampled(Extent(frames=commas + 1), processing)
    pixels = 0
    for index, frame in zip(range(taken), _parts(memoryview(text)), strict=False):
        place = f"{where}: frame {index}"
        try:
            extent = extent_of(frame, "image", count_frames=False)
        except MediaError as error:
            raise type(error)(f"frame {index}: {error}") from error
        pixels += _check_picture(limits, extent, place, processing)
    return pixels


def _parts(text: memoryview) -> Iterator[memoryview]:
    begin = 0
    for comma in _COMMA.finditer(text):
        yield text[begin : comma.start()]
        begin = comma.end()
    yield text[begin:]


def _check_picture(limits: MediaLimits, extent: Extent, where: str, processing: Processing) -> int:
    pixels = extent.width * extent.height
    if not pixels:
        raise MediaError("it holds no picture")
    if pixels > limits.max_item_pixels:
        raise _too_large(
            f"{where}: {extent.width} × {extent.height} = {pixels} pixels",
            limits.max_item_pixels,
            "max_item_pixels",
            "send a smaller picture",
        )
    return max(pixels, processing.pixels)


def _check_number(limits: MediaLimits, frames: int, where: str) -> None:
    if frames > limits.max_video_frames:
        raise _too_large(
            f"{where}: a video of {frames} frames",
            limits.max_video_frames,
            "max_video_frames",
            "send a part of it, or fewer frames a second",
        )


def _sampled(extent: Extent, processing: Processing) -> int:
    """Return how many frames of a video are taken at most."""
    if processing.frames < 0:
        return extent.frames
    by_time = math.ceil(extent.seconds * max(processing.frames_per_s, FRAMES_SAMPLED_PER_S))
    if not processing.frames_per_s:
        by_time = min(by_time, MOST_FRAMES_SAMPLED)
    return min(extent.frames, max(FRAMES_SAMPLED, processing.frames, by_time))


def _too_large(what: str, limit: float, key: str, remedy: str) -> RequestError:
    return RequestError(
        f"{what}: at most {limit:.15g} are allowed; {remedy}, or raise router.{key}",
        status=413,
        code="media_too_large",
    )


def check_processor_settings(
    limits: MediaLimits,
    mm_processor_kwargs: msgspec.Raw | None,
    media_io_kwargs: msgspec.Raw | None,
) -> Processing:
    """Return what a request's settings ask for, if that keeps within the limits.

    Every number in them counts, at whatever depth: those of known names by what they mean, others
    as pixels. ``longest_edge`` and ``shortest_edge`` are taken as pixels, as Qwen-VL means them.

    Args:
        limits: That hold.
        mm_processor_kwargs: As the client sent them; ``None`` or empty if it sent none.
        media_io_kwargs: The same.

    Raises:
        RequestError: 400; names the number, the limit and the remedy.
    """
    wishes = _Wishes(limits)
    for name, raw in (
        ("mm_processor_kwargs", mm_processor_kwargs),
        ("media_io_kwargs", media_io_kwargs),
    ):
        nbytes = 0 if raw is None else len(memoryview(raw))
        if raw is None or not nbytes:
            continue
        if nbytes > MAX_SETTINGS_BYTES:
            raise _refused(
                f"{name} has {nbytes} bytes: at most {MAX_SETTINGS_BYTES} are "
                "allowed; send fewer settings"
            )
        try:
            wishes.take(msgspec.json.decode(raw), "", name)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _refused(f"{name} cannot be read: {error}") from error
    return Processing(pixels=wishes.pixels, frames=wishes.frames, frames_per_s=wishes.frames_per_s)


class _Wishes:
    """Takes in settings, one number after another."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.pixels = 0
        self.frames = 0
        self.frames_per_s = 0.0

    def take(self, value: Any, name: str, where: str) -> None:
        if isinstance(value, dict):
            self._take_edges(value.get("height"), value.get("width"), where)
            for key, inner in value.items():
                self.take(inner, key, f"{where}.{key[:64]}")
        elif isinstance(value, list):
            self._within(len(value), self._limits.max_video_frames, where, "entries")
            if name in _EDGES and len(value) == 2:
                self._take_edges(value[0], value[1], where)
                name = "height"
            for inner in value:
                self.take(inner, name, where)
        elif _is_number(value):
            self._take_number(value, name, where)

    def _take_number(self, value: float, name: str, where: str) -> None:
        limits = self._limits
        if name in _EDGES:
            self._within(value, math.isqrt(limits.max_item_pixels), where, "pixels a side")
            if name in ("size", "crop_size"):
                self._take_edges(value, value, where)
        elif name in _FRAMES:
            self._within(value, limits.max_video_frames, where, "frames")
            if name in _SAMPLING:
                all_or_most = -1 if value < 0 or self.frames < 0 else max(self.frames, int(value))
                self.frames = all_or_most
        elif name in _TILES:
            self._within(value, limits.max_item_pixels // TILE_PIXELS, where, "tiles")
            self.pixels = max(self.pixels, int(value) * TILE_PIXELS)
        elif name in _SECONDS:
            self._within(value, limits.max_media_seconds, where, "seconds")
        elif name == "fps":
            most = limits.max_video_frames / limits.max_media_seconds
            self._within(value, most, where, "frames a second")
            self.frames_per_s = max(self.frames_per_s, value)
        else:
            self._within(value, limits.max_item_pixels, where, "pixels")
            if name in _ENLARGING:
                self.pixels = max(self.pixels, int(value))

    def _take_edges(self, height: Any, width: Any, where: str) -> None:
        if _is_number(height) and _is_number(width):
            pixels = int(height) * int(width)
            self._within(pixels, self._limits.max_item_pixels, where, "pixels")
            self.pixels = max(self.pixels, pixels)

    def _within(self, value: float, most: float, where: str, what: str) -> None:
        if abs(value) > most:
            shown = f"{value:.15g}" if abs(value) < 1e18 else "beyond all measure"
            raise _refused(
                f"{where} is {shown}: at most {most:.15g} {what} are allowed by this router's "
                "media limits (router.max_item_pixels, max_video_frames, max_media_seconds); ask "
                "for less, or leave it out"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(message: str) -> RequestError:
    return RequestError(message, status=400, code="settings_too_large")
