"""Stage times of a server that is up, by single requests from outside: `plan --measure`."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from epd_portable.bench.sizing.streams import stream
from epd_portable.bench.stats import quantile
from epd_portable.errors import MeasurementError

TEXT_WORDS = (8, 64, 256, 768)
CONCURRENCY = (1, 2, 4, 8)
SIDES = (112, 224, 336, 448)
SEVERAL = 4
"""Pictures of a request, beside those of one."""
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
        slope_s: Time for each.
        points: What was measured: place and seconds.
    """

    name: str
    across: str
    base_s: float
    slope_s: float
    points: tuple[tuple[float, float], ...]

    def at(self, place: float) -> float:
        """Return the time on the line."""
        return self.base_s + self.slope_s * place

    @property
    def residuals_s(self) -> tuple[float, ...]:
        """How far each point lies above the line."""
        return tuple(seconds - self.at(place) for place, seconds in self.points)

    @property
    def rms_s(self) -> float:
        """Root of the mean square of the residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals_s))))


def fit(name: str, across: str, points: Sequence[tuple[float, float]]) -> Line:
    """Lay a line through points; neither time nor slope is below zero.

    A line that would be is laid through zero, or flat, whichever is nearer to the points.

    Raises:
        ValueError: There are fewer than two places.
    """
    places = np.array([place for place, _ in points], dtype=float)
    seconds = np.array([value for _, value in points], dtype=float)
    if len(set(places.tolist())) < 2:
        raise ValueError(f"{name}: {len(points)} points at one place give no line; measure two")
    columns = np.stack([np.ones_like(places), places], axis=1)
    base_s, slope_s = np.linalg.lstsq(columns, seconds, rcond=None)[0].tolist()
    if base_s < 0 or slope_s < 0:
        steep = float(places @ seconds / (places @ places))
        through_zero, flat = (0.0, max(0.0, steep)), (max(0.0, float(seconds.mean())), 0.0)
        base_s, slope_s = min(
            (through_zero, flat),
            key=lambda line: float(np.sum((line[0] + line[1] * places - seconds) ** 2)),
        )
    return Line(
        name=name,
        across=across,
        base_s=base_s,
        slope_s=slope_s,
        points=tuple(zip(places.tolist(), seconds.tolist(), strict=True)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStages:
    """Stage times and how well they fit.

    Attributes:
        times: For a file.
        lines: Behind them.
        notes: What a reader must know of them.
    """

    times: StageTimes
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What single requests took, in seconds.

    Attributes:
        texts: Tokens of a prompt, and the time to its first token.
        streams: Streams at once, and the time per token of each.
        sides: Of the pictures below, in pixels.
        embeddings: Prompt tokens of one of them.
        alone: Time to the first token with one picture.
        several: The same with `SEVERAL` of them.
        stalls: Longest time between two tokens of a stream beside a request with one picture.
    """

    texts: tuple[tuple[float, float], ...]
    streams: tuple[tuple[float, float], ...]
    sides: tuple[int, ...]
    embeddings: tuple[float, ...]
    alone: tuple[float, ...]
    several: tuple[float, ...]
    stalls: tuple[float, ...]


