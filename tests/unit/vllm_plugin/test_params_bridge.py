"""``ec_transfer_params`` in responses of a server that does not know the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from epd_portable.vllm_plugin.params_bridge import ParamsMiddleware

OUTCOME = {"items": [{"mm_hash": 'with "quotes" and é'}]}


async def old_server(request: Request) -> Response:
    """Return, as vLLM 0.23 does, ``kv_transfer_params`` alone."""
    body = json.loads(await request.body())
    if body.get("stream"):
        return StreamingResponse(iter([b"data: {}\n\n"]), media_type="text/event-stream")
    return JSONResponse({"seen": body, "kv_transfer_params": body.get("kv")}, status_code=201)


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[Route("/v1/chat/completions", old_server, methods=["POST", "GET"])])
    app.add_middleware(ParamsMiddleware)
    return TestClient(app)


@pytest.mark.parametrize("kv", [{}, {"block": 3}])
def test_field_moves_out_of_kv_transfer_params(client: TestClient, kv: dict[str, Any]) -> None:
    body = {"kv": kv | {"ec_transfer_params": OUTCOME}}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 201
    found = response.json()
    assert found["ec_transfer_params"] == OUTCOME
    assert found["kv_transfer_params"] == (kv or None)
    assert found["seen"] == body


@pytest.mark.parametrize("body", [{"messages": []}, {"vllm_xargs": {"a": 1}, "kv": {"b": 2}}])
def test_other_responses_pass_unchanged(client: TestClient, body: dict[str, Any]) -> None:
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["seen"] == body
    assert "ec_transfer_params" not in found


def test_pieces_of_an_answer_are_passed_on_as_they_come(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={"stream": True})
    assert response.text == "data: {}\n\n"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{broken", b'{"ec_transfer_params":'])
def test_body_that_is_no_object_is_left_to_the_server(body: bytes) -> None:
    seen: list[bytes] = []

    async def echo(request: Request) -> Response:
        seen.append(await request.body())
        return Response(b"[2]", media_type="application/json")

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    app.add_middleware(ParamsMiddleware)
    assert TestClient(app).post("/", content=body).content == b"[2]"
    assert seen == [body]
