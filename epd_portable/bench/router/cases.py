"""What is measured of a router that stays up: cases, and the figures that each yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from epd_portable.bench.router.stage import Effort, Measured, Stage

Values: TypeAlias = dict[str, float]
"""Figures of one turn, by their keys; a side yields those that it has."""

TEXT_RATE = 100.0
TEXT_CLIENTS = 32
STREAMS = 64
STREAM_GAPS_MS = (64, 16)
STREAM_TOKENS = 200
PICTURES = (("100 KB", 100_000, 20.0), ("1 MB", 1_000_000, 8.0), ("4 MB", 4_000_000, 3.0))
"""Sizes, and rates at which nothing that is measured is busy."""
PICTURE_CLIENTS = 8
OPEN_STREAMS = (0, 200, 600, 1200)
BESIDE_RATE = 50.0
LATENCY_RATE = 200.0
LARGE_PICTURE_BYTES = 45_000_000
"""60 MB in base64."""

_ENDLESS = 100_000
_NEVER_MS = 3_600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFigure:
    """One number that a case yields.

    Attributes:
        key: In `Values`.
        what: In tables, with what it is counted in.
        clock: ``CPU`` time of what is measured, ``wall`` time, or something ``counted``.
        better: Which way.
        limit: What it should reach, if that is fixed.
        peer_limit: How many times better than the peer's it should be, if that is fixed.
    """

    key: str
    what: str
    clock: Literal["CPU", "wall", "counted"]
    better: Literal["lower", "higher"] = "lower"
    limit: float | None = None
    peer_limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Figures that are measured together.

    Attributes:
        name: By which it is asked for.
        about: For users.
        figures: What it yields.
        measure: Takes one turn.
        kinds: Of sides that take part.
        once: One turn is enough, whatever the effort.
        seconds: About how long one turn takes.
    """

    name: str
    about: str
    figures: tuple[CaseFigure, ...]
    measure: Callable[[Stage, Measured], Values]
    kinds: frozenset[str] = frozenset({"router", "proxy", "direct"})
    once: bool = False
    seconds: Callable[[Effort], float]


def text(stage: Stage, measured: Measured) -> Values:
    """Texts with an answer of one token: at a rate, then as many as can be."""
    window_s = stage.effort.window_s
    flow = stage.flow(measured, "text", count=round(TEXT_RATE * window_s), rate=TEXT_RATE)
    paced = stage.run(measured, flow)
    most = stage.run(
        measured, stage.flow(measured, "text", seconds=window_s / 1.5, connections=TEXT_CLIENTS)
    )
    return {
        "cpu_ms": paced.cpu_each_s("text") * 1e3,
        "cpu_ms_most": most.cpu_each_s("text") * 1e3,
        "rate": most.rate("text"),
    }


def stream(stage: Stage, measured: Measured) -> Values:
    """Many streams of small events: the middle of endless ones, then whole ones at full speed."""
    values: Values = {}
    for gap_ms in STREAM_GAPS_MS:
        flow = stage.flow(
            measured,
            "streams",
            count=STREAMS,
            connections=8,
            chunks=_ENDLESS,
            gap_ms=gap_ms,
            hold=True,
        )
        stage.run(measured, flow)
        window = stage.watch(measured, stage.effort.window_s)
        values[f"cpu_us_{gap_ms}"] = window.cpu_s / max(window.tokens, 1) * 1e6
        stage.release()
    count = STREAMS * (1 if stage.effort.rounds == 1 else 3)
    flow = stage.flow(
        measured, "whole", count=count, connections=STREAMS, chunks=STREAM_TOKENS, gap_ms=1
    )
    window = stage.run(measured, flow)
    values["cpu_us_most"] = window.cpu_each_s("whole") / STREAM_TOKENS * 1e6
    values["rate"] = window.rate("whole") * STREAM_TOKENS
    return values


