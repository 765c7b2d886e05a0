from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from epd_portable.errors import RequestError
from epd_portable.router.contents.body import (
    CHAT_PATH,
    COMPLETION_PATH,
    MAX_JSON_BYTES,
    MEDIA_SUFFIX,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Call,
    Rules,
    read_call,
    size,
)
from epd_portable.router.contents.media import content_key
from epd_portable.wire.params import (
    EncodedItem,
    EncodeParams,
    ExpectedTransfer,
    PrefillParams,
    read_params,
)
from tests.unit.router.bodies import RED, TEXT, image, joined, said, sent, transfer

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
PICTURE = {"type": "image_url", "image_url": {"url": RED}}
WITH_IMAGE = [{"role": "system", "content": "Be brief."}, *said(TEXT, PICTURE)]
RULES = Rules(max_items=8)


def chat(messages: Any = MESSAGES, rules: Rules = RULES, **more: Any) -> Call:
    return read_call(CHAT_PATH, json.dumps({"messages": messages, **more}).encode(), rules)


def test_an_encode_job_holds_the_image_and_nothing_of_the_text() -> None:
    call = chat(WITH_IMAGE, max_tokens=5, mm_processor_kwargs={"max_pixels": 64}, seed=3)
    item = call.items[0]

    body = sent(call.for_encoder(item, transfer(item.item_uuid)))

    assert read_params(body.pop("ec_transfer_params"), EncodeParams).transfers == (
        transfer(item.item_uuid),
    )
    part = {"type": "image_url", "image_url": {"url": RED}, "uuid": item.item_uuid}
    assert body == {
        "messages": [{"role": "user", "content": [part]}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "mm_processor_kwargs": {"max_pixels": 64},
    }


FILM = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,ZmlsbQ=="}}
CLIP = {"type": "input_audio", "input_audio": {"data": "Y2xpcA==", "format": "wav"}}


@pytest.mark.parametrize(
    ("settings", "modalities"),
    [
        ({"use_audio_in_video": True}, ["image"]),
        ({"use_audio_in_video": False}, ["video", "audio", "image"]),
        ({"fps": 2}, ["video", "audio", "image"]),
        (None, ["video", "audio", "image"]),
    ],
)
def test_videos_whose_sound_is_taken_too_are_left_to_the_instance_with_the_prompt(
    settings: dict[str, Any] | None, modalities: list[str]
) -> None:
    messages = [{"role": "user", "content": [FILM, CLIP, PICTURE]}]
    call = chat(messages, mm_processor_kwargs=settings)
    assert [item.modality for item in call.items] == modalities
    for item, part in zip(call.items, [FILM, CLIP, PICTURE][-len(modalities) :], strict=True):
        job = sent(call.for_encoder(item, transfer(item.item_uuid)))
        assert job["messages"][0]["content"] == [{**part, "uuid": item.item_uuid}]


def test_processor_settings_of_another_form_are_refused() -> None:
    with pytest.raises(RequestError, match="mm_processor_kwargs: give an object") as caught:
        chat(WITH_IMAGE, mm_processor_kwargs=["fps"])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, b'{ "messages" : [{"role":"user","content":"caf\\u00e9"}],  "seed": 1.0 }'),
        (CHAT_PATH, b'{"messages": [],  "future": [1.0, {}]}'),
        (CHAT_PATH, b'{"messages": [{"content": "%b"}]}' % (b"word " * 100_000)),
        (COMPLETION_PATH, b'{ "prompt" : "once" , "stream": true}'),
        (COMPLETION_PATH, b'{"prompt":[' + b"1," * 900_000 + b"1]}"),
        (RESPONSES_PATH, b'{ "input": "hello", "store" : false }'),
        ("/v1/embeddings", b'{ "model" : "demo",  "input" : [1,2], "messages": "hi"}'),
    ],
    ids=range(7),
)
def test_what_needs_no_change_reaches_the_instance_byte_for_byte(path: str, body: bytes) -> None:
    call = read_call(path, body, RULES)
    (segment,) = call.for_pd(None)
    assert segment is body
    assert (call.stream, call.items) == (b'"stream": true' in body, ())


