"""Which of the ways to use a number of devices serves the highest rate within the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_portable.bench.sizing.capacity import capacities
from epd_portable.bench.sizing.demand import Demand
from epd_portable.bench.sizing.simulate import Deployment, Outcome, RoutingRules, Simulation
from epd_portable.bench.sizing.stages import StageTimes

PRECISION = 1.01
"""Bisection ends when the rate that fails is not above this multiple of the one that holds."""
WORTH_IT = 1.05
"""A split is recommended when it serves this multiple of what replicas do; it is more to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyLimits:
    """What 99 of 100 requests of every kind must keep, in seconds.

    Attributes:
        ttft_s: Time to the first token of a text.
        ttft_pictures_s: The same with pictures.
        tpot_s: Time per token after it.
    """

    ttft_s: float
    ttft_pictures_s: float
    tpot_s: float

    def ttft_of(self, kind: str) -> float:
        """Return the limit of the time to the first token of a kind of request."""
        return self.ttft_pictures_s if kind == "pictures" else self.ttft_s

    def broken(self, outcome: Outcome) -> str:
        """Return which limit a load broke first, or nothing."""
        for kind, seen in outcome.kinds.items():
            if seen.ttft_p99 > self.ttft_of(kind):
                return f"TTFT of {kind}"
            if seen.tpot_p99 > self.tpot_s:
                return f"TPOT of {kind}"
        return ""

    def goodput(self, outcome: Outcome) -> float:
        """Return how many requests a second were within the limits."""
        good = sum(
            request.ttft_s <= self.ttft_of("pictures" if request.items else "text")
            and request.tpot_s <= self.tpot_s
            for request in outcome.requests
        )
        return outcome.rate * good / len(outcome.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingQuestion:
    """What is simulated, but for the deployment and the rate.

    Attributes:
        times: Of the stages.
        demand: Of the clients.
        rules: Of router and instances.
        count: Requests of a simulation.
        seed: Of everything that is drawn.
    """

    times: StageTimes
    demand: Demand
    rules: RoutingRules
    count: int
    seed: int

    def capacities(self, deployment: Deployment) -> dict[str, float]:
        """Return the rate at which each stage of a deployment is full."""
        return capacities(self.times, self.demand, deployment, self.rules)

    def ask(self, deployment: Deployment, rate: float) -> Outcome:
        """Simulate one deployment at one rate."""
        requests = self.demand.requests(self.times, rate=rate, count=self.count, seed=self.seed)
        return Simulation(self.times, deployment, self.rules, seed=self.seed).run(requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The best that a deployment can do.

    Attributes:
        deployment: The instances.
        rate: Highest rate found, requests a second, at which all limits hold; 0 when there is none.
        goodput: Requests a second within the limits at that rate.
        outcome: At that rate; at the lowest that was tried when none holds.
        limit: What breaks first above it.
        capacities: Rates at which stages are full, whatever the latencies.
    """

    deployment: Deployment
    rate: float
    goodput: float
    outcome: Outcome
    limit: str
    capacities: dict[str, float]

    @property
    def fullest(self) -> tuple[str, float]:
        """The stage that is nearest to what it can do, and the share of that which it does."""
        stage, capacity = min(self.capacities.items(), key=lambda each: each[1])
        return stage, self.rate / capacity


def deployments(devices: int) -> list[Deployment]:
    """Return replicas, and every split of the devices.

    Args:
        devices: At least one; with one there are replicas only.
    """
    splits = [Deployment(encoders=k, engines=devices - k) for k in range(1, devices)]
    return [Deployment(encoders=0, engines=devices), *splits]


def best_rate(question: SizingQuestion, deployment: Deployment, limits: LatencyLimits) -> Candidate:
    """Find the highest rate at which all limits hold, by bisection.

    A hundredth of the most that the stages could do in the mean is the lowest rate that is tried.
    """
    capacity = question.capacities(deployment)
    above = min(capacity.values())
    below, held = above / 100, question.ask(deployment, above / 100)
    limit = limits.broken(held)
    if limit:
        return Candidate(
            deployment=deployment,
            rate=0.0,
            goodput=0.0,
            outcome=held,
            limit=limit,
            capacities=capacity,
        )
    while above / below > PRECISION:
        # In steps of the same ratio: rates of different deployments lie far apart.
        rate = (above * below) ** 0.5
        outcome = question.ask(deployment, rate)
        broken = limits.broken(outcome)
        if broken:
            above, limit = rate, broken
        else:
            below, held = rate, outcome
    return Candidate(
        deployment=deployment,
        rate=below,
        goodput=limits.goodput(held),
        outcome=held,
        limit=limit,
        capacities=capacity,
    )


def search(
    question: SizingQuestion,
    devices: int,
    limits: LatencyLimits,
    report: Callable[[str], None],
) -> list[Candidate]:
    """Find the best rate of replicas and of every split, in this order."""
    found = []
    for deployment in deployments(devices):
        report(f"simulating {deployment}")
        found.append(best_rate(question, deployment, limits))
    return found


def recommend(candidates: Sequence[Candidate]) -> str:
    """Return one sentence: split or not, how, and what that is worth.

    Args:
        candidates: Of `search`: replicas first.
    """
    replicas, splits = candidates[0], candidates[1:]
    best = max(splits, key=lambda each: each.rate, default=None)
    if not replicas.rate and (best is None or not best.rate):
        return (
            f"No way to use {replicas.deployment.devices} devices keeps the limits, even at a "
            f"hundredth of what they could compute: {replicas.deployment} breaks {replicas.limit} "
            "first; raise that limit, or use shorter stages."
        )
    if best is None or best.rate < WORTH_IT * replicas.rate:
        other = f" against {best.rate:.3g} of {best.deployment}" if best else ""
        times = f" ({best.rate / replicas.rate:.2f} times)" if best else ""
        return (
            f"Do not disaggregate: {replicas.deployment} serve {replicas.rate:.3g} requests/s "
            f"within the limits{other}{times}."
        )
    worth = f"{best.rate / replicas.rate:.2f} times" if replicas.rate else "which keep none"
    return (
        f"Disaggregate: {best.deployment.encoders} encode and {best.deployment.engines} "
        f"prefill+decode instances (1 to {best.deployment.engines / best.deployment.encoders:.2g}) "
        f"serve {best.rate:.3g} requests/s within the limits, against {replicas.rate:.3g} of "
        f"{replicas.deployment} ({worth})."
    )
