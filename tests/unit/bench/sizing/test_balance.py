"""Roles that are switched by `Balance`, in the simulation behind ``epd-bench plan``.

Every device holds both engines, and one of them gets new work. A device that is to answer does so
when its encoder has nothing left; one that is to encode does so at once, and its engine's steps
wait for that. Not modelled: memory of two engines, and what two processes cost each other besides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from epd_portable.bench.mix import Mix
from epd_portable.bench.sizing.search import (
    LatencyLimits,
    RatedDeployment,
    SizingQuestion,
    search,
)
from epd_portable.bench.sizing.simulate import Deployment, Simulation
from epd_portable.bench.sizing.stages import StageTimes, load_stages
from epd_portable.bench.sizing.workload import SimulatedRequest, draw_requests
from epd_portable.placement.assignment import BUSY_THRESHOLD
from epd_portable.placement.balance import TICK_S, Balance
from tests.unit.bench.sizing.test_command import FOLDER

A100 = "a100-7b-derived"
DEVICES = 4
SEEDS = range(1, 6)
LEAST, STEP = 0.5, 1.02
"""Loads that are tried: parts of what the best split for each workload alone would serve."""
PERIOD_S, RAMP_S = 60.0, 15.0
TEXTS = Mix(share=0.02, text=512, output=256)
PICTURES = Mix(share=0.9, pictures=(4,), text=64, output=16)
LIMITS = LatencyLimits(ttft_s=1.0, ttft_pictures_s=4.0, tpot_s=0.05)


class Switched(Simulation):
    """Devices of which each is an encode or a prefill+decode instance at a time."""

    def __init__(self, times: StageTimes, encoders: int, balance: Balance | None, **more: Any):
        both = Deployment(encoders=DEVICES, engines=DEVICES)
        super().__init__(times, both, **more)
        self.every = self._encoders
        self.encodes = [index < encoders for index in range(DEVICES)]
        self.balance = balance
        self.switches = 0
        batch = (LIMITS.tpot_s / 2 - times.decode.base_s) / times.decode.per_sequence_s
        self.token_s = times.decode.per_sequence_s + times.decode.base_s / max(1.0, batch)

    def run(self, requests: Sequence[SimulatedRequest]) -> Any:
        self.left = len(requests)
        if self.balance is not None:
            self._timeline.at(TICK_S, self._tick, None)
        return super().run(requests)

    def _choose_engine(self) -> int:
        answers = [index for index, encodes in enumerate(self.encodes) if not encodes]
        free = [index for index in answers if not self.every[index].load] or answers
        low = min(self._loads[index] for index in free)
        return self._random.choice([index for index in free if self._loads[index] == low])

    def _divide(self, request: SimulatedRequest, engine: int) -> None:
        embeddings = [item.embeddings for item in request.items]
        if self.balance is not None:
            tokens = request.text_tokens + sum(embeddings)
            self.balance.note(
                self._timeline.now,
                sum(map(self._times.encode.seconds, embeddings)),
                self._times.prefill.per_token_s * tokens
                + (request.output_tokens - 1) * self.token_s,
            )
        self._encoders = [self.every[i] for i, encodes in enumerate(self.encodes) if encodes]
        if self._encoders:
            super()._divide(request, engine)
        self._encoders = self.every

    def _way_of_item(self, item: Any, request: Any, encoder: Any, engine: int) -> Any:
        own = self._engines[self.every.index(encoder)]
        if own.computes_for:
            own._since_s += self._times.encode.seconds(item.embeddings)
            own._until(own._since_s + own._planned * own._step_s)
        return super()._way_of_item(item, request, encoder, engine)

    def _last(self, request: SimulatedRequest) -> None:
        self.left -= 1
        super()._last(request)

    def _tick(self, _: None) -> None:
        assert self.balance is not None
        now, have = self._timeline.now, sum(self.encodes)
        owed_s = [
            sum(each.pending_encode_s for each in kind) for kind in (self.every, self._engines)
        ]
        wanted, _ = self.balance.decide(now, have, *owed_s)
        loads = [each.load for each in self.every] if wanted < have else self._loads
        for _ in range(abs(wanted - have)):
            able = [i for i, encodes in enumerate(self.encodes) if encodes is (wanted < have)]
            chosen = min(able, key=loads.__getitem__)
            self.encodes[chosen] = not self.encodes[chosen]
            self.switches += 1
        if self.left:
            self._timeline.at(now + TICK_S, self._tick, None)


def turning(
    times: StageTimes, loads: Sequence[tuple[Mix, float]], seed: int
) -> list[tuple[SimulatedRequest, int]]:
    """Return requests of one workload and of the other in turns, twice; each comes and goes."""
    found, draw = [], random.Random(seed)
    total_s = 2 * PERIOD_S * len(loads)
    for phase, (mix, rate) in enumerate(loads):
        count = int(rate * total_s)
        for each in draw_requests(mix, times, rate=rate, count=count, seed=seed + phase):
            since_s = (each.arrival_s - phase * PERIOD_S) % (2 * PERIOD_S)
            ends = max(0.0, 1 - (since_s - PERIOD_S) / RAMP_S)
            share = min(1.0, since_s / RAMP_S) if since_s < PERIOD_S else ends
            if each.arrival_s < total_s and draw.random() < share:
                found.append((each, phase))
    return sorted(found, key=lambda pair: pair[0].arrival_s)


def share_of(way: Sequence[RatedDeployment], best: Sequence[float]) -> float:
    """Return what one way to use the devices serves of the best, where this is least."""
    return min(each.rate / most for each, most in zip(way, best, strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "size", "elastic", "least"),
    [("cpu-rows", 448, False, 1.3), ("cpu-rows", 448, True, 1.3), (A100, 1024, True, 1)],
)
def test_devices_that_switch_serve_most_of_what_switching_could_gain(
    name: str, size: int, elastic: bool, least: float, tmp_path: Path
) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text((FOLDER / f"{name}.yaml").read_text().replace(", shares_core: true", ""))
    times = load_stages(file)
    threshold = BUSY_THRESHOLD if elastic else None
    mixes = [TEXTS, PICTURES.model_copy(update={"size": (size,)})]
    found = [
        search(
            SizingQuestion(times=times, workload=mix, elastic=elastic, count=1000, seed=1),
            DEVICES,
            LIMITS,
        )
        for mix in mixes
    ]
    # Without elastic encoding nobody may be left to encode, so replicas are no way.
    ways = [*zip(*found, strict=True)][0 if elastic else 1 :]
    best = [max(each.rate for each in of_one) for of_one in zip(*ways, strict=True)]
    stays = max(ways, key=lambda way: share_of(way, best))
    bound = 1 / share_of(stays, best)

    def kept(encoders: int, switches: bool, load: float, seed: int) -> bool:
        """Return whether 95 of 100 requests of each phase keep the limits."""
        rates = [load * rate for rate in best]
        found = turning(times, [*zip(mixes, rates, strict=True)], seed)
        balance = Balance(DEVICES, elastic=elastic) if switches else None
        switched = Switched(times, encoders, balance, elastic_threshold=threshold, seed=seed)
        switched.run([each for each, _ in found])
        good: tuple[list[bool], list[bool]] = ([], [])
        for each, phase in found:
            ttft_s = LIMITS.ttft_pictures_s if each.items else LIMITS.ttft_s
            good[phase].append(each.ttft_s <= ttft_s and each.tpot_s <= LIMITS.tpot_s)
        return min(sum(phase) / len(phase) for phase in good) >= 0.95

    def capacities(encoders: int, switches: bool) -> list[float]:
        """Return for each seed the load up to which all are kept, from the least one on."""
        found = []
        for seed in SEEDS:
            load = LEAST
            while kept(encoders, switches, load, seed):
                load *= STEP
            found.append(load / STEP)
        return found

    # One split for all seeds: which of them serves a single trace best is known afterwards only.
    splits = range(0 if elastic else 1, DEVICES)
    fixed = max((capacities(encoders, False) for encoders in splits), key=fmean)
    switched = capacities(stays[0].deployment.encoders, True)
    gains = [most / of_split for most, of_split in zip(switched, fixed, strict=True)]
    print(f"{name}, elastic: {elastic}: bound {bound:.2f}, gains", *map("{:.2f}".format, gains))
    assert bound >= least
    if bound >= 1.3:
        assert fmean(gains) >= 0.80 * bound
    assert min(gains) >= 0.97
