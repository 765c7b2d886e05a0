from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.errors import RequestError
from epd_portable.router.contents.cut_text import LONG_BYTES, CutText

LONG = "iVBORw0KGgo" * 1000
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def fields(cut: CutText) -> dict[str, msgspec.Raw]:
    return _object.decode(cut.small)


def again(cut: CutText) -> bytes:
    """Take the small text apart, write it anew, and put the long strings back."""
    return b"".join(cut.segments(msgspec.json.encode(fields(cut))))


def test_long_strings_are_not_in_the_small_text_and_come_out_again_as_views() -> None:
    data = json.dumps({"a": LONG, "b": [1, "x", {"c": "A" + LONG}], "d": None}).encode()
    cut = CutText(data)

    assert len(cut.small) < 200
    assert json.loads(again(cut)) == json.loads(data)
    views = [each for each in cut.segments(bytes(cut.small)) if isinstance(each, memoryview)]
    assert [bytes(each) for each in views] == [LONG.encode(), b"A" + LONG.encode()]
    assert all(each.obj is data for each in views)
    text = cut.text_bytes(fields(cut)["a"], "here")
    assert isinstance(text, memoryview) and text.obj is data


def test_short_texts_are_not_cut() -> None:
    data = json.dumps({"a": "b" * (LONG_BYTES // 2)}).encode()
    cut = CutText(data)
    assert cut.small is data
    assert cut.segments(b"anything") == [b"anything"]


def test_blanks_between_values_are_no_string() -> None:
    blanks = b" " * 9000
    for place in (b'{%b"a":1}', b'{"a"%b:1}', b'{"a":%b1}', b'{"a":[1,%b2]}', b'{"a":1}%b'):
        assert json.loads(again(CutText(place % blanks))) == json.loads(place % b"")


def _long(pieces: list[str]) -> str:
    return "".join(piece * 700 for piece in pieces)


texts = st.lists(
    st.sampled_from(["a", '"', "\\", "\\\\", "\n", "/", ",", ":", "]", "}", " ", "é", "AAAA+/="]),
    max_size=12,
).map(_long) | st.text(max_size=5)
trees = st.recursive(
    texts | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(texts, trees, max_size=4), st.sampled_from([None, 1]))
def test_any_object_comes_out_as_it_was(tree: dict[str, Any], indent: int | None) -> None:
    data = json.dumps(tree, indent=indent).encode()
    assert json.loads(again(CutText(data))) == tree
    assert CutText(data).whole(bytes(CutText(data).original())) == data


def test_words_like_the_one_that_stands_for_a_string_are_words() -> None:
    """Nobody can send it, as it is made for each text after that has come."""
    first = CutText(json.dumps({"a": LONG}).encode())
    word = bytes(fields(first)["a"]).decode().strip('"')
    second = CutText(json.dumps({"a": LONG, "b": word}).encode())
    assert json.loads(again(second)) == {"a": LONG, "b": word}


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "' + LONG.encode(),
        b'{"a": "x"' + LONG.encode() + b'"y"}',
        b'{"a"' + LONG.encode() + b': "y"}',
        b'"' + LONG.encode() + b'" "' + LONG.encode() + b'"',
        LONG.encode() + b'"' + LONG.encode(),
        b'{"a": "' + LONG.encode() + b"\\" * 9 + b'"}',
    ],
)
def test_what_is_no_json_is_none_without_its_long_strings(data: bytes) -> None:
    with pytest.raises(ValueError):
        json.loads(data)
    with pytest.raises(msgspec.DecodeError):
        fields(CutText(data))


def text_of(value: str, written: bytes | None = None) -> bytes:
    cut = CutText(b'{"a": %b}' % (json.dumps(value).encode() if written is None else written))
    return bytes(cut.text_bytes(fields(cut)["a"], "here"))


@pytest.mark.parametrize(
    "value", ["", "abc", LONG, "a/b", LONG + "/x+y==", LONG + '"' + LONG, "é" * 9000, "\n" * 9000]
)
def test_a_string_is_read_with_and_without_escapes(value: str) -> None:
    assert text_of(value) == value.encode()
    assert text_of(value, json.dumps(value).replace("/", "\\/").encode()) == value.encode()
    assert text_of(value, json.dumps(value).replace("+", "\\u002b").encode()) == value.encode()


def test_a_long_text_whose_slashes_are_escaped_is_read_in_steps() -> None:
    value = "AB/D/" * 300_000
    assert text_of(value, b'"' + value.replace("/", "\\/").encode() + b'"') == value.encode()


@pytest.mark.parametrize("written", [b"7", b"null", b'["' + LONG.encode() + b'"]'])
def test_another_value_than_a_string_is_refused_with_its_place(written: bytes) -> None:
    with pytest.raises(RequestError, match="here: Expected `str`"):
        text_of("", written)


@pytest.mark.parametrize("end", ["\\q", "\\u12", "\\"])
def test_a_wrong_escape_in_a_long_string_is_refused_with_its_place(end: str) -> None:
    with pytest.raises(RequestError, match="here: ") as caught:
        text_of("", b'"' + LONG.encode() + end.encode() + b' "')
    assert caught.value.status == 400


def test_counting_sees_the_small_text_only() -> None:
    cut = CutText(json.dumps({"a": "," * 9000 + LONG, "b": ["x"] * 900_000}).encode())
    assert cut.count(b",") == cut.small.count(b",") >= 900_000
