"""Every path of the installed vLLM is passed on, answered here, or refused for a reason."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from epd_portable.demo.pictures import draw
from epd_portable.router.contents.body import DECISION_PATH
from epd_portable.router.server import NO_JSON, NOT_SERVED, TO_ANY_INSTANCE, WITH_MEDIA
from tests.integration.router.conftest import Build, Topology

PICTURE = draw(1).data_url()
OWN = {"/health", "/ping", "/metrics"}
OF_LIBRARIES = [
    *(("/adapters", "POST"), ("/adapters/{adapter_name}", "DELETE"), ("/metrics", "GET")),
    *(("/docs/oauth2-redirect", "GET"), ("/openapi.json", "GET"), ("/redoc", "GET")),
]
"""Paths that vLLM's server has from what it is made of."""
WEBSOCKET = {"connection": "upgrade", "upgrade": "websocket"}


def engine_paths() -> Iterator[tuple[str, str]]:
    """Give what the sources of the engine's server serve: paths, with methods; none for sockets."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    for source in (Path(found.origin).parent / "entrypoints").rglob("*.py"):
        # What supervises servers has some of its own.
        if source.parent.name != "launchers":
            for node in ast.walk(ast.parse(source.read_text("utf-8"))):
                yield from routes(node)


def routes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Give what a call such as ``router.post("/path")`` lets be served."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return
    path, kind = getattr(node.args[0], "value", None), node.func.attr
    if not (isinstance(path, str) and path.startswith("/")):
        return
    if kind in ("get", "post", "put", "delete", "patch"):
        yield path, kind.upper()
    elif kind in ("websocket", "mount", "route", "api_route", "add_api_route", "add_route"):
        given = [each.value for each in node.keywords if each.arg == "methods"]
        methods = [each.value for one in given for each in ast.walk(one) if is_word(each)]
        yield from ((path, str(method)) for method in methods or ["GET" * (kind != "websocket")])


def is_word(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant)


async def fate(t: Topology, path: str, method: str) -> str:
    """Return what the router does with a request, or nothing if it has no thought of it."""
    headers = {} if method else WEBSOCKET
    body = {"messages": [], "prompt": "hello", "input": "hello"} if method == "POST" else None
    response = await t.client.request(method or "GET", path, json=body, headers=headers)
    if response.status_code == 200:
        return "answered" if path in OWN else "passed on"
    error = response.json()["error"]
    if error["code"] == "not_served" and any(
        why in error["message"] for why in NOT_SERVED.values()
    ):
        return "refused"
    return "refused" if error["code"] == "websocket_unsupported" else ""


@pytest.mark.needs_vllm
async def test_every_path_of_the_engine_is_passed_on_answered_or_refused(build: Build) -> None:
    t = await build(admin_port=None)
    fates = {}
    for template, method in {*engine_paths(), *OF_LIBRARIES}:
        path = re.sub(r"\{\w+\}", "x", template)
        fates[template, method] = await fate(t, path, method)
    assert {each for each, what in fates.items() if not what} == set()
    assert fates["/v1/chat/completions", "POST"] == fates["/v1/models", "GET"] == "passed on"
    assert fates["/health", "GET"] == fates["/ping", "POST"] == "answered"
    assert fates["/sleep", "POST"] == fates["/v1/realtime", ""] == "refused"
    assert fates["/v1/responses/{response_id}", "GET"] == "refused"


READ = sorted(
    path
    for path in {*WITH_MEDIA, *TO_ANY_INSTANCE} - NO_JSON - {DECISION_PATH}
    if TO_ANY_INSTANCE.get(path, "POST") == "POST"
)


async def test_a_client_names_no_item_and_no_transfer_at_any_path(build: Build) -> None:
    t = await build()
    part = {"type": "image_url", "image_url": {"url": PICTURE}, "uuid": "of-another"}
    message = {"role": "user", "content": [part]}
    for path in READ:
        messages: list[Any] = [[message]] if path.endswith("/batch") else [message]
        body = {"messages": messages, "input": messages, "prompt": "hello"}
        response = await t.client.post(path, json={**body, "ec_transfer_params": {"transfers": []}})
        assert response.status_code == 200
        received = t.pd.received[-1]
        assert received.path == path
        assert received.params is None or received.params["transfers"], path
        field = "input" if "responses" in path else "messages"
        anthropic = path.startswith("/v1/messages")
        if path != "/v1/completions" and not anthropic:
            assert "of-another" not in json.dumps(received.body[field]), path


async def test_media_are_not_taken_where_nobody_looks_at_them_nor_encoded_to_be_shown(
    build: Build,
) -> None:
    t = await build()
    refused = await t.client.post("/v1/systemone", json={"state": "x", "images": [PICTURE]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_part")
    assert t.pd.received == []
    assert (await t.client.post("/v1/systemone", json={"state": "x"})).status_code == 200
    content = [{"type": "input_image", "image_url": PICTURE}]
    shown = await t.client.post("/v1/responses/render", json={"input": [{"content": content}]})
    assert shown.status_code == 200
    assert t.encoders[0].received == []
