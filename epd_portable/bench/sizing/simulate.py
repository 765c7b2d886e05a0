"""Instances behind a front under a load, event by event."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from epd_portable.bench.sizing.engine import SimulatedEngine
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.timeline import FifoServer, Process, Timeline
from epd_portable.bench.sizing.workload import PictureItem, SimulatedRequest
from epd_portable.bench.stats import quantile
from epd_portable.placement.assignment import count_local_first
from epd_portable.placement.instances import FEW
from epd_portable.placement.ring import LOAD_BOUND
from epd_portable.placement.work import AnswerLoad, Work

WARM_UP_SHARE = 0.1
"""Part of the requests, the first, that find empty instances and count in no quantile."""

SPLIT_ENGINES = "prefill+decode"
REPLICAS = "one process"
"""Names of the stage that is the language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """How devices are used.

    Attributes:
        encoders: Encode instances; 0: every engine is a one-process replica.
        engines: Prefill+decode instances, or replicas.
    """

    encoders: int
    engines: int

    @property
    def devices(self) -> int:
        """One for each instance."""
        return self.encoders + self.engines

    def __str__(self) -> str:
        """Return its name, as in ``2e6pd`` or ``8 × one process``."""
        if self.encoders:
            return f"{self.encoders}e{self.engines}pd"
        return f"{self.engines} × {REPLICAS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Times of one kind of request, in seconds."""

    count: int
    ttft_p95: float
    tpot_p95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulation saw.

    Attributes:
        kinds: Quantiles of ``text`` and ``pictures``, of those that there were.
        busy: Share of the time that a stage computed, the mean of its instances, by stage.
        owed_s: What an instance owes while requests come, on average, as a front shows it: of
            ``encode`` where there is one, and of ``answer``.
        local_items: Pictures that prefill+decode instances encoded.
        transferred: Pictures that came from an encoder.
    """

    kinds: dict[str, Quantiles]
    busy: dict[str, float]
    owed_s: dict[str, float]
    local_items: int
    transferred: int


class _Encoder:
    """An encode instance: front end and vision tower."""

    def __init__(self, timeline: Timeline) -> None:
        self.tower = FifoServer(timeline)
        self.front_end = FifoServer(timeline)
        self.load = 0
        self.pending_encode_s = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Answer:
    """An answer that an engine owes.

    Attributes:
        tokens: Of its prompt.
        owed_s: What it is taken for.
        since_s: From when on.
        began_s: `AnswerLoad.each_s` when it waited for no picture any more; negative before.
    """

    engine: int
    tokens: int
    owed_s: float
    since_s: float
    began_s: float = -1.0


class Simulation:
    """One deployment and the requests that it gets; call `run` once.

    Args:
        elastic_threshold: `RouterSettings.elastic_threshold`; ``None``: prefill+decode instances
            encode nothing.
    """

    def __init__(
        self,
        times: StageTimes,
        deployment: Deployment,
        *,
        elastic_threshold: float | None = None,
        seed: int,
    ) -> None:
        self._times = times
        self._elastic_threshold = elastic_threshold
        self._random = random.Random(seed)
        self._timeline = Timeline()
        self._encoders = [_Encoder(self._timeline) for _ in range(deployment.encoders)]
        self._encoding = 0
        self._engines = [
            SimulatedEngine(
                self._timeline,
                times,
                on_first=self._first,
                on_last=self._last,
            )
            for _ in range(deployment.engines)
        ]
        self._loads = [0] * deployment.engines
        work = Work()
        self._owed = [
            AnswerLoad(work, "prefill-decode", lambda: self._timeline.now) for _ in self._engines
        ]
        self._computes_for = [0] * deployment.engines
        self._answers: dict[SimulatedRequest, _Answer] = {}
        self._owed_long: dict[str, list[tuple[float, float]]] = {"encode": [], "answer": []}
        """Of each piece of work: when its request came, and its seconds times those it was owed."""
        self._local = 0
        self._transferred = 0

    def run(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        """Send the requests and wait for the last answer.

        Args:
            requests: In the order of arrival; at least one, each with a text of a token or more.
        """
        for request in requests:
            self._timeline.at(request.arrival_s, self._arrive, request)
        self._timeline.run()
        return self._outcome(requests)

    def _arrive(self, request: SimulatedRequest) -> None:
        engine = self._choose_engine()
        self._loads[engine] += 1
        tokens = request.text_tokens + sum(item.embeddings for item in request.items)
        self._answers[request] = _Answer(
            engine=engine,
            tokens=tokens,
            owed_s=self._owed[engine].expected_ms(tokens) / 1000,
            since_s=self._timeline.now,
        )
        if self._encoders:
            self._divide(request, engine)
        self._compute(request)
        self._engines[engine].submit(request)

    def _compute(self, request: SimulatedRequest) -> None:
        """Count a request as one that the engine computes for, once it waits for no picture."""
        if all(item.here or item.encoded for item in request.items):
            answer = self._answers[request]
            engine = answer.engine
            answer.began_s = self._owed[engine].each_s(self._computes_for[engine])
            self._computes_for[engine] += 1

    def _owe(self, stage: str, request: SimulatedRequest, seconds: float, since_s: float) -> None:
        """Note work that is owed no more."""
        owed = request.arrival_s, seconds * (self._timeline.now - since_s)
        self._owed_long[stage].append(owed)

    def _choose_engine(self) -> int:
        count = len(self._engines)
        if count <= FEW:
            low = min(self._loads)
            return self._random.choice([i for i, load in enumerate(self._loads) if load == low])
        one, other = self._random.sample(range(count), 2)
        return one if self._loads[one] <= self._loads[other] else other

    def _choose_encoder(self) -> _Encoder:
        """Return an item's encoder by hash under a load bound; new items have random hashes."""
        limit = math.ceil(LOAD_BOUND * (self._encoding + 1) / len(self._encoders))
        while True:
            encoder = self._random.choice(self._encoders)
            if encoder.load < limit:
                return encoder

    def _divide(self, request: SimulatedRequest, engine: int) -> None:
        """Choose who encodes each picture, and send those that encoders do."""
        encoders = []
        for _ in request.items:
            encoder = self._choose_encoder()
            encoder.load += 1
            self._encoding += 1
            encoders.append(encoder)
        here = 0
        if self._elastic_threshold is not None:
            # The router's own rule, with times that are known.
            here, _ = count_local_first(
                [self._times.encode.seconds(item.embeddings) for item in request.items],
                encoders,
                self._engines[engine],
                threshold=self._elastic_threshold,
            )
        for index, (item, encoder) in enumerate(zip(request.items, encoders, strict=True)):
            item.here = index < here
            if item.here:
                encoder.load -= 1
                self._encoding -= 1
                self._local += 1
            else:
                encoder.pending_encode_s += self._times.encode.seconds(item.embeddings)
                self._transferred += 1
                self._timeline.start(self._way_of_item(item, request, encoder, engine))

    def _way_of_item(
        self, item: PictureItem, request: SimulatedRequest, encoder: _Encoder, engine: int
    ) -> Process:
        front_end, encode_s = self._times.front_end, self._times.encode.seconds(item.embeddings)
        since_s = self._timeline.now
        yield encoder.front_end.accept(
            front_end.request_s + front_end.picture_s + front_end.pixel_s * item.pixels
        )
        yield encoder.tower.accept(encode_s)
        encoder.pending_encode_s -= encode_s
        self._owe("encode", request, encode_s, since_s)
        yield self._timeline.now + self._times.transfer.seconds(item.embeddings)
        encoder.load -= 1
        self._encoding -= 1
        item.encoded = True
        self._compute(request)
        self._engines[engine].landed(request)

    def _first(self, request: SimulatedRequest) -> None:
        request.first_token_s = self._timeline.now

    def _last(self, request: SimulatedRequest) -> None:
        answer = self._answers.pop(request)
        engine = answer.engine
        self._loads[engine] -= 1
        self._owed[engine].observe(answer.tokens, self._computes_for[engine], answer.began_s)
        self._computes_for[engine] -= 1
        self._owe("answer", request, answer.owed_s, answer.since_s)
        assert request.end_s < 0, "a request ends once"
        request.end_s = self._timeline.now

    def _outcome(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        engines, encoders = self._engines, self._encoders
        assert not self._encoding and not any(self._loads), "what has begun has ended"
        stages = {
            "front end": [engine.front_end.busy_s for engine in engines],
            "preprocessing": [engine.preprocessing.busy_s for engine in engines],
            SPLIT_ENGINES if encoders else REPLICAS: [
                engine.compute_s + engine.encode_s for engine in engines
            ],
        }
        if encoders:
            stages["encode"] = [encoder.tower.busy_s for encoder in encoders]
            stages["encoders' front end"] = [encoder.front_end.busy_s for encoder in encoders]
        counted = requests[int(len(requests) * WARM_UP_SHARE) :]
        kinds = {
            "text": [each for each in counted if not each.items],
            "pictures": [each for each in counted if each.items],
        }
        since_s = counted[0].arrival_s
        while_s = counted[-1].arrival_s - since_s or self._timeline.now
        instances = {"encode": len(encoders), "answer": len(engines)}
        owed_s = {
            stage: sum(owed for arrival_s, owed in self._owed_long[stage] if arrival_s >= since_s)
            / (while_s * count)
            for stage, count in instances.items()
            if count
        }
        return Outcome(
            kinds={kind: _quantiles(found) for kind, found in kinds.items() if found},
            busy={name: fmean(busy_s) / self._timeline.now for name, busy_s in stages.items()},
            owed_s=owed_s,
            local_items=self._local,
            transferred=self._transferred,
        )


def _quantiles(requests: Sequence[SimulatedRequest]) -> Quantiles:
    ttft, tpot = [each.ttft_s for each in requests], [each.tpot_s for each in requests]
    return Quantiles(
        count=len(requests),
        ttft_p95=quantile(ttft, 0.95),
        tpot_p95=quantile(tpot, 0.95),
    )
