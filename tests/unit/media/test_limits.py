from __future__ import annotations

import json

import msgspec
import pytest

from epd_portable.config.front import MediaSection
from epd_portable.errors import RequestError
from epd_portable.media.limits import MAX_SETTINGS_BYTES, check_settings

LIMITS = MediaSection()
NAME = "mm_processor_kwargs"


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@pytest.mark.parametrize(
    "settings",
    [
        {"use_audio_in_video": True, "do_resize": False},
        {"max_pixels": 1_003_520, "min_pixels": 50_176},
        {"size": {"longest_edge": 12_845_056, "shortest_edge": 3136}},
        {"images_kwargs": {"size": {"height": 336, "width": 100}}},
        {"size": 448, "crop_size": [336, 100]},
        {"max_dynamic_patch": 2},
        {"video": {"fps": 4, "num_frames": -1}},
        "nonsense",
        None,
    ],
)
def test_settings_within_the_limits_are_accepted(settings: object) -> None:
    check_settings(LIMITS, NAME, raw(settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_pixels": 4e9}, "max_pixels is 4000000000: at most 67108864 pixels"),
        ({"size": {"longest_edge": 1 << 40}}, r"size\.longest_edge is 1099511627776"),
        ({"size": {"height": 60_000, "width": 60_000}}, "size is 3600000000: at most 67108864"),
        ({"size": [60_000, 60_000]}, "size is 3600000000"),
        ({"size": 60_000}, "size is 60000: at most 8192 pixels a side"),
        ({"crop_size": {"height": 60_000}}, "height is 60000: at most 8192"),
        ({"images_kwargs": [{"anything": {"at": [{"all": 7e7}]}}]}, r"all is 70000000"),
        ({"max_dynamic_patch": 335}, "max_dynamic_patch is 335: at most 334 tiles"),
        ({"frames_indices": [0] * 10_000}, "frames_indices is 10000: at most 6000 entries"),
        ({"max_pixels": -4e9}, "max_pixels is -4000000000"),
        ({"max_pixels": 10**400}, "max_pixels is beyond all measure"),
        ({"x": {"height": 1e308, "width": 1e308}}, "x is beyond all measure"),
        ({"x": "y" * MAX_SETTINGS_BYTES}, "at most 65536 are allowed"),
    ],
)
def test_settings_that_ask_for_more_than_the_limits_are_refused(
    settings: object, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_settings(MediaSection(max_seconds=100), NAME, raw(settings))
    assert (caught.value.status, caught.value.code) == (400, "settings_too_large")


def test_decoder_whose_frames_are_not_counted_is_refused() -> None:
    check_settings(LIMITS, "media_io_kwargs", raw({"video": {"backend": "opencv"}}))
    check_settings(LIMITS, "mm_processor_kwargs", raw({"backend": "torchvision"}))
    with pytest.raises(RequestError, match=r"video\.backend is 'torchcodec': .*'opencv' only"):
        check_settings(LIMITS, "media_io_kwargs", raw({"video": {"backend": "torchcodec"}}))


@pytest.mark.parametrize("text", [b"{", b"[" * 5000, b'{"a": 1e999}', b"\xff", b'{"a": NaN}'])
def test_settings_that_are_no_json_are_refused(text: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        check_settings(LIMITS, NAME, msgspec.Raw(text))
