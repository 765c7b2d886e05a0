from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.errors import RequestError
from epd_portable.media.limits import Modality
from epd_portable.router.contents.cut_text import CutText
from epd_portable.router.contents.media import MediaItem, MediaReader, content_key, split_data_url

RED = "data:image/png;base64," + base64.b64encode(b"red picture!").decode()


CLIP = base64.b64encode(b"one clip").decode()
FILM = "data:video/mp4;base64," + base64.b64encode(b"one film").decode()


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def video(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


def sound(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}, **more}


def input_audio(data: Any, sort: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": sort}}


class Read(msgspec.Struct):
    messages: Any
    items: tuple[MediaItem, ...]


def read_raw(raw: bytes, *, max_items: int = 8, salt: bytes = b"") -> Read:
    cut = CutText(raw)
    reader = MediaReader(cut, salt=salt, max_items=max_items)
    messages = reader.chat(msgspec.Raw(bytes(cut.small)), "messages")
    return Read(messages, reader.items)


def read(*parts: Any, max_items: int = 8, salt: bytes = b"") -> Read:
    raw = json.dumps([{"role": "user", "content": list(parts)}]).encode()
    return read_raw(raw, max_items=max_items, salt=salt)


def parts_of(found: Read) -> list[dict[str, Any]]:
    (message,) = found.messages
    parts: list[dict[str, Any]] = json.loads(msgspec.json.encode(message))["content"]
    return parts


def test_a_clients_own_uuid_is_replaced_on_media_and_removed_elsewhere() -> None:
    conversation = read(
        image(RED, uuid="forged"),
        video(FILM, uuid="forged"),
        sound("data:audio/wav;base64," + CLIP, uuid="forged"),
        {**input_audio("AAAA", "mp3"), "uuid": "forged"},
        {"type": "text", "text": "x", "uuid": "forged"},
    )

    *media, words = parts_of(conversation)
    assert [part["uuid"] for part in media] == [item.item_uuid for item in conversation.items]
    assert words == {"type": "text", "text": "x"}


def test_messages_without_images_keep_the_clients_bytes() -> None:
    plain = b'{"role":"system",   "content":"caf\\u00e9"}'
    shown = json.dumps({"role": "user", "content": [image(RED)]}).encode()

    assert msgspec.json.encode(read_raw(b"[%s,%s]" % (plain, shown)).messages[0]) == plain


def test_items_are_named_by_their_content_whatever_form_or_type_they_are_said_to_have() -> None:
    assert len(read(image(RED), {"type": "image_url", "image_url": RED}).items) == 1
    assert len(read(input_audio(CLIP), sound("data:audio/wav;base64," + CLIP)).items) == 1
    assert [item.modality for item in read(video(FILM), sound(FILM)).items] == ["video", "audio"]
    jpeg, png = (f"data:image/{kind};base64,AAAA" for kind in ("jpeg", "png"))
    mp4, webm, frames = (f"data:video/{kind};base64,AAAA" for kind in ("mp4", "webm", "jpeg"))
    assert len(read(image(jpeg), image(png)).items) == 1
    assert len(read(input_audio(CLIP, "mp3"), input_audio(CLIP, "wav")).items) == 1
    # Frames one after the other the engine reads in another way.
    assert len(read(video(mp4), video(webm), video(frames)).items) == 2


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6)), min_size=2, unique=True))
def test_keys_differ_wherever_the_fields_are_cut(pairs: list[tuple[bytes, bytes]]) -> None:
    keys = {content_key("image", data, salt) for salt, data in pairs}
    assert len(keys) == len(pairs)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            image("http://example.com/a.png"),
            ["only data URLs", "http://example.com/a.png", "inline"],
        ),
        (image("file:///etc/passwd"), ["only data URLs"]),
        (image(""), ["only data URLs"]),
        (image("data:image/png;base64"), ["no ','"]),
        (image("data:image/png;" + "x" * 5000), ["no ','"]),
        (image("data:image/png,AAAA"), ["not base64", ";base64"]),
        (image("data:image/png;base64;x=1,AAAA"), ["not base64"]),
        (image("data:text/plain;base64,AAAA"), ["'text/plain' is no image"]),
        (image("data:;base64,AAAA"), ["'' is no image"]),
        (image("data:image/;base64,AAAA"), ["'image/' is no image"]),
        (image("data:video/mp4;base64,AAAA"), ["'video/mp4' is no image"]),
        (image("data:image/png;base64,"), ["no data"]),
        (video("https://example.com/a.mp4"), ["video_url", "only data URLs", "data:video/mp4"]),
        (video(RED), ["'image/png' is no video", "video/mp4"]),
        (sound(RED), ["'image/png' is no audio", "audio/wav"]),
        (sound("data:audio/wav;base64,"), ["audio_url", "no data"]),
        (input_audio(""), ["input_audio.data", "no data"]),
        (input_audio(7), ["input_audio.data", "got `int`"]),
        (input_audio(CLIP, "wav;base64,AAAA"), ["input_audio.format", "'wav'"]),
        (input_audio(CLIP, None), ["input_audio.format", "got `null`"]),
        ({"type": "input_audio"}, ["input_audio is missing", "format"]),
        ({"type": "input_audio", "input_audio": {"data": CLIP}}, ["format is missing"]),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ["data is missing"]),
        ({"type": "input_audio", "input_audio": CLIP}, ["input_audio", "got `str`"]),
        ({"type": "video_url"}, ["video_url is missing", "data:video/mp4"]),
        ({**image(RED), **video(FILM)}, ["image_url and video_url", "a part of its own"]),
        ({"type": "image_url", "video_url": FILM}, ["type must be 'video_url'"]),
        ({"type": "image_embeds", "image_embeds": {}}, ["image_embeds is not accepted"]),
        ({"type": "prompt_embeds", "data": ""}, ["prompt_embeds is not accepted"]),
        ({"type": None, "image_url": RED}, ["content[1].type"]),
        (
            {"type": "text", "text": "x", "uuid": "u", "image_url": RED},
            ["type must be 'image_url'"],
        ),
        ({"video_embeds": {}}, ["video_embeds is not accepted"]),
        ({"type": "image_url"}, ["image_url is missing"]),
        ({"type": "image_url", "image_url": {}}, ["image_url.url is missing"]),
        ({"type": "image_url", "image_url": None, "uuid": "known"}, ["got `null`"]),
        ({"type": "image_url", "image_url": {"url": 7}}, ["got `int`"]),
        ({"type": 7}, ["content[1].type"]),
    ],
)
def test_a_bad_part_is_refused_with_place_value_and_remedy(
    part: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        read({"type": "text", "text": "x"}, part)
    assert caught.value.status == 400
    for word in ["messages[0].content[1]", *words]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("url", "kind", "expected"),
    [
        ("data:image/png;base64,AA==", "image", "image/png"),
        ("DATA:image/PNG;name=a;base64,AAA=", "image", "image/png"),
        (RED, "image", "image/png"),
        (FILM, "video", "video/mp4"),
        ("data:audio/x-wav;codecs=1;base64,AAAA", "audio", "audio/x-wav"),
        (FILM, "audio", "video/mp4"),
    ],
)
def test_good_data_urls_pass(url: str, kind: Modality, expected: str) -> None:
    media_type, data = split_data_url(url.encode(), kind, "here")
    assert media_type == expected
    assert base64.b64decode(data, validate=True)


@pytest.mark.parametrize("name", ["image_url", "video_url", "audio_url"])
def test_an_item_without_a_type_is_found_all_the_same(name: str) -> None:
    family = name.removesuffix("_url")
    assert len(read({name: f"data:{family}/x;base64,AAAA"}).items) == 1


def test_too_many_items_are_refused_with_the_limit() -> None:
    with pytest.raises(RequestError, match=r"content\[2\].video_url: item 3 .* at most 2 images"):
        read(image(RED), image(RED), video(FILM), max_items=2)


@pytest.mark.parametrize("raw", [b"7", b"{}", b'["x"]', b"null"])
def test_messages_of_another_form_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="messages"):
        read_raw(raw)
