"""Figures of turns, and ratios of sides round by round. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from epd_portable.bench.load.plan import Limits
from epd_portable.bench.load.record import MeasuredRequest, SideTurn
from epd_portable.bench.stats import Ratio, quantile

KINDS = ("text", "pictures", "all")
QUANTITIES: dict[str, Callable[[MeasuredRequest], float]] = {
    "TTFT": lambda each: each.ttft_s,
    "TPOT": lambda each: each.tpot_s,
    "longest ITL": lambda each: each.longest_gap_s,
    "E2E": lambda each: each.e2e_s,
}
"""What is told of each request, in seconds."""
_GROWS = 1.25
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
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
    return [pick(each) for each in requests if not each.problem]


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


def cpu_s_per_request(turn: SideTurn) -> float:
    """Return the CPU time of all of a side's processes for each request of a turn."""
    return turn.whole_cpu_s / len(turn.requests)


def queue_grew(turn: SideTurn) -> bool:
    """Return whether requests of a kind came faster than they were answered, all the time.

    Each third of the window has more open requests than the one before, by a quarter or more. In
    any single round arrivals at random can do that as well.
    """
    window_s = sending_s(turn)
    for kind in ("text", "pictures"):
        open_requests = [0.0, 0.0, 0.0]
        for each in of_kind([turn], kind):
            for third in range(3):
                begin_s, end_s = window_s * third / 3, window_s * (third + 1) / 3
                stayed_s = min(each.sent_s + each.e2e_s, end_s) - max(each.sent_s, begin_s)
                open_requests[third] += max(0.0, stayed_s) / (end_s - begin_s)
        first, second, last = open_requests
        if last >= 2 and last >= _GROWS * second and second >= _GROWS * first:
            return True
    return False


def over_capacity(turns: Sequence[SideTurn]) -> bool:
    """Return whether the queue grew in most rounds: such times depend on the window's length."""
    return 2 * sum(map(queue_grew, turns)) > len(turns)


def failures(turns: Sequence[SideTurn], kind: str = "all") -> int:
    """Return how many requests have no answer that counts."""
    return sum(bool(each.problem) for each in of_kind(turns, kind))


def p99s(turns: Sequence[SideTurn]) -> tuple[float, float]:
    """Return p99 of TTFT and of TPOT of turns together; a failure takes for ever."""
    requests = of_kind(turns, "all")
    ttft_s = [math.inf if each.problem else each.ttft_s for each in requests]
    tpot_s = [math.inf if each.problem else each.tpot_s for each in requests]
    return _p99(ttft_s), _p99(tpot_s)


def meets(turns: Sequence[SideTurn], limits: Limits) -> bool:
    """Return whether p99 of TTFT and of TPOT are within the limits."""
    ttft_s, tpot_s = p99s(turns)
    return ttft_s <= limits.ttft_s and tpot_s <= limits.tpot_s


def ratio(
    turns: Sequence[SideTurn],
    peers: Sequence[SideTurn],
    figure: Callable[[SideTurn], float | None],
) -> Ratio | None:
    """Return a figure of one side by that of another, round by round.

    Args:
        turns: Of one side, one a round.
        peers: Of the other, of the same rounds.
        figure: Of one turn; not negative, ``None`` where the round has none.

    Returns:
        The median of the rounds, with the lowest and the highest; ``None`` if none has the figure.
    """
    found = []
    for turn, peer in zip(turns, peers, strict=True):
        assert (turn.point, turn.turn) == (peer.point, peer.turn), "rounds of different requests"
        own, other = figure(turn), figure(peer)
        if own is not None and other:
            found.append(own / other)
    if not found:
        return None
    return Ratio(median=quantile(found, 0.5), low=min(found), high=max(found))


def _p99(values: list[float]) -> float:
    """Return p99 by nearest rank: infinite values have no neighbours to lie between."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]
