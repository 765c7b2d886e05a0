"""Stage times of a vLLM that is up, by single requests from outside: `plan --measure`."""

from __future__ import annotations

import itertools
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import numpy as np

from epd_portable.bench.pictures import data_url
from epd_portable.bench.servers import model_name
from epd_portable.bench.sizing.stages import (
    DecodeStage,
    EncodeStage,
    FrontEndStage,
    PrefillStage,
    StageTimes,
)
from epd_portable.bench.stats import quantile
from epd_portable.errors import MeasurementError

TEXT_WORDS = (8, 64, 256, 768)
CONCURRENCY = (1, 2, 4, 8)
SIDES = (112, 224, 336, 448)
DECODE_TOKENS = 48
STREAM_TOKENS = 96
"""Of the answer beside which a picture is sent; long enough to last until it is encoded."""
STREAM_BEGUN = 4
"""Events of that answer after which the picture is sent; the first few are no tokens."""
LOW = 0.25
"""The quantile that counts of what was repeated: what disturbs a measurement only adds to it."""
STALLED = 0.5
"""A stream that stands still for this share of a picture's time shares its engine with encoding."""
_TIMEOUT_S = 300.0
_WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line through measured times, by least squares.

    Attributes:
        name: What was measured.
        across: What the slope is for.
        base_s: Time at zero, not below zero.
        slope_s: Time for each, not below zero.
        rms_s: Root of the mean square of the points' distances from it.
        points: Place and seconds of what was measured.
    """

    name: str
    across: str
    base_s: float
    slope_s: float
    rms_s: float
    points: tuple[tuple[float, float], ...]


def fit(name: str, across: str, points: Sequence[tuple[float, float]]) -> Line:
    """Lay a line through points.

    Where time or slope would be negative it is laid through zero, or flat, whichever is nearer.

    Raises:
        ValueError: There are fewer than two places.
    """
    places, seconds = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if len(set(places.tolist())) < 2:
        raise ValueError(f"{name}: {len(points)} points at one place give no line; measure two")

    def distance_s(line: tuple[float, float]) -> float:
        return float(np.sqrt(np.mean((line[0] + line[1] * places - seconds) ** 2)))

    slope_s, base_s = np.polyfit(places, seconds, 1).tolist()
    if base_s < 0 or slope_s < 0:
        steep = max(0.0, float(places @ seconds / (places @ places)))
        flat = max(0.0, float(seconds.mean()))
        base_s, slope_s = min(((0.0, steep), (flat, 0.0)), key=distance_s)
    return Line(
        name=name,
        across=across,
        base_s=base_s,
        slope_s=slope_s,
        rms_s=distance_s((base_s, slope_s)),
        points=tuple(points),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What single requests took, in seconds.

    Attributes:
        texts: Tokens of a prompt, and the time to its first token.
        streams: Streams at once, and the time per token of each.
        sides: Of the pictures below, in pixels.
        embeddings: Prompt tokens of one of them.
        alone: Time to the first token with one picture.
        stalls: Longest time between two tokens of a stream beside a request with one picture.
    """

    texts: tuple[tuple[float, float], ...]
    streams: tuple[tuple[float, float], ...]
    sides: tuple[int, ...]
    embeddings: tuple[float, ...]
    alone: tuple[float, ...]
    stalls: tuple[float, ...]


def analyse(seen: Observations, *, source: str) -> tuple[StageTimes, tuple[Line, ...]]:
    """Tell the stages of one process apart.

    A stream stands still while its engine encodes a picture, and not while the API server prepares
    it.

    Args:
        seen: What was measured.
        source: `StageTimes.source`.

    Returns:
        The times, and the lines behind them.

    Raises:
        MeasurementError: The stream did not stand still: something else encodes.
    """
    text = fit("prefill", "token", seen.texts)
    decode = fit("decode", "sequence", seen.streams)
    prompts_s = [text.slope_s * count for count in seen.embeddings]
    # What a request with a picture takes beyond a text of as many tokens.
    beyond_s = [
        max(0.0, alone - text.base_s - prompt_s)
        for alone, prompt_s in zip(seen.alone, prompts_s, strict=True)
    ]
    # A step with prefill and a stream; what is left of a stall is encoding.
    step_s = min(text.base_s, decode.base_s + decode.slope_s)
    still_s = [
        max(0.0, stall - step_s - prompt_s)
        for stall, prompt_s in zip(seen.stalls, prompts_s, strict=True)
    ]
    if sum(still_s) <= STALLED * sum(beyond_s):
        raise MeasurementError(
            "streams did not stand still beside pictures, so another process or thread encodes: "
            "measure plain vLLM in one process"
        )
    encode_s = [min(each) for each in zip(still_s, beyond_s, strict=True)]
    encode = fit("encode", "embedding", list(zip(seen.embeddings, encode_s, strict=True)))
    rest_s = [beyond - each for beyond, each in zip(beyond_s, encode_s, strict=True)]
    pixels = [float(side**2) for side in seen.sides]
    front_end = fit("front end, a picture", "pixel", list(zip(pixels, rest_s, strict=True)))
    # A text's time to its first token holds HTTP and tokenizer, which a step does not.
    base_s = min(text.base_s, decode.base_s)
    times = StageTimes(
        source=source,
        encode=EncodeStage(
            base_s=encode.base_s,
            per_embedding_s=encode.slope_s,
            pixels_per_embedding=round(median(map(float.__truediv__, pixels, seen.embeddings))),
        ),
        prefill=PrefillStage(base_s=base_s, per_token_s=text.slope_s),
        decode=DecodeStage(base_s=decode.base_s, per_sequence_s=decode.slope_s),
        front_end=FrontEndStage(
            request_s=text.base_s - base_s,
            picture_s=front_end.base_s,
            pixel_s=front_end.slope_s,
        ),
    )
    return times, (text, decode, encode, front_end)