@pytest.mark.parametrize(
    ("asked", "model"), [("demo", "demo"), ("my-adapter", "my-adapter"), (None, "")]
)
def test_the_model_may_be_named_or_left_out(asked: str | None, model: str) -> None:
    assert chat(model=asked).model == model


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"hello", 400, ["'hello'", "not JSON", "byte 0"]),
        (b"", 400, ["0 bytes", "not JSON"]),
        (b'{"messages": [', 400, ["not JSON", "truncated"]),
        (b'{"messages": [], "seed": NaN}', 400, ["not JSON", "(byte 25)"]),
        (b"\xff\xfe{\x00}\x00", 400, ["not JSON in UTF-8"]),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ["recursion"]),
        (b"[]", 400, ["got `array`", "one JSON object"]),
        (b'{"messages": [], "model": 7}', 400, ["model", "got `int`"]),
        (b'{"messages": "hi"}', 400, ["messages", "array"]),
        (b'{"messages": [], "vllm_xargs": {"ec_transfer_params": "x"}}', 400, ["router's own"]),
        (b'{"messages": [], "vllm_xargs": 7}', 400, ["vllm_xargs"]),
    ],
)
def test_a_bad_body_is_refused_with_value_and_remedy(
    body: bytes, status: int, words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        read_call(CHAT_PATH, body, RULES)
    assert caught.value.status == status
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT_PATH, "messages"),
        (COMPLETION_PATH, "prompt"),
        (RESPONSES_PATH, "input"),
        (MESSAGES_PATH, "messages"),
    ],
)
def test_a_request_needs_its_prompt(path: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is missing in the request body: give "):
        read_call(path, b'{"model": "demo"}', RULES)


# What goes in place of media.

BLUE = "data:image/png;base64,Ymx1ZQ=="


def asked_of(*parts: Any) -> Call:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*parts]}]
    return chat(messages, seed=3)


def told(call: Call) -> dict[str, EncodedItem]:
    return {
        item.item_uuid: EncodedItem(
            mm_hash=item.item_uuid, modality="image", metadata={"image_grid_thw": [1, 8, number]}
        )
        for number, item in enumerate(call.items)
    }


def params(call: Call) -> PrefillParams:
    transfers = [ExpectedTransfer(transfer_id="t", item_uuid=i.item_uuid) for i in call.items]
    return PrefillParams(transfers=tuple(transfers))


def test_renamed_items_hold_their_media_under_other_names_everywhere() -> None:
    call = asked_of(TEXT, image(RED), image(BLUE), image(RED))
    renamed = call.renamed()
    names = [item.item_uuid + MEDIA_SUFFIX for item in call.items]
    assert [item.item_uuid for item in renamed.items] == names
    assert sent(renamed.for_pd(None))["messages"][1]["content"] == [
        TEXT,
        image(RED) | {"uuid": names[0]},
        image(BLUE) | {"uuid": names[1]},
        image(RED) | {"uuid": names[0]},
    ]
    job = sent(renamed.for_encoder(renamed.items[0], transfer(names[0])))
    assert job["messages"][0]["content"] == [image(RED) | {"uuid": names[0]}]


# Keys, and who shares them.


SALTED: list[dict[str, Any]] = [
    {"cache_salt": None, "mm_processor_kwargs": None},
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"media_io_kwargs": {"image": {"x": 1}}},
    {"mm_processor_kwargs": {"max_pixels": 64}},
    {"cache_salt": "s" * 9000, "mm_processor_kwargs": {"x": "y" * 9000}},
]


def test_who_sets_a_salt_shares_no_item_with_others() -> None:
    first, second = (
        [chat(WITH_IMAGE, **more).items[0].item_uuid for more in SALTED] for _ in range(2)
    )
    assert first == second
    assert first[0] == first[1]
    assert len(set(first)) == len(SALTED) - 1
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in first)


# Segments.


