from __future__ import annotations

import base64
import binascii

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd_portable.errors import MediaError
from epd_portable.media.base64_view import MAX_STEPS, Base64View


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_any_bytes_at_any_place_are_those_of_the_file(data: bytes, draw: st.DataObject) -> None:
    view = Base64View(base64.b64encode(data))
    assert view.size == len(data)
    for _ in range(8):
        begin = draw.draw(st.integers(0, len(data)))
        count = draw.draw(st.integers(0, len(data) - begin))
        assert view.read(begin, count) == data[begin : begin + count]


def test_integers_are_read_in_both_orders() -> None:
    view = Base64View(base64.b64encode(b"\x00\x01\x02\x03"))
    assert (view.number(1, 3), view.little(1, 3)) == (0x010203, 0x030201)


@pytest.mark.parametrize(("offset", "count"), [(0, 6), (5, 1), (6, 0), (1 << 70, 1), (-1, 2)])
def test_what_is_not_there_is_refused(offset: int, count: int) -> None:
    with pytest.raises(MediaError, match="ends at byte 5"):
        Base64View(base64.b64encode(b"12345")).read(offset, count)


@pytest.mark.parametrize("text", [b"", b"A", b"AAA", b"AAAAA"])
def test_a_text_of_another_length_is_refused(text: bytes) -> None:
    with pytest.raises(MediaError, match="multiple of 4"):
        Base64View(text)


@pytest.mark.parametrize(
    "text",
    [b"AA=AAAAA", b"AAAA====", b"A===", b"AA\nA", b"AAA-", b"AA==AA==", b"\xff" * 4, b"===="],
)
def test_a_text_that_is_no_base64_is_refused(text: bytes) -> None:
    view = Base64View(text)
    with pytest.raises(MediaError):
        view.read(0, view.size)
        view.read(0, len(text) // 4 * 3)


def test_only_what_is_near_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = binascii.a2b_base64

    def counted(text: memoryview) -> bytes:
        decoded.append(len(text))
        return decode(text)

    monkeypatch.setattr("binascii.a2b_base64", counted)
    view = Base64View(base64.b64encode(bytes(10_000_000)))
    view.read(0, 16)
    view.read(9_000_000, 16)
    assert len(decoded) == 2 and sum(decoded) < 4096


def test_steps_are_bounded() -> None:
    view = Base64View(b"AAAA")
    view.step(MAX_STEPS)
    with pytest.raises(MediaError, match="send a simpler file"):
        view.step()
