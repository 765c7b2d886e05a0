"""Bodies of requests, and what is sent of them."""

from __future__ import annotations

import json
from typing import Any

from epd_portable.router.contents.cut_text import Segments
from epd_portable.wire.params import EncodeTransfer

RED = "data:image/png;base64,cmVk"
TEXT = {"type": "text", "text": "What is this?"}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def joined(segments: Segments) -> bytes:
    return b"".join(segments)


def sent(segments: Segments) -> Any:
    return json.loads(joined(segments))


def transfer(item_uuid: str = "h") -> EncodeTransfer:
    return EncodeTransfer(transfer_id="t", item_uuid=item_uuid, consumer="tcp://c:1")
