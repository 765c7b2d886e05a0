"""Streamed chat completions, timed."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from epd_portable.errors import MeasurementError

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One answer, in seconds from the moment its request was sent.

    Attributes:
        ttft_s: Until the first token.
        gaps_s: Between each token and the one before it (inter-token latencies).
        latency_s: Until the end of the answer.
        tokens: Tokens of the answer.
    """

    ttft_s: float
    gaps_s: tuple[float, ...]
    latency_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return sum(self.gaps_s) / max(self.tokens - 1, 1)

    @property
    def longest_gap_s(self) -> float:
        """How long the answer stood still at worst."""
        return max(self.gaps_s, default=0.0)


def model_name(url: str) -> str:
    """Return the name of the one model that a server has.

    Raises:
        MeasurementError: It does not say.
    """
    response = httpx.get(f"{url}/v1/models", timeout=_TIMEOUT_S, trust_env=False)
    if response.status_code != httpx.codes.OK:
        raise MeasurementError(f"{url}/v1/models answered {response.status_code}: {response.text}")
    return str(response.json()["data"][0]["id"])


def stream(url: str, body: dict[str, Any]) -> Timing:
    """Send a chat request, have its answer streamed and time it.

    Args:
        url: Base address of the server.
        body: The request, without ``stream``; special tokens should be shown, because a token
            without text is not seen to arrive.

    Raises:
        MeasurementError: The server refused, or broke off.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(request).encode()
    headers = {"content-type": "application/json"}
    address = f"{url}/v1/chat/completions"
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            begin_s = time.monotonic()
            with client.stream("POST", address, content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    text = response.read().decode(errors="replace")
                    raise MeasurementError(f"{address} answered {response.status_code}: {text}")
                return read_stream(response.iter_lines(), begin_s, time.monotonic)
    except httpx.TransportError as error:
        raise MeasurementError(f"{address}: {error!r}") from error


def read_stream(lines: Iterable[str], begin_s: float, clock: Callable[[], float]) -> Timing:
    """Time the events of a streamed answer.

    Args:
        lines: Of the response, as they arrive.
        begin_s: When the request was sent, on the clock.
        clock: Monotonic seconds.

    Raises:
        MeasurementError: The answer holds an error, no token or no usage, or is not complete.
    """
    times: list[float] = []
    tokens = 0
    for line in lines:
        now = clock()
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            break
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            raise MeasurementError(f"the answer broke off: {event['error']}")
        if any(choice["delta"].get("content") for choice in event["choices"]):
            times.append(now)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    else:
        raise MeasurementError("the answer ended without [DONE]")
    if not times or not tokens:
        raise MeasurementError(f"the answer has {len(times)} pieces of text and {tokens} tokens")
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return Timing(
        ttft_s=times[0] - begin_s, gaps_s=gaps, latency_s=clock() - begin_s, tokens=tokens
    )