def picture(stage: Stage, measured: Measured) -> Values:
    """Requests with one picture that nobody sent before, by its size."""
    values: Values = {}
    window_s = stage.effort.window_s
    for name, nbytes, rate in PICTURES:
        count = max(4, round(rate * window_s))
        flow = stage.flow(measured, "picture", count=count, rate=rate, picture_bytes=nbytes)
        paced = stage.run(measured, flow)
        flow = stage.flow(
            measured,
            "picture",
            seconds=window_s / 2,
            connections=PICTURE_CLIENTS,
            picture_bytes=nbytes,
        )
        most = stage.run(measured, flow)
        values[f"cpu_ms {name}"] = paced.cpu_each_s("picture") * 1e3
        values[f"cpu_ms_most {name}"] = most.cpu_each_s("picture") * 1e3
        values[f"rate {name}"] = most.rate("picture")
    return values


def beside(stage: Stage, measured: Measured) -> Values:
    """Texts beside streams that are open and silent."""
    values: Values = {}
    opened = 0
    for level in OPEN_STREAMS:
        more = level - opened
        if more:
            flow = stage.flow(
                measured,
                "open",
                count=more,
                connections=16,
                chunks=2,
                gap_ms=_NEVER_MS,
                hold=True,
            )
            stage.run(measured, flow)
            opened = level
        count = round(BESIDE_RATE * stage.effort.window_s)
        flow = stage.flow(measured, "text", count=count, rate=BESIDE_RATE)
        values[f"cpu_ms_{level}"] = stage.run(measured, flow).cpu_each_s("text") * 1e3
    stage.release()
    values["times"] = values[f"cpu_ms_{OPEN_STREAMS[-1]}"] / values[f"cpu_ms_{OPEN_STREAMS[0]}"]
    return values


def latency(stage: Stage, measured: Measured) -> Values:
    """Texts through a side and to the instance itself, one after the other at the same rate."""
    direct = Measured(measured.side, stage.instances.addresses[1].port, None)
    count = round(LATENCY_RATE * stage.effort.window_s)
    # Connections are open before the first is timed, and each is of use to the next.
    through, itself = (
        stage.flow(
            asked, name, count=count, rate=LATENCY_RATE, connections=4, start_s=turn / LATENCY_RATE
        )
        for asked, name, turn in ((measured, "through", 0.0), (direct, "direct", 0.5))
    )
    window = stage.run(measured, through, itself)
    values: Values = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        added_s = window.latency_s("through", share) - window.latency_s("direct", share)
        values[name] = added_s * 1e3
        values[f"{name} direct"] = window.latency_s("direct", share) * 1e3
    return values


def large(stage: Stage, measured: Measured) -> Values:
    """Texts while another client sends one body of 60 MB after the other."""
    seconds = 2 * stage.effort.window_s
    texts = stage.flow(
        measured,
        "text",
        count=round(TEXT_RATE * seconds),
        rate=TEXT_RATE,
        connections=4,
        start_s=0.2,
    )
    bodies = stage.flow(
        measured, "body", seconds=seconds, connections=1, picture_bytes=LARGE_PICTURE_BYTES
    )
    window = stage.run(measured, texts, heavy=[bodies])
    return {
        "p99": window.latency_s("text", 0.99) * 1e3,
        "most": window.latency_s("text", 1.0) * 1e3,
        "bodies": window.rate("body"),
    }


