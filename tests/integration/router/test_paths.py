"""Every path of the installed vLLM is passed on, answered here, or refused for a reason."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.demo.pictures import draw
from epd_portable.router.contents.body import DECISION_PATH
from epd_portable.router.server import NO_JSON, NOT_SERVED, TO_ANY_INSTANCE, WITH_MEDIA
from tests.integration.router.conftest import Build, Topology

PICTURE = draw(1).data_url()
OWN = {"/health", "/ping", "/metrics"}
WEBSOCKET = {"connection": "upgrade", "upgrade": "websocket"}


def engine_paths() -> list[list[str]]:
    # It sets up logging and warns as it likes, in a process of its own.
    script = Path(__file__).with_name("engine_paths.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return paths


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
    for template, *methods in await asyncio.to_thread(engine_paths):
        path = re.sub(r"\{\w+\}", "x", template)
        for method in set(methods) - {"HEAD"} or {""}:
            # Prometheus' own application is mounted, for whatever method.
            if template != "/metrics" or method:
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


@pytest.mark.parametrize("path", READ)
async def test_a_client_names_no_item_and_no_transfer_at_any_path(build: Build, path: str) -> None:
    t = await build()
    part = {"type": "image_url", "image_url": {"url": PICTURE}, "uuid": "of-another"}
    message = {"role": "user", "content": [part]}
    messages: list[Any] = [[message]] if path.endswith("/batch") else [message]
    body = {"messages": messages, "input": messages, "prompt": "hello"}
    response = await t.client.post(path, json={**body, "ec_transfer_params": {"transfers": []}})
    assert response.status_code == 200
    [received] = t.pd.received
    assert received.params is None or received.params["transfers"]
    field = "input" if "responses" in path else "messages"
    anthropic = path.startswith("/v1/messages")
    if path != "/v1/completions" and not anthropic:
        assert "of-another" not in json.dumps(received.body[field])


async def test_media_are_not_taken_where_nobody_looks_at_them(build: Build) -> None:
    t = await build()
    refused = await t.client.post("/v1/systemone", json={"state": "x", "images": [PICTURE]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_part")
    assert t.pd.received == []
    assert (await t.client.post("/v1/systemone", json={"state": "x"})).status_code == 200


async def test_what_is_shown_of_a_prompt_is_not_encoded(build: Build) -> None:
    t = await build()
    content = [{"type": "input_image", "image_url": PICTURE}]
    shown = await t.client.post("/v1/responses/render", json={"input": [{"content": content}]})
    assert shown.status_code == 200
    assert t.encoders[0].received == []
