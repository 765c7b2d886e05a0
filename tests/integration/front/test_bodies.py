"""Bodies of requests at the front: any bytes are passed on or refused, in the client's own form."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.integration.front.played_front import CHAT, Serve, keys_file, stalled
from tests.property.budget import budget

MANY = 400_000
BOMBS: dict[str, bytes] = {
    "many values": b'{"messages":[' + b"0," * (10 * MANY) + b"0]}",
    "many names": b"{" + b",".join(b'"n%d":0' % number for number in range(MANY // 2)) + b"}",
    "long name": b'{"' + b"x" * (20 * MANY) + b'":0}',
    "long model": b'{"messages":[],"model":"' + b"x" * (20 * MANY) + b'"}',
    "nested lists": b'{"messages":' + b"[" * (10 * MANY),
    "nested objects": b'{"messages":[' + b'{"content":' * MANY,
    "nested settings": b'{"mm_processor_kwargs":' + b'{"a":' * MANY,
    "many settings": b'{"mm_processor_kwargs":{' + b'"a":1,' * MANY + b'"a":1}}',
    "long number in settings": b'{"mm_processor_kwargs":{"a":' + b"9" * MANY + b"}}",
    "escaped image": b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:'
    + rb"AA\/" * (5 * MANY) + b'"}}]}]}',
    "many parts": b'{"messages":[{"content":[' + b"{}," * MANY + b"{}]}]}",
    "session of many values": b'{"session_id":[' + b"[],"  * MANY + b"[]]}",
}  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
names = st.sampled_from(
    ["mm_processor_kwargs", "media_io_kwargs", "messages", "model", "session_id", "priority"]
)


@pytest.mark.parametrize("name", BOMBS)
async def test_large_bodies_take_little_further_memory(serve: Serve, name: str) -> None:
    http, _ = serve()
    await http.post(CHAT, content=b"{}")
    tracemalloc.start()
    try:
        got = await http.post(CHAT, content=BOMBS[name])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got.status_code in (200, 400), got.text
    # The test's client and the server each hold the body, some of it twice for a moment.
    assert most < 8 * len(BOMBS[name]) + (16 << 20)


@settings(budget(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(names, values).map(lambda each: json.dumps(each).encode())
    | st.dictionaries(names, values).map(lambda each: json.dumps(each).encode("utf-16"))
    | st.text(max_size=40).map(lambda each: b'{"mm_processor_kwargs":' + each.encode() + b"}")
    | st.binary(max_size=80)
)
async def test_any_body_is_passed_on_or_refused(fronted: Any, body: bytes) -> None:
    got = await fronted.post(CHAT, content=body)
    assert (got.status_code, got.text) == (200, str(len(body))) or (
        got.status_code == 400 and "message" in got.json()["error"]
    )


@pytest.fixture
def fronted(serve: Serve) -> Any:
    """Return a client of one front for all bodies of a test."""
    http, _ = serve()
    return http


PATHS = [
    *(CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/v1/chat/completions/batch", "/v1/audio/transcriptions", "/pooling", "/tokenize"),
]
ANTHROPIC = ["/v1/messages", "/v1/messages/count_tokens"]


async def test_refusals_have_the_form_of_each_api(serve: Serve) -> None:
    http, _ = serve(max_body_bytes=60, max_bodies_bytes=60, body_timeout_s=0.01)

    settings = b'{"mm_processor_kwargs": {"max_pixels": 1000000000000}}'
    page = {"origin": "https://a.example", "content-type": "text/plain"}
    refused: list[tuple[int, str, str, dict[str, Any]]] = [
        (400, "invalid_request_error", "invalid_request_error", {"content": settings}),
        (403, "invalid_request_error", "permission_error", {"content": b"{}", "headers": page}),
        (408, "invalid_request_error", "invalid_request_error", {}),
        (413, "request_too_large", "request_too_large", {"content": b"x" * 61}),
    ]
    for path in PATHS + ANTHROPIC:
        for status, openai, anthropic, asked in refused:
            if status == 408:
                asked = {"content": stalled()}
            got = await http.post(path, **asked)
            assert got.status_code == status, (path, got.text)
            error = got.json()
            assert error["error"]["message"], path
            if path in ANTHROPIC:
                assert (error["type"], error["error"]["type"]) == ("error", anthropic)
            else:
                assert (error["error"]["type"], error["error"]["param"]) == (openai, None)
                assert error["error"]["code"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_bodies_of_every_method_are_bounded(serve: Serve, method: str) -> None:
    http, _ = serve(max_body_bytes=100, max_bodies_bytes=100)
    assert (await http.request(method, "/any", content=b"x" * 100)).text == "100"
    large = await http.request(method, "/any", content=b"x" * 101)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


async def test_page_without_permission_calls_no_endpoint(serve: Serve) -> None:
    """Browsers send requests without a type, and without a body, before they ask a server."""
    page = {"origin": "https://page.example"}

    def calls(*_: Any) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            called.append(scope["path"])  # Without a look at the body, as handlers that take none.
            await PlainTextResponse("called")(scope, receive, send)

        return call

    called: list[str] = []
    http, _ = serve(calls)
    for path in ("/pause", "/abort_requests", "/v1/responses/r/cancel", CHAT):
        for content in (b"", b"{}"):
            refused = await http.post(path, content=content, headers=page)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                403,
                "origin_not_allowed",
            )
    assert not called
    http, _ = serve(calls, cors_origins=["https://page.example"])
    for headers in (page, {}):
        assert (await http.post("/pause", headers=headers)).status_code == 200
    assert (await http.get("/v1/models", headers={"origin": "https://b.example"})).is_success


async def test_access_line_holds_no_content(serve: Serve, tmp_path: Path) -> None:
    log = tmp_path / "log"
    http, _ = serve(access_log=str(log), api_keys_file=keys_file(tmp_path, "k" * 20))
    headers = {"authorization": "Bearer " + "k" * 20, "x-secret": "header"}
    body = {"messages": [{"role": "user", "content": "my secret prompt"}], "user": "somebody"}
    for shown in (headers, {"authorization": "Bearer wrong-key-of-a-client"}):
        await http.post(f"{CHAT}?token=hidden", json=body, headers=shown)
    text = log.read_text()
    assert [json.loads(line)["status"] for line in text.splitlines()] == [200, 401]
    for said in ("secret", "somebody", "kkkk", "wrong-key", "hidden", "x-secret"):
        assert said not in text
