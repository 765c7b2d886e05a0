"""The figures of a turn, which is one side in one round of a point, and ratios of sides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import msgspec

from epd_portable.bench.load.clients import Answers, LoadAnswer
from epd_portable.bench.load.plan import LoadPlan, LoadRequest
from epd_portable.bench.load.usage import CPUSeconds
from epd_portable.bench.stats import Ratio, quantile

KINDS = ("text", "pictures", "all")
QUANTITIES: dict[str, Callable[[LoadAnswer], float]] = {
    "TTFT": lambda answer: answer.ttft_s,
    "TPOT": lambda answer: answer.tpot_s,
    "longest ITL": lambda answer: max(answer.itl_s, default=0.0),
    "E2E": lambda answer: answer.e2e_s,
}
"""Of each answer, in seconds."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
MAX_LATE_S = 0.05
"""A round is refused if p99 of the lateness of its requests is above this."""
MAX_CLIENT_SHARE = 0.8
"""A round is refused if its clients used more of a core."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One side in one round of a point: a line of the samples.

    Attributes:
        point: Key of the point.
        round: Its number; refused rounds count.
        side: Name of the side.
        requests: How many, by kind.
        problem: Of the first that failed.
        wall_s: From the beginning to the last end.
        times_s: Quantiles of those, by kind and quantity.
        serving: What ``vllm bench serve`` says of them, by its names.
        late_s: Quantiles of how late requests were sent.
        memory_bytes: By part of the side, right after.
        counted: What the side's own metrics counted.
        refused: Why the round does not count; empty if it does.
    """

    point: str
    round: int
    side: str
    requests: dict[str, int]
    failed: int
    problem: str
    wall_s: float
    times_s: dict[str, dict[str, dict[str, float]]]
    serving: dict[str, float]
    late_s: dict[str, float]
    pictures: int
    distinct_pictures: int
    cpu_s: CPUSeconds
    client_cpu_s: float
    memory_bytes: dict[str, int]
    counted: dict[str, int]
    refused: str

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(self.requests.values())

    @property
    def cpu_s_per_request(self) -> float:
        """CPU time of all processes of the side."""
        return sum(self.cpu_s.values()) / self.count

    def quantile(self, kind: str, quantity: str, name: str) -> float | None:
        """Return a quantile in seconds; ``None`` if no request of the kind was answered."""
        return self.times_s.get(kind, {}).get(quantity, {}).get(name)


def make_turn(
    requests: Sequence[LoadRequest],
    done: Answers,
    plan: LoadPlan,
    **more: Any,
) -> Turn:
    """Return the figures of a turn; `more` are attributes that the answers do not show.

    It is refused if the clients were late or busy.
    """
    answers = {
        kind: [
            answer
            for request, answer in zip(requests, done.answers, strict=True)
            if kind in (request.kind, "all")
        ]
        for kind in KINDS
    }
    answers = {kind: found for kind, found in answers.items() if found}
    ended = {
        kind: [answer for answer in found if not answer.problem] for kind, found in answers.items()
    }
    problems = [answer.problem for answer in done.answers if answer.problem]
    late_s = _quantiles([answer.late_s for answer in done.answers])
    pictures = [picture for request in requests for picture in request.pictures]
    return Turn(
        requests={kind: len(found) for kind, found in answers.items() if kind != "all"},
        failed=len(problems),
        problem=problems[0] if problems else "",
        wall_s=round(done.wall_s, 6),
        times_s={
            kind: {name: _quantiles(list(map(pick, found))) for name, pick in QUANTITIES.items()}
            for kind, found in ended.items()
            if found
        },
        serving=_serving(ended["all"], done.wall_s, plan),
        late_s=late_s,
        pictures=len(pictures),
        distinct_pictures=len({(picture.seed, picture.size) for picture in pictures}),
        client_cpu_s=done.cpu_s,
        refused=_refusal(late_s["p99"], done),
        **more,
    )


def _serving(answers: Sequence[LoadAnswer], wall_s: float, plan: LoadPlan) -> dict[str, float]:
    output = sum(answer.tokens for answer in answers)
    good = sum(answer.ttft_s <= plan.ttft_s and answer.tpot_s <= plan.tpot_s for answer in answers)
    found = {
        "duration, s": wall_s,
        "requests/s": len(answers) / wall_s,
        "goodput, requests/s": good / wall_s,
        "output tokens/s": output / wall_s,
        "all tokens/s": (output + sum(answer.prompt_tokens for answer in answers)) / wall_s,
    }
    times = {name: [QUANTITIES[name](answer) for answer in answers] for name in ("TTFT", "TPOT")}
    times["ITL"] = [each for answer in answers for each in answer.itl_s]
    for name, values in times.items():
        ms = [value * 1e3 for value in values] or [0.0]
        found[f"{name} mean, ms"] = fmean(ms)
        found[f"{name} p50, ms"], found[f"{name} p99, ms"] = quantile(ms, 0.5), quantile(ms, 0.99)
    return {name: round(value, 3) for name, value in found.items()}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return quantiles to a microsecond."""
    return {name: round(quantile(values, share), 6) for name, share in QUANTILES.items()}


def _refusal(late_s: float, done: Answers) -> str:
    if late_s > MAX_LATE_S:
        return (
            f"requests were sent late (p99 {late_s * 1000:.0f} ms, at most "
            f"{MAX_LATE_S * 1000:.0f}): the clients did not get a core in time; leave one free "
            "(fewer instances, or an idle machine), or ask at a lower rate"
        )
    share = done.cpu_s / done.wall_s
    if share > MAX_CLIENT_SHARE:
        return (
            f"the clients used {share:.0%} of a core (at most {MAX_CLIENT_SHARE:.0%}): they were "
            "the limit in place of the side; ask at a lower rate or for shorter answers"
        )
    return ""


def ratio(
    turns: Sequence[Turn], peers: Sequence[Turn], figure: Callable[[Turn], float | None]
) -> Ratio | None:
    """Return a figure of one side by that of another in the same rounds; ``None`` if none has it.

    It is the median of the rounds, with the lowest and the highest.
    """
    found = []
    for turn, peer in zip(turns, peers, strict=True):
        assert (turn.point, turn.round) == (peer.point, peer.round), "rounds of different requests"
        own, other = figure(turn), figure(peer)
        if own is not None and other:
            found.append(own / other)
    if not found:
        return None
    return Ratio(median=quantile(found, 0.5), low=min(found), high=max(found))
