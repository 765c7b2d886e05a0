"""``epd-bench serve``: a topology against plain vLLM in one process, taking turns."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from epd_portable.bench import servers
from epd_portable.bench.client import Timing, model_name, stream
from epd_portable.bench.provenance import Provenance, provenance
from epd_portable.bench.traces import Handover, handovers, read_events, since
from epd_portable.bench.workload import Kind, Round, rounds
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import load_topology

SPLIT = "split"
ONE_PROCESS = "one process"
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        config: Topology file.
        platform: What it runs on.
        settings: As ``--set`` takes them.
        kinds: Of requests.
        requests: Measured requests of each kind to each side, at least.
        concurrency: Of them at the same moment.
        max_tokens: Of an answer.
        baseline: Whether plain vLLM is measured too.
    """

    config: Path
    platform: PlatformName
    settings: tuple[str, ...]
    kinds: tuple[Kind, ...]
    requests: int
    concurrency: int
    max_tokens: int
    baseline: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        kind: Name of its kind.
        side: `SPLIT` or `ONE_PROCESS`.
        timing: Of its answer.
    """

    kind: str
    side: str
    timing: Timing


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
    samples: list[Sample]
    provenance: Provenance
    handovers: list[Handover]


def measure(plan: Plan, report: Callable[[str], None]) -> Results:
    """Start both sides, measure, stop them.

    Raises:
        ConfigError: The topology file or a setting is wrong.
        LaunchError: A side did not start.
        MeasurementError: A request failed.
    """
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder, ExitStack() as stack:
        trace_dir = Path(folder, "trace")
        pending = _sides(plan, Path(folder), trace_dir, report)
        with ThreadPoolExecutor() as pool:
            running = list(pool.map(stack.enter_context, pending.values()))
        sides = dict(zip(pending, running, strict=True))
        urls = {side: server.url for side, server in sides.items()}
        models = {side: model_name(url) for side, url in urls.items()}
        seeds = itertools.count(1)
        report(f"warm-up: {WARM_UP_ROUNDS} rounds of each kind")
        for kind in plan.kinds:
            for _ in range(WARM_UP_ROUNDS):
                _ask_all(urls, models, _next_round(plan, kind, seeds))
        since_s = time.monotonic()
        asked = 0
        samples: list[Sample] = []
        turns = -(-plan.requests // plan.concurrency)
        for turn in range(turns):
            report(f"round {turn + 1} of {turns}")
            for kind in plan.kinds:
                asking = _next_round(plan, kind, seeds)
                asked += asking.pictures
                # The side that goes first changes, so that neither has the warmer machine.
                order = list(urls) if turn % 2 == 0 else list(reversed(urls))
                answers = _ask_all({side: urls[side] for side in order}, models, asking)
                samples += [
                    Sample(kind=kind.name, side=side, timing=timing)
                    for side, timings in answers.items()
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


def _sides(
    plan: Plan, folder: Path, trace_dir: Path, report: Callable[[str], None]
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
    if plan.baseline:
        sides[ONE_PROCESS] = servers.one_process(
            config.model,
            log=folder / "reference.log",
            engine_args=config.engine_args,
            env=config.env,
            report=report,
        )
    return sides


def _next_round(plan: Plan, kind: Kind, seeds: Iterator[int]) -> Round:
    return rounds(kind, concurrency=plan.concurrency, max_tokens=plan.max_tokens, seeds=seeds)


def _ask_all(
    urls: Mapping[str, str], models: Mapping[str, str], asking: Round
) -> dict[str, Sequence[Timing]]:
    """Send the round to each side, one side after the other."""
    answers: dict[str, Sequence[Timing]] = {}
    for side, url in urls.items():
        bodies = [{**body, "model": models[side]} for body in (*asking.beside, *asking.measured)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            timings = list(pool.map(stream, itertools.repeat(url), bodies))
        answers[side] = timings[len(asking.beside) :]
    return answers
