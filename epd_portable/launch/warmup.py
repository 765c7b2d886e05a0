"""The first requests of every instance, so that no client pays for what an engine does once.

The first step of an engine compiles and allocates; that can take longer than a request is ready to
wait for a picture from another instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from epd_portable.launch.plan import ProcessSpec

_TIMEOUT_S = 300.0
# A grey square of 112 × 112 pixels.
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAHAAAABwCAAAAADji6uXAAAASElEQVR42u3NMREAAAgEoNfk"
    "RreF5wAFqMmtjlAoFAqFQqFQKBQKhUKhUCgUCoVCoVAoFAqFQqFQKBQKhUKhUCgUCoVC4etwAYyiAWCrne1FAAAAAElFTkSu"
    "QmCC"
)
_IMAGE = {"type": "image_url", "image_url": {"url": _PICTURE}}
_TEXT = {"type": "text", "text": "What is in the picture?"}


def warm_up(specs: Iterable[ProcessSpec], model: str) -> list[str]:
    """Send every instance its first requests, all instances at once; blocks until all answered.

    Args:
        specs: Processes of a plan; the router is passed over.
        model: Name that clients use.

    Returns:
        One sentence for each instance that did not answer as expected.
    """
    instances = [spec for spec in specs if spec.role != "router"]
    with ThreadPoolExecutor(len(instances)) as pool:
        problems = pool.map(lambda spec: _warm_up_one(spec, model), instances)
    return [problem for problem in problems if problem]


def _warm_up_one(spec: ProcessSpec, model: str) -> str:
    contents: list[list[dict[str, Any]]] = [[_IMAGE]]
    if spec.role != "encode":
        contents = [[_TEXT], [_IMAGE, _TEXT]]
    for content in contents:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1 if spec.role == "encode" else 2,
            # Their kernel is compiled when they are first asked for.
            "logprobs": spec.role != "encode",
        }
        try:
            answer = httpx.post(
                f"{spec.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError as error:
            return f"{spec.name} did not answer its first request: {error!r}"
        if answer.status_code != httpx.codes.OK:
            return f"{spec.name} answered its first request {answer.status_code}: {answer.text}"
    return ""
