"""What is measured: points of load, how often, and within which limits. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from epd_portable.bench.load.commands import Ask
from epd_portable.bench.load.requests import Mix, Recorded, asks_of_mix, asks_of_trace
from epd_portable.bench.load.schedule import arrivals, seed_of

ROUNDS = 3
"""A single round is one draw of the arrivals: three are the fewest that a figure is made of."""
PICTURES = 30
"""The fewest requests with pictures behind a figure of them."""
_MOST_ROUNDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """One load: what is asked, and how often.

    Attributes:
        mix: What is asked; of recorded traffic only the form of its pictures counts.
        rate: Requests a second, whatever becomes of those before; 0 for a closed loop.
        concurrency: Clients of a closed loop; 0 for an open one.
        cv: Coefficient of variation of the gaps between arrivals.
        replay: Name of recorded traffic, which says itself when requests come.
    """

    mix: Mix
    rate: float = 0.0
    concurrency: int = 0
    cv: float = 1.0
    replay: str = ""

    @property
    def pace(self) -> str:
        """How often, for tables."""
        if self.replay:
            return self.replay
        if self.concurrency:
            return f"{self.concurrency} at once"
        if not self.rate:
            return "rate sought"
        bursts = "" if self.cv == 1 else f" (CV {self.cv:g})"
        return f"{self.rate:g}/s{bursts}"

    @property
    def key(self) -> str:
        """A name that no other point of a measurement has."""
        if self.replay:
            return self.pace
        mix = self.mix
        return f"{self.pace}, {mix.about}, {mix.text_tokens}+{mix.output_tokens} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an answer may take at most to be a good one; infinite for no limit.

    Attributes:
        ttft_s: To the first token.
        tpot_s: For each token after it.
    """

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRange:
    """Where the highest rate that meets the limits is looked for.

    Attributes:
        low: Lowest rate.
        high: Highest rate.
        precision: The search ends when what met the limits and what did not are so close, as a
            share of the rate.
    """

    low: float
    high: float
    precision: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """A whole measurement.

    Attributes:
        points: Of a search those whose rate is sought; their own rate does not count.
        seconds: Window of arrivals of each point in a round.
        requests: Requests of a closed loop in a round.
        rounds: Each asks every side the same, and no request twice; 0 for as many as it takes, see
            `rounds_of`.
        warm_up: Requests of each kind to each side before all.
        seed: Decides everything that is random.
        limits: What an answer may take.
        search: Look for the highest rate; ``None`` measures the points as they are.
        replay: Recorded traffic.
        timeout_s: Longest time of a request.
        max_late_s: p99 of the lateness of sends above which a round is refused.
        max_client_share: Share of a core that the clients may use.
    """

    points: tuple[LoadPoint, ...]
    seconds: float
    requests: int
    rounds: int
    warm_up: int
    seed: int
    limits: Limits
    search: SearchRange | None
    replay: tuple[Recorded, ...]
    timeout_s: float
    max_late_s: float
    max_client_share: float

    def asks(self, point: LoadPoint, turn: int, words_per_token: float) -> tuple[Ask, ...]:
        """Return the requests of a round of a point; the same for every side.

        Args:
            point: Of the plan, or of its search.
            turn: Number of the round, with those that were refused.
            words_per_token: See `epd_portable.bench.load.requests.asks_of_mix`.
        """
        seed = seed_of(self.seed, point.key, turn)
        if point.replay:
            return asks_of_trace(
                self.replay,
                seed=seed,
                format=point.mix.format,
                words_per_token=words_per_token,
            )
        times: tuple[float, ...] = (0.0,) * self.requests
        if not point.concurrency:
            times = arrivals(point.rate, self.seconds, cv=point.cv, seed=seed)
        return asks_of_mix(
            point.mix,
            times,
            seed=seed,
            set_seed=seed_of(self.seed, "repeated"),
            words_per_token=words_per_token,
        )

    def rounds_of(self, point: LoadPoint) -> int:
        """Return how often a point is measured: what was asked for, or until there is enough.

        Enough are `ROUNDS` with `PICTURES` requests that have pictures, if any have.
        """
        if self.rounds:
            return self.rounds
        count = pictures = 0
        while count < ROUNDS or (0 < pictures < PICTURES and count < _MOST_ROUNDS):
            pictures += self.pictures_in(point, count)
            count += 1
        return count

    def pictures_in(self, point: LoadPoint, turn: int) -> int:
        """Return how many requests with pictures a round has."""
        return sum(ask.kind == "pictures" for ask in self.asks(point, turn, 1.0))

    def expected_s(self, point: LoadPoint) -> float:
        """Return about how long a side takes in a round, without what it takes too long."""
        if point.replay:
            return self.replay[-1].time_s - self.replay[0].time_s + 5.0
        return self.seconds + 5.0

    def fingerprint(self, **more: Any) -> str:
        """Return what tells requests of this measurement from those of all others.

        Points are not in it: a point's key says what it asks.

        Args:
            more: What else decides them: sides, model, settings.
        """
        decided = {
            "seed": self.seed,
            "seconds": self.seconds,
            "requests": self.requests,
            "formats": sorted({point.mix.format for point in self.points}),
            "replay": [
                (each.time_s, each.text_tokens, each.output_tokens, each.sizes, each.seeds)
                for each in self.replay
            ],
            **more,
        }
        text = json.dumps(decided, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def described(plan: LoadPlan) -> dict[str, Any]:
    """Return a plan as plain JSON values, without the recorded traffic."""
    whole = dataclasses.asdict(plan)
    whole["replay"] = len(plan.replay)
    whole["points"] = [point.key for point in plan.points]
    whole["limits"] = {
        name: None if value == float("inf") else value for name, value in whole["limits"].items()
    }
    return whole