def analyse(
    seen: Observations, *, shares_core: bool, pixels_per_embedding: int, source: str
) -> MeasuredStages:
    """Tell the stages apart.

    A stream stands still while its engine encodes a picture, and not while the API server prepares
    it. Where it does not stand still, another instance encodes.

    Args:
        seen: Of one server.
        shares_core: What to say of the server's API server and engine.
        pixels_per_embedding: Of the model.
        source: For the file.
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
    step_s = min(text.base_s, decode.at(1.0))
    still_s = [
        max(0.0, stall - step_s - prompt_s)
        for stall, prompt_s in zip(seen.stalls, prompts_s, strict=True)
    ]
    if sum(still_s) > STALLED * sum(beyond_s):
        encode_s = [min(each) for each in zip(still_s, beyond_s, strict=True)]
        note = "Encoding is the time for which a stream beside a picture stood still."
    else:
        encode_s = [
            max(0.0, min(beyond, (several - alone) / (SEVERAL - 1) - prompt))
            for beyond, alone, several, prompt in zip(
                beyond_s, seen.alone, seen.several, prompts_s, strict=True
            )
        ]
        note = (
            "Streams did not stand still beside pictures: another instance encodes. Encoding "
            "is what each further picture of a request takes, perhaps with preprocessing."
        )
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
            pixels_per_embedding=pixels_per_embedding,
        ),
        prefill=PrefillStage(base_s=base_s, per_token_s=text.slope_s),
        decode=DecodeStage(base_s=decode.base_s, per_sequence_s=decode.slope_s),
        front_end=FrontEndStage(
            request_s=text.base_s - base_s,
            picture_s=front_end.base_s,
            pixel_s=front_end.slope_s,
            shares_core=shares_core,
        ),
    )
    return MeasuredStages(times=times, lines=(text, decode, encode, front_end), notes=(note,))


class Probe:
    """Single requests to one server, all of them new to its caches.

    Args:
        url: Of the server.
        repeat: Measurements of each point, of which the lower quartile counts.
        report: Gets progress lines.
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
        stalls, alone, several, embeddings = self._pictures()
        return Observations(
            texts=texts,
            streams=streams,
            sides=SIDES,
            embeddings=embeddings,
            alone=alone,
            several=several,
            stalls=stalls,
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
                    timings = pool.map(stream, itertools.repeat(self._url), bodies)
                seen += [timing.tpot_s for timing in timings]
            points.append((float(streams), quantile(seen, LOW)))
        return tuple(points)

    def _pictures(self) -> tuple[tuple[float, ...], ...]:
        """Return by side: longest gap of a stream, TTFT with one and with several, embeddings."""
        stalls, alone, several, embeddings = [], [], [], []
        _, without = self._first(self._body(0, []))
        for side in SIDES:
            self._report(f"pictures of {side} pixels")
            ones = [self._first(self._body(0, [side])) for _ in range(self._repeat)]
            fours = [self._first(self._body(0, [side] * SEVERAL))[0] for _ in range(self._repeat)]
            gaps = [self._gap_beside(side) for _ in range(self._repeat)]
            alone.append(quantile([seconds for seconds, _ in ones], LOW))
            several.append(quantile(fours, LOW))
            stalls.append(quantile(gaps, LOW))
            embeddings.append(float(ones[0][1] - without))
        if min(embeddings) <= 0:
            raise MeasurementError(
                f"{self._url}: a picture adds {min(embeddings):g} prompt tokens; is its model one "
                "that reads pictures?"
            )
        return tuple(stalls), tuple(alone), tuple(several), tuple(embeddings)

    def _gap_beside(self, side: int) -> float:
        """Return how long a stream stood still at most while a picture was asked about."""
        beside: list[Future[tuple[float, int]]] = []
        with ThreadPoolExecutor(1) as pool:

            def ask_beside(pieces: int) -> None:
                if pieces == STREAM_BEGUN:
                    beside.append(pool.submit(self._first, self._body(0, [side])))

            body = self._body(16, [], tokens=STREAM_TOKENS)
            timing = stream(self._url, body, came=ask_beside)
            beside[0].result()
        return timing.longest_gap_s

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
            "skip_special_tokens": False,
        }

    def _first(self, body: dict[str, Any]) -> tuple[float, int]:
        """Return the time of an answer of one token, and the tokens of its prompt."""
        address = f"{self._url}/v1/chat/completions"
        try:
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http:
                begin_s = time.monotonic()
                answer = http.post(address, json=body)
                seconds = time.monotonic() - begin_s
        except httpx.TransportError as error:
            raise MeasurementError(f"{address}: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            raise MeasurementError(f"{address} answered {answer.status_code}: {answer.text}")
        return seconds, int(answer.json()["usage"]["prompt_tokens"])
