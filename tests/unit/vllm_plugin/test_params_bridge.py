"""``ec_transfer_params`` through a server that does not know the field, and back."""

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

PARAMS = {"transfers": [{"transfer_id": "t", "item_uuid": 'with "quotes" and é'}]}


async def old_server(request: Request) -> Response:
    """Do as vLLM 0.23 does: keep scalars of ``vllm_xargs``, answer with ``kv_transfer_params``."""
    raw = await request.body()
    assert int(request.headers["content-length"]) == len(raw)
    body = json.loads(raw)
    if body.get("stream"):
        return StreamingResponse(iter([b"data: {}\n\n"]), media_type="text/event-stream")
    extra = body.get("vllm_xargs") or {}
    told = extra.get("ec_transfer_params")
    outcome: dict[str, Any] | None = dict(body.get("kv") or {})
    if told is not None:
        assert isinstance(told, str)
        outcome["ec_transfer_params"] = {"items": json.loads(told)["transfers"]}
    return JSONResponse({"seen": body, "kv_transfer_params": outcome or None}, status_code=201)


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[Route("/v1/chat/completions", old_server, methods=["POST", "GET"])])
    app.add_middleware(ParamsMiddleware)
    return TestClient(app)


def test_the_field_reaches_the_engine_and_its_answer_the_client(client: TestClient) -> None:
    body = {"messages": [{"content": "hi"}], "ec_transfer_params": PARAMS, "vllm_xargs": {"a": 1}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 201
    found = answer.json()
    assert found["ec_transfer_params"] == {"items": PARAMS["transfers"]}
    assert found["kv_transfer_params"] is None
    assert found["seen"]["messages"] == body["messages"]
    assert found["seen"]["vllm_xargs"]["a"] == 1
    assert "ec_transfer_params" not in found["seen"]


def test_what_kv_connectors_answer_stays_where_it_is(client: TestClient) -> None:
    body = {"ec_transfer_params": PARAMS, "kv": {"block": 3}}
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["kv_transfer_params"] == {"block": 3}
    assert found["ec_transfer_params"] == {"items": PARAMS["transfers"]}


@pytest.mark.parametrize("body", [{"messages": []}, {"vllm_xargs": {"a": 1}, "kv": {"b": 2}}])
def test_other_requests_pass_unchanged(client: TestClient, body: dict[str, Any]) -> None:
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["seen"] == body
    assert "ec_transfer_params" not in found


def test_pieces_of_an_answer_are_passed_on_as_they_come(client: TestClient) -> None:
    body = {"stream": True, "ec_transfer_params": PARAMS}
    assert client.post("/v1/chat/completions", json=body).text == "data: {}\n\n"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{broken", b'{"ec_transfer_params":'])
def test_what_is_no_object_is_left_to_the_server(body: bytes) -> None:
    seen: list[bytes] = []

    async def echo(request: Request) -> Response:
        seen.append(await request.body())
        return Response(b"[2]", media_type="application/json")

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    app.add_middleware(ParamsMiddleware)
    assert TestClient(app).post("/", content=body).content == b"[2]"
    assert seen == [body]
