from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest

from epd_portable.errors import RequestError
from epd_portable.media.formats import Modality
from epd_portable.media.limits import (
    DEFAULT_PROCESSING,
    FRAME_LIST,
    MAX_SETTINGS_BYTES,
    MediaLimits,
    Processing,
    check_item,
    check_processor_settings,
    check_request,
)
from tests.unit.media import samples
from tests.unit.media.samples import ANIMATIONS, STILLS, text

LIMITS = MediaLimits()
WHERE = "messages[0].content[1].image_url"


def cost(
    data: bytes | memoryview,
    modality: Modality = "image",
    processing: Processing = DEFAULT_PROCESSING,
    media_type: str = "image/png",
    **limits: Any,
) -> int:
    encoded = data if isinstance(data, memoryview) else text(data)
    return check_item(MediaLimits(**limits), modality, media_type, encoded, WHERE, processing)


def refused(status: int, code: str, words: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        cost(*args, **kwargs)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert str(caught.value).startswith(WHERE)


def video(frames: int, *, fps: int = 25, size: tuple[int, int] = (100, 100)) -> bytes:
    return samples.mp4(size=size, times=((frames, 1),), scale=fps, duration=frames)


def test_a_picture_costs_its_pixels() -> None:
    assert cost(STILLS["jpeg"]) == samples.WIDTH * samples.HEIGHT
    assert cost(ANIMATIONS["gif"]) == samples.WIDTH * samples.HEIGHT, "its first frame is taken"


def test_many_black_pictures_of_few_bytes_are_refused() -> None:
    """64 of them, of 30 kB each, would take 34 GB once they are decoded."""
    picture = samples.png(13_370, 13_370)
    assert len(picture) < 100_000
    refused(
        413,
        "media_too_large",
        r"13370 × 13370 = 178756900 pixels: at most 67108864 are allowed; send a smaller picture, "
        r"or raise router\.max_item_pixels",
        picture,
    )
    pixels = cost(picture, max_item_pixels=1 << 28)
    check_request(LIMITS, pixels)
    with pytest.raises(RequestError, match=r"have 357513800 pixels.*router\.max_request_pixels"):
        check_request(LIMITS, 2 * pixels)


@pytest.mark.parametrize(
    ("frames", "fps", "taken"),
    [
        (20, 25, 20),
        (400, 25, 32),
        (2500, 25, 200),
        (15_000, 25, 768),
        (1000, 2, 768),
    ],
    ids=["all", "as many as vLLM takes", "two a second", "no more than that", "long and slow"],
)
def test_a_video_costs_the_frames_that_are_sampled(frames: int, fps: int, taken: int) -> None:
    assert cost(video(frames, fps=fps), "video") == taken * 100 * 100


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (Processing(frames=64), 64),
        (Processing(frames=8), 32),
        (Processing(frames=-1), 400),
        (Processing(frames_per_s=5), 80),
        (Processing(frames_per_s=60), 400),
    ],
)
def test_a_video_costs_what_its_request_asks_for(asked: Processing, taken: int) -> None:
    assert cost(video(400), "video", asked) == taken * 100 * 100


def test_a_picture_costs_what_it_is_enlarged_to() -> None:
    assert cost(STILLS["png"], processing=Processing(pixels=1_000_000)) == 1_000_000


@pytest.mark.parametrize(
    ("data", "modality", "words"),
    [
        (video(36_001, fps=100), "video", "36001 frames: at most 36000 .*router.max_video_frames"),
        (video(601, fps=1), "video", r"601.0 s: at most 600 .*router\.max_media_seconds"),
        (video(601, fps=1), "audio", r"601.0 s: at most 600 .*router\.max_media_seconds"),
        (video(5, size=(9000, 9000)), "video", "9000 × 9000 .*router.max_item_pixels"),
    ],
)
def test_what_is_larger_than_a_limit_is_refused_with_its_key(
    data: bytes, modality: Modality, words: str
) -> None:
    refused(413, "media_too_large", words, data, modality)