CASES: tuple[Case, ...] = (
    Case(
        name="text",
        about="texts answered with one token",
        figures=(
            CaseFigure(key="cpu_ms", what="text, 1 token, 100/s: ms each", clock="CPU", limit=0.25),
            CaseFigure(
                key="cpu_ms_most",
                what=f"text, 1 token, {TEXT_CLIENTS} clients: ms each",
                clock="CPU",
                limit=0.25,
            ),
            CaseFigure(
                key="rate",
                what=f"text, 1 token, {TEXT_CLIENTS} clients: requests/s",
                clock="wall",
                better="higher",
            ),
        ),
        measure=text,
        seconds=lambda effort: 1.7 * effort.window_s + 1,
    ),
    Case(
        name="stream",
        about=f"{STREAMS} streams of small events at several rates",
        figures=(
            *(
                CaseFigure(
                    key=f"cpu_us_{gap_ms}",
                    what=f"streamed token at {STREAMS * 1000 // gap_ms:,}/s: µs each",
                    clock="CPU",
                    limit=25,
                )
                for gap_ms in STREAM_GAPS_MS
            ),
            CaseFigure(
                key="cpu_us_most",
                what="streamed token at 1 ms from its last, request and all: µs each",
                clock="CPU",
                limit=25,
            ),
            CaseFigure(
                key="rate",
                what="streamed tokens at 1 ms from their last: tokens/s",
                clock="wall",
                better="higher",
            ),
        ),
        measure=stream,
        seconds=lambda effort: 2 * effort.window_s + 2 * effort.rounds,
    ),
    Case(
        name="picture",
        about="one picture of 100 KB, 1 MB, 4 MB in a request",
        figures=tuple(
            figure
            for name, _, rate in PICTURES
            for figure in (
                CaseFigure(
                    key=f"cpu_ms {name}",
                    what=f"picture of {name}, at {rate:g}/s: ms each",
                    clock="CPU",
                    limit=2.5 if name == "1 MB" else None,
                ),
                CaseFigure(
                    key=f"cpu_ms_most {name}",
                    what=f"picture of {name}, {PICTURE_CLIENTS} clients: ms each",
                    clock="CPU",
                    peer_limit=5 if name == "1 MB" else None,
                ),
                CaseFigure(
                    key=f"rate {name}",
                    what=f"picture of {name}, {PICTURE_CLIENTS} clients: requests/s",
                    clock="wall",
                    better="higher",
                    peer_limit=5 if name == "1 MB" else None,
                ),
            )
        ),
        measure=picture,
        seconds=lambda effort: 4.5 * effort.window_s + 2,
    ),
    Case(
        name="beside",
        about="texts beside up to 1,200 streams that are open",
        figures=(
            *(
                CaseFigure(
                    key=f"cpu_ms_{level}",
                    what=f"text beside {level:,} open streams: ms each",
                    clock="CPU",
                )
                for level in OPEN_STREAMS
            ),
            CaseFigure(
                key="times",
                what=f"text beside {OPEN_STREAMS[-1]:,} open streams by alone",
                clock="CPU",
                limit=1.2,
            ),
        ),
        measure=beside,
        kinds=frozenset({"router", "proxy"}),
        seconds=lambda effort: 4 * effort.window_s + 6,
    ),
    Case(
        name="latency",
        about="what a text waits longer than without a router, at 200/s",
        figures=(
            CaseFigure(key="p50", what="added latency at 200/s, p50: ms", clock="wall", limit=0.5),
            CaseFigure(key="p99", what="added latency at 200/s, p99: ms", clock="wall", limit=3),
            CaseFigure(key="p50 direct", what="the instance itself, p50: ms", clock="wall"),
            CaseFigure(key="p99 direct", what="the instance itself, p99: ms", clock="wall"),
        ),
        measure=latency,
        kinds=frozenset({"router", "proxy"}),
        seconds=lambda effort: effort.window_s + 0.5,
    ),
    Case(
        name="large",
        about="texts while bodies of 60 MB arrive",
        figures=(
            CaseFigure(key="p99", what="text while 60 MB arrive, p99: ms", clock="wall", limit=15),
            CaseFigure(key="most", what="text while 60 MB arrive, longest: ms", clock="wall"),
            CaseFigure(key="bodies", what="such bodies/s", clock="wall", better="higher"),
        ),
        measure=large,
        seconds=lambda effort: 2 * effort.window_s + 2,
    ),
)
"""Those that need nothing but what stays up."""
