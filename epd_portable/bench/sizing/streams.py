"""Single streamed answers of a server, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from epd_portable.bench.load import answers
from epd_portable.errors import MeasurementError

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTiming:
    """How the pieces of one answer came.

    Attributes:
        tpot_s: Time per output token after the first.
        longest_gap_s: How long the answer stood still at worst.
    """

    tpot_s: float
    longest_gap_s: float


def stream(
    url: str, body: dict[str, Any], *, came: Callable[[int], None] = lambda count: None
) -> StreamTiming:
    """Send a chat request, have its answer streamed and time it.

    Args:
        url: Base address of the server.
        body: The request, without ``stream``; special tokens should be shown, because a token
            without text is not seen to arrive.
        came: Called with the number of pieces after each.

    Raises:
        MeasurementError: The server refused, or broke off.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    address = f"{url}/v1/chat/completions"
    pieces: list[tuple[float, bytes]] = []
    try:
        with (
            httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http,
            http.stream("POST", address, json=request) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                text = answer.read().decode(errors="replace")
                raise MeasurementError(f"{address} answered {answer.status_code}: {text}")
            for piece in answer.iter_raw():
                pieces.append((time.monotonic(), piece))
                came(len(pieces))
    except httpx.TransportError as error:
        raise MeasurementError(f"{address}: {error!r}") from error
    reading = answers.read(pieces, output_tokens=body["max_tokens"])
    if reading.problem:
        raise MeasurementError(f"{address}: {reading.problem}")
    gaps = answers.gaps(reading.times_s)
    return StreamTiming(
        tpot_s=sum(gaps) / max(reading.tokens - 1, 1), longest_gap_s=max(gaps, default=0.0)
    )
