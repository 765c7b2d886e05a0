"""What headers say is what decoders find."""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from epd_portable.media.base64_view import Base64View
from epd_portable.media.extent import Extent
from epd_portable.media.formats import PICTURES, Modality, extent_of, kind_of
from tests.unit.media import samples
from tests.unit.media.samples import ANIMATIONS, STILLS, text

SECONDS = 2.5


def read(data: bytes, modality: Modality, *, count_frames: bool = True) -> Extent:
    return extent_of(text(data), modality, count_frames=count_frames)


@pytest.mark.parametrize("name", STILLS)
def test_pictures_are_as_large_as_pillow_says(name: str) -> None:
    found = read(STILLS[name], "image")
    with Image.open(io.BytesIO(STILLS[name])) as picture:
        assert (found.width, found.height, found.frames) == (*picture.size, 1)


def test_there_is_a_picture_of_every_format() -> None:
    assert {kind_of(Base64View(text(data))) for data in STILLS.values()} == PICTURES.keys()


@pytest.mark.parametrize("name", ANIMATIONS)
def test_animations_have_the_frames_that_pillow_counts(name: str) -> None:
    data = ANIMATIONS[name]
    found = read(data, "image")
    with Image.open(io.BytesIO(data)) as picture:
        assert (found.width, found.height, found.frames) == (*picture.size, picture.n_frames)
        assert picture.n_frames == 5


def test_frames_are_counted_only_where_they_count() -> None:
    assert read(ANIMATIONS["gif"], "image", count_frames=False).frames == 1


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [("mp4", "mp4v"), ("mov", "mp4v"), ("avi", "MJPG"), ("webm", "VP90"), ("mkv", "MJPG")],
)
def test_videos_are_what_opencv_says(suffix: str, codec: str, tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="vLLM's decoder of videos is not installed")
    path = tmp_path / f"video.{suffix}"
    found = read(samples.recorded(path, codec), "video")
    opened = cv2.VideoCapture(str(path))
    assert (found.width, found.height, found.frames) == (
        opened.get(cv2.CAP_PROP_FRAME_WIDTH),
        opened.get(cv2.CAP_PROP_FRAME_HEIGHT),
        opened.get(cv2.CAP_PROP_FRAME_COUNT),
    )
    assert found.seconds == pytest.approx(1.6, abs=0.05)


def test_headers_of_a_video_are_found_wherever_they_are(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="vLLM's decoder of videos is not installed")
    data = samples.recorded(tmp_path / "video.mp4", "mp4v")
    at = data.index(b"moov") - 4
    assert data.index(b"mdat") < at, "OpenCV writes its headers last"
    begin = int.from_bytes(data[:4], "big")
    first = data[:begin] + data[at:] + data[begin:at]
    assert read(first, "video") == read(data, "video")


def test_a_video_is_as_large_as_the_largest_that_its_headers_say() -> None:
    found = read(samples.mp4(size=(16, 16), entry_size=(4096, 2160), sampled=9000), "video")
    assert (found.width, found.height, found.frames) == (4096, 2160, 9000)


def test_fragments_of_a_video_count() -> None:
    run = samples.box(b"trun", bytes([0, 0, 1, 0]), (3).to_bytes(4, "big"), *[b"\0\0\0\x19"] * 3)
    known = samples.box(b"tfhd", bytes(4), (1).to_bytes(4, "big"))
    begin = samples.box(b"tfdt", bytes(4), (250).to_bytes(4, "big"))
    fragment = samples.box(b"moof", samples.box(b"traf", known, begin, run))
    found = read(samples.mp4(times=(), duration=0) + fragment * 2, "video")
    assert (found.frames, found.seconds) == (6, 13.0)


def test_a_recording_of_unknown_length_is_as_long_as_what_is_in_it() -> None:
    found = read(samples.live_webm(clusters=3, blocks=10), "video")
    assert (found.width, found.height, found.seconds) == (640, 480, 2.9)
    assert found.frames == 174, "60 a second, because the file tells no time of a frame"


@pytest.mark.parametrize("rate", [8_000, 48_000])
@pytest.mark.parametrize(
    ("container", "coding"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("WAVEX", "PCM_24"),
        ("RF64", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
    ],
)
def test_clips_play_as_long_as_libsndfile_says(container: str, coding: str, rate: int) -> None:
    buffer = io.BytesIO()
    channels = 2 if rate == 48_000 else 1
    sound = np.random.default_rng(0).uniform(-0.1, 0.1, (int(SECONDS * rate), channels))
    soundfile.write(buffer, sound, rate, format=container, subtype=coding)
    found = read(buffer.getvalue(), "audio")
    buffer.seek(0)
    assert found.seconds == pytest.approx(soundfile.info(buffer).duration, rel=0.07)
    assert found.seconds >= SECONDS
    assert (found.width, found.frames) == (0, 0)


def test_a_clip_behind_a_picture_in_its_tags_is_read() -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(24_000), 24_000, format="MP3")
    tag = b"ID3\x04\0\0\0\0\x7f\x7f" + b"\xff\xfb\x90\x64" * 4095 + b"\0\0\0"
    assert read(tag + buffer.getvalue(), "audio").seconds == pytest.approx(1.1, abs=0.1)


def test_the_sound_of_a_video_is_as_long_as_the_video() -> None:
    assert read(samples.mp4(), "audio").seconds == 4.0


def test_a_picture_of_a_megabyte_costs_little_however_large_it_is() -> None:
    """Beside the digest that names it, whatever else the machine does."""
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1000, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG", quality=90)
    encoded = base64.b64encode(buffer.getvalue())
    assert len(encoded) > 1_000_000

    def cpu_s(times: int, work: Callable[[], object]) -> float:
        begun = time.thread_time()
        for _ in range(times):
            work()
        return (time.thread_time() - begun) / times

    digest_s = cpu_s(20, lambda: hashlib.sha256(encoded).digest())
    header_s = cpu_s(200, lambda: extent_of(encoded, "image", count_frames=False))
    assert header_s < digest_s / 5, f"{1e6 * header_s:.0f} µs"