@pytest.mark.parametrize(
    ("data", "modality", "code", "words"),
    [
        (b"<svg/>", "image", "unknown_media", r"PNG, JPEG.*set router\.unknown_media to pass"),
        (STILLS["png"][:30], "image", "invalid_media", "PNG: it ends at byte 30.*the whole file"),
        (samples.box(b"ftyp", b"isom"), "video", "invalid_media", "MP4/MOV: it has no track"),
        (b"RIFF\0\0\0\0AVI " + bytes(4), "video", "invalid_media", "holds no picture"),
    ],
)
def test_what_cannot_be_bounded_is_refused_unless_it_shall_pass(
    data: bytes, modality: Modality, code: str, words: str
) -> None:
    refused(400, code, words, data, modality)
    assert cost(data, modality, unknown_media="pass") == 0


def test_an_animation_is_a_video_to_what_decodes_videos() -> None:
    data = samples.gif(100, screen=(10, 10))
    assert cost(data, "video") == 32 * 100
    words = "100 frames: at most 64 are allowed"
    refused(413, "media_too_large", words, data, "video", max_video_frames=64)


def test_sound_costs_no_pixels() -> None:
    assert cost(video(400), "audio") == 0


def frame_list(*frames: bytes) -> memoryview:
    return memoryview(b",".join(bytes(text(frame)) for frame in frames))


def test_a_list_of_pictures_costs_those_that_are_taken() -> None:
    frames = [STILLS["jpeg"]] * 40
    each = samples.WIDTH * samples.HEIGHT
    assert cost(frame_list(*frames[:3]), "video", media_type=FRAME_LIST) == 3 * each
    assert cost(frame_list(*frames), "video", media_type="Video/JPEG") == 32 * each
    every = Processing(frames=-1)
    assert cost(frame_list(*frames), "video", every, FRAME_LIST) == 40 * each


def test_each_picture_of_a_list_is_held_against_the_limits() -> None:
    large = samples.png_header(9000, 9000)
    frames = frame_list(STILLS["jpeg"], large)
    refused(413, "media_too_large", "frame 1: 9000 × 9000", frames, "video", media_type=FRAME_LIST)
    frames = frame_list(STILLS["jpeg"], b"nonsense")
    refused(400, "unknown_media", "frame 1: it begins", frames, "video", media_type=FRAME_LIST)
    many = frame_list(*[STILLS["jpeg"]] * 9)
    refused(
        413,
        "media_too_large",
        "9 frames: at most 8",
        many,
        "video",
        media_type=FRAME_LIST,
        max_video_frames=8,
    )
    empty = memoryview(bytes(text(STILLS["jpeg"])) + b",")
    refused(400, "invalid_media", "frame 1: 0 characters", empty, "video", media_type=FRAME_LIST)


