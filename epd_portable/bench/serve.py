"""``epd-bench serve``: a topology against a peer, taking turns."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epd_portable.bench import cpu_time, servers
from epd_portable.bench.client import Timing, model_name, stream
from epd_portable.bench.cpu_time import CpuTime
from epd_portable.bench.provenance import Provenance, provenance
from epd_portable.bench.traces import Handover, handovers, read_events, since
from epd_portable.bench.workload import RequestKind, Round, rounds
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import load_topology
from epd_portable.platforms.traits import TRAITS

SPLIT = "split"
Baseline = Literal["one process", "concurrent"]
"""Plain vLLM in one process, or the same topology with ``transfer.media: concurrent``."""
ONE_PROCESS: Baseline = "one process"
CONCURRENT: Baseline = "concurrent"
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """What to measure.

    Attributes:
        config: Topology file.
        platform: What it runs on.
        settings: As ``--set`` takes them.
        kinds: Of requests.
        requests: Measured requests of each kind to each side, at least.
        concurrency: Of them at the same moment.
        max_tokens: Of an answer.
        baseline: What is measured too.
    """

    config: Path
    platform: PlatformName
    settings: tuple[str, ...]
    kinds: tuple[RequestKind, ...]
    requests: int
    concurrency: int
    max_tokens: int
    baseline: Baseline | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSample:
    """One measured request.

    Attributes:
        kind: Name of its kind.
        side: `SPLIT` or the `Baseline`.
        timing: Of its answer.
        cpu: Its share of what its round used.
    """

    kind: str
    side: str
    timing: Timing
    cpu: CpuTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything that was measured.

    Attributes:
        startup_s: Seconds from the start to readiness, by side.
        samples: The n-th of a kind and side was measured next to the n-th of the other side.
        provenance: Where the pictures' encoder outputs came from.
        handovers: Of the topology, from output to placed tensor.
    """

    startup_s: dict[str, float]
    samples: list[ServeSample]
    provenance: Provenance
    handovers: list[Handover]


def measure(plan: ServePlan, report: Callable[[str], None]) -> Results:
    """Start both sides, measure, stop them.

    Raises:
        ConfigError: The topology file or a setting is wrong.
        LaunchError: A side did not start.
        MeasurementError: A request failed.
    """
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder, ExitStack() as stack:
        trace_dir = Path(folder, "trace")
        pending = _sides(plan, Path(folder), trace_dir, report)
        sides = start(pending, stack, together=not TRAITS[plan.platform].needs_device_copy)
        urls = {side: server.url for side, server in sides.items()}
        models = {side: model_name(url) for side, url in urls.items()}
        seeds = itertools.count(1)
        report(f"warm-up: {WARM_UP_ROUNDS} rounds of each kind")
        for kind in plan.kinds:
            for _ in range(WARM_UP_ROUNDS):
                asking = _next_round(plan, kind, seeds)
                for side, url in urls.items():
                    _ask(url, models[side], asking)
        since_s = time.monotonic()
        asked = 0
        samples: list[ServeSample] = []
        turns = -(-plan.requests // plan.concurrency)
        for turn in range(turns):
            report(f"round {turn + 1} of {turns}")
            for kind in plan.kinds:
                asking = _next_round(plan, kind, seeds)
                asked += asking.pictures
                # The side that goes first changes, so that neither has the warmer machine.
                order = list(urls) if turn % 2 == 0 else list(reversed(urls))
                for side in order:
                    before = cpu_time.read(sides[side].pid)
                    timings = _ask(urls[side], models[side], asking)
                    used = cpu_time.read(sides[side].pid) - before
                    samples += [
                        ServeSample(
                            kind=kind.name, side=side, timing=timing, cpu=used.shared(len(timings))
                        )
                        for timing in timings
                    ]
        report("stopping")
        stack.close()
        recent = since(read_events(trace_dir), since_s)
    return Results(
        startup_s={side: server.startup_s for side, server in sides.items()},
        samples=samples,
        provenance=provenance(recent, asked=asked),
        handovers=handovers(recent),
    )


def start(
    sides: Mapping[str, AbstractContextManager[servers.Server]], stack: ExitStack, *, together: bool
) -> dict[str, servers.Server]:
    """Start the sides of a comparison, and let ``stack`` stop them.

    Args:
        sides: By name.
        stack: What ends them.
        together: At the same moment. Engines on one device must not: each measures its memory.
    """
    if together:
        with ThreadPoolExecutor() as pool:
            running = list(pool.map(stack.enter_context, sides.values()))
    else:
        running = [stack.enter_context(side) for side in sides.values()]
    return dict(zip(sides, running, strict=True))


def _sides(
    plan: ServePlan, folder: Path, trace_dir: Path, report: Callable[[str], None]
) -> dict[str, servers.Server]:
    config = load_topology(plan.config, plan.platform, overrides=plan.settings)
    sides = {
        SPLIT: servers.topology(
            plan.config,
            platform=plan.platform,
            log_dir=folder / "split",
            settings=plan.settings,
            env={"EPD_TRACE_DIR": str(trace_dir)},
            report=report,
        )
    }
    if plan.baseline == CONCURRENT:
        sides[CONCURRENT] = servers.topology(
            plan.config,
            platform=plan.platform,
            log_dir=folder / CONCURRENT,
            settings=(*plan.settings, "transfer.media=concurrent"),
            # Its trace is written like the other's, at the same cost, and not read.
            env={"EPD_TRACE_DIR": str(folder / "trace of concurrent")},
            report=report,
        )
    if plan.baseline == ONE_PROCESS:
        sides[ONE_PROCESS] = servers.one_process(
            config.model,
            log=folder / "reference.log",
            engine_args=config.engine_args,
            platform=plan.platform,
            env=config.env,
            report=report,
        )
    return sides


def _next_round(plan: ServePlan, kind: RequestKind, seeds: Iterator[int]) -> Round:
    return rounds(kind, concurrency=plan.concurrency, max_tokens=plan.max_tokens, seeds=seeds)


def _ask(url: str, model: str, asking: Round) -> Sequence[Timing]:
    """Send the round to one side; return the timings of what is measured."""
    bodies = [{**body, "model": model} for body in (*asking.beside, *asking.measured)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        timings = list(pool.map(stream, itertools.repeat(url), bodies))
    return timings[len(asking.beside) :]
