from __future__ import annotations

import json
from typing import Any

from epd_portable.router.requests import Call, read_chat
from epd_portable.router.substitution import MEDIA_SUFFIX
from epd_portable.wire.params import (
    EncodedItem,
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    prefill_params,
)

RED, BLUE = "data:image/png;base64,cmVk", "data:image/png;base64,Ymx1ZQ=="
TEXT = {"type": "text", "text": "What is this?"}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def chat(*parts: Any) -> Call:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*parts]}]
    body = json.dumps({"messages": messages, "seed": 3}).encode()
    return read_chat(body, model="demo", max_items=8)


def told(call: Call) -> dict[str, EncodedItem]:
    return {
        item.mm_hash: EncodedItem(
            mm_hash=item.mm_hash, modality="image", metadata={"image_grid_thw": [1, 8, number]}
        )
        for number, item in enumerate(call.items)
    }


def params(call: Call) -> PrefillParams:
    transfers = [ExpectedTransfer(transfer_id="t", mm_hash=i.mm_hash) for i in call.items]
    return PrefillParams(transfers=tuple(transfers))


def test_a_bare_body_holds_metadata_under_the_items_names_and_no_media() -> None:
    call = chat(TEXT, image(RED), image(BLUE), image(RED))
    red, blue = (item.mm_hash for item in call.items)

    data = call.for_pd(params(call), told(call))

    body = json.loads(data)
    assert b"base64" not in data
    assert prefill_params(body.pop("ec_transfer_params")) == params(call)
    bare = [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, n]}, "uuid": name}
        for n, name in [(0, red), (1, blue), (0, red)]
    ]
    assert body == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [TEXT, *bare]},
        ],
        "seed": 3,
    }


def test_the_call_itself_keeps_its_media() -> None:
    call = chat(image(RED))
    before = call.for_pd(params(call))
    call.for_pd(params(call), told(call))
    assert call.for_pd(params(call)) == before
    assert b"base64,cmVk" in before


def test_renamed_items_hold_their_media_under_other_names_everywhere() -> None:
    call = chat(TEXT, image(RED), image(BLUE), image(RED))
    renamed = call.renamed()
    names = [item.mm_hash + MEDIA_SUFFIX for item in call.items]
    assert [item.mm_hash for item in renamed.items] == names
    sent = json.loads(renamed.for_pd(None))["messages"][1]["content"]
    assert sent == [
        TEXT,
        image(RED) | {"uuid": names[0]},
        image(BLUE) | {"uuid": names[1]},
        image(RED) | {"uuid": names[0]},
    ]
    transfer = EncodeTransfer(transfer_id="t", mm_hash=names[0], consumer="tcp://c:1")
    job = json.loads(renamed.for_encoder(renamed.items[0], transfer))
    assert job["messages"][0]["content"] == [image(RED) | {"uuid": names[0]}]
