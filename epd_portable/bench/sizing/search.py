"""Which of the ways to use a number of devices serves the highest rate within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from epd_portable.bench.console import progress
from epd_portable.bench.mix import Mix
from epd_portable.bench.sizing.simulate import Deployment, Outcome, Simulation
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.workload import draw_requests
from epd_portable.placement.assignment import BUSY_THRESHOLD

PRECISION = 1.01
"""Bisection ends when the rate that fails is not above this multiple of the one that holds."""
WORTH_IT = 1.05
"""A split, which is more to run, is recommended when it serves this multiple of replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyLimits:
    """What 95 of 100 requests of every kind must keep, in seconds.

    Attributes:
        ttft_s: Time to the first token of a text.
        ttft_pictures_s: Time to the first token of a request with pictures.
        tpot_s: Time per token after it.
    """

    ttft_s: float
    ttft_pictures_s: float
    tpot_s: float

    def broken(self, outcome: Outcome) -> str:
        """Return the limit that a load broke first; empty if it kept all."""
        for kind, seen in outcome.kinds.items():
            ttft_s = self.ttft_pictures_s if kind == "pictures" else self.ttft_s
            if seen.ttft_p95 > ttft_s:
                return f"TTFT of {kind}"
            if seen.tpot_p95 > self.tpot_s:
                return f"TPOT of {kind}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingQuestion:
    """What is simulated, but for the deployment and the rate: so many requests, drawn by a seed."""

    times: StageTimes
    workload: Mix
    elastic: bool
    count: int
    seed: int

    def simulate(self, deployment: Deployment, rate: float) -> Outcome:
        """Simulate one deployment at one rate."""
        requests = draw_requests(
            self.workload, self.times, rate=rate, count=self.count, seed=self.seed
        )
        threshold = BUSY_THRESHOLD if self.elastic else None
        simulation = Simulation(self.times, deployment, elastic_threshold=threshold, seed=self.seed)
        return simulation.run(requests)

    def capacity(self, deployment: Deployment) -> float:
        """Return a rate, in requests per second, above which the work of devices only grows.

        The mean work of a request times the rate is at most what the instances have. Engines are
        taken to be filled up to their limits in every step.
        """
        times, load = self.times, self.workload
        pictures = load.share * fmean(load.pictures)
        embeddings = fmean(times.encode.embeddings(side**2) for side in load.size)
        encode_s = pictures * times.encode.seconds(embeddings)
        step_share_s = times.prefill.base_s / times.engine.max_num_batched_tokens
        prompt = load.text + pictures * embeddings
        engine_s = prompt * (times.prefill.per_token_s + step_share_s)
        sequence_s = times.decode.per_sequence_s + times.decode.base_s / times.engine.max_num_seqs
        engine_s += (load.output - 1) * sequence_s
        rates = [deployment.devices / (engine_s + encode_s)]
        if deployment.encoders:
            rates.append(deployment.engines / engine_s)
            if encode_s and not self.elastic:
                rates.append(deployment.encoders / encode_s)
        return min(rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedDeployment:
    """The best that a deployment can do.

    Attributes:
        rate: Requests per second: the highest found at which all limits hold, 0 for none.
        outcome: At that rate; at the lowest that was tried when none holds.
        limit: What breaks first above it.
    """

    deployment: Deployment
    rate: float
    outcome: Outcome
    limit: str


def deployments(devices: int) -> list[Deployment]:
    """Return replicas, and every split of the devices; with one device there are replicas only."""
    splits = [Deployment(encoders=k, engines=devices - k) for k in range(1, devices)]
    return [Deployment(encoders=0, engines=devices), *splits]


def best_rate(
    question: SizingQuestion, deployment: Deployment, limits: LatencyLimits
) -> RatedDeployment:
    """Find the highest rate at which all limits hold, by bisection.

    The lowest rate that is tried is a hundredth of the capacity.
    """
    above = question.capacity(deployment)
    below, rate = above / 100, 0.0
    held = question.simulate(deployment, below)
    limit = limits.broken(held)
    if not limit:
        while above / below > PRECISION:
            # In steps of the same ratio: rates of different deployments lie far apart.
            middle = (above * below) ** 0.5
            outcome = question.simulate(deployment, middle)
            broken = limits.broken(outcome)
            if broken:
                above, limit = middle, broken
            else:
                below, held = middle, outcome
        rate = below
    return RatedDeployment(deployment=deployment, rate=rate, outcome=held, limit=limit)


def search(question: SizingQuestion, devices: int, limits: LatencyLimits) -> list[RatedDeployment]:
    """Find the best rate of replicas and of every split, in this order."""
    found = []
    for deployment in deployments(devices):
        progress(f"simulating {deployment}")
        found.append(best_rate(question, deployment, limits))
    return found


def recommend(candidates: Sequence[RatedDeployment]) -> str:
    """Return one sentence: split or not, how, and what that is worth; replicas come first."""
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
