"""Advice by arithmetic: replicas, split, overlapped or remote encoding for one traffic. Pure.

The capacity of a way is what its busiest stage allows: devices are equal, and no time is lost. One
plain vLLM on an H200 had a sixth less than that, because its host was the limit. Of latency only
the longest stall of a token stream is estimated: the computation that steps wait for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

OVERLAP = 1.35
"""Speed of a device with steps and vision tower at the same time, 1 with one of them: assumed."""
CLEAR_GAIN = 1.05
"""Least gain for which a way is preferred to replicas, as a factor."""

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Traffic(BaseModel):
    """Mean request, and device time of its stages.

    Attributes:
        encode: Milliseconds of one image on one device.
        prefill: Milliseconds of one prompt.
        token: Milliseconds of one output token: a step's time by its requests.
        output: Tokens of a response.
        images: Images of a request.
        remote: Milliseconds of one image at an encoder on another machine or silicon; 0 for none.
        rate: Requests a second that are expected; 0 for as many as possible.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    encode: Number
    prefill: Number
    token: Number
    output: Number
    images: Number
    remote: Number = 0.0
    rate: Number = 0.0

    @classmethod
    def read(cls, text: str) -> Traffic:
        """Read ``encode=16,prefill=9,...``; `ConfigError` names all that is wrong."""
        try:
            return cls.model_validate(dict(part.partition("=")[::2] for part in text.split(",")))
        except ValidationError as error:
            raise ConfigError(
                f"--advise {text}: {in_one_line(error)}. Write NAME=NUMBER,... for "
                f"{', '.join(cls.model_fields)}; only remote and rate may be left out."
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to use the devices.

    Attributes:
        layout: Engines, as in a topology file.
        requests_s: Most requests a second.
        stall_ms: Longest stall of a token stream.
    """

    name: str
    layout: str
    requests_s: float
    stall_ms: float


def ways(traffic: Traffic, devices: int) -> list[Way]:
    """Return the ways to use so many devices, the best first."""
    found = sorted(_ways(traffic, devices), key=lambda way: -way.requests_s)
    plain = next(way for way in found if way.name == "replicas")
    if found[0].requests_s < CLEAR_GAIN * plain.requests_s:
        found.sort(key=lambda way: way is not plain)
    return found


def _ways(traffic: Traffic, devices: int) -> Iterator[Way]:
    encode = traffic.images * traffic.encode
    decode = traffic.output * traffic.token
    generate = traffic.prefill + decode
    hidden = min(encode, decode) * (1 - 1 / OVERLAP)
    alike = f"encode_prefill_decode: {devices}"
    whole, overlapped = (_rate(devices, encode + generate - each) for each in (0, hidden))
    stall_ms = traffic.encode + traffic.prefill
    yield Way(name="replicas", layout=alike, requests_s=whole, stall_ms=stall_ms)
    for encoders in range(1, devices):
        rate = min(_rate(encoders, encode), _rate(devices - encoders, generate))
        layout = f"encode: {encoders}, prefill_decode: {devices - encoders}"
        yield Way(name="split", layout=layout, requests_s=rate, stall_ms=traffic.prefill)
    name = "overlapped (assumed, not run on hardware)"
    yield Way(name=name, layout=alike, requests_s=overlapped, stall_ms=traffic.prefill)
    if traffic.remote:
        rate = _rate(devices, generate)
        encoders = math.ceil((traffic.rate or rate) * traffic.images * traffic.remote / 1000)
        layout = f"prefill_decode: {devices}, and {encoders} encode engines that join"
        yield Way(name="remote", layout=layout, requests_s=rate, stall_ms=traffic.prefill)


def _rate(devices: int, milliseconds: float) -> float:
    return math.inf if not milliseconds else devices * 1000 / milliseconds


def advice_rows(found: Sequence[Way], traffic: Traffic) -> list[tuple[str, ...]]:
    """Return a table of the ways, the best layout of each."""
    rows: list[tuple[str, ...]] = []
    for way in {way.name: way for way in reversed(found)}.values():
        busy = f"{traffic.rate / way.requests_s:.0%}" if traffic.rate else "-"
        rows.append((way.name, way.layout, f"{way.requests_s:.1f}", busy, f"{way.stall_ms:.0f}"))
    return [("way", "instances", "requests/s", "busy", "longest stall, ms"), *rows[::-1]]
