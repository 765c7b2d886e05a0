"""Whatever is sent: an answer at once, never another error, and never less than decoders find."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from PIL import Image

from epd_portable.errors import MediaError, UnknownMediaError
from epd_portable.media.formats import READERS, Modality, extent_of
from tests.unit.media import samples
from tests.unit.media.samples import ANIMATIONS, STILLS, box, chunk, gif, mp4, png_header, text


def _sound(container: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(4000), 8000, format=container)
    return buffer.getvalue()


FILES = [
    *STILLS.values(),
    *ANIMATIONS.values(),
    mp4(),
    samples.live_webm(),
    *(_sound(container) for container in ("WAV", "FLAC", "OGG", "MP3")),
]
MODALITIES: list[Modality] = ["image", "video", "audio"]


@st.composite
def broken(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """A file with bytes changed, taken out or put in, near its beginning as a rule, or cut off."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 6))):
        near = draw(st.sampled_from((16, 64, 300, len(data))))
        at = draw(st.integers(0, min(near, len(data)) - 1))
        value = draw(st.sampled_from((0, 1, 2, 0x7F, 0x80, 0xFF)) | st.integers(0, 255))
        how = draw(st.sampled_from(("change", "word", "cut out", "put in")))
        if how == "change":
            data[at] = value
        elif how == "word":
            data[at : at + 4] = bytes([value]) * 4
        elif how == "cut out" and len(data) > 1:
            del data[at]
        else:
            data.insert(at, value)
    return bytes(data[: draw(st.integers(1, len(data)) | st.just(len(data)))])


@settings(max_examples=600)
@given(broken(FILES), st.sampled_from(MODALITIES), st.booleans())
def test_a_broken_file_is_read_or_refused(data: bytes, modality: Modality, count: bool) -> None:
    with contextlib.suppress(MediaError):
        found = extent_of(text(data), modality, count_frames=count)
        assert found.width >= 0 and found.height >= 0 and found.frames >= 0 and found.seconds >= 0


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=400), st.sampled_from(FILES), st.integers(0, 40))
def test_anything_behind_a_beginning_is_read_or_refused(tail: bytes, file: bytes, n: int) -> None:
    for modality in MODALITIES:
        with contextlib.suppress(MediaError):
            extent_of(text(file[:n] + tail), modality, count_frames=True)


@settings(max_examples=600)
@given(broken([*STILLS.values(), *ANIMATIONS.values()]))
def test_no_picture_is_larger_to_pillow_than_it_is_here(data: bytes) -> None:
    try:
        found = extent_of(text(data), "image", count_frames=False)
    except MediaError:
        return
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            if picture.format not in ("IM", "IMT", "SPIDER", "PCD", "TGA"):
                assert width <= found.width and height <= found.height, picture.format


@pytest.mark.parametrize("text_", [b"AAAA", b"////", b"AAA=", b"A===", b"!!!!", b"AAAAA", b""])
@pytest.mark.parametrize("modality", MODALITIES)
def test_what_is_no_file_is_refused(text_: bytes, modality: Modality) -> None:
    with pytest.raises(MediaError):
        extent_of(text_, modality, count_frames=True)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="99999" height="99999"/>'


@pytest.mark.parametrize(
    ("modality", "data"),
    [
        ("image", SVG),
        ("image", b"%PDF-1.7"),
        ("image", mp4()),
        ("image", _sound("WAV")),
        ("audio", STILLS["png"]),
        ("video", _sound("FLAC")),
        ("video", b"#EXTM3U\nhttp://127.0.0.1/x.ts\n"),
        ("video", b"FLV\1" + bytes(20)),
        ("audio", b"RIFF\0\0\0\0sfbk"),
    ],
)
def test_other_formats_are_refused_with_those_that_are_known(
    modality: Modality, data: bytes
) -> None:
    with pytest.raises(UnknownMediaError) as caught:
        extent_of(text(data), modality, count_frames=True)
    assert all(kind in str(caught.value) for kind in READERS[modality])


def tiff(*pages: tuple[int, int, int]) -> bytes:
    """Return a TIFF of pages with a width, a height and the place of the next page."""
    data = b"II*\0\x08\0\0\0"
    for width, height, after in pages:
        data += struct.pack("<H", 2)
        data += struct.pack("<HHII", 256, 4, 1, width) + struct.pack("<HHII", 257, 4, 1, height)
        data += struct.pack("<I", after)
    return data


ONE_PAGE = 2 + 2 * 12 + 4

