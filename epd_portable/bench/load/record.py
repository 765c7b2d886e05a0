"""What was measured, as it is kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from epd_portable.bench.load.commands import Ask, ClientsDone
from epd_portable.bench.load.stages import RequestStages
from epd_portable.bench.load.watch import Counted, Memory
from epd_portable.bench.provenance import Provenance
from epd_portable.bench.stats import quantile
from epd_portable.bench.traces import Handover


class TracedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the event traces of a turn say.

    Attributes:
        stages: Of the requests whose way can be told.
        handovers: Of the items, from output to placed tensor.
        provenance: Where the encoder outputs came from.
    """

    stages: tuple[RequestStages, ...]
    handovers: tuple[Handover, ...]
    provenance: Provenance


class MeasuredRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One measured request; in JSON an array in this order, because there are thousands.

    Attributes:
        kind: ``text`` or ``pictures``.
        pictures: How many.
        sent_s: From the beginning of the round.
        late_s: How much later that was than it was due.
        ttft_s: To the first token; negative for none.
        tpot_s: For each token after it.
        e2e_s: To the end.
        longest_gap_s: How long the answer stood still at worst: the longest ITL.
        tokens: Of the answer.
        prompt_tokens: Of the request.
        problem: Why it does not count as answered; empty if it does.
    """

    kind: str
    pictures: int
    sent_s: float
    late_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    longest_gap_s: float
    tokens: int
    prompt_tokens: int
    problem: str = ""


class SideTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one side: a point, in a round.

    Attributes:
        point: Key of the point.
        turn: Number of the round, with those that were refused.
        side: Name of the side.
        requests: In the order of their times.
        wall_s: Duration, to the last answer.
        cpu_s: CPU time by part of the side and by what its processes are.
        memory: By part of the side, right after.
        counted: What the side's own metrics say of the turn.
        client_cpu_s: CPU time of the clients.
        distinct_pictures: How many different ones were asked about.
        traced: What its event traces say; ``None`` without.
        refused: Why the round does not count; empty if it does.
    """

    point: str
    turn: int
    side: str
    requests: tuple[MeasuredRequest, ...]
    wall_s: float
    cpu_s: dict[str, dict[str, float]]
    memory: dict[str, Memory]
    counted: Counted
    client_cpu_s: float
    distinct_pictures: int = 0
    traced: TracedTurn | None = None
    refused: str = ""

    @property
    def late_p99_s(self) -> float:
        """How late requests were sent."""
        return quantile([each.late_s for each in self.requests], 0.99)

    @property
    def whole_cpu_s(self) -> float:
        """CPU time of all processes of the side."""
        return sum(sum(roles.values()) for roles in self.cpu_s.values())


def records(asks: Sequence[Ask], done: ClientsDone) -> tuple[MeasuredRequest, ...]:
    """Return what became of the requests of a run."""
    found = []
    for ask, answer in zip(asks, done.answers, strict=True):
        found.append(
            MeasuredRequest(
                kind=ask.kind,
                pictures=len(ask.pictures),
                sent_s=round(answer.sent_s, 4),
                late_s=round(answer.late_s, 4),
                ttft_s=round(answer.ttft_s, 4),
                tpot_s=round(sum(answer.gaps_s) / max(answer.tokens - 1, 1), 6),
                e2e_s=round(answer.e2e_s, 4),
                longest_gap_s=round(max(answer.gaps_s, default=0.0), 5),
                tokens=answer.tokens,
                prompt_tokens=answer.prompt_tokens,
                problem=answer.problem,
            )
        )
    return tuple(found)


def refusal(
    records: Sequence[MeasuredRequest],
    *,
    client_cpu_s: float,
    wall_s: float,
    max_late_s: float,
    max_client_share: float,
) -> str:
    """Say why a run does not show the side, but the clients; empty if it does.

    Args:
        records: Of the run.
        client_cpu_s: CPU time of the clients.
        wall_s: Duration of the run.
        max_late_s: Bound of the p99 of lateness.
        max_client_share: Bound of the share of a core.
    """
    late_s = quantile([each.late_s for each in records], 0.99)
    if late_s > max_late_s:
        return (
            f"requests were sent late (p99 {late_s * 1000:.0f} ms, --max-late-ms allows "
            f"{max_late_s * 1000:.0f}): the clients did not get a core in time; leave one free "
            "(fewer instances, or an idle machine), or ask at a lower rate"
        )
    share = client_cpu_s / wall_s if wall_s else 0.0
    if share > max_client_share:
        return (
            f"the clients used {share:.0%} of a core ({max_client_share:.0%} is the bound): they "
            "were the limit in place of the side; ask at a lower rate or for shorter answers"
        )
    return ""
