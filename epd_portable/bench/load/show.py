"""What `load` shows while it runs, and of what it would do."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from epd_portable.bench.load.measure import ABOUT_RATES, LoadProgress
from epd_portable.bench.load.plan import ROUNDS
from epd_portable.bench.load.report import Setting
from epd_portable.config.schema import Topology


class LoadBar(LoadProgress):
    """Lines on standard error, and below them a bar with the time that is left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            # So long as rounds take: one says little of the next.
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> LoadBar:
        """Show the bar, where somebody looks."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False)

    def expect(self, seconds: float) -> None:
        """Lengthen the bar."""
        task = self._bar.tasks[0]
        total = (task.total or 0.0) + seconds
        self._bar.update(self._task, description="measuring", total=total)
        if not self._console.is_terminal:
            self.say(f"about {total / 60:.0f} min of measuring")

    def done(self, seconds: float) -> None:
        """Fill the bar further."""
        self._bar.advance(self._task, seconds)


def plan_text(setting: Setting, topologies: dict[str, Topology]) -> str:
    """Return what would be measured."""
    plan = setting.plan
    lines = [setting.equal]
    lines += [
        f"  {side.name}: {side.what}, model {topologies[side.name].model}, engine arguments "
        f"{topologies[side.name].engine_args}"
        for side in setting.sides
    ]
    lines.append(
        "All sides are up all the time."
        if setting.together
        else "Sides are up one at a time: each is started once a round, for a search at each rate."
    )
    seconds = 0.0
    for point in plan.points:
        if plan.search is not None:
            rounds = ABOUT_RATES * (plan.rounds or ROUNDS)
            lines.append(f"  {point.key}")
        else:
            rounds = plan.rounds_of(point)
            pictures = sum(plan.pictures_in(point, turn) for turn in range(rounds))
            lines.append(f"  {point.key}: {rounds} rounds, {pictures} requests with pictures")
        seconds += rounds * plan.expected_s(point)
    lines.append(f"about {seconds * len(setting.sides) / 60:.0f} min of measuring")
    return "\n".join(lines)
