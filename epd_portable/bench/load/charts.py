"""Pictures of the results of `load`: times and goodput over the load."""

from __future__ import annotations

from epd_portable.bench.chart import Chart, Series, TimelineChart
from epd_portable.bench.load import figures
from epd_portable.bench.load.measure import LoadResults
from epd_portable.bench.load.record import SideTurn
from epd_portable.bench.load.report import Setting, good_rounds
from epd_portable.bench.load.stage_report import timelines
from epd_portable.bench.stats import quantile

_TIMES = (("TTFT", "p99"), ("TPOT", "p99"), ("E2E", "p50"), ("longest ITL", "p99"))


def make_charts(results: LoadResults, setting: Setting) -> list[Chart | TimelineChart]:
    """Return a chart of each of several times, one of goodput, and stages of some requests."""
    rounds = good_rounds(results, setting)
    if not rounds:
        return []
    across = tuple(f"{point.pace}\n{point.mix.about}" for point in rounds)
    limits = setting.plan.limits

    def series(pick: object) -> tuple[Series, ...]:
        assert callable(pick)
        return tuple(
            Series(
                name=side.name,
                values=tuple(pick(by_side[side.name]) for by_side in rounds.values()),
            )
            for side in setting.sides
        )

    def goodput(turns: list[SideTurn]) -> float:
        return quantile([figures.goodput(turn, limits) for turn in turns], 0.5)

    found: list[Chart | TimelineChart] = [
        Chart(
            title=f"{quantity}, {name}",
            across=across,
            across_label="",
            up_label="ms",
            series=series(
                lambda turns, quantity=quantity, name=name: (
                    1000 * (figures.statistic(turns, "all", quantity, name) or 0.0)
                )
            ),
        )
        for quantity, name in _TIMES
    ]
    found.append(
        Chart(
            title="Goodput",
            across=across,
            across_label="",
            up_label="requests/s",
            series=series(goodput),
            bars=True,
        )
    )
    return [*found, *timelines(rounds)]