def large(nbytes: int, **more: Any) -> tuple[bytes, str]:
    data = hashlib.shake_256(b"large").hexdigest(nbytes // 2)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
    messages = [{"role": "user", "content": [TEXT, picture]}]
    return json.dumps({"messages": messages, **more}).encode(), data


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_large_picture_is_keyed_and_sent_without_a_copy(kind: type) -> None:
    body, text = large(1 << 20, seed=3)
    data = kind(body)
    call = read_call(CHAT_PATH, data, RULES)
    (item,) = call.items
    assert item.item_uuid == content_key("image", text.encode(), b"\0\0\0")

    job = call.for_encoder(item, transfer(item.item_uuid))
    for written in (call.for_pd(params(call)), job):
        (view,) = (each for each in written if isinstance(each, memoryview))
        assert view.obj is data and len(view) > 1 << 20
        assert size(written) == len(joined(written))
        assert text in sent(written)["messages"][-1]["content"][-1]["image_url"]["url"]
    described = call.for_pd(params(call), told(call))
    assert size(described) < 1000


# Responses and messages.


def responses(given: Any, rules: Rules = RULES, **more: Any) -> Call:
    return read_call(RESPONSES_PATH, json.dumps({"input": given, **more}).encode(), rules)


SEEN = {"type": "input_image", "image_url": RED, "detail": "auto", "uuid": "forged"}


def test_images_of_a_responses_request_are_keyed_wherever_the_engine_looks_for_them() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "x", "uuid": "u"}, SEEN]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{**SEEN, "image_url": BLUE}]},
        {"role": "user", "content": "text"},
    ]
    call = responses(given, mm_processor_kwargs={"max_pixels": 64}, stream=True, model="demo")
    red, blue = call.items
    assert (call.stream, call.takes_metadata, call.model) == (True, False, "demo")

    body = sent(call.for_pd(params(call)))

    assert read_params(body["ec_transfer_params"], PrefillParams) == params(call)
    assert body["input"][0]["content"] == [
        {"type": "input_text", "text": "x"},
        {**SEEN, "uuid": red.item_uuid},
    ]
    assert body["input"][2]["output"] == [{**SEEN, "image_url": BLUE, "uuid": blue.item_uuid}]
    assert body["input"][1::2] == given[1::2]
    job = sent(call.for_encoder(red, transfer(red.item_uuid)))
    assert job["messages"][0]["content"] == [{**SEEN, "uuid": red.item_uuid}]
    assert job["mm_processor_kwargs"] == {"max_pixels": 64}
    chat_key = chat(WITH_IMAGE, mm_processor_kwargs={"max_pixels": 64}).items[0].item_uuid
    assert red.item_uuid == chat_key


def block(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", **source}}


def anthropic(messages: Any, rules: Rules = RULES, path: str = MESSAGES_PATH) -> Call:
    data = {"model": "demo", "max_tokens": 5, "messages": messages, "mm_processor_kwargs": {"x": 1}}
    return read_call(path, json.dumps(data).encode(), rules)


DRAWN = [
    {"role": "system", "content": [block(media_type="image/png", data="bm90aGluZw==")]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "secret"},
            block(media_type="image/png", data="cmVk"),
            {"type": "tool_result", "content": [block(media_type="image/webp", data="dG9vbA==")]},
            {"type": "tool_result", "content": "text"},
            block(data="anBlZw=="),
            {"type": "image", "source": {"type": "url", "url": BLUE}},
        ],
    },
    {"role": "user", "content": "text"},
    {"role": "assistant", "content": [{"type": "tool_result", "content": [block(data="AAAA")]}]},
]


def test_images_of_anthropics_messages_are_found_in_the_engines_order_and_not_named() -> None:
    call = anthropic(DRAWN)
    urls = []
    for item in call.items:
        job = sent(call.for_encoder(item, transfer(item.item_uuid)))
        (part,) = job["messages"][0]["content"]
        assert part.keys() == {"type", "image_url"}
        assert "mm_processor_kwargs" not in job
        urls.append(part["image_url"]["url"])
    assert urls == ["data:image/webp;base64,dG9vbA==", RED, "data:image/jpeg;base64,anBlZw==", BLUE]

    body = sent(call.for_pd(params(call)))

    assert read_params(body.pop("ec_transfer_params"), PrefillParams) == params(call)
    assert body["messages"] == DRAWN
    assert not call.takes_metadata