LARGE: dict[str, tuple[bytes, tuple[int, int]]] = {
    "png": (samples.png(13_370, 1), (13_370, 1)),
    "png whose second header is larger": (
        png_header(1, 1, chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 0, 0, 0, 0))),
        (9000, 9000),
    ),
    "gif whose frame is larger than its screen": (gif(1, frame=(60_000, 60_000)), (60_000, 60_000)),
    "webp of the largest size": (
        b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff" * 6,
        (1 << 24, 1 << 24),
    ),
    "bmp upside down": (
        b"BM" + bytes(12) + struct.pack("<Iii", 40, 30_000, -30_000),
        (30_000,) * 2,
    ),
    "ico whose picture is larger than it says": (
        struct.pack("<HHH", 0, 1, 1)
        + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, 99, 22)
        + png_header(20_000, 20_000),
        (20_000, 20_000),
    ),
    "jpeg 2000 whose stream is larger than it says": (
        b"\0\0\0\x0cjP  \r\n\x87\n"
        + box(b"jp2h", box(b"ihdr", struct.pack(">II", 1, 1) + bytes(6)))
        + box(b"jp2c", b"\xff\x4f\xff\x51\0\0\0\0" + struct.pack(">4I", 50_000, 40_000, 0, 0)),
        (50_000, 40_000),
    ),
    "avif with a small one beside": (
        box(b"ftyp", b"avif")
        + box(
            b"meta",
            bytes(4),
            box(
                b"iprp",
                box(
                    b"ipco",
                    box(b"ispe", struct.pack(">III", 0, 16, 16)),
                    box(b"ispe", struct.pack(">III", 0, 65_536, 65_536)),
                ),
            ),
        ),
        (65_536, 65_536),
    ),
    "tiff of 64 bits": (
        b"MM\0+\0\x08\0\0"
        + struct.pack(">QQ", 16, 2)
        + struct.pack(">HHQQ", 256, 16, 1, 1 << 40)
        + struct.pack(">HHQQ", 257, 16, 1, 7)
        + bytes(8),
        (1 << 40, 7),
    ),
    "cursor whose picture is larger than it says": (
        struct.pack("<HHH", 0, 2, 1)
        + struct.pack("<BBBBHHII", 16, 16, 0, 0, 0, 0, 99, 22)
        + struct.pack("<Iii", 40, 3000, 8000),
        (3000, 4000),
    ),
    "pnm": (b"P4\n99999 99999\n", (99_999, 99_999)),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_size_in_a_file_counts(name: str) -> None:
    data, size = LARGE[name]
    found = extent_of(text(data), "image", count_frames=False)
    assert (found.width, found.height) == size


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "gif of a million frames": (lambda: gif(1_000_000), "has more than 65536 parts"),
    "gif of a million empty pieces": (
        lambda: gif(1)[:-1] + (b"!\xfe" + b"\x01x" * 50_000 + b"\0") * 20,
        "has more than 65536 parts",
    ),
    "gif without a picture": (lambda: gif(0), "holds no picture"),
    "png of many remarks": (
        lambda: png_header(1, 1, chunk(b"tEXt", b"") * 70_000),
        "has more than 65536 parts",
    ),
    "png without pixels": (lambda: png_header(0, 5), "0 × 5 pixels"),
    "png cut off": (lambda: png_header(5, 5)[:20], "ends at byte 20"),
    "jpeg of rubbish": (lambda: b"\xff\xd8\xff" + bytes(300_000), "has more than 65536 parts"),
    "jpeg without a size": (lambda: b"\xff\xd8\xff\xda\0\x02", "0 × 0 pixels"),
    "tiff that goes round": (
        lambda: tiff((1, 1, 8 + ONE_PAGE), (1, 1, 8)),
        "go round in a circle",
    ),
    "tiff that is its own next page": (lambda: tiff((1, 1, 8)), "go round in a circle"),
    "tiff with a huge directory": (
        lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 1 << 60),
        "has more than 65536 parts",
    ),
    "tiff with a size elsewhere": (
        lambda: tiff((1, 1, 0)).replace(b"\x04\0\x01\0", b"\x04\0\x02\0"),
        "no single integer",
    ),
    "pnm that is an IM file, too": (
        lambda: b"P6 1 1 255 :\nImage size (x*y): 60000*60000\nImage type: L image\n\x1a",
        "on lines of their own",
    ),
    "mp4 with a box of one byte": (
        lambda: box(b"ftyp", b"isom") + box(b"moov", length=7),
        "has 7 bytes",
    ),
    "mp4 with a large box of eight bytes": (
        lambda: box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", 8),
        "has 8 bytes",
    ),
    "mp4 with a box without an end": (
        lambda: box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", (1 << 64) - 1),
        "has no track",
    ),
    "mp4 with a box to the end": (
        lambda: box(b"ftyp", b"isom") + box(b"mdat", mp4(), length=0),
        "has no track",
    ),
    "mp4 of many empty boxes": (
        lambda: box(b"ftyp", b"isom") + box(b"free") * 70_000,
        "has more than 65536 parts",
    ),
    "mp4 with a table that is not there": (
        lambda: mp4().replace(
            box(b"stts", struct.pack(">IIII", 0, 1, 100, 1)),
            box(b"stts", struct.pack(">IIII", 0, 60_000, 100, 1)),
        ),
        "ends at byte",
    ),
    "mp4 with a table of 70,000 entries": (
        lambda: mp4(times=((1, 1),) * 70_000),
        "has more than 65536 parts",
    ),
    "mp4 nested deeply": (
        lambda: box(b"ftyp", b"isom") + struct.pack(">I4s", 1000, b"moov") * 100,
        "nested more than 8 deep",
    ),
    "mp4 with compressed headers": (
        lambda: box(b"ftyp", b"qt  ") + box(b"moov", box(b"cmov", bytes(20))),
        "compressed",
    ),
    "webm of nothing": (lambda: samples.ebml(0x1A45DFA3), "has no track"),
    "webm of zeros": (lambda: samples.ebml(0x1A45DFA3) + bytes(100), "no element begins"),
    "webm of many empty elements": (
        lambda: samples.ebml(0x1A45DFA3) + samples.ebml(0xEC) * 70_000,
        "has more than 65536 parts",
    ),
    **{
        f"webm that plays {ticks} ticks": (
            lambda ticks=ticks: (
                samples.ebml(0x1A45DFA3)
                + samples.ebml(0x1549A966, samples.ebml(0x4489, struct.pack(">d", ticks)))
                + samples.ebml(0x1654AE6B)
            ),
            "says? that it plays",
        )
        for ticks in (float("nan"), float("inf"), 1e308, -1e9)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(MediaError, match=words):
        extent_of(text(make()), "video", count_frames=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"RIFF\xff\xff\xff\xffWAVEdata" + bytes(50), "no chunk 'fmt '"),
        (b"fLaC\0\0\0\x22" + bytes(34), "does not tell how long"),
        (b"fLaC\0\0\0\x22" + bytes(17) + b"\1" + bytes(16), "0 samples a second"),
        (b"OggS\0\2" + bytes(20) + b"\1\x08\x80theora!", "only Vorbis, Opus, FLAC and Speex"),
        (b"ID3\4\0\0\0\0\0\0" * 9, "but tags"),
        (b"ID3\4\0\0\x7f\x7f\x7f\x7f", "but tags"),
        (b"\xff\xf3" + bytes(5000), "no frame begins"),
    ],
)
def test_sound_of_which_nothing_is_told_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        extent_of(text(data), "audio", count_frames=True)


