from __future__ import annotations

import base64
import json
import struct
import zlib

import pytest

from epd_portable.bench.router.questions import (
    LAST_EVENT,
    NoisePicture,
    Question,
    event,
    find_items,
    find_question,
    judge,
    request,
    whole_answer,
)

WHOLE = Question(number=7)
STREAMED = Question(number=7, chunks=3, gap_ms=5, first_ms=2)
EVENTS = [event(7, index) for index in range(3)]
FAILED = b'data: {"error":{"message":"lost","type":"x","code":502}}\n\n'


def body_of(parts: list[bytes]) -> bytes:
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return body


def png_chunks(data: bytes) -> dict[bytes, bytes]:
    """Return the chunks of a picture by their kind, checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + content)
        found[kind] = content
        at += 12 + length
    return found


@pytest.mark.parametrize("question", [WHOLE, STREAMED])
def test_an_instance_reads_the_question_that_was_asked(question: Question) -> None:
    for picture in (None, NoisePicture(1000)):
        body = body_of(request(question, "a:1", picture))
        assert find_question(body) == question
        assert json.loads(body)["stream"] is bool(question.chunks)
    assert find_question(b'{"messages": []}') is None


def test_pictures_are_whole_as_large_as_asked_and_differ() -> None:
    picture = NoisePicture(30_000)
    urls = [b"".join(picture.url(number)) for number in (1, 2)]
    assert urls[0] != urls[1]
    for url in urls:
        data = base64.b64decode(url.removeprefix(b"data:image/png;base64,"), validate=True)
        assert 29_000 < len(data) < 31_000
        chunks = png_chunks(data)
        width, height = struct.unpack_from(">II", chunks[b"IHDR"])
        assert len(zlib.decompress(chunks[b"IDAT"])) == height * (1 + 3 * width)


def test_items_are_found_once_each_in_their_order() -> None:
    body = b'{"transfers":[{"mm_hash":"b"},{"mm_hash": "a"},{"mm_hash":"b"}]}'
    assert find_items(body) == ["b", "a"]


def test_the_answer_that_was_meant_is_right() -> None:
    assert judge(WHOLE, 200, whole_answer(7, {"instance": "x"})) == ("right", "")
    assert judge(STREAMED, 200, b"".join([*EVENTS, LAST_EVENT])) == ("right", "")
    # Written anew, but saying the same.
    spaced = b"".join(each.replace(b'","', b'", "') for each in EVENTS) + LAST_EVENT
    assert judge(STREAMED, 200, spaced) == ("right", "")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"".join(EVENTS), "ends after 3 of 3 tokens"),
        (b"".join([EVENTS[0], EVENTS[2], LAST_EVENT]), "token 1 is another"),
        (b"".join([EVENTS[0], EVENTS[0], LAST_EVENT]), "token 1 is another"),
        (b"".join([event(8, 0), LAST_EVENT]), "token 0 is another"),
        (b"".join([*EVENTS[:2], LAST_EVENT]), "ends after 2 of 3 tokens"),
        (b"".join([*EVENTS, LAST_EVENT, EVENTS[0]]), "something follows the end"),
        (EVENTS[0] + EVENTS[1][:50], "ends within an event"),
        (EVENTS[0] + EVENTS[1][:50] + FAILED, "not an event"),
        (FAILED + EVENTS[0], "something follows the end"),
        (b"", "ends after 0 of 3 tokens"),
    ],
)
def test_of_a_stream_nothing_may_be_lost_doubled_mixed_up_or_glued(body: bytes, words: str) -> None:
    verdict, detail = judge(STREAMED, 200, body)
    assert verdict == "wrong"
    assert words in detail


def test_an_error_is_clear_if_it_has_its_form_and_place() -> None:
    error = json.dumps({"error": {"message": "full", "code": 503}}).encode()
    assert judge(WHOLE, 503, error) == ("error", "status 503: full")
    assert judge(STREAMED, 200, EVENTS[0] + FAILED) == ("error", "after 1 tokens: lost")
    assert judge(STREAMED, 200, FAILED + LAST_EVENT)[0] == "error"
    assert judge(WHOLE, 500, b"Internal Server Error")[0] == "wrong"
    assert judge(WHOLE, 500, b'{"detail": "no"}')[0] == "wrong"


@pytest.mark.parametrize("body", [whole_answer(8), b"{}", b"null", b"hello"])
def test_an_answer_that_is_anothers_or_none_is_wrong(body: bytes) -> None:
    assert judge(WHOLE, 200, body)[0] == "wrong"