def test_a_large_image_of_anthropics_messages_is_sent_without_a_copy() -> None:
    data = "ABCD" * 100_000
    call = anthropic([{"role": "user", "content": [block(media_type="image/png", data=data)]}])
    (item,) = call.items
    job = call.for_encoder(item, transfer(item.item_uuid))
    assert any(isinstance(each, memoryview) for each in job)
    (part,) = sent(job)["messages"][0]["content"]
    assert part["image_url"] == {"url": "data:image/png;base64," + data}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"type": "url", "url": "http://example.com/a.png"}, ["source.url", "only data URLs"]),
        ({"type": "url"}, ["source.url is missing"]),
        ({"type": "base64"}, ["source.data is missing"]),
        ({"data": ""}, ["source.data", "no data"]),
        ({"data": 7}, ["source.data", "got `int`"]),
        ({"data": "AAAA", "media_type": "text/html"}, ["'text/html'", "no image", "image/png"]),
        ({"data": "A", "media_type": "image/png;base64,BBBB#"}, ["source.media_type", "no image"]),
    ],
)
def test_a_bad_source_is_refused_with_place_and_remedy(source: Any, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        anthropic([{"role": "user", "content": [{"type": "image", "source": source}]}])
    assert caught.value.status == 400
    for word in ["messages[0].content[0].source", *words]:
        assert word in str(caught.value)


def test_media_go_to_chat_only_where_instances_hold_no_encoder() -> None:
    rules = Rules(pd_takes_media=False)
    assert len(chat(WITH_IMAGE, rules=rules).items) == 1
    for read in (
        lambda: anthropic(DRAWN, rules),
        lambda: responses([{"role": "user", "content": [SEEN]}], rules),
        lambda: read_call("/tokenize", json.dumps({"messages": WITH_IMAGE}).encode(), rules),
    ):
        with pytest.raises(RequestError, match=f"in chat requests only.*{CHAT_PATH}"):
            read()


# Other endpoints.


@pytest.mark.parametrize(
    "path", [CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH, "/tokenize", "/invocations"]
)
def test_no_endpoint_takes_what_travels_between_router_and_instances(path: str) -> None:
    body = {"messages": [], "prompt": "", "input": "", "ec_transfer_params": {}}
    call = read_call(path, json.dumps({**body, "kv_transfer_params": {}}).encode(), RULES)
    assert sent(call.for_pd(None)) == {"messages": [], "prompt": "", "input": ""}
    with pytest.raises(RequestError, match="router's own"):
        forged = {**body, "vllm_xargs": {"kv_transfer_params": "x"}}
        read_call(path, json.dumps(forged).encode(), RULES)


def test_a_body_that_nobody_looks_at_goes_on_as_it_is() -> None:
    data = bytearray(b"--boundary\r\n" + b"A" * 10_000)
    call = Call.untouched("POST", "/v1/audio/transcriptions", data)
    assert joined(call.for_pd(None)) == data
    assert call.method == "POST"


@pytest.mark.parametrize(
    "body", [b'\xef\xbb\xbf{"messages":[]}', '{"a":1}'.encode("utf-16"), b"[]"]
)
def test_other_endpoints_take_only_json_that_is_read_here_as_there(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_call("/tokenize", body, RULES)


# Bodies that would hold up others.

BOUNDS: dict[str, bytes] = {
    "bytes": b'{"messages":[],"seed":' + b" " * MAX_JSON_BYTES + b"1}",
    "commas": b'{"messages":[' + b"1," * 300_001 + b"1]}",
    "strings": b'{"messages":[],"x":[' + b'"",' * 100_001 + b'""]}',
    "commas in messages": b'{"messages":['
    + (b'{"content":[' + b"{}," * 19_000 + b"{}]},") * 16
    + b"{}]}",
    "messages": b'{"messages":[' + b"{}," * 20_000 + b"{}]}",
    "parts": b'{"messages":[{"content":[' + b"{}," * 20_000 + b"{}]}]}",
}


@pytest.mark.parametrize("what", BOUNDS)
def test_a_body_with_too_many_values_is_refused(what: str) -> None:
    with pytest.raises(RequestError, match=r"at most \d+ are allowed; send fewer") as caught:
        read_call(CHAT_PATH, BOUNDS[what], RULES)
    assert caught.value.status == 413


class Pauses:
    """Counts the moments at which other threads may run."""

    def __init__(self) -> None:
        self.count = 0

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < 0.001
        self.count += 1


LARGE = 48 << 20


def picture(nbytes: int = LARGE) -> bytes:
    part = image("data:image/png;base64," + "AbCd/fGh" * (nbytes // 8))
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a picture": picture,
    "a picture with escapes": lambda: picture(LARGE // 4).replace(b"/", b"\\/"),
    "a text": lambda: b'{"messages":[{"content":"' + b"words\\n" * (LARGE // 7) + b'"}]}',
    "no end": lambda: picture()[:-9],
    "backslashes": lambda: b'{"messages":"' + b"\\" * LARGE + b'"}',
    "blanks": lambda: b'{"messages":' + b" " * LARGE + b"[]}",
    "numbers": lambda: b'{"messages":[' + b"1," * (LARGE // 2) + b"1]}",
    "commas": lambda: b'{"messages":"' + b"," * (MAX_JSON_BYTES - 100) + b'"}',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_large_body_keeps_other_threads_waiting(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = HOSTILE[what]()
    pauses = Pauses()
    monkeypatch.setattr("epd_portable.router.contents.cut_text.time", pauses)
    with contextlib.suppress(RequestError):
        call = read_call(CHAT_PATH, data, RULES)
        call.for_pd(params(call) if call.items else None)
    # At least every 8 MiB.
    assert pauses.count >= len(data) >> 23