class Probe:
    """Single requests to one server, all of them new to its caches.

    Args:
        url: Base address of the server.
        repeat: Measurements of each point, of which the lower quartile counts.
        report: Gets progress lines.

    Raises:
        MeasurementError: There is no server.
    """

    def __init__(self, url: str, *, repeat: int, report: Callable[[str], None]) -> None:
        self._url = url.rstrip("/")
        self._repeat = repeat
        self._report = report
        self._seeds = itertools.count(secrets.randbits(40))
        try:
            self._model = model_name(self._url)
        except httpx.TransportError as error:
            raise MeasurementError(
                f"--measure {url}: {error!r}; start a server there first, or give its address"
            ) from error

    def run(self) -> Observations:
        """Ask for all that `analyse` needs.

        Raises:
            MeasurementError: The server refused a request, or its model reads no pictures.
        """
        self._report("warm-up")
        for side in (SIDES[0], SIDES[-1]):
            self._first(self._body(0, [side]))
        texts, streams = self._texts(), self._streams()
        stalls, alone, embeddings = [], [], []
        _, without = self._first(self._body(0, []))
        for side in SIDES:
            self._report(f"pictures of {side} pixels")
            ones = [self._first(self._body(0, [side])) for _ in range(self._repeat)]
            gaps = [self._gap_beside(side) for _ in range(self._repeat)]
            alone.append(quantile([seconds for seconds, _ in ones], LOW))
            stalls.append(quantile(gaps, LOW))
            embeddings.append(float(ones[0][1] - without))
        if min(embeddings) <= 0:
            raise MeasurementError(
                f"{self._url}: a picture adds {min(embeddings):g} prompt tokens; is its model one "
                "that reads pictures?"
            )
        return Observations(
            texts=texts,
            streams=streams,
            sides=SIDES,
            embeddings=tuple(embeddings),
            alone=tuple(alone),
            stalls=tuple(stalls),
        )

    def _texts(self) -> tuple[tuple[float, float], ...]:
        points = []
        for words in TEXT_WORDS:
            self._report(f"text of {words} words")
            seen = [self._first(self._body(words, [])) for _ in range(self._repeat)]
            # The same number of words is not always the same number of tokens.
            tokens = quantile([float(count) for _, count in seen], LOW)
            points.append((tokens, quantile([seconds for seconds, _ in seen], LOW)))
        return tuple(points)

    def _streams(self) -> tuple[tuple[float, float], ...]:
        points = []
        for streams in CONCURRENCY:
            self._report(f"{streams} streams")
            seen: list[float] = []
            for _ in range(self._repeat):
                bodies = [self._body(16, [], tokens=DECODE_TOKENS) for _ in range(streams)]
                with ThreadPoolExecutor(streams) as pool:
                    for times_s in pool.map(self._stream, bodies):
                        seen.append((times_s[-1] - times_s[0]) / (DECODE_TOKENS - 1))
            points.append((float(streams), quantile(seen, LOW)))
        return tuple(points)

    def _gap_beside(self, side: int) -> float:
        """Return how long a stream stood still at most while a picture was asked about."""
        beside: list[Future[tuple[float, int]]] = []
        with ThreadPoolExecutor(1) as pool:

            def ask_beside(events: int) -> None:
                if events == STREAM_BEGUN:
                    beside.append(pool.submit(self._first, self._body(0, [side])))

            times_s = self._stream(self._body(16, [], tokens=STREAM_TOKENS), came=ask_beside)
            beside[0].result()
        return max(after - before for before, after in itertools.pairwise(times_s))

    def _body(self, words: int, sides: Sequence[int], *, tokens: int = 1) -> dict[str, Any]:
        """Return a request; without words it has the same text every time."""
        text = " ".join(random.Random(next(self._seeds)).choices(_WORDS, k=words)) or "look"
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(next(self._seeds), side)}}
            for side in sides
        ]
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            # A token without text is not seen to arrive.
            "skip_special_tokens": False,
        }

    def _first(self, body: dict[str, Any]) -> tuple[float, int]:
        """Return the time of an answer of one token, and the tokens of its prompt."""
        begin_s = time.monotonic()
        with self._posted(body) as answer:
            content = answer.read()
        return time.monotonic() - begin_s, int(json.loads(content)["usage"]["prompt_tokens"])

    def _stream(
        self, body: dict[str, Any], *, came: Callable[[int], None] = lambda events: None
    ) -> list[float]:
        """Return when each piece of a streamed answer's text came.

        Args:
            body: Of the request.
            came: Called with the number of events after each.
        """
        times_s: list[float] = []
        events = 0
        with self._posted({**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events += 1
                    choices = json.loads(line.removeprefix("data: ")).get("choices")
                    if choices and choices[0]["delta"].get("content"):
                        times_s.append(time.monotonic())
                    came(events)
        if len(times_s) < body["max_tokens"] / 2:
            raise MeasurementError(
                f"{self._url} sent {len(times_s)} pieces of text for {body['max_tokens']} tokens: "
                "it broke off, or sends several tokens at a time (--stream-interval)"
            )
        return times_s

    @contextmanager
    def _posted(self, body: dict[str, Any]) -> Iterator[httpx.Response]:
        address = f"{self._url}/v1/chat/completions"
        try:
            with (
                httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http,
                http.stream("POST", address, json=body) as answer,
            ):
                if answer.status_code != httpx.codes.OK:
                    text = answer.read().decode(errors="replace")
                    raise MeasurementError(f"{address} answered {answer.status_code}: {text}")
                yield answer
        except httpx.TransportError as error:
            raise MeasurementError(f"{address}: {error!r}") from error
