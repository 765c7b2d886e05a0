from __future__ import annotations

import json
from typing import Any

import pytest

from epd_portable.errors import RequestError
from epd_portable.router.requests import Call, read_chat, read_completion
from epd_portable.wire.params import (
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    encode_params,
    prefill_params,
)

RED = "data:image/png;base64,cmVk"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
WITH_IMAGE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": RED}},
        ],
    },
]


def chat(messages: Any = MESSAGES, **more: Any) -> Call:
    body = json.dumps({"messages": messages, **more}).encode()
    return read_chat(body, model="demo", max_items=8)


def test_a_text_request_reaches_the_instance_byte_for_byte() -> None:
    body = b'{ "messages" : [{"role":"user","content":"caf\\u00e9"}],  "seed": 1.0 }'
    assert read_chat(body, model="demo", max_items=1).for_pd(None) == body


def test_a_text_completion_reaches_the_instance_byte_for_byte() -> None:
    body = b'{ "prompt" : "once" , "stream": true}'
    call = read_completion(body, model="demo")
    assert call.for_pd(None) == body
    assert call.stream


@pytest.mark.parametrize("name", ["ec_transfer_params", "kv_transfer_params"])
def test_forged_transfer_parameters_are_dropped(name: str) -> None:
    call = chat(**{name: {"transfers": []}}, temperature=0)
    assert json.loads(call.for_pd(None)) == {"messages": MESSAGES, "temperature": 0}


def test_the_pd_body_holds_the_expected_transfers() -> None:
    call = chat(WITH_IMAGE, max_tokens=5)
    expected = PrefillParams(
        transfers=(ExpectedTransfer(transfer_id="t", mm_hash=call.items[0].mm_hash),), reply_to="r"
    )

    body = json.loads(call.for_pd(expected))

    assert prefill_params(body["ec_transfer_params"]) == expected
    assert body["max_tokens"] == 5
    assert body["messages"][1]["content"][1]["uuid"] == call.items[0].mm_hash


def test_an_encode_job_holds_the_image_and_nothing_of_the_text() -> None:
    call = chat(WITH_IMAGE, max_tokens=5, mm_processor_kwargs={"max_pixels": 64}, seed=3)
    item = call.items[0]
    transfer = EncodeTransfer(transfer_id="t", mm_hash=item.mm_hash, consumer="tcp://c:1")

    body = json.loads(call.for_encoder(item, transfer))

    assert encode_params(body.pop("ec_transfer_params")).transfers == (transfer,)
    part = {"type": "image_url", "image_url": {"url": RED}, "uuid": item.mm_hash}
    assert body == {
        "model": "demo",
        "messages": [{"role": "user", "content": [part]}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "mm_processor_kwargs": {"max_pixels": 64},
    }


def test_processor_settings_change_the_key_of_an_image() -> None:
    plain = chat(WITH_IMAGE)
    small = chat(WITH_IMAGE, mm_processor_kwargs={"max_pixels": 64})
    assert plain.items[0].mm_hash != small.items[0].mm_hash


FILM = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,ZmlsbQ=="}}
CLIP = {"type": "input_audio", "input_audio": {"data": "Y2xpcA==", "format": "wav"}}
PICTURE = {"type": "image_url", "image_url": {"url": RED}}


@pytest.mark.parametrize(("part", "modality"), [(FILM, "video"), (CLIP, "audio")])
def test_an_encode_job_holds_a_video_or_a_clip_alone(part: dict[str, Any], modality: str) -> None:
    call = chat([{"role": "user", "content": [part, {"type": "text", "text": "secret"}]}])
    (item,) = call.items
    transfer = EncodeTransfer(
        transfer_id="t", mm_hash=item.mm_hash, consumer="tcp://c:1", modality=item.modality
    )

    body = json.loads(call.for_encoder(item, transfer))

    assert item.modality == modality
    assert body["messages"][0]["content"] == [{**part, "uuid": item.mm_hash}]
    assert encode_params(body["ec_transfer_params"]).transfers == (transfer,)


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


def test_processor_settings_of_another_form_are_refused() -> None:
    with pytest.raises(RequestError, match=r"mm_processor_kwargs: .* give an object") as caught:
        chat(WITH_IMAGE, mm_processor_kwargs=["fps"])
    assert caught.value.status == 400


@pytest.mark.parametrize("asked", ["demo", None])
def test_the_served_model_may_be_named_or_left_out(asked: str | None) -> None:
    assert chat(model=asked).model == "demo"


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
        (b"{}", 400, ["'messages' is missing"]),
        (b'{"messages": [], "max_token": 5}', 400, ["'max_token'", "mean 'max_tokens'"]),
        (b'{"messages": [], "zzz": 5, "qqq": 1}', 400, ["'qqq', 'zzz'", "remove"]),
        (b'{"messages": [], "guided_json": {}}', 400, ["'guided_json'"]),
        (b'{"messages": [], "model": "gpt"}', 404, ["'gpt'", "'demo'"]),
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
        read_chat(body, model="demo", max_items=1)
    assert caught.value.status == status
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_completion_needs_a_prompt() -> None:
    with pytest.raises(RequestError, match="'prompt' is missing"):
        read_completion(b"{}", model="demo")
