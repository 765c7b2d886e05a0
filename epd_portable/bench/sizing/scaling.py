"""Where the design saturates: the same load for each device, on more and more of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from epd_portable.bench.sizing.capacity import router_s
from epd_portable.bench.sizing.search import LatencyLimits, SizingQuestion
from epd_portable.bench.sizing.simulate import Deployment, Outcome
from epd_portable.connector.connections import MAX_CONSUMERS
from epd_portable.router.fleet.members import PROBES_PER_S
from epd_portable.router.fleet.tally import MAX_INSTANCES
from epd_portable.router.settings import RouterSettings

REQUESTS_A_DEVICE = 60
MOST_REQUESTS = 300_000
FEWEST_REQUESTS = 5_000
WORKER_SHARE = 0.7
"""Of a router's process that may be busy when processes are counted out: beyond, waiting grows."""
MOST_WORKERS = 64
"""As `router.workers` takes them."""
MESSAGES_AN_ITEM = 4
"""Of the control channel when nothing fails: announce, grant, written, injected."""
PROBE_INTERVAL_S: float = RouterSettings.model_fields["probe_interval_s"].default


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the parts have to do at one size; rates by the second.

    Attributes:
        deployment: The instances.
        rate: Requests.
        router_cores: CPU time of the router.
        workers_needed: Processes of the router, each busy for `WORKER_SHARE` at most.
        messages: Of the control channel, all together.
        pairs: Encode × prefill+decode instances: connections, were all kept.
        connections: That are kept: an encoder has `MAX_CONSUMERS` at most.
        reconnected: Share of the items for which an encoder opens a connection that it has closed
            for another consumer: all are as likely, and the one used least lately is closed.
        health_age_s: Time between two questions for an instance's health.
        router_bytes: What the router knows of instances.
        workers: Processes of the simulated router.
        outcome: What the simulation saw.
        within: Share of the requests within the limits.
        wall_s: Time that the simulation took.
    """

    deployment: Deployment
    rate: float
    router_cores: float
    workers_needed: int
    messages: float
    pairs: int
    connections: int
    reconnected: float
    health_age_s: float
    router_bytes: int
    workers: int
    outcome: Outcome
    within: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A limit in the package, and from how many devices on a deployment of a ratio passes it.

    Attributes:
        name: What is limited.
        value: The limit.
        devices: The most that keep it.
        beyond: What happens with more.
    """

    name: str
    value: int
    devices: int
    beyond: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The sizes of a study, and where the router is full.

    Attributes:
        rows: With one process of the router and with as many as needed, by size.
        rate_per_device: Requests a second.
        knees: Devices at which so many processes of the router are busy for `WORKER_SHARE`; empty
            when the router takes no time.
        bounds: Limits of the package, the nearest first.
    """

    rows: tuple[Growth, ...]
    rate_per_device: float
    knees: dict[int, int]
    bounds: tuple[Bound, ...]


def scaled(unit: Deployment, devices: int) -> Deployment:
    """Return a deployment of so many devices with the ratio of another, as near as whole ones can.

    Args:
        unit: Has the ratio.
        devices: At least two where ``unit`` has encoders.
    """
    if not unit.encoders:
        return Deployment(encoders=0, engines=devices)
    encoders = min(devices - 1, max(1, round(devices * unit.encoders / unit.devices)))
    return Deployment(encoders=encoders, engines=devices - encoders)


def workers_needed(rate: float, per_request_s: float) -> int:
    """Return how many processes of the router a rate needs."""
    return max(1, math.ceil(rate * per_request_s / WORKER_SHARE))


def study(
    question: SizingQuestion,
    unit: Deployment,
    limits: LatencyLimits,
    *,
    sizes: Sequence[int],
    rate_per_device: float,
    report: Callable[[str], None],
) -> Study:
    """Simulate every size, with one process of the router and with as many as it needs.

    Args:
        question: What is asked; its count of requests is not used.
        unit: Has the ratio of encode to prefill+decode instances.
        limits: Of latencies.
        sizes: Numbers of devices.
        rate_per_device: Requests a second for each of them.
        report: Gets progress lines.
    """
    per_request_s = router_s(question.times, question.demand)
    rows = []
    for devices in sizes:
        needed = workers_needed(devices * rate_per_device, per_request_s)
        for workers in dict.fromkeys((1, needed)):
            report(f"simulating {devices} devices, router processes: {workers}")
            rows.append(
                _row(
                    question, scaled(unit, devices), limits, rate_per_device, workers, per_request_s
                )
            )
    knees = {
        workers: math.floor(WORKER_SHARE * workers / per_request_s / rate_per_device)
        for workers in (1, 2, 4, 8, 16, 32, MOST_WORKERS)
        if per_request_s
    }
    return Study(
        rows=tuple(rows),
        rate_per_device=rate_per_device,
        knees=knees,
        bounds=bounds(unit, knees),
    )


def bounds(unit: Deployment, knees: Mapping[int, int]) -> tuple[Bound, ...]:
    """Return what the package limits, by how many devices of a ratio keep it.

    Args:
        unit: Has the ratio.
        knees: As in `Study`.
    """

    def of_engines(count: int) -> int:
        return count * unit.devices // unit.engines

    found = [
        Bound(
            name="consumers to which an encoder keeps connections",
            value=MAX_CONSUMERS,
            devices=of_engines(MAX_CONSUMERS),
            beyond="items open a connection, another is closed",
        ),
        Bound(
            name="questions for health a second",
            value=int(PROBES_PER_S),
            devices=int(PROBES_PER_S * PROBE_INTERVAL_S),
            beyond="each instance is asked less often",
        ),
        Bound(
            name="instances that a router counts",
            value=MAX_INSTANCES,
            devices=MAX_INSTANCES,
            beyond="refused",
        ),
    ]
    if MOST_WORKERS in knees:
        found.append(
            Bound(
                name="router.workers",
                value=MOST_WORKERS,
                devices=knees[MOST_WORKERS],
                beyond="the router is full: a second one, with instances of its own",
            )
        )
    return tuple(sorted(found, key=lambda bound: bound.devices))


def _row(
    question: SizingQuestion,
    deployment: Deployment,
    limits: LatencyLimits,
    rate_per_device: float,
    workers: int,
    per_request_s: float,
) -> Growth:
    rate = deployment.devices * rate_per_device
    count = deployment.devices * REQUESTS_A_DEVICE
    asked = replace(
        question,
        rules=replace(question.rules, router_workers=workers),
        count=min(MOST_REQUESTS, max(FEWEST_REQUESTS, count)),
    )
    begin_s = time.monotonic()
    outcome = asked.ask(deployment, rate)
    wall_s = time.monotonic() - begin_s
    router = question.times.router
    probes = min(PROBES_PER_S, deployment.devices / PROBE_INTERVAL_S)
    items = outcome.transferred / outcome.duration_s
    return Growth(
        deployment=deployment,
        rate=rate,
        router_cores=rate * per_request_s + probes * router.probe_s,
        workers_needed=workers_needed(rate, per_request_s),
        messages=items * MESSAGES_AN_ITEM,
        pairs=deployment.encoders * deployment.engines,
        connections=deployment.encoders * min(MAX_CONSUMERS, deployment.engines),
        reconnected=max(0.0, 1 - MAX_CONSUMERS / deployment.engines)
        if deployment.encoders
        else 0.0,
        health_age_s=deployment.devices / probes,
        router_bytes=deployment.devices * router.instance_bytes,
        workers=workers,
        outcome=outcome,
        within=limits.goodput(outcome) / outcome.rate,
        wall_s=wall_s,
    )
