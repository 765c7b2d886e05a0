"""What reaches the instances, and what reaches the client."""

from __future__ import annotations

import base64
from typing import Any

from starlette.responses import JSONResponse, Response

from epd_portable.wire.params import EncodeParams, PrefillParams, read_params
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import JSON, Received
from tests.keyring import secret


def image(content: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": url}}


RED, BLUE = image(b"red"), image(b"blu")
"""Of one size: what is known of encoding one of them holds for the other."""
TEXT = {"type": "text", "text": "What is this?"}


async def test_text_reaches_the_pd_instance_unchanged_and_no_encoder(build: Build) -> None:
    t = await build()
    body = b'{ "messages": [{"role":"user","content":"caf\\u00e9"}] }'

    path = "/v1/chat/completions"
    response = await t.client.post(f"{path}?a=b%20c&d", content=body, headers=JSON)

    assert response.status_code == 200
    assert [(r.path, r.query, r.raw) for r in t.pd.received] == [(path, "a=b%20c&d", body)]
    assert t.encoders[0].received == []


async def test_encode_jobs_and_pd_request_run_at_the_same_time(build: Build) -> None:
    t = await build()

    async def encode(received: Received) -> Response:
        await t.pd.until(lambda pd: len(pd.received) == 1)
        return JSONResponse({})

    async def generate(received: Received) -> Response:
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 2)
        return JSONResponse({"answer": 42})

    t.encoders[0].behaviour = encode
    t.pd.behaviour = generate

    response = await t.chat(RED, TEXT, BLUE, max_tokens=7)

    assert response.json() == {"answer": 42}
    jobs = [read_params(r.params, EncodeParams).transfers[0] for r in t.encoders[0].received]
    expected = read_params(t.pd.received[0].params, PrefillParams)
    assert {j.transfer_id for j in jobs} == {e.transfer_id for e in expected.transfers}
    assert {j.consumer for j in jobs} == {t.control.address}
    for job in jobs:
        assert secret().verify_transfer(
            job.proof, job.transfer_id, job.item_uuid, t.control.address
        )
    parts = t.pd.received[0].body["messages"][0]["content"]
    assert [parts[0]["uuid"], parts[2]["uuid"]] == [e.item_uuid for e in expected.transfers]
    assert {e.encoder for e in expected.transfers} == {"encode-0"}
    assert t.pd.received[0].body["max_tokens"] == 7
    assert "What is this" not in str([r.raw for r in t.encoders[0].received])


async def test_bad_input_is_answered_in_openais_form(build: Build) -> None:
    t = await build()
    headers = JSON | {"x-request-id": "a b;" + "c" * 500}
    response = await t.client.post("/v1/chat/completions", content=b"not json", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    # An id that could harm is replaced.
    assert len(response.headers["x-request-id"]) == 32
    assert t.pd.received == []


async def test_unknown_paths_and_methods_are_answered_in_json(build: Build) -> None:
    t = await build()
    unknown = await t.client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_path")
    assert "/v1/chat/completions" in unknown.json()["error"]["message"]
    wrong = await t.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_large_image_arrives_unchanged(build: Build) -> None:
    t = await build()
    large = image(bytes(range(256)) * 8192)

    await t.chat(large, TEXT)
    await t.encoders[0].until(lambda encoder: bool(encoder.received))
    for received in (t.pd.received[0], t.encoders[0].received[0]):
        assert received.body["messages"][0]["content"][0]["image_url"] == large["image_url"]