def test_no_settings_ask_for_nothing() -> None:
    assert check_processor_settings(LIMITS, msgspec.Raw(), None) == DEFAULT_PROCESSING


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@pytest.mark.parametrize(
    ("processor", "io", "asked"),
    [
        (None, None, Processing()),
        ({"use_audio_in_video": True, "do_resize": False}, {}, Processing()),
        ({"max_pixels": 1_003_520}, None, Processing()),
        ({"min_pixels": 50_176}, None, Processing(pixels=50_176)),
        (
            {"size": {"longest_edge": 12_845_056, "shortest_edge": 3136}},
            None,
            Processing(pixels=3136),
        ),
        (
            {"images_kwargs": {"size": {"height": 336, "width": 100}}},
            None,
            Processing(pixels=33_600),
        ),
        ({"size": 448}, None, Processing(pixels=448 * 448)),
        ({"size": [336, 100]}, None, Processing(pixels=33_600)),
        ({"max_dynamic_patch": 2}, None, Processing(pixels=2 * 448 * 448)),
        (None, {"video": {"num_frames": 64}}, Processing(frames=64)),
        ({"num_frames": -1}, {"video": {"num_frames": 64}}, Processing(frames=-1)),
        (None, {"video": {"fps": 4, "num_frames": 8}}, Processing(frames=8, frames_per_s=4)),
        ({"fps": [1.5, 3]}, None, Processing(frames_per_s=3)),
        (None, {"image": {"rgba_background_color": [255, 255, 255]}}, Processing()),
        ("nonsense", 7, Processing()),
    ],
)
def test_settings_say_what_they_ask_for(processor: object, io: object, asked: Processing) -> None:
    settings = [None if value is None else raw(value) for value in (processor, io)]
    assert check_processor_settings(LIMITS, *settings) == asked


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_pixels": 4e9}, "max_pixels is 4000000000: at most 67108864 pixels"),
        ({"min_pixels": 4_000_000_000}, "min_pixels is 4000000000"),
        ({"size": {"longest_edge": 1 << 40}}, r"size\.longest_edge is 1099511627776"),
        ({"size": {"height": 60_000, "width": 60_000}}, "size is 3600000000: at most 67108864"),
        ({"size": [60_000, 60_000]}, "size is 3600000000"),
        ({"size": 60_000}, "size is 60000: at most 8192 pixels a side"),
        ({"crop_size": {"height": 60_000}}, "height is 60000: at most 8192"),
        ({"images_kwargs": [{"anything": {"at": [{"all": 7e7}]}}]}, r"all is 70000000"),
        ({"num_frames": 36_001}, "num_frames is 36001: at most 36000 frames"),
        ({"fps": 61}, "fps is 61: at most 60 frames a second"),
        ({"fps": [1, 1e9]}, "fps is 1000000000"),
        ({"max_duration": 601}, "max_duration is 601: at most 600 seconds"),
        ({"max_dynamic_patch": 335}, "max_dynamic_patch is 335: at most 334 tiles"),
        ({"frames_indices": [0] * 10_000}, "frames_indices is 10000: at most 8000 entries"),
        ({"max_pixels": -4e9}, "max_pixels is -4000000000"),
        ({"max_pixels": 10**400}, "beyond all measure"),
        ({"x": {"height": 1e308, "width": 1e308}}, "beyond all measure"),
        ({"x": "y" * MAX_SETTINGS_BYTES}, "at most 65536 are allowed"),
    ],
)
def test_settings_that_ask_for_more_than_the_limits_are_refused(
    settings: object, words: str
) -> None:
    limits = MediaLimits(max_video_frames=8000) if "8000" in words else LIMITS
    encoded = msgspec.Raw(json.dumps(settings).encode())
    for arguments in ((encoded, None), (None, encoded)):
        with pytest.raises(RequestError, match=words) as caught:
            check_processor_settings(limits, *arguments)
        assert (caught.value.status, caught.value.code) == (400, "settings_too_large")


@pytest.mark.parametrize("text_", [b"{", b"[" * 5000, b'{"a": 1e999}', b"\xff", b'{"a": NaN}'])
def test_settings_that_are_no_json_are_refused(text_: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        check_processor_settings(LIMITS, msgspec.Raw(text_), None)


def test_limits_are_taken_from_settings_of_the_same_names() -> None:
    class Settings:
        max_item_pixels = 1
        max_request_pixels = 2
        max_video_frames = 3
        max_media_seconds = 4.0
        unknown_media = "pass"
        port = 8000

    assert MediaLimits.among(Settings()) == MediaLimits(
        max_item_pixels=1,
        max_request_pixels=2,
        max_video_frames=3,
        max_media_seconds=4.0,
        unknown_media="pass",
    )


def test_a_video_of_too_many_frames_is_refused_by_what_its_table_says() -> None:
    table = struct.pack(">I", 0xFFFF_FFFF)
    data = samples.mp4(duration=1).replace(struct.pack(">III", 0, 1000, 100), bytes(8) + table)
    refused(413, "media_too_large", "4294967295 frames", data, "video")
