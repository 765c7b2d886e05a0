"""Figures of turns, and ratios of sides round by round. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from epd_portable.bench.load.plan import Limits
from epd_portable.bench.load.record import MeasuredRequest, SideTurn
from epd_portable.bench.stats import quantile

KINDS = ("text", "pictures", "all")
QUANTITIES: dict[str, Callable[[MeasuredRequest], Sequence[float]]] = {
    "TTFT": lambda each: (each.ttft_s,),
    "TPOT": lambda each: (each.tpot_s,),
    "ITL": lambda each: [gap_ms / 1000 for gap_ms in each.gaps_ms],
    "longest ITL": lambda each: (each.longest_gap_s,),
    "E2E": lambda each: (each.e2e_s,),
}
"""What is told of requests; each yields one value or many, in seconds."""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "p50": lambda values: quantile(values, 0.5),
    "p90": lambda values: quantile(values, 0.9),
    "p99": lambda values: quantile(values, 0.99),
}


def of_kind(turns: Sequence[SideTurn], kind: str) -> list[MeasuredRequest]:
    """Return the requests of a kind, failed ones too."""
    return [each for turn in turns for each in turn.requests if kind in ("all", each.kind)]


def values(requests: Sequence[MeasuredRequest], quantity: str) -> list[float]:
    """Return a quantity of all requests that were answered."""
    pick = QUANTITIES[quantity]
    return [value for each in requests if not each.problem for value in pick(each)]


def statistic(turns: Sequence[SideTurn], kind: str, quantity: str, name: str) -> float | None:
    """Return one figure of some turns together; ``None`` where there is nothing."""
    found = values(of_kind(turns, kind), quantity)
    return STATISTICS[name](found) if found else None


def is_good(request: MeasuredRequest, limits: Limits) -> bool:
    """Return whether a request was answered, and within the limits."""
    return (
        not request.problem and request.ttft_s <= limits.ttft_s and request.tpot_s <= limits.tpot_s
    )


def goodput(turn: SideTurn, limits: Limits, kind: str = "all") -> float:
    """Return requests a second that were answered within the limits.

    The time is that from the first sending to the last: a side that answers all in time has the
    rate of its requests.
    """
    requests = of_kind([turn], kind)
    return sum(is_good(each, limits) for each in requests) / sending_s(turn)


def sending_s(turn: SideTurn) -> float:
    """Return the time in which a turn's requests came; of a closed loop its duration."""
    last = max((each.sent_s for each in turn.requests), default=0.0)
    return last or turn.wall_s


def throughput(turn: SideTurn) -> float:
    """Return output tokens a second, to the last answer."""
    return sum(each.tokens for each in turn.requests if not each.problem) / turn.wall_s


def failures(turns: Sequence[SideTurn], kind: str = "all") -> int:
    """Return how many requests have no answer that counts."""
    return sum(bool(each.problem) for each in of_kind(turns, kind))


def meets(turns: Sequence[SideTurn], limits: Limits, share: float) -> bool:
    """Return whether a quantile of TTFT and of TPOT is within the limits, failures included."""
    requests = of_kind(turns, "all")
    ttft_s = [math.inf if each.problem else each.ttft_s for each in requests]
    tpot_s = [math.inf if each.problem else each.tpot_s for each in requests]
    return _at(ttft_s, share) <= limits.ttft_s and _at(tpot_s, share) <= limits.tpot_s


def ratios(
    turns: Sequence[SideTurn],
    peers: Sequence[SideTurn],
    figure: Callable[[SideTurn], float | None],
) -> list[float]:
    """Return a figure of one side by that of another, round by round; rounds without it are not.

    Args:
        turns: Of one side, one a round.
        peers: Of the other, of the same rounds.
        figure: Of one turn; not negative.
    """
    found = []
    for turn, peer in zip(turns, peers, strict=True):
        assert (turn.point, turn.turn) == (peer.point, peer.turn), "rounds of different requests"
        own, other = figure(turn), figure(peer)
        if own is not None and other:
            found.append(own / other)
    return found


def _at(values: list[float], share: float) -> float:
    """Return a quantile by nearest rank: infinite values have no neighbours to lie between."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
