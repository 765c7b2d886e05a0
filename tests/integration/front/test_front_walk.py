"""Files that a request with an image enters are those of the table in `docs/structures.md`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from starlette.responses import Response
from vllm.v1.engine import FinishReason

import epd_portable
from epd_portable.front.http import FrontMiddleware
from tests.integration.front import test_front
from tests.integration.front.played_front import Make, request

pytestmark = pytest.mark.needs_vllm

PACKAGE = Path(epd_portable.__file__).parent
PAGE = PACKAGE.parent / "docs" / "structures.md"

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
}


def documented() -> tuple[int, set[str]]:
    """Return the number of files in the page's text, and the names in its table."""
    text = PAGE.read_text().partition("## An image's way through the front\n")[2]
    text = text.partition("\n## ")[0]
    found = re.search(r"(\d+) files", text)
    assert found
    table = "".join(line for line in text.splitlines() if line.startswith("|"))
    return int(found[1]), set(re.findall(r"`([a-z_/]+\.py)`", table))


class Walk:
    """Files of the package whose functions are called."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            self.entered.add(path[len(f"{PACKAGE}/") :])


async def test_image_enters_the_files_of_the_page(make: Make) -> None:
    played = make("e-0", "pd-0")

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await played.client.add_request_async(request(scope["path"], ("a",)))
        await test_front.settle()
        await played.says("e-0", played.engines["e-0"].last.request_id, end=FinishReason.STOP)
        await played.says("pd-0", scope["path"], 7, end=FinishReason.STOP)
        assert await played.answers()
        await Response()(scope, receive, send)

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(BODY).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    served = FrontMiddleware(vllm)
    served._open(played.client)
    sent: list[Any] = []
    walk = Walk()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    sys.setprofile(walk.note)
    try:
        await served(scope, receive, send)
    finally:
        sys.setprofile(None)
        REGISTRY.unregister(cast(Any, played.client.metrics.registry))
    assert sent[0]["status"] == 200
    count, named = documented()
    assert walk.entered == named and len(named) == count