def test_a_forged_rate_makes_a_clip_no_shorter() -> None:
    sound = struct.pack("<HHIIHH", 1, 1, 0xFFFF_FFFF, 0, 1, 8)
    data = b"RIFF\0\0\0\0WAVE" + b"fmt \x10\0\0\0" + sound + b"data\0\0\0\0" + bytes(192_000)
    assert extent_of(text(data), "audio", count_frames=True).seconds == pytest.approx(2, abs=0.01)


def test_a_forged_size_of_samples_makes_a_clip_no_shorter() -> None:
    for block_bytes, bits in ((60_000, 8), (1, 60_000)):
        sound = struct.pack("<HHIIHH", 1, 1, 8000, 0, block_bytes, bits)
        data = b"RIFF\0\0\0\0WAVE" + b"fmt \x10\0\0\0" + sound + b"data\0\0\0\0" + bytes(16_000)
        found = extent_of(text(data), "audio", count_frames=True)
        assert found.seconds == pytest.approx(2, abs=0.01)


def test_files_one_behind_the_other_are_refused() -> None:
    first, second = _sound("OGG"), bytearray(_sound("OGG"))
    at = -1
    while (at := second.find(b"OggS", at + 1)) >= 0:
        second[at + 14 : at + 18] = b"\1\2\3\4"
    with pytest.raises(MediaError, match="several files in one"):
        extent_of(text(first + bytes(second)), "audio", count_frames=True)
