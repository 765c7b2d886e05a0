"""Files that a request enters are those of the table in `docs/structures.md`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY
from starlette.responses import Response
from vllm.v1.engine import FinishReason

import epd_portable
from epd_portable.front.http import FrontMiddleware
from tests.integration.front.played_front import Make, request, sent_by, settle

PACKAGE = Path(epd_portable.__file__).parent
PAGE = PACKAGE.parent / "docs" / "structures.md"

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
}


def documented() -> tuple[set[str], set[str]]:
    """Return the files of a request with an image, and those that a text does not enter.

    They are in the table of the page, and in the sentence on texts. Their numbers are in its text.
    """
    text = PAGE.read_text().partition("## An image's way through the front\n")[2]
    text = text.partition("\n## ")[0]
    table = "".join(line for line in text.splitlines() if line.startswith("|"))
    found = re.search(r"(\d+) files.* enters (\d+) of them, all but\s(.+?)\n\n", text, re.DOTALL)
    assert found
    files, left_out = (set(re.findall(r"`([a-z_/]+\.py)`", part)) for part in (table, found[3]))
    assert (int(found[1]), int(found[2])) == (len(files), len(files - left_out))
    return files, left_out


class Walk:
    """Files of the package whose functions are called."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            self.entered.add(path[len(f"{PACKAGE}/") :])


@pytest.mark.parametrize("items", [("a",), ()])
async def test_request_enters_the_files_of_the_page(make: Make, items: tuple[str, ...]) -> None:
    played = make("e-0", "pd-0")

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await played.client.add_request_async(request(scope["path"], items))
        await settle()
        for each in items:
            job = played.engines["e-0"].last
            assert job.mm_features[0].identifier == each
            await played.says("e-0", job.request_id, end=FinishReason.STOP)
        await played.says("pd-0", scope["path"], 7, end=FinishReason.STOP)
        assert await played.answers()
        await Response()(scope, receive, send)

    served = FrontMiddleware(vllm)
    served._open(played.client)
    walk = Walk()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    sys.setprofile(walk.note)
    try:
        sent = await sent_by(served, scope, type="http.request", body=json.dumps(BODY).encode())
    finally:
        sys.setprofile(None)
        REGISTRY.unregister(cast(Any, played.client.metrics.registry))
    assert sent[0]["status"] == 200
    files, left_out = documented()
    assert walk.entered == (files if items else files - left_out)
