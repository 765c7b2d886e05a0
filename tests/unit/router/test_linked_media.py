"""What a request names by URL, once it is there: sent as if the client had inlined it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd_portable.errors import RequestError
from epd_portable.router.contents.body import (
    BATCH_PATH,
    CHAT_PATH,
    COUNT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Call,
    Rules,
    read_call,
)
from epd_portable.router.contents.cut_text import LONG_BYTES, Bytes
from tests.unit.router.bodies import image, said, sent, transfer

RULES = Rules()
URL = "https://example.com/a.png"
OTHER = "https://example.com/b.png"
TEXT = b"iVBORw0KGgoAAAANSUhE" * 400
INLINED = f"data:image/octet-stream;base64,{TEXT.decode()}"


class Fetched:
    """What is there of a request's URLs, without a network."""

    def __init__(self, *urls: str, text: Bytes = TEXT) -> None:
        self.there = urls
        self.text = text
        self.wanted: list[str] = []

    def find_media(self, url: Bytes, where: str) -> Bytes | None:
        name = bytes(url).decode()
        self.wanted.append(f"{name} at {where}")
        return self.text if name in self.there else None


def read(path: str, linked: Fetched | None, rules: Rules = RULES, **body: Any) -> Call:
    return read_call(path, json.dumps(body).encode(), rules, linked.find_media if linked else None)


def block(url: str = URL) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}, "cache_control": None}


def test_what_was_fetched_is_sent_without_a_copy() -> None:
    text = memoryview(b"A" * 100_000)
    call = read(CHAT_PATH, Fetched(URL, text=text), messages=said(image(URL)))
    for body in (call.for_pd(None), call.for_encoder(call.items[0], transfer())):
        assert any(piece is text for piece in body)


def test_a_request_whose_media_are_not_there_names_them_all_at_once() -> None:
    linked = Fetched()
    film = {"type": "video_url", "video_url": {"url": OTHER}}
    clip = {"type": "audio_url", "audio_url": "http://example.com/c.wav"}
    call = read(CHAT_PATH, linked, messages=said(image(URL), film, clip, image(INLINED)))

    assert linked.wanted == [
        f"{URL} at messages[0].content[0].image_url",
        f"{OTHER} at messages[0].content[1].video_url",
        "http://example.com/c.wav at messages[0].content[2].audio_url",
    ]
    assert len(call.items) == 1


def test_items_by_url_and_inlined_keep_their_order_and_equal_ones_are_one() -> None:
    linked = Fetched(URL, OTHER)
    other = INLINED.replace("iVBO", "iVBP")
    parts = [image(other), image(URL), image(OTHER), image(INLINED)]
    call = read(CHAT_PATH, linked, messages=said(*parts))

    assert len(call.items) == 2
    uuids = [part["uuid"] for part in sent(call.for_pd(None))["messages"][0]["content"]]
    assert uuids[1] == uuids[2] == uuids[3] != uuids[0]


@pytest.mark.parametrize("filler", [0, 2 * LONG_BYTES], ids=["short", "with long strings"])
def test_long_strings_of_the_client_and_fetched_ones_do_not_mix(filler: int) -> None:
    messages = [{"role": "system", "content": "s" * filler}, *said(image(URL), image(INLINED))]
    body = sent(read(CHAT_PATH, Fetched(URL), messages=messages).for_pd(None))
    assert body["messages"][0]["content"] == "s" * filler
    urls = [part["image_url"] for part in body["messages"][1]["content"]]
    assert urls == [{"url": INLINED, "detail": "high"}] * 2


def test_a_responses_image_is_inlined() -> None:
    part = {"type": "input_image", "image_url": URL, "detail": "low"}
    call = read(RESPONSES_PATH, Fetched(URL), input=said(part))
    (written,) = sent(call.for_pd(None))["input"][0]["content"]
    assert written == {**part, "image_url": INLINED, "uuid": call.items[0].item_uuid}


@pytest.mark.parametrize("path", [MESSAGES_PATH, COUNT_PATH])
def test_anthropics_images_are_inlined_and_all_else_stays(path: str) -> None:
    text = {"type": "text", "text": URL}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [text, block(OTHER)]}
    messages = [
        {"role": "assistant", "content": "x"},
        *said(text, block(), result),
        *said(block(INLINED)),
    ]
    call = read(path, Fetched(URL, OTHER), messages=messages)

    body = sent(call.for_pd(None))
    inlined = block(INLINED)
    assert body["messages"][0] == messages[0]
    assert body["messages"][1]["content"] == [text, inlined, {**result, "content": [text, inlined]}]
    assert body["messages"][2] == messages[2]
    assert len(call.items) == (1 if path == MESSAGES_PATH else 0)


def test_anthropics_messages_without_urls_reach_the_instance_byte_for_byte() -> None:
    body = {"messages": said(block(INLINED), {"type": "text", "text": "x"}), "max_tokens": 1}
    data = json.dumps(body).encode()
    call = read_call(MESSAGES_PATH, data, RULES, Fetched().find_media)
    assert call.for_pd(None) == [data]


ELSEWHERE = {
    "/v1/embeddings": lambda url: {"messages": said(image(url))},
    BATCH_PATH: lambda url: {"messages": [said(image(url)), said(image(url))]},
    "/v1/score": lambda url: {"data_1": "x", "data_2": {"content": [image(url)]}},
    "/score": lambda url: {"queries": "x", "documents": ["y", {"content": [image(url)]}]},
    "/v1/rerank": lambda url: {"query": {"content": [image(url)]}, "documents": ["y"]},
    "/v2/embed": lambda url: {"inputs": [{"content": [image(url)]}], "model": "demo"},
    "/invocations": lambda url: {"data_1": [{"content": [image(url)]}], "data_2": "x"},
}


@pytest.mark.parametrize("path", ELSEWHERE)
def test_no_instance_gets_a_url_to_fetch(path: str) -> None:
    with pytest.raises(RequestError, match=r"router\.media_urls\.allowed_domains") as refused:
        read(path, None, **ELSEWHERE[path](URL))
    assert (refused.value.status, refused.value.code) == (400, "unsupported_url")

    linked = Fetched()
    read(path, linked, **ELSEWHERE[path](URL))
    assert linked.wanted

    body = b"".join(read(path, Fetched(URL), **ELSEWHERE[path](URL)).for_pd(None))
    assert INLINED.encode() in body
    assert URL.encode() not in body


def test_images_of_requests_for_embeddings_are_urls_alone() -> None:
    with pytest.raises(RequestError, match=r"images\[1\].*allowed_domains"):
        read("/v2/embed", None, images=[INLINED, URL])
    call = read("/v2/embed", Fetched(URL), images=[INLINED, URL], input_type="x")
    assert sent(call.for_pd(None)) == {"images": [INLINED, INLINED], "input_type": "x"}


def test_what_only_looks_like_a_part_elsewhere_is_left_alone() -> None:
    tools = [{"type": "function", "function": {"parameters": {"properties": {"image_url": {}}}}}]
    body = {
        "tools": tools,
        "documents": [{"data": {"image_url": URL, "title": "{"}}, "{"],
        "input": [URL, "{"],
        "images": "none",
    }
    data = json.dumps(body).encode()
    assert read_call("/cohere/v2/chat", data, RULES, None).for_pd(None) == [data]


def test_too_many_items_are_refused_before_anything_is_fetched() -> None:
    linked = Fetched()
    with pytest.raises(RequestError, match="max_media_items"):
        read(CHAT_PATH, linked, Rules(max_items=2), messages=said(*[image(URL)] * 3))
    assert len(linked.wanted) == 2
